"""Checkpoints of queries, as files."""

import json
from pathlib import Path


def checkpoint(live, query):
    return Path(live.settings.checkpoint.removeprefix("file://")) / query


def newest(live, query, folder):
    """The newest file of one of the logs; None where there is none."""
    files = (checkpoint(live, query) / folder).glob("[0-9]*")
    return max(files, key=lambda path: int(path.name), default=None)


def committed(live, query):
    """How many records a query has read and committed."""
    done = newest(live, query, "commits")
    if done is None:
        return 0
    ends = json.loads(
        (checkpoint(live, query) / "offsets" / done.name).read_text().splitlines()[-1]
    )
    return sum(at for of_topic in ends.values() for at in of_topic.values())


def cut(path, share=0.0):
    """Leave so much of a file, as a power cut may."""
    with path.open("r+b") as file:
        file.truncate(int(path.stat().st_size * share))

"""The checkpoints of the queries: whole, and of the topics that are there, before a query begins.

Spark goes on from a checkpoint whatever has become of the topics since. Offsets that lie beyond the
end of a partition are replaced by that end, so what is there would be skipped; and a file that a
power cut has left empty keeps the query from starting. So each checkpoint is looked at first.

What does not count is left out, and the query starts at the earliest record there: what has gone on
is read back, as after a crash, and nothing is skipped. Cluster and topic ids are noted in a file
beside Spark's own ones, by Spark's file system: so they are kept, copied and lost together.
"""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Self

from pyspark.sql import SparkSession

from duetime.config import Settings
from duetime.errors import KafkaError
from duetime.pipeline.checkpoint_files import CheckpointFiles, CheckpointLogs
from duetime.stores.logs import is_same_topic
from duetime.stores.offsets import Offsets
from duetime.stores.places import Place

log = logging.getLogger(__name__)

#: How long the broker may take to answer while queries run, in seconds: others wait behind it.
LOOK_TIMEOUT_S = 1.0

#: The file of ours in each checkpoint.
NOTE = "duetime.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicsNote:
    """Of which topics a checkpoint's offsets are."""

    cluster_id: str | None = None
    topic_ids: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: bytes) -> Self:
        """Read a note. A torn one says nothing."""
        try:
            return cls(**json.loads(text or b"{}"))
        except (ValueError, TypeError):
            return cls()

    def is_of(self, topic: str, there: "TopicsNote") -> bool:
        """Return whether the topic that is there is the noted one, as far as that is known."""
        if not is_same_topic(self.cluster_id, there.cluster_id):
            return False
        return is_same_topic(self.topic_ids.get(topic), there.topic_ids.get(topic))


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a checkpoint is good for."""

    #: Where the query has got to, of the partitions where that counts; empty without a checkpoint.
    offsets: Mapping[Place, int]
    #: Topics with offsets that do not count, because they are of another log.
    lost: frozenset[str]
    #: Why Spark may not go on from it, a sentence each.
    troubles: tuple[str, ...]


class Checkpoints:
    """Looks at the checkpoints before queries begin. Not thread-safe but for `moved`."""

    def __init__(self, spark: SparkSession, settings: Settings, offsets: Offsets) -> None:
        """`offsets` is asked about topics, and closed by whoever gave it."""
        self._spark = spark
        self._root = settings.checkpoint
        self._offsets = offsets
        #: By query, what its topics were when it was looked at, and when it was begun.
        self._seen: dict[str, TopicsNote] = {}
        self._noted: dict[str, TopicsNote] = {}

    def open(self, name: str, topics: Sequence[str], troubles: Sequence[str] = ()) -> None:
        """Make the checkpoint of a query one that Spark can go on from. Raises KafkaError.

        Known `troubles` of it are why it cannot be.
        """
        if found := [*self.look(name, topics).troubles, *troubles]:
            self.remove(name, found)
        self.note(name)

    def look(self, name: str, topics: Sequence[str]) -> Found:
        """Drop torn files at the end of its logs, and say what the rest is good for.

        Raises KafkaError.
        """
        files = self._files(name)
        logs = CheckpointLogs(name, files)
        unreadable = logs.mend()
        done = logs.done()
        ours = {at: end for at, end in (done | logs.planned()).items() if at[0] in topics}
        noted, there = TopicsNote.parse(files.read(NOTE) or b""), self._there(topics)
        self._seen[name] = there
        ends = self._ends(ours)
        other = sorted({topic for topic, _ in ours if not noted.is_of(topic, there)})
        beyond = sorted(at for at in ours if ours[at] > ends.get(at, 0) and at[0] not in other)
        troubles = [
            *([unreadable] if unreadable else []),
            *(f"topic {topic} was created again, or is another cluster's" for topic in other),
            *(
                f"partition {at[1]} of {at[0]} ends at {ends.get(at, 0)}, and {ours[at]} was read: "
                "see whether the brokers lost records"
                for at in beyond
            ),
        ]
        return Found(
            offsets={
                at: end
                for at, end in done.items()
                if at in ours and at[0] not in other and at not in beyond
            },
            lost=frozenset({*other, *(topic for topic, _ in beyond)}),
            troubles=tuple(troubles),
        )

    def remove(self, name: str, troubles: Sequence[str]) -> None:
        """Remove a checkpoint, and log why. Its query begins as one without a checkpoint."""
        for each in troubles:
            log.error(
                "checkpoint not used: reading from the earliest record, without what was "
                "delivered query=%s reason=%s",
                name,
                each,
            )
        self._files(name).delete("")

    def note(self, name: str) -> None:
        """Note that its offsets are of the topics that it was looked at with."""
        files, there = self._files(name), self._seen[name]
        if TopicsNote.parse(files.read(NOTE) or b"") != there:
            files.write(NOTE, json.dumps(asdict(there)))
        self._noted[name] = there

    def moved(self) -> dict[str, str]:
        """Return the queries that read a topic which was created again since, and which it is.

        From any thread. What cannot be known now is known the next time.
        """
        noted = dict(self._noted)
        topics = {topic for each in noted.values() for topic in each.topic_ids}
        try:
            ids = self._offsets.topic_ids(topics, LOOK_TIMEOUT_S)
        except KafkaError:
            return {}
        return {
            name: topic
            for name, each in noted.items()
            for topic, one in each.topic_ids.items()
            if not is_same_topic(one, ids.get(topic))
        }

    def _there(self, topics: Iterable[str]) -> TopicsNote:
        ids = self._offsets.topic_ids(topics)
        return TopicsNote(cluster_id=self._offsets.cluster_id(), topic_ids=ids)

    def _ends(self, places: Iterable[Place]) -> dict[Place, int]:
        """Return where these partitions end, of those that are there."""
        wanted = set(places)
        there = {
            place
            for topic in {topic for topic, _ in wanted}
            for place in self._offsets.readable_places(topic)
        }
        return self._offsets.ends(wanted & there)

    def _files(self, name: str) -> CheckpointFiles:
        return CheckpointFiles(self._spark, f"{self._root}/{name}")

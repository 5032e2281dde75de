"""Which log an offset belongs to: a topic that is deleted and created has another one.

Offsets are committed apart from the log that they count. So the log may be another one (the topic,
or the whole cluster, was created again), or may have lost its end (a power cut, an unclean
election, a restore). An offset beyond the log's end, or of another topic id, says nothing about
what the log holds now: its records are unread.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Self

from confluent_kafka import TopicCollection
from confluent_kafka.admin import AdminClient

#: What a broker answers that gives topics no ids (before Kafka 2.8).
NO_ID = "0" * 32


class Commit(NamedTuple):
    """What a group has committed of one partition."""

    offset: int
    #: Empty where nothing was noted.
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNote:
    """What is noted beside a committed offset of the wheel."""

    #: None where the broker has none, or where an older version has committed.
    topic_id: str | None = None
    #: Since when what follows may have been taken up, epoch ms; None where it was not.
    begun_ms: int | None = None

    def text(self) -> str:
        """Return the note as the metadata of a commit."""
        return json.dumps({"topic_id": self.topic_id, "begun_ms": self.begun_ms})

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the metadata of a commit; any tool may have written it."""
        try:
            noted = json.loads(text or "null")
        except ValueError:
            return cls()
        if type(noted) is int:
            # Earlier versions noted the instant alone.
            return cls(begun_ms=noted)
        if not isinstance(noted, dict):
            return cls()
        topic_id, begun_ms = noted.get("topic_id"), noted.get("begun_ms")
        return cls(
            topic_id=topic_id if isinstance(topic_id, str) else None,
            begun_ms=begun_ms if isinstance(begun_ms, int) else None,
        )


def is_same_topic(noted_id: str | None, topic_id: str | None) -> bool:
    """Return whether both ids are of one topic; an id that is not known differs from none."""
    return not noted_id or not topic_id or noted_id == topic_id


def belongs(commit: Commit, end: int, topic_id: str | None) -> bool:
    """Return whether the committed offset is one of the log that ends at `end`."""
    return commit.offset <= end and is_same_topic(LogNote.parse(commit.note).topic_id, topic_id)


def describe_topic_ids(
    admin: AdminClient, topics: Iterable[str], timeout_s: float
) -> dict[str, str]:
    """Return the id of each topic, as 32 hex digits. Raises KafkaException."""
    asked = admin.describe_topics(TopicCollection(list(topics)), request_timeout=timeout_s)
    ids = {}
    for topic, answer in asked.items():
        found = answer.result().topic_id
        # As text, it may have a slash.
        halves = found.get_most_significant_bits(), found.get_least_significant_bits()
        ids[topic] = "".join(f"{each % 2**64:016x}" for each in halves)
    return ids

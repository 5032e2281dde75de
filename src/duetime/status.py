"""Who leads, who stands by, and whether anything is late: from the group and offsets alone."""

import json
from collections.abc import Iterable, Sequence
from contextlib import closing
from typing import Any

from confluent_kafka import ConsumerGroupState
from confluent_kafka.admin import AdminClient, ConsumerGroupDescription

from duetime.clock import Clock
from duetime.config import Settings
from duetime.connection import librdkafka_properties
from duetime.standing import Rescue, Status
from duetime.stores import Pending
from duetime.stores.offsets import TIMEOUT_S, Offsets, answer
from duetime.stores.opening import open_reader
from duetime.topics import TopicNames

#: What is due is on its way for a moment: later than this it is late, in ms.
LATE_MS = 1_000


class StatusReader:
    """Asks Kafka again and again over the same connections. Not for several threads at a time."""

    def __init__(self, settings: Settings) -> None:
        self._names = TopicNames(settings)
        self._admin = AdminClient(librdkafka_properties(settings))
        self._offsets = Offsets(settings, self._names.leader_group)

    def status(self, slots: Sequence[Pending], now_ms: int) -> Status:
        """The state, where this is what waits. Raises KafkaError."""
        leader, standbys = self._members()
        note = self._note() if leader else {}
        note = note if note.get("leader") == leader else {}
        late, lag_ms = late_of(slots, now_ms)
        return Status(
            leader=leader,
            since_ms=note.get("since_ms"),
            standbys=standbys,
            waiting=sum(slot.count for slot in slots),
            late=late,
            lag_ms=lag_ms,
            rescued=note.get("rescued"),
            rescues=tuple(Rescue(*each) for each in note.get("rescues", ())),
            queries=note.get("queries", {}),
        )

    def close(self) -> None:
        """Close the connections."""
        self._offsets.close()

    def _members(self) -> tuple[str | None, tuple[str, ...]]:
        """Who is assigned the partition, and the others."""
        group = self._names.leader_group

        def described() -> ConsumerGroupDescription:
            asked = self._admin.describe_consumer_groups([group], request_timeout=TIMEOUT_S)
            found: ConsumerGroupDescription = asked[group].result()
            return found

        found = answer(described)
        if found.state is ConsumerGroupState.DEAD:
            return None, ()
        leaders = [one.client_id for one in found.members if one.assignment.topic_partitions]
        others = sorted(
            one.client_id for one in found.members if not one.assignment.topic_partitions
        )
        return (leaders[0] if leaders else None), tuple(others)

    def _note(self) -> dict[str, Any]:
        """What the leader noted when it renewed its lease."""
        place = self._names.leader, 0
        note = self._offsets.notes([place]).get(place)
        found: dict[str, Any] = json.loads(note) if note else {}
        return found


def late_of(slots: Iterable[Pending], now_ms: int) -> tuple[int, int]:
    """How many messages wait in slots that are over, and for how long the oldest is, in ms."""
    late = [slot for slot in slots if slot.end_ms + LATE_MS < now_ms]
    longest_ms = max((now_ms - slot.end_ms for slot in late), default=0)
    return sum(slot.count for slot in late), longest_ms


def status(settings: Settings, clock: Clock) -> Status:
    """Ask Kafka once. Raises KafkaError."""
    with closing(open_reader(settings)) as reader, closing(StatusReader(settings)) as asking:
        now_ms = clock.now_ms()
        return asking.status(reader.pending(now_ms), now_ms)

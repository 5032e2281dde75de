"""Who leads, who stands by, and whether anything is late: from the group and offsets alone."""

import json
from dataclasses import dataclass
from typing import Any

from confluent_kafka import ConsumerGroupState
from confluent_kafka.admin import AdminClient, ConsumerGroupDescription

from duetime.clock import Clock
from duetime.config import Settings
from duetime.connection import librdkafka_properties
from duetime.stores.offsets import TIMEOUT_S, Offsets, answer
from duetime.stores.reader import WheelReader
from duetime.topics import TopicNames

#: What is due is on its way for a moment: later than this it is late, in ms.
LATE_MS = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The state of the pipelines on a cluster."""

    #: `host:process` of the pipeline that delivers; None where none does.
    leader: str | None
    #: Since when it leads, epoch ms.
    since_ms: int | None
    #: The pipelines that would take over.
    standbys: tuple[str, ...]
    #: Messages that wait in the wheel.
    waiting: int
    #: Those of them whose slot is over, and which are not delivered.
    late: int
    #: How long the oldest slot of those is over, in ms.
    lag_ms: int


def status(settings: Settings, clock: Clock) -> Status:
    """Ask Kafka. Raises KafkaError."""
    leader, standbys = _members(settings)
    note = _note(settings) if leader else {}
    now_ms = clock.now_ms()
    reader = WheelReader(settings)
    try:
        slots = reader.pending(now_ms)
    finally:
        reader.close()
    late = [slot for slot in slots if slot.end_ms + LATE_MS < now_ms]
    return Status(
        leader=leader,
        since_ms=note.get("since_ms") if note.get("leader") == leader else None,
        standbys=standbys,
        waiting=sum(slot.count for slot in slots),
        late=sum(slot.count for slot in late),
        lag_ms=max((now_ms - slot.end_ms for slot in late), default=0),
    )


def _members(settings: Settings) -> tuple[str | None, tuple[str, ...]]:
    """Who is assigned the partition, and the others."""
    group = TopicNames(settings).leader_group
    admin = AdminClient(librdkafka_properties(settings))

    def described() -> ConsumerGroupDescription:
        asked = admin.describe_consumer_groups([group], request_timeout=TIMEOUT_S)
        found: ConsumerGroupDescription = asked[group].result()
        return found

    found = answer(described)
    if found.state is ConsumerGroupState.DEAD:
        return None, ()
    leaders = [one.client_id for one in found.members if one.assignment.topic_partitions]
    others = sorted(one.client_id for one in found.members if not one.assignment.topic_partitions)
    return (leaders[0] if leaders else None), tuple(others)


def _note(settings: Settings) -> dict[str, Any]:
    """What the leader noted when it renewed its lease."""
    names = TopicNames(settings)
    offsets = Offsets(settings, names.leader_group)
    try:
        notes = offsets.notes([(names.leader, 0)])
    finally:
        offsets.close()
    note = notes.get((names.leader, 0))
    found: dict[str, Any] = json.loads(note) if note else {}
    return found

"""Kafka's answers about offsets, one request for many partitions at a time."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

from confluent_kafka import (
    OFFSET_INVALID,
    Consumer,
    IsolationLevel,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka import KafkaError as BrokerError
from confluent_kafka.admin import (
    AclOperation,
    AdminClient,
    ListOffsetsResultInfo,
    OffsetSpec,
    TopicDescription,
)

from duetime.config import Settings
from duetime.connection import librdkafka_properties
from duetime.errors import KafkaError, words
from duetime.stores import OffsetRange
from duetime.stores.logs import NO_ID, Commit, describe_topic_ids
from duetime.stores.places import Place

log = logging.getLogger(__name__)

#: How long one request may take, in seconds.
TIMEOUT_S = 10.0

#: How long to wait before asking again, in seconds.
ASK_AGAIN_S = 0.1

#: Answers that someone else leads the partition, or the same broker once more.
MOVED = (
    BrokerError.NOT_LEADER_FOR_PARTITION,
    BrokerError.FENCED_LEADER_EPOCH,
    BrokerError.UNKNOWN_LEADER_EPOCH,
)

#: Answers that pass: partitions or the group are just getting their broker, or another one.
PASSING = (
    *MOVED,
    BrokerError.LEADER_NOT_AVAILABLE,
    BrokerError.OFFSET_NOT_AVAILABLE,
    BrokerError.NOT_COORDINATOR,
    BrokerError.COORDINATOR_NOT_AVAILABLE,
    BrokerError.COORDINATOR_LOAD_IN_PROGRESS,
)

#: Answers that there is no such topic or partition.
MISSING = (
    BrokerError.UNKNOWN_TOPIC_OR_PART,
    BrokerError._UNKNOWN_PARTITION,  # noqa: SLF001 (their public names)
    BrokerError._NOENT,  # noqa: SLF001
)

#: By whether only what is committed is asked about.
ISOLATION = {True: IsolationLevel.READ_COMMITTED, False: IsolationLevel.READ_UNCOMMITTED}

_Answer = TypeVar("_Answer")


class Unreadable(Exception):
    """We may not read this topic, and will not another time."""


class Offsets:
    """The offsets of any partitions, and those that one consumer group has committed."""

    def __init__(self, settings: Settings, group: str) -> None:
        self._properties = librdkafka_properties(settings)
        self._admin = AdminClient(self._properties)
        self._consumer = Consumer(
            self._properties
            | {"group.id": group, "enable.auto.commit": False, "auto.offset.reset": "error"}
        )

    def readable_places(self, topic: str, *, all_led: bool = False) -> list[Place]:
        """The topic's partitions; none where there is no such topic. Raises Unreadable.

        With `all_led`, a topic is unreadable while one of its partitions has no leader.
        """
        try:
            found = answer(lambda: self._described(topic, all_led=all_led))
        except KafkaError as error:
            code = error.__cause__.args[0].code() if error.__cause__ else None
            if all_led and code == BrokerError.LEADER_NOT_AVAILABLE:
                raise Unreadable("a partition has no leader") from error
            if code in MISSING:
                return []
            if code == BrokerError.TOPIC_AUTHORIZATION_FAILED:
                raise Unreadable("it may not be described") from error
            raise
        if found.authorized_operations and AclOperation.READ not in found.authorized_operations:
            raise Unreadable("it may not be read")
        return [(topic, each.id) for each in found.partitions]

    def ends(self, places: Iterable[Place], *, committed_only: bool = False) -> dict[Place, int]:
        """The offset of each partition's next record; or of its first open transaction's."""
        return self._list(places, OffsetSpec.latest(), committed_only=committed_only)

    def leader_epochs(self, places: Iterable[Place]) -> dict[Place, int]:
        """Return the present epoch of each partition's leader, where it has one."""
        wanted = {TopicPartition(*place): OffsetSpec.latest() for place in places}
        found = answer(lambda: self._ask(wanted, ISOLATION[False])) if wanted else {}
        epochs = {place: one.leader_epoch for place, one in found.items()}
        return {place: epoch for place, epoch in epochs.items() if epoch is not None}

    def is_replicated(self) -> bool:
        """Return whether there are several brokers, and so may be replicas that lag."""
        described = self._admin.describe_cluster(request_timeout=TIMEOUT_S)
        return len(answer(described.result).nodes) > 1

    def appended(self, topics: Iterable[str]) -> dict[str, int | None]:
        """How many records were ever appended to each topic; None where we may not read it."""
        places = {topic: self._allowed(topic) for topic in topics}
        ends = self.ends(place for known in places.values() for place in known or ())
        return {
            topic: None if known is None else sum(ends[place] for place in known)
            for topic, known in places.items()
        }

    def starts(self, places: Iterable[Place]) -> dict[Place, int]:
        """The first offset that each partition still has."""
        return self._list(places, OffsetSpec.earliest())

    def first_since(self, instants_ms: Mapping[Place, int]) -> dict[Place, int | None]:
        """The first offset appended at or after the instant; None where there is none."""
        wanted = {
            TopicPartition(*place): OffsetSpec.for_timestamp(max(0, instant))
            for place, instant in instants_ms.items()
        }
        found = self._offsets(wanted)
        return {place: offset if offset >= 0 else None for place, offset in found.items()}

    def first_appended_ms(self, places: Iterable[Place]) -> dict[Place, int]:
        """When the first record that each still has was appended, epoch ms; -1: there is none."""
        wanted = {TopicPartition(*place): OffsetSpec.for_timestamp(0) for place in places}
        found = answer(lambda: self._ask(wanted, ISOLATION[False])) if wanted else {}
        return {place: one.timestamp for place, one in found.items()}

    def last_ms(self, places: Iterable[Place]) -> dict[Place, int]:
        """Return the latest timestamp in each, epoch ms; -1 where there is no record."""
        wanted = {TopicPartition(*place): OffsetSpec.max_timestamp() for place in places}
        found = answer(lambda: self._ask(wanted, ISOLATION[False])) if wanted else {}
        return {place: one.timestamp for place, one in found.items()}

    def committed(self, places: Iterable[Place]) -> dict[Place, int]:
        """What the group has committed; without those where it has not, or not for very long."""
        return {place: one.offset for place, one in self.commits(places).items()}

    def commits(self, places: Iterable[Place]) -> dict[Place, Commit]:
        """Return what the group has committed, with the note, where it has."""
        asked = [TopicPartition(topic, partition) for topic, partition in places]
        if not asked:
            return {}
        answers = answer(lambda: self._consumer.committed(asked, timeout=TIMEOUT_S))
        for one in answers:
            if one.error is not None:
                raise _failed(one.error)
        return {
            (one.topic, one.partition): Commit(one.offset, one.metadata or "")
            for one in answers
            if one.offset >= 0
        }

    def notes(self, places: Iterable[Place]) -> dict[Place, str]:
        """What was noted with the commits, where something was."""
        return {place: one.note for place, one in self.commits(places).items() if one.note}

    def topic_ids(self, topics: Iterable[str], timeout_s: float = TIMEOUT_S) -> dict[str, str]:
        """Return the id of each topic, without those of brokers that give topics none."""
        asked = set(topics)
        found = answer(lambda: describe_topic_ids(self._admin, asked, timeout_s)) if asked else {}
        return {topic: one for topic, one in found.items() if one != NO_ID}

    def cluster_id(self) -> str | None:
        """Return the id of the cluster."""
        asked = answer(lambda: self._admin.describe_cluster(request_timeout=TIMEOUT_S).result())
        found: str | None = asked.cluster_id
        return found

    def commit(
        self, offsets: Mapping[Place, int], notes: Mapping[Place, str] = MappingProxyType({})
    ) -> None:
        """Commit for the group, with a note for some, and wait for the broker's answer."""
        if not offsets:
            return
        positions = [
            TopicPartition(*place, offset, metadata=notes.get(place, ""))
            for place, offset in offsets.items()
        ]
        answers = answer(lambda: self._consumer.commit(offsets=positions, asynchronous=False))
        for one in answers or ():
            if one.error is not None:
                raise _failed(one.error)

    def delete_before(self, offsets: Mapping[Place, int]) -> None:
        """Free the storage of records before these. Not waited for: the next one covers it."""
        if offsets:
            deleted = self._admin.delete_records(
                [TopicPartition(*place, offset) for place, offset in offsets.items()]
            )
            for place, future in deleted.items():
                future.add_done_callback(partial(_tell_kept, place.topic))

    def close(self) -> None:
        """Close the connection."""
        self._consumer.close()

    def _allowed(self, topic: str) -> list[Place] | None:
        try:
            return self.readable_places(topic)
        except Unreadable:
            return None

    def _described(self, topic: str, *, all_led: bool) -> TopicDescription:
        described = self._admin.describe_topics(
            TopicCollection([topic]), include_authorized_operations=True, request_timeout=TIMEOUT_S
        )
        found: TopicDescription = described[topic].result()
        if all_led and not all(each.leader for each in found.partitions):
            raise KafkaException(BrokerError(BrokerError.LEADER_NOT_AVAILABLE))
        return found

    def _list(
        self, places: Iterable[Place], spec: OffsetSpec, *, committed_only: bool = False
    ) -> dict[Place, int]:
        wanted = {TopicPartition(*place): spec for place in places}
        return self._offsets(wanted, ISOLATION[committed_only])

    def _offsets(
        self, wanted: dict[Any, OffsetSpec], isolation: IsolationLevel = ISOLATION[False]
    ) -> dict[Place, int]:
        found = answer(lambda: self._ask(wanted, isolation)) if wanted else {}
        return {place: one.offset for place, one in found.items()}

    def _ask(
        self, wanted: dict[Any, OffsetSpec], isolation: IsolationLevel
    ) -> dict[Place, ListOffsetsResultInfo]:
        answers = self._admin.list_offsets(
            wanted, isolation_level=isolation, request_timeout=TIMEOUT_S
        )
        try:
            found = {(at.topic, at.partition): one.result() for at, one in answers.items()}
        except KafkaException as error:
            if error.args[0].code() in MOVED:
                # It keeps to the leaders it has heard of for 15 minutes, whatever they say.
                self._admin = AdminClient(self._properties)
            raise
        if any(one.offset == OFFSET_INVALID for one in found.values()):
            # A broker that is just starting: no error, and no offset either.
            raise KafkaException(BrokerError(BrokerError.LEADER_NOT_AVAILABLE))
        return found


def _tell_kept(topic: str, deleted: Future[object]) -> None:
    error = deleted.exception()
    if error is not None:
        log.warning("storage is not freed topic=%s error=%s", topic, words(error))


def whole(settings: Settings, topic: str) -> OffsetRange:
    """All that there is in a topic of one partition. Raises KafkaError."""
    place = topic, 0
    with closing(Offsets(settings, f"{settings.namespace}.reader")) as offsets:
        return OffsetRange(*place, offsets.starts([place])[place], offsets.ends([place])[place])


def answer(ask: Callable[[], _Answer]) -> _Answer:
    """The answer, asked for again while it is one that passes. Raises KafkaError."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while True:
        try:
            return ask()
        except KafkaException as error:
            if error.args[0].code() not in PASSING or time.monotonic() > deadline_s:
                raise _failed(error.args[0]) from error
        time.sleep(ASK_AGAIN_S)


def _failed(error: BrokerError) -> KafkaError:
    if error.code() == BrokerError._NOENT:  # noqa: SLF001 (its public name)
        # The client says so of topics that are gone, and of those whose brokers all are.
        return KafkaError(
            "nobody leads the topics of the wheel: the brokers are down, or topics are missing, "
            "which `duetime topics` says"
        )
    if error.code() in MISSING:
        return KafkaError(
            "topics of the wheel are missing, or have too few partitions: see `duetime topics`"
        )
    return KafkaError(f"Kafka did not answer about offsets ({error.str()}): is the broker up?")

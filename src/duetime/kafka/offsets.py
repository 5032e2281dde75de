"""Kafka's answers about offsets, one request for many partitions at a time."""

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain, repeat
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from confluent_kafka import OFFSET_INVALID, Consumer, IsolationLevel, KafkaException, TopicPartition
from confluent_kafka import KafkaError as BrokerError
from confluent_kafka.admin import (
    AclOperation,
    AdminClient,
    DescribeClusterResult,
    ListOffsetsResultInfo,
    OffsetSpec,
    TopicDescription,
)
from pydantic import TypeAdapter, ValidationError

from duetime.core.errors import KafkaError, error_text
from duetime.core.messages import LATEST_MS
from duetime.core.settings import Settings
from duetime.core.topics import TopicNames
from duetime.kafka.connection import librdkafka_properties
from duetime.kafka.descriptions import (
    TIMED_OUT,
    describe_topic_ids,
    described_cluster,
    described_topics,
)

log = logging.getLogger(__name__)

AnswerT = TypeVar("AnswerT")

#: A topic's name and the number of a partition.
Partition = tuple[str, int]

#: The longest timeout of a request, in seconds; while answers are transient, another try begins
#: within this time. A broker that has died is replaced by then.
TIMEOUT_S = 15.0

#: Timeouts of the first tries to get offsets, in seconds; a later one has the longest.
TRIES_S = 2.0, 4.0

#: Wait before a request is repeated, in seconds.
RETRY_INTERVAL_S = 0.1

#: Errors that another broker leads the partition, or the same one again.
MOVED = (
    BrokerError.NOT_LEADER_FOR_PARTITION,
    BrokerError.FENCED_LEADER_EPOCH,
    BrokerError.UNKNOWN_LEADER_EPOCH,
)

#: Transient errors: partitions or the group are about to have a broker, or another one.
TRANSIENT = (
    *MOVED,
    *TIMED_OUT,
    BrokerError.LEADER_NOT_AVAILABLE,
    BrokerError.OFFSET_NOT_AVAILABLE,
    BrokerError.NOT_COORDINATOR,
    BrokerError.COORDINATOR_NOT_AVAILABLE,
    BrokerError.COORDINATOR_LOAD_IN_PROGRESS,
)

#: Errors that there is no such topic or partition.
MISSING = (
    BrokerError.UNKNOWN_TOPIC_OR_PART,
    BrokerError._UNKNOWN_PARTITION,  # noqa: SLF001 (their public names)
    BrokerError._NOENT,  # noqa: SLF001
)

#: Events of a consumer about a position: the log does not have it, or it is the log's end.
ANSWERS = (BrokerError._AUTO_OFFSET_RESET, BrokerError._PARTITION_EOF)  # noqa: SLF001 (public names)

#: The id of every topic on a broker that gives topics no ids (before Kafka 2.8).
NO_ID = "0" * 32


class DueTimes(NamedTuple):
    """Due times from one instant up to, not including, another one, epoch ms."""

    from_ms: int
    to_ms: int


#: All due times: a claim that was not asked for any.
ANY_TIME = DueTimes(0, LATEST_MS + 1)


@dataclass(frozen=True, slots=True, order=True)
class OffsetRange:
    """Records `start` up to, not including, `end` of one partition."""

    topic: str
    partition: int
    start: int
    end: int
    #: When work on it first began, epoch ms, or None. If set, some of it may have been sent.
    started_ms: int | None = None
    #: The due times, of a claim of overdue messages; equality ignores it.
    due: DueTimes = field(default=ANY_TIME, compare=False)

    @property
    def place(self) -> Partition:
        """The topic and the partition."""
        return self.topic, self.partition

    @property
    def count(self) -> int:
        """The number of offsets."""
        return self.end - self.start


class Position(NamedTuple):
    """An offset, and the leader epoch of the log at the time: None from brokers before Kafka 2.1.

    All records before the offset are of that epoch, or of earlier ones.
    """

    offset: int
    leader_epoch: int | None


class Commit(NamedTuple):
    """A group's committed offset of one partition, and its metadata."""

    offset: int
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LogIdentity:
    """The identity of the log that a committed offset belongs to: the metadata of the commit.

    Offsets are committed apart from the log that they count. So the log may be another one (the
    topic, or the whole cluster, was created again), or may have lost its end (a power cut, an
    unclean election, a restore). An offset beyond the log's end, or of another topic id, says
    nothing about what the log holds now: its records are unread. Nor does one that the log has
    grown past again, which the leader epoch shows: see `Offsets.truncated`.
    """

    #: None where the broker has none, or where an older version has committed.
    topic_id: str | None = None
    #: The leader epoch at which the offset was one of the log's. None where it is not known.
    leader_epoch: int | None = None
    #: When work on what follows began, epoch ms; None where it did not.
    started_ms: int | None = None
    #: The number of the leader that has committed: see `duetime.kafka.leadership.Generations`.
    generation: int | None = None

    def text(self) -> str:
        """Encode it for a commit."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> "LogIdentity":
        """Decode the metadata of a commit; any tool may have written it."""
        try:
            noted = _NOTE.validate_json(text or "{}", strict=True)
        except ValidationError:
            return cls()
        # Earlier versions wrote the instant alone.
        return cls(started_ms=noted) if isinstance(noted, int) else noted


_NOTE: TypeAdapter[LogIdentity | int] = TypeAdapter(LogIdentity | int)


class Unreadable(Exception):
    """This user may not read the topic, and retrying does not help."""


class Offsets:
    """The offsets of any partitions, and those that one consumer group has committed.

    Without a group it is the readers', which commits nothing.

    Methods raise KafkaError where the cluster does not answer.
    """

    def __init__(self, settings: Settings, group: str | None = None) -> None:
        self._properties = librdkafka_properties(settings)
        self._group = group or TopicNames(settings).reader_group
        self._admin = AdminClient(self._properties)
        self._consumer = self._new_consumer()

    def close(self) -> None:
        """Close the connection."""
        self._consumer.close()

    def readable_partitions(
        self, topic: str, *, all_led: bool = False, timeout_s: float = TIMEOUT_S
    ) -> list[Partition]:
        """Return the topic's partitions; none where there is no such topic. Raises Unreadable.

        With `all_led`, a topic is unreadable if one of its partitions gets no leader in
        `timeout_s`.
        """
        try:
            found = answer(lambda: self._describe(topic, all_led=all_led), timeout_s)
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

    def starts(self, places: Iterable[Partition]) -> dict[Partition, int]:
        """Return the first offset that each partition still has."""
        return _offsets(self._query(dict.fromkeys(places, OffsetSpec.earliest())))

    def ends(
        self, places: Iterable[Partition], *, committed_only: bool = False
    ) -> dict[Partition, int]:
        """Return the offset of each partition's next record; or of its first open transaction."""
        latest = dict.fromkeys(places, OffsetSpec.latest())
        return _offsets(self._query(latest, committed_only=committed_only))

    def first_since(self, instants_ms: Mapping[Partition, int]) -> dict[Partition, int | None]:
        """Return the first offset appended at or after the instant (epoch ms); None without one."""
        specs = {
            place: OffsetSpec.for_timestamp(max(0, instant_ms))
            for place, instant_ms in instants_ms.items()
        }
        found = _offsets(self._query(specs))
        return {place: offset if offset >= 0 else None for place, offset in found.items()}

    def ranges_since(self, topic: str, since_ms: int) -> list[OffsetRange]:
        """Return what was appended to the topic at or after the instant (epoch ms)."""
        partitions = self.readable_partitions(topic)
        ends, starts = self.ends(partitions), self.first_since(dict.fromkeys(partitions, since_ms))
        return [
            OffsetRange(*partition, start, ends[partition])
            for partition, start in starts.items()
            if start is not None and start < ends[partition]
        ]

    def first_appended_ms(
        self, places: Iterable[Partition], since_ms: int = 0
    ) -> dict[Partition, int]:
        """Return the timestamp of the first record at or after `since_ms`, epoch ms; -1 if none."""
        return self._timestamps(dict.fromkeys(places, OffsetSpec.for_timestamp(since_ms)))

    def last_ms(self, places: Iterable[Partition]) -> dict[Partition, int]:
        """Return the latest timestamp in each, epoch ms; -1 without a record."""
        return self._timestamps(dict.fromkeys(places, OffsetSpec.max_timestamp()))

    def latest(self, places: Iterable[Partition]) -> dict[Partition, Position]:
        """Return the offset of each partition's next record, and its current leader epoch."""
        found = self._query(dict.fromkeys(places, OffsetSpec.latest()))
        return {place: Position(one.offset, one.leader_epoch) for place, one in found.items()}

    def leader_epochs(self, places: Iterable[Partition]) -> dict[Partition, int]:
        """Return the current leader epoch of each partition whose broker has one."""
        found = {place: one.leader_epoch for place, one in self.latest(places).items()}
        return {place: epoch for place, epoch in found.items() if epoch is not None}

    def truncated(self, positions: Mapping[Partition, Position]) -> set[Partition]:
        """Return the partitions whose log has lost records before the position.

        It may have grown past the offset again: then the epoch of the position ends before it.
        librdkafka asks for that end before it fetches from a position that has an epoch (KIP-320).
        """
        missing = dict(positions)
        found = set[Partition]()
        if not missing:
            return found
        deadline_s = time.monotonic() + TIMEOUT_S
        with closing(self._new_consumer()) as consumer:
            consumer.assign(
                [
                    TopicPartition(*place, at.offset, leader_epoch=at.leader_epoch)
                    for place, at in missing.items()
                ]
            )
            while missing:
                event = consumer.poll(max(0.0, deadline_s - time.monotonic()))
                if event is None:
                    raise _failed(BrokerError(BrokerError._TIMED_OUT))  # noqa: SLF001 (its public name)
                topic, partition, error = event.topic(), event.partition(), event.error()
                if error and error.code() not in ANSWERS:
                    raise _failed(error)
                place = str(topic), int(partition or 0)
                if error and error.code() == BrokerError._AUTO_OFFSET_RESET:  # noqa: SLF001
                    found.add(place)
                if missing.pop(place, None):
                    consumer.incremental_unassign([TopicPartition(*place)])
        return found

    def appended(self, topics: Iterable[str]) -> dict[str, int | None]:
        """Return how many records were ever appended to each topic; None where it is unreadable."""

        def readable(topic: str) -> list[Partition] | None:
            try:
                return self.readable_partitions(topic)
            except Unreadable:
                return None

        places = {topic: readable(topic) for topic in topics}
        ends = self.ends(place for known in places.values() for place in known or ())
        return {
            topic: None if known is None else sum(ends[place] for place in known)
            for topic, known in places.items()
        }

    def committed(self, places: Iterable[Partition]) -> dict[Partition, int]:
        """Return the offsets that the group has committed, where it has."""
        return {place: one.offset for place, one in self.commits(places).items()}

    def notes(self, places: Iterable[Partition]) -> dict[Partition, str]:
        """Return the metadata of the group's commits, where there is some."""
        return {place: one.note for place, one in self.commits(places).items() if one.note}

    def commits(self, places: Iterable[Partition]) -> dict[Partition, Commit]:
        """Return the group's commits with their metadata, where it has committed."""
        asked = [TopicPartition(topic, partition) for topic, partition in places]
        if not asked:
            return {}
        answers = answer(lambda: self._consumer.committed(asked, timeout=TIMEOUT_S))
        _raise_errors(answers)
        return {
            (one.topic, one.partition): Commit(one.offset, one.metadata or "")
            for one in answers
            if one.offset >= 0
        }

    def commit(
        self,
        offsets: Mapping[Partition, int],
        notes: Mapping[Partition, str] = MappingProxyType({}),
    ) -> None:
        """Commit for the group, with metadata for some, and wait for the broker's answer."""
        if not offsets:
            return
        positions = [
            TopicPartition(*place, offset, metadata=notes.get(place, ""))
            for place, offset in offsets.items()
        ]
        answers = answer(lambda: self._consumer.commit(offsets=positions, asynchronous=False))
        _raise_errors(answers or ())

    def delete_before(self, offsets: Mapping[Partition, int]) -> None:
        """Delete the records before these offsets, in the background: a later call covers them."""
        if not offsets:
            return
        positions = [TopicPartition(*place, offset) for place, offset in offsets.items()]
        for place, future in self._admin.delete_records(positions).items():
            future.add_done_callback(partial(_log_failed_deletion, place.topic))

    def is_replicated(self) -> bool:
        """Return whether there are several brokers, and so may be replicas that lag."""
        return len(self._describe_cluster().nodes) > 1

    def cluster_id(self) -> str | None:
        """Return the id of the cluster."""
        found: str | None = self._describe_cluster().cluster_id
        return found

    def _describe_cluster(self) -> DescribeClusterResult:
        return answer(partial(described_cluster, self._admin, TIMEOUT_S))

    def topic_ids(self, topics: Iterable[str], timeout_s: float = TIMEOUT_S) -> dict[str, str]:
        """Return the id of each topic; without those of brokers that give topics no ids."""
        asked = set(topics)
        found = answer(lambda: describe_topic_ids(self._admin, asked, timeout_s)) if asked else {}
        return {topic: one for topic, one in found.items() if one != NO_ID}

    def _new_consumer(self) -> Consumer:
        return Consumer(
            self._properties
            | {"group.id": self._group, "enable.auto.commit": False}
            # How `truncated` learns of a position that the log does not have, or of its end.
            | {"auto.offset.reset": "error", "enable.partition.eof": True, "fetch.wait.max.ms": 10}
        )

    def _describe(self, topic: str, *, all_led: bool) -> TopicDescription:
        found = described_topics(self._admin, [topic], TIMEOUT_S, rights=True)[topic].result()
        if all_led and not all(each.leader for each in found.partitions):
            raise KafkaException(BrokerError(BrokerError.LEADER_NOT_AVAILABLE))
        return found

    def _timestamps(self, specs: Mapping[Partition, OffsetSpec]) -> dict[Partition, int]:
        return {place: one.timestamp for place, one in self._query(specs).items()}

    def _query(
        self, specs: Mapping[Partition, OffsetSpec], *, committed_only: bool = False
    ) -> dict[Partition, ListOffsetsResultInfo]:
        """Ask for one offset per partition, again while the answer is transient."""
        isolation = (
            IsolationLevel.READ_COMMITTED if committed_only else IsolationLevel.READ_UNCOMMITTED
        )
        wanted = {TopicPartition(*place): spec for place, spec in specs.items()}
        timeouts_s = chain(TRIES_S, repeat(TIMEOUT_S))

        def ask() -> dict[Partition, ListOffsetsResultInfo]:
            # Kept until it has answered: another thread may put a new one in its place, and one
            # without a reference ends without an answer.
            admin = self._admin
            answers = admin.list_offsets(
                wanted, isolation_level=isolation, request_timeout=next(timeouts_s)
            )
            try:
                found = {(at.topic, at.partition): one.result() for at, one in answers.items()}
            except KafkaException as error:
                if error.args[0].code() in (*MOVED, *TIMED_OUT):
                    # It keeps to the leaders that it knows for 15 minutes, whatever they answer.
                    self._admin = AdminClient(self._properties)
                raise
            if any(one.offset == OFFSET_INVALID for one in found.values()):
                # A broker that is just starting: no error, and no offset either.
                raise KafkaException(BrokerError(BrokerError.LEADER_NOT_AVAILABLE))
            return found

        return answer(ask) if wanted else {}


def _offsets(found: Mapping[Partition, ListOffsetsResultInfo]) -> dict[Partition, int]:
    return {place: one.offset for place, one in found.items()}


def _log_failed_deletion(topic: str, deleted: Future[object]) -> None:
    if (error := deleted.exception()) is not None:
        log.warning("could not delete records topic=%s error=%s", topic, error_text(error))


def runs(offsets: Sequence[int], max_gap: int) -> Iterator[tuple[int, int]]:
    """Yield the first and last of each run of ascending offsets at most `max_gap` apart."""
    first = None
    for at, offset in enumerate(offsets):
        first = offset if first is None else first
        if at + 1 == len(offsets) or offsets[at + 1] - offset > max_gap:
            yield first, offset
            first = None


def is_same_topic(noted_id: str | None, topic_id: str | None) -> bool:
    """Return whether both ids are of one topic; an unknown id differs from none."""
    return not noted_id or not topic_id or noted_id == topic_id


def belongs(commit: Commit, end: int, topic_id: str | None) -> bool:
    """Return whether the committed offset is one of the log that ends at `end`."""
    return commit.offset <= end and is_same_topic(LogIdentity.parse(commit.note).topic_id, topic_id)


def answer(ask: Callable[[], AnswerT], timeout_s: float = TIMEOUT_S) -> AnswerT:
    """Return the answer of a request, repeated while its error is transient. Raises KafkaError."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            return ask()
        except KafkaException as error:
            if error.args[0].code() not in TRANSIENT or time.monotonic() > deadline_s:
                raise _failed(error.args[0]) from error
        time.sleep(RETRY_INTERVAL_S)


def _raise_errors(answers: Iterable[TopicPartition]) -> None:
    for one in answers:
        if one.error is not None:
            raise _failed(one.error)


def _failed(error: BrokerError) -> KafkaError:
    if error.code() == BrokerError._NOENT:  # noqa: SLF001 (its public name)
        # The client reports this for topics that are gone, and for those whose brokers all are.
        return KafkaError(
            "the topics of the wheel have no leader: the brokers are down, or topics are missing; "
            "`duetime topics` tells which"
        )
    if error.code() in MISSING:
        return KafkaError(
            "topics of the wheel are missing, or have too few partitions: see `duetime topics`"
        )
    return KafkaError(f"Kafka did not answer about offsets ({error.str()}): is the broker up?")

"""duetime's topics and groups: their names, how topics are created, what existing ones must be."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from duetime.core.clock import UNITS_MS
from duetime.core.errors import ConfigError
from duetime.core.messages import LEADER, WHEEL
from duetime.core.settings import Settings

#: The most bytes that duetime's headers, and a rejected record's error headers, add to a record.
OVERHEAD_BYTES = 64 * 1024

#: The end of the name of a delayed topic that has a visible one.
DELAYED = ".delayed"

HOUR_MS = UNITS_MS["h"]

#: A day: how long a pipeline may be down and still finds all markers.
DAY_MS = UNITS_MS["d"]

#: Kafka's default retention, for records that have been taken in already.
WEEK_MS = 7 * DAY_MS

#: The least retention of intake: a record that is not taken in by then is lost, and a pipeline may
#: be down for a while.
MIN_INTAKE_RETENTION_MS = HOUR_MS

#: Larger than an entry of the schedules topic, which has a schedule twice, without its message.
SCHEDULE_BYTES = 2 * OVERHEAD_BYTES

#: No record is removed by age: only settled ones are freed, with DeleteRecords.
KEEP = {"cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1"}

#: Records are of use for a moment only.
TRANSIENT = {"cleanup.policy": "delete", "retention.ms": "600000"}

#: The same, for a topic with many records: only whole segments are deleted, never the present one.
TRANSIENT_LOG = TRANSIENT | {"segment.ms": "600000", "segment.bytes": "16777216"}

DELETE, COMPACT = {"cleanup.policy": "delete"}, {"cleanup.policy": "compact"}

#: Records are deleted by age alone.
DELETE_BY_AGE = DELETE | {"retention.bytes": "-1"}

#: Timestamps are set by the broker on append, because delays or ages count from there.
STAMPED = {"message.timestamp.type": "LogAppendTime"}

#: Limits how far a sender's timestamp is ahead of the broker's clock; brokers before 3.6 have the
#: second one.
AHEAD = ("message.timestamp.after.max.ms", "message.timestamp.difference.max.ms")

#: A day: no clock is that wrong, and timestamps in micro- or nanoseconds are refused.
MAX_AHEAD_MS = DAY_MS

#: The least age of a segment, and the size for each such time that its partition is filled.
MIN_SEGMENT_MS, SEGMENT_STEP_BYTES = 600_000, 16 * 1024 * 1024

#: The largest segment, in bytes: a billion messages of 350 bytes have 652 of them.
MAX_SEGMENT_BYTES = 512 * 1024 * 1024

#: The segments of a partition that is filled slowly. Of each level 65 partitions are filled at a
#: time, and three levels have long ones: 8 make 1,500 segments in all, and 16 make 2,300.
SEGMENTS = 8

#: Bytes of a segment for each byte of its index. The time index has 12 bytes for every 4,096
#: (`index.interval.bytes`), a ratio of 341. A full index closes the segment before its time.
BYTES_PER_INDEX_BYTE = 256


def native_topic(namespace: str) -> str:
    """Return the intake topic of duetime's native envelope."""
    return f"{namespace}.in"


class TopicNames:
    """The names of duetime's topics and groups under one namespace."""

    def __init__(self, settings: Settings) -> None:
        prefix = self._prefix = settings.namespace
        self.native = native_topic(prefix)
        self.transactional = f"{self.native}.tx"
        self.airtel = settings.airtel_topic
        self.countdown = settings.countdown_topic
        self.scheduler = settings.scheduler_topic
        self.control = f"{prefix}.control"
        self.rejected = f"{prefix}.rejected"
        self.retry = f"{prefix}.retry"
        self.dead_letter = f"{prefix}.dead-letter"
        self.sending = f"{prefix}.sending"
        self.redrive_log = f"{prefix}.redrive-log"
        self.lanes = f"{prefix}.lanes"
        self.store_inbox = f"{prefix}.store-inbox"
        self.schedule_commands = f"{prefix}.schedule-commands"
        self.schedules = f"{prefix}.schedules"
        self.warmup = f"{prefix}.warmup"
        self.tracker_wakeup = f"{prefix}.tracker-wakeup"
        self.leader = f"{prefix}{LEADER}"
        #: Has no members, and commits nothing: clients that only read offsets and ranges name it.
        self.reader_group = f"{prefix}.reader"
        self.redelivery_group = f"{prefix}.redelivery"
        self.release_group = f"{prefix}.release"
        self.intake_group = f"{prefix}.intake"
        #: Has no members: its commits are the progress of the real-time queries.
        self.progress_group = f"{prefix}.progress"
        #: Has no members: its commits are the positions of the slots' indexes.
        self.index_group = f"{prefix}.index"

    def outbox(self, cluster: str) -> str:
        """Return the topic of messages on their way to another cluster."""
        return f"{self._prefix}.outbox.{cluster}"

    def isolated(self, cluster: str | None = None) -> str:
        """Return a cluster's topic of records that are sent with reports; None is this one."""
        return f"{self._prefix}.isolated" + ("" if cluster is None else f".{cluster}")

    def wheel(self, level: int) -> str:
        """Return the topic of one level of the wheel."""
        return f"{self._prefix}{WHEEL}{level}"

    def visible_group(self, topic: str) -> str:
        """Return the group that forwards a delayed topic to its visible one."""
        return f"{self._prefix}.visible.{topic}"

    @property
    def own(self) -> list[str]:
        """The topics of messages that duetime sends to itself, and that cannot be cancelled."""
        return [self.schedule_commands, self.warmup]

    @property
    def plain_intake(self) -> list[str]:
        """The intake topics that are read to their end, regardless of open transactions there."""
        return [self.native, self.control, self.airtel, self.countdown, self.scheduler]

    @property
    def intake(self) -> list[str]:
        """Every topic that an intake query reads."""
        return [*self.plain_intake, self.transactional]


def namespaces(topics: Collection[str]) -> set[str]:
    """Return the namespaces on a cluster with these topics: each has a leader topic and a wheel."""
    found = (name.removesuffix(LEADER) for name in topics if name.endswith(LEADER))
    return {name for name in found if f"{name}{WHEEL}0" in topics}


def message_topics(settings: Settings) -> list[str]:
    """Return the internal topics in which messages wait, or end, on their way."""
    names = TopicNames(settings)
    wheel = (names.wheel(level) for level in range(settings.wheel_levels))
    outboxes = (names.outbox(each) for each in settings.clusters)
    isolated = isolated_topics(settings)
    ends = names.sending, names.retry, names.dead_letter, names.rejected
    return [*wheel, *outboxes, *isolated, names.store_inbox, names.lanes, *ends]


def isolated_topics(settings: Settings) -> list[str]:
    """Return the topics of records that are sent with reports, here and on the others."""
    return [TopicNames(settings).isolated(each) for each in (None, *settings.clusters)]


def internal_destinations(settings: Settings) -> set[tuple[str | None, str]]:
    """Return `TopicNames.own` and the clusters' probe topics, as (cluster or None, topic)."""
    here = {(None, topic) for topic in TopicNames(settings).own}
    clusters = settings.clusters.items()
    return here | {(name, each.probe_topic) for name, each in clusters if each.probe_topic}


def reserved_topics(settings: Settings) -> tuple[str, ...]:
    """Return the markers topics of all queues, and the delayed topics that are enabled.

    A message there would acknowledge others' messages, or be malformed.
    """
    markers = (queue.markers_topic(name) for name, queue in settings.queues.items())
    return *markers, *enabled_delayed_topics(settings)


def enabled_delayed_topics(settings: Settings) -> list[str]:
    """Return the delayed topics that are enabled."""
    return [name for name, topic in settings.delayed_topics.items() if topic.enable]


def visible_topics(settings: Settings) -> dict[str, str]:
    """Return the visible topics by the name of their delayed topic."""
    return {
        name: name.removesuffix(DELAYED)
        for name in enabled_delayed_topics(settings)
        if name.endswith(DELAYED) and name != DELAYED
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicSpec:
    """A topic that duetime needs: how it is created, and what an existing one must be."""

    name: str
    partitions: int
    #: The settings it is created with.
    settings: Mapping[str, str]
    #: Whether exactly this many partitions are needed, because a partition carries meaning.
    exact: bool = False
    #: Whether partitions may be added: those that are there keep their meaning.
    may_grow: bool = False
    #: Settings that must have exactly this value, or messages are lost or misplaced.
    required: Mapping[str, str] = field(default_factory=dict)
    #: The least max.message.bytes that takes every record duetime writes there; 0 is no limit.
    least_bytes: int = 0
    #: The least retention.ms, unless it is unlimited; 0 is no limit.
    least_retention_ms: int = 0
    #: Whether senders set the timestamps, where the broker does not.
    from_senders: bool = False

    def problems(self, partitions: int, settings: Mapping[str, str]) -> Iterator[str]:
        """Yield what is wrong with the existing topic, a sentence each that names the setting."""
        if self.may_grow and partitions < self.partitions:
            yield (
                f"topic {self.name} has {partitions} partitions, and needs {self.partitions}: "
                "add them with `duetime topics`"
            )
        elif self.exact and partitions != self.partitions:
            yield (
                f"topic {self.name} has {partitions} partitions, and a partition carries meaning "
                f"there: it must have {self.partitions}"
            )
        for name, value in self.required.items():
            if settings.get(name, value) != value:
                yield self._problem(
                    name, settings[name], f"which would lose or misplace messages: set {value}"
                )
        size, least = int(settings.get("max.message.bytes", self.least_bytes)), self.least_bytes
        if size < least:
            verdict = f"too small for max_message_bytes: set {least}"
            yield self._problem("max.message.bytes", size, verdict)
        retention_ms = int(settings.get("retention.ms", -1))
        if 0 <= retention_ms < self.least_retention_ms:
            yield self._problem(
                "retention.ms",
                retention_ms,
                "too short, since what is not taken in by then is lost: "
                f"set {self.least_retention_ms} or more",
            )
        yield from self._too_far_ahead(settings)

    def outdated(self, settings: Mapping[str, str]) -> dict[str, str]:
        """Return the settings that differ and may be changed at any time, as they should be."""
        return {
            name: value
            for name, value in self.settings.items()
            if name.startswith("segment.") and settings.get(name, value) != value
        }

    def _too_far_ahead(self, settings: Mapping[str, str]) -> Iterator[str]:
        # Spark cannot read a record whose timestamp overflows in us, and begins there again.
        limits = [(int(settings[each]), each) for each in AHEAD if each in settings]
        by_senders = self.from_senders and settings.get("message.timestamp.type") == "CreateTime"
        if by_senders and limits and min(limits)[0] > MAX_AHEAD_MS:
            limit_ms, name = min(limits)
            yield self._problem(
                name,
                limit_ms,
                "and timestamps are the senders' there: one in nanoseconds would stop all reading. "
                f"Set {MAX_AHEAD_MS} or less, or message.timestamp.type=LogAppendTime",
            )

    def _problem(self, setting: str, value: object, verdict: str) -> str:
        return f"topic {self.name}: {setting} is {value}, {verdict}"


def required_topics(settings: Settings) -> list[TopicSpec]:
    """Return every topic that the pipeline needs."""
    names, wheel, intake = TopicNames(settings), settings.wheel, settings.intake_partitions
    specs = [
        # Delays count from the record's timestamp, so the broker must set it, not the sender.
        _intake(names.native, intake, settings, required=DELETE_BY_AGE | STAMPED),
        _intake(names.transactional, intake, settings, required=DELETE_BY_AGE | STAMPED),
        _intake(names.countdown, 1, settings, required=DELETE_BY_AGE | STAMPED),
        _intake(names.control, 1, settings, from_senders=True),
        _intake(names.airtel, 1, settings, from_senders=True),
        _intake(names.scheduler, 1, settings, from_senders=True),
        # The pipeline reads delayed topics without Spark, which takes any timestamp.
        *(_intake(name, intake, settings) for name in enabled_delayed_topics(settings)),
        # A lane's wait counts from the append.
        _pending(names.lanes, settings.delay_lanes.lanes, settings),
        # A record's age tells which turn of the ring it belongs to.
        *(
            replace(
                _pending(
                    names.wheel(level), wheel.partitions, settings, filled_ms=wheel.filled_ms(level)
                ),
                may_grow=True,
            )
            for level in range(wheel.levels)
        ),
        # One partition: messages for another cluster stay in order.
        *(_log(names.outbox(each), settings, required=KEEP) for each in settings.clusters),
        _log(names.rejected, settings),
        _log(names.retry, settings, required=KEEP),
        *(_log(each, settings, required=KEEP) for each in isolated_topics(settings)),
        _log(names.sending, settings, required=KEEP),
        _log(names.dead_letter, settings),
        _log(names.redrive_log, settings),
        _log(names.schedule_commands, settings, required=KEEP),
        TopicSpec(
            name=names.schedules,
            partitions=1,
            exact=True,
            settings=COMPACT | {"max.message.bytes": str(SCHEDULE_BYTES)},
            required=COMPACT,
            least_bytes=SCHEDULE_BYTES,
        ),
        # Synthetic messages arrive in one partition, and warm-up jobs read the other.
        TopicSpec(name=names.warmup, partitions=2, exact=True, settings=TRANSIENT | STAMPED),
        TopicSpec(name=names.leader, partitions=1, exact=True, settings=TRANSIENT_LOG | STAMPED),
    ]
    if settings.store_kind != "kafka":
        specs.append(_pending(names.store_inbox, intake, settings, exact=False))
    if settings.store_kind == "aerospike" and settings.aerospike_expiry_notifications:
        specs.append(_intake(settings.aerospike_expiry_topic, 1, settings, from_senders=True))
    return [*specs, *_queue_topics(settings)]


def _queue_topics(settings: Settings) -> Iterator[TopicSpec]:
    for name, queue in settings.queues.items():
        timeout_ms = queue.max_visibility_timeout_ms
        # A marker is in its message's partition: the two topics have as many.
        yield TopicSpec(
            name=name,
            partitions=queue.partitions,
            exact=True,
            settings=DELETE | STAMPED,
            from_senders=True,
            # Compaction would remove an older message of the same key before its redelivery.
            required=DELETE,
            least_retention_ms=timeout_ms,
        )
        # An end marker that is removed before its start marker is tracked would come too late.
        kept_ms = max(DAY_MS, 2 * timeout_ms)
        yield TopicSpec(
            name=queue.markers_topic(name),
            partitions=queue.partitions,
            exact=True,
            settings=DELETE_BY_AGE | {"retention.ms": str(kept_ms)} | STAMPED,
            from_senders=True,
            required=DELETE_BY_AGE,
            least_retention_ms=kept_ms,
        )
        # A dead letter's number is its offset.
        yield _log(queue.dead_topic(name), settings)
    if settings.queues:
        yield TopicSpec(name=TopicNames(settings).tracker_wakeup, partitions=1, settings=TRANSIENT)


def _intake(
    name: str,
    partitions: int,
    settings: Settings,
    *,
    required: Mapping[str, str] = DELETE_BY_AGE,
    from_senders: bool = False,
) -> TopicSpec:
    # A little more room than max_message_bytes, so that a too large message is rejected with its
    # reason and not by an error in the sender's log.
    room = {"max.message.bytes": str(settings.max_message_bytes + OVERHEAD_BYTES)}
    return TopicSpec(
        name=name,
        partitions=partitions,
        settings=KEEP | {"retention.ms": str(WEEK_MS)} | STAMPED | room,
        required=required,
        least_retention_ms=MIN_INTAKE_RETENTION_MS,
        from_senders=from_senders,
    )


def _pending(
    name: str, partitions: int, settings: Settings, *, filled_ms: int = 0, exact: bool = True
) -> TopicSpec:
    """Return a topic of pending messages; `filled_ms` is as for `segment_settings`."""
    room = settings.max_message_bytes + OVERHEAD_BYTES
    size = {"max.message.bytes": str(room)}
    return TopicSpec(
        name=name,
        partitions=partitions,
        exact=exact,
        settings=KEEP | STAMPED | size | segment_settings(filled_ms, room),
        required=KEEP | STAMPED,
        least_bytes=room,
    )


def _log(name: str, settings: Settings, *, required: Mapping[str, str] = DELETE) -> TopicSpec:
    """Return a topic that is read from its beginning, in order, so it has one partition.

    KEEP is `required` where its messages are nowhere else.
    """
    # Room for the largest record any topic holds, and the error headers on top.
    room = settings.max_message_bytes + 2 * OVERHEAD_BYTES
    return TopicSpec(
        name=name,
        partitions=1,
        exact=True,
        # Stamped by the broker: the time of a failure is when it was written.
        settings=KEEP | STAMPED | {"max.message.bytes": str(room)},
        required=required,
        least_bytes=room,
    )


def segment_settings(filled_ms: int, largest_bytes: int) -> dict[str, str]:
    """Return the segment settings of a topic whose partitions are filled for `filled_ms` at a time.

    `largest_bytes` is the topic's max.message.bytes: Kafka refuses a batch larger than a segment.

    Kafka frees whole segments only, and never the active one. Many small segments give the disk
    back soon, but each costs the broker a file descriptor and two memory maps, of which a machine
    has 65,530 by default. So size and age follow from how long a partition is filled; with the
    default wheel:

        level   a partition is filled for   a segment is closed after   or at
        0       88 s                        10 min                      16 MiB
        1       69 min                      10 min                      96 MiB
        2       74 h                        9 h                         512 MiB
        3       197 days                    25 days                     512 MiB
        4       34 years                    4 years                     512 MiB

    A slot that is emptied keeps its active segment until its partition is filled by the next turn
    of the ring: an eighth of what it held, and 512 MiB at most. `test_topic_segments` counts the
    segments of a broker.
    """
    size = max(1, filled_ms // MIN_SEGMENT_MS) * SEGMENT_STEP_BYTES
    size = max(min(size, MAX_SEGMENT_BYTES), largest_bytes)
    return {
        "segment.bytes": str(size),
        "segment.ms": str(max(MIN_SEGMENT_MS, filled_ms // SEGMENTS)),
        "segment.index.bytes": str(size // BYTES_PER_INDEX_BYTE),
    }


def shared_names(topics: Iterable[TopicSpec]) -> Iterator[str]:
    """Yield a sentence for each name of several topics: one topic cannot have two contracts."""
    for name, times in Counter(topic.name for topic in topics).items():
        if times > 1:
            yield (
                f"topic {name} is named for {times} purposes: give each *_topic setting a name of "
                "its own"
            )


def check_all(problems: Iterable[str]) -> None:
    """Raise ConfigError with every problem, if there is one."""
    if found := list(problems):
        raise ConfigError("; ".join(found))

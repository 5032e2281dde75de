"""duetime's own topics as they must be: how each is created, and the check that nothing is lost."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from duetime.config import Settings
from duetime.errors import ConfigError
from duetime.segments import segment_settings
from duetime.tables import QueueSettings
from duetime.topics import OVERHEAD_BYTES, TopicNames, enabled

#: No record is removed by age: only what is settled is freed, with DeleteRecords.
KEEP = {"cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1"}

#: What is of use for a moment only.
PASSING = {"cleanup.policy": "delete", "retention.ms": "600000"}

#: Seven days, Kafka's own default, for what has been taken in already.
WEEK_MS = 7 * 24 * 3_600_000

#: A day: a pipeline may be down for so long, and finds all markers.
DAY_MS = 24 * 3_600_000

#: An hour: what is not taken in within its retention is lost, and a pipeline may be down a while.
LEAST_INTAKE_RETENTION_MS = 3_600_000

#: More than a series is large in the topic of all, with what it was before, whatever is in it.
SERIES_BYTES = 2 * OVERHEAD_BYTES

#: Stamped by the broker on append, because something counts from there.
STAMPED = {"message.timestamp.type": "LogAppendTime"}

#: How far ahead of the broker's clock a sender's timestamp may be, as brokers since 3.6 and as
#: older ones call it.
AHEAD = ("message.timestamp.after.max.ms", "message.timestamp.difference.max.ms")

#: A day: no clock is that wrong, and what is in micro- or nanoseconds is turned away.
MOST_AHEAD_MS = DAY_MS


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """A topic that duetime needs: how it is created, and what it must not be."""

    name: str
    partitions: int
    #: Settings it is created with.
    settings: Mapping[str, str]
    #: Whether exactly this many partitions are needed, because a partition carries meaning.
    exact: bool = False
    #: Settings whose value must be exactly this, or messages are lost or misplaced.
    required: Mapping[str, str] = field(default_factory=dict)
    #: The least max.message.bytes that takes every record duetime writes there; 0 is no matter.
    least_bytes: int = 0
    #: The least retention.ms, unless it is unlimited; 0 is no matter.
    least_retention_ms: int = 0
    #: Whether others write there, and where the topic is not stamped by the broker, set the time.
    from_senders: bool = False

    def problems(self, partitions: int, settings: Mapping[str, str]) -> Iterator[str]:
        """What is wrong with the topic as it exists, a sentence each, naming the setting."""
        if self.exact and partitions != self.partitions:
            yield (
                f"topic {self.name} has {partitions} partitions, and a partition carries meaning "
                f"there: it must have {self.partitions}"
            )
        for name, value in self.required.items():
            if settings.get(name, value) != value:
                yield self._says(
                    name, settings[name], f"which would lose or misplace messages: set {value}"
                )
        yield from self._too_small(settings)
        yield from self._too_far_ahead(settings)

    def outdated(self, settings: Mapping[str, str]) -> dict[str, str]:
        """Return the settings that differ and may be changed at any time, as they should be."""
        return {
            name: value
            for name, value in self.settings.items()
            if name.startswith("segment.") and settings.get(name, value) != value
        }

    def _too_small(self, settings: Mapping[str, str]) -> Iterator[str]:
        size = settings.get("max.message.bytes", "")
        if size and int(size) < self.least_bytes:
            yield self._says(
                "max.message.bytes",
                size,
                f"too small for max_message_bytes: set {self.least_bytes}",
            )
        retention = settings.get("retention.ms", "")
        if retention and 0 <= int(retention) < self.least_retention_ms:
            yield self._says(
                "retention.ms",
                retention,
                "too short, since what is not taken in by then is lost: "
                f"set {self.least_retention_ms} or more",
            )

    def _too_far_ahead(self, settings: Mapping[str, str]) -> Iterator[str]:
        """Spark cannot read a record whose timestamp overflows in us, and begins there again."""
        is_stamped = settings.get("message.timestamp.type") != "CreateTime"
        limits = [(int(settings[each]), each) for each in AHEAD if each in settings]
        if is_stamped or not self.from_senders or not limits:
            return
        limit_ms, name = min(limits)
        if limit_ms > MOST_AHEAD_MS:
            yield self._says(
                name,
                str(limit_ms),
                "and timestamps are the senders' there: one in nanoseconds would stop all reading. "
                f"Set {MOST_AHEAD_MS} or less, or message.timestamp.type=LogAppendTime",
            )

    def _says(self, setting: str, value: str, verdict: str) -> str:
        return f"topic {self.name}: {setting} is {value}, {verdict}"


def required_topics(settings: Settings) -> list[Topic]:
    """Every topic that the pipeline needs, as it should be."""
    names = TopicNames(settings)
    unstamped = (names.control, names.airtel, names.scheduler)
    levels = range(settings.wheel_levels)
    partitions = settings.intake_partitions
    ring, lanes = settings.wheel.ring, settings.ladder.lanes
    return [
        # Their delays count from the record's timestamp, so the broker must set it, not the sender.
        _intake_topic(names.native, partitions, settings, required=STAMPED),
        _intake_topic(names.transactional, partitions, settings, required=STAMPED),
        _intake_topic(names.countdown, 1, settings, required=STAMPED),
        *(_intake_topic(name, 1, settings, from_senders=True) for name in unstamped),
        # The pipeline reads delayed topics without Spark, which takes any timestamp.
        *(_intake_topic(name, partitions, settings) for name in enabled(settings)),
        # A lane's wait counts from the append.
        _waiting_topic(names.lanes, lanes, settings),
        # A record's age tells which turn of the ring it belongs to.
        *(
            _waiting_topic(names.wheel(level), ring, settings, settings.wheel.filled_ms(level))
            for level in levels
        ),
        *_store_topics(names.store, settings),
        # One partition: what is on its way to another cluster stays in order.
        *(_kept_topic(names.outbox(each), settings, only_copy=True) for each in settings.clusters),
        _kept_topic(names.rejected, settings),
        _kept_topic(names.failed, settings, only_copy=True),
        _kept_topic(names.isolated, settings, only_copy=True),
        _kept_topic(names.sending, settings, only_copy=True),
        _kept_topic(names.dead, settings),
        _kept_topic(names.redriven, settings),
        _kept_topic(names.recurring, settings, only_copy=True),
        _series_topic(names.series),
        _warmup_topic(names.warmup),
        # Nothing is written there: whoever is assigned its partition leads.
        Topic(name=names.leader, partitions=1, exact=True, settings={}),
        *_of_queues(settings),
    ]


def _of_queues(settings: Settings) -> Iterator[Topic]:
    for name, own in settings.queues.items():
        yield from _of_queue(name, own, settings)
    if settings.queues:
        yield Topic(name=TopicNames(settings).wake, partitions=1, settings=PASSING)


def _of_queue(name: str, own: QueueSettings, settings: Settings) -> Iterator[Topic]:
    # A marker is where its message is: the two have as many partitions.
    yield Topic(
        name=name,
        partitions=own.partitions,
        exact=True,
        settings={"cleanup.policy": "delete"} | STAMPED,
        from_senders=True,
        # Compacted, an older message of the same key would be gone before it can come again.
        required={"cleanup.policy": "delete"},
        least_retention_ms=own.timeout_max_ms,
    )
    # An end marker that is gone before its start marker is followed would come too late.
    kept_ms = max(DAY_MS, 2 * own.timeout_max_ms)
    kept = {"cleanup.policy": "delete", "retention.bytes": "-1"}
    yield Topic(
        name=own.markers_topic(name),
        partitions=own.partitions,
        exact=True,
        settings=kept | {"retention.ms": str(kept_ms)} | STAMPED,
        from_senders=True,
        required=kept,
        least_retention_ms=kept_ms,
    )
    # A dead letter is called by its offset.
    yield _kept_topic(own.dead_topic(name), settings)


def shared_names(topics: Iterable[Topic]) -> Iterator[str]:
    """What is wrong with the names: one topic cannot have two contracts."""
    for name, times in Counter(topic.name for topic in topics).items():
        if times > 1:
            yield (
                f"topic {name} is named for {times} purposes: give each *_topic setting a name of "
                "its own"
            )


def _intake_topic(
    name: str,
    partitions: int,
    settings: Settings,
    *,
    required: Mapping[str, str] = MappingProxyType({}),
    from_senders: bool = False,
) -> Topic:
    # A little more room than max_message_bytes, so that a too large message is rejected with its
    # reason and not by an error in the sender's log.
    room = {"max.message.bytes": str(settings.max_message_bytes + OVERHEAD_BYTES)}
    return Topic(
        name=name,
        partitions=partitions,
        settings=KEEP | {"retention.ms": str(WEEK_MS)} | STAMPED | room,
        required={"cleanup.policy": "delete", "retention.bytes": "-1", **required},
        least_retention_ms=LEAST_INTAKE_RETENTION_MS,
        from_senders=from_senders,
    )


def _waiting_topic(name: str, partitions: int, settings: Settings, filled_ms: int = 0) -> Topic:
    """`filled_ms`: how long a partition is filled before it is emptied; 0 is no time at all."""
    room = settings.max_message_bytes + OVERHEAD_BYTES
    return Topic(
        name=name,
        partitions=partitions,
        exact=True,
        settings=KEEP
        | STAMPED
        | {"max.message.bytes": str(room)}
        | segment_settings(filled_ms, room),
        required=KEEP | STAMPED,
        least_bytes=room,
    )


def _store_topics(name: str, settings: Settings) -> list[Topic]:
    """What is on its way to another store than Kafka: as many partitions as intake has."""
    if settings.store_kind == "kafka":
        return []
    waiting = _waiting_topic(name, settings.intake_partitions, settings)
    told = settings.store_kind == "aerospike" and settings.aerospike_notices
    notices = (
        [_intake_topic(settings.aerospike_topic, 1, settings, from_senders=True)] if told else []
    )
    return [replace(waiting, exact=False), *notices]


def _kept_topic(name: str, settings: Settings, *, only_copy: bool = False) -> Topic:
    """What has failed, is dead or rejected. One partition: it is read from its beginning, in order.

    `only_copy`: messages are nowhere else, so it may not be cleaned up.
    """
    # Room for the largest record any topic holds, and the error headers on top.
    room = settings.max_message_bytes + 2 * OVERHEAD_BYTES
    return Topic(
        name=name,
        partitions=1,
        # Stamped by the broker: the time of a failure is when it was written down.
        exact=True,
        settings=KEEP | STAMPED | {"max.message.bytes": str(room)},
        required=KEEP if only_copy else {"cleanup.policy": "delete"},
        least_bytes=room,
    )


def _series_topic(name: str) -> Topic:
    """The present state of each series, by its name: without what is in it, so never large."""
    latest = {"cleanup.policy": "compact"}
    return Topic(
        name=name,
        partitions=1,
        exact=True,
        settings=latest | {"max.message.bytes": str(SERIES_BYTES)},
        required=latest,
        least_bytes=SERIES_BYTES,
    )


def _warmup_topic(name: str) -> Topic:
    return Topic(
        # Where the pipeline's own messages arrive, and where drilled turns read.
        name=name,
        partitions=2,
        exact=True,
        settings=PASSING | STAMPED,
    )


def check_all(problems: Iterable[str]) -> None:
    """Raise ConfigError with every problem, or return where there is none."""
    found = list(problems)
    if found:
        raise ConfigError("; ".join(found))

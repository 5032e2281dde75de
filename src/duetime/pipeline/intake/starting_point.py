"""The starting point of intake: its checkpoint, or the offsets of the first start.

Another service may have delivered the records of an intake topic before duetime reads it, and
nothing shows which. So the first start on such a topic requires a starting point, which is
committed for the group `duetime.intake`. A later start without a checkpoint begins there, and
recovery leaves out the messages that were delivered since.
"""

import logging
import time
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress

from duetime.core.clock import format_instant, parse_instant
from duetime.core.errors import ConfigError, InvalidMessage, KafkaError
from duetime.core.settings import EARLIEST, LATEST, Settings
from duetime.core.topics import TopicNames, message_topics
from duetime.kafka.offsets import LogIdentity, Offsets, Partition, Unreadable, belongs
from duetime.pipeline import INTAKE
from duetime.pipeline.recovery.checkpoint import Checkpoints, CheckpointState

log = logging.getLogger(__name__)

#: The interval in which the starting point is committed, in seconds: brokers drop offsets after a
#: week.
COMMIT_INTERVAL_S = 86_400.0

CHOICES = (
    "say with --from (or start_from in the configuration) where to begin: earliest, latest, an "
    "instant such as 2026-12-24T18:00:00Z, or the consumer group of the service that read there "
    "before"
)


class IntakeStart:
    """Finds where intake begins, and commits the starting point."""

    def __init__(self, settings: Settings, checkpoints: Checkpoints, offsets: Offsets) -> None:
        """`offsets` are those of the group `duetime.intake`."""
        self._settings = settings
        self._names = TopicNames(settings)
        self._checkpoints = checkpoints
        self._offsets = offsets
        self._marks: dict[Partition, int] = {}
        self._notes: dict[Partition, str] = {}
        self._commit_at_s = 0.0

    def require(self) -> None:
        """Raise ConfigError if the starting point would be a guess."""
        self._first(*self._read())

    def begin(self, reached: Mapping[Partition, int]) -> dict[Partition, int] | None:
        """Return where a new checkpoint begins, or None if Spark can continue from its own.

        `reached` are offsets before which all records have moved on. Raises ConfigError,
        KafkaError.
        """
        found, logs = self._read()
        first = self._first(found, logs)
        self._log_first_start(first, logs)
        offsets = {at: max(offset, reached.get(at, 0)) for at, offset in found.offsets.items()}
        removed = logs.removed(offsets)
        for topic, count in removed.items():
            log.error(
                "retention removed records before intake topic=%s records=%d: give the topic a "
                "longer retention.ms than the pipeline is ever down",
                topic,
                count,
            )
        others = {key: offset for key, offset in logs.starts.items() if key not in first}
        earlier = {
            key: offset for key, offset in logs.marks.items() if key[0] not in found.invalid_topics
        }
        # Spark begins at the earliest record of a partition that its checkpoint does not know.
        is_first_at_start = first.items() <= logs.starts.items()
        is_usable = found.offsets and not found.problems and not removed and is_first_at_start
        if not is_usable:
            self._checkpoints.remove(INTAKE, found.problems)
        self._checkpoints.note(INTAKE)
        self._marks = others | first | logs.marks
        self._notes = {
            key: LogIdentity(topic_id=logs.ids.get(key[0])).text() for key in self._marks
        }
        self._commit()
        return None if is_usable else logs.within(others | earlier | first | offsets)

    def keep(self) -> None:
        """Commit the starting point again, once in COMMIT_INTERVAL_S, because offsets expire."""
        if self._marks and time.monotonic() >= self._commit_at_s:
            with suppress(KafkaError):
                self._commit()

    def _commit(self) -> None:
        self._offsets.commit(self._marks, self._notes)
        self._commit_at_s = time.monotonic() + COMMIT_INTERVAL_S

    def _read(self) -> tuple[CheckpointState, "_IntakeLogs"]:
        topics = self._names.plain_intake
        logs = _IntakeLogs(self._offsets, topics)
        return self._checkpoints.inspect(INTAKE, topics), logs

    def _first(self, found: CheckpointState, logs: "_IntakeLogs") -> dict[Partition, int]:
        """Return the starting point of topics that no start has read. Raises ConfigError."""
        known = {topic for topic, _ in found.offsets} | found.invalid_topics | logs.marked
        new = [topic for topic in self._names.plain_intake if topic not in known]
        if not new or (not known and self._is_used()):
            return {}
        start_from = self._settings.start_from
        # No other service has read an internal topic that a later version of duetime adds.
        added = {topic for topic in new if known and self._is_internal(topic)}
        earliest = {key: offset for key, offset in logs.starts.items() if key[0] in added}
        starts = {
            key: offset
            for key, offset in logs.starts.items()
            if key[0] in new and key[0] not in added
        }
        if start_from:
            return earliest | self._chosen(start_from, starts, logs)
        self._refuse_to_guess({key for key in starts if not self._is_internal(key[0])}, logs)
        return earliest | starts

    def _chosen(
        self, start_from: str, starts: Mapping[Partition, int], logs: "_IntakeLogs"
    ) -> dict[Partition, int]:
        if start_from == EARLIEST:
            return dict(starts)
        if start_from == LATEST:
            return {key: logs.ends[key] for key in starts}
        with suppress(InvalidMessage):
            since = self._offsets.first_since(dict.fromkeys(starts, parse_instant(start_from)))
            return {key: logs.ends[key] if at is None else at for key, at in since.items()}
        return self._committed_by(start_from, starts, logs)

    def _committed_by(
        self, group: str, starts: Mapping[Partition, int], logs: "_IntakeLogs"
    ) -> dict[Partition, int]:
        with closing(Offsets(self._settings, group)) as offsets:
            committed = offsets.committed(starts)
        topics = {topic for topic, _ in committed}
        if starts and not topics:
            known = ", ".join(self._names.plain_intake)
            raise ConfigError(
                f"the group {group} has committed nothing on {known}: "
                f"correct its name, or {CHOICES}"
            )
        # The group's offsets say nothing of a topic that it does not read.
        unread = {key for key in starts if key[0] not in topics and not self._is_internal(key[0])}
        self._refuse_to_guess(unread, logs, f", and the group {group} has committed nothing there")
        return logs.within({**starts, **committed})

    def _refuse_to_guess(
        self, partitions: Iterable[Partition], logs: "_IntakeLogs", why: str = ""
    ) -> None:
        """Raise ConfigError if the partitions have records."""
        history = logs.after({key: logs.starts[key] for key in partitions})
        if not any(history.values()):
            return
        first_ms, last_ms = self._offsets.first_appended_ms(partitions), self._last_ms(partitions)
        topics = []
        for topic, count in history.items():
            filled = [
                key for key in partitions if key[0] == topic and logs.starts[key] < logs.ends[key]
            ]
            if filled:
                since = format_instant(min(first_ms[key] for key in filled))
                last = [last_ms[key] for key in filled if last_ms]
                until = f" to {format_instant(max(last))}" if last else ""
                topics.append(f"{count} records in {topic}, from {since}{until}")
        raise ConfigError(
            "another service may have delivered what is in the intake topics already, and this "
            f"start would deliver it a second time ({'; '.join(topics)}{why}): {CHOICES}"
        )

    def _last_ms(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """Return the latest timestamp of each, epoch ms; nothing from brokers before Kafka 3.0."""
        try:
            return self._offsets.last_ms(partitions)
        except KafkaError:
            return {}

    def _log_first_start(self, first: Mapping[Partition, int], logs: "_IntakeLogs") -> None:
        topics = sorted({topic for topic, _ in first})
        read, passed = logs.after(first), logs.before(first)
        if topics:
            log.info(
                "first start: reading intake topics from=%s records=%d passed_over=%d topics=%s",
                self._settings.start_from or EARLIEST,
                sum(read.values()),
                sum(passed.values()),
                ",".join(topics),
            )
        for topic, count in passed.items():
            if count:
                log.warning("first start: not delivering records=%d topic=%s", count, topic)

    def _is_internal(self, topic: str) -> bool:
        """Return whether only duetime can have delivered the topic's records, by its name."""
        return topic.startswith(f"{self._settings.namespace}.")

    def _is_used(self) -> bool:
        """Return whether this namespace has taken in records, by an earlier version of duetime."""
        topics = [*message_topics(self._settings), self._names.schedule_commands]
        return any(self._offsets.appended(topics).values())


class _IntakeLogs:
    """The logs of the intake topics, as of now. Raises ConfigError, KafkaError."""

    def __init__(self, offsets: Offsets, topics: Iterable[str]) -> None:
        partitions = [each for topic in topics for each in _readable(offsets, topic)]
        self.starts, self.ends = offsets.starts(partitions), offsets.ends(partitions)
        self.ids = offsets.topic_ids(topics)
        commits = offsets.commits(partitions)
        #: Topics that a start has read.
        self.marked = {topic for topic, _ in commits}
        #: The starting point, without partitions of topics that were created again.
        self.marks = {
            key: commit.offset
            for key, commit in commits.items()
            if belongs(commit, self.ends[key], self.ids.get(key[0]))
        }

    def within(self, offsets: Mapping[Partition, int]) -> dict[Partition, int]:
        """Return the offsets, each moved into its log."""
        return {
            key: min(max(self.starts[key], offset), self.ends[key])
            for key, offset in offsets.items()
            if key in self.starts
        }

    def removed(self, offsets: Mapping[Partition, int]) -> dict[str, int]:
        """Return the records from these offsets on that each topic has lost, if any."""
        behind = {key: self.starts[key] - at for key, at in offsets.items() if key in self.starts}
        return _by_topic({key: count for key, count in behind.items() if count > 0})

    def after(self, offsets: Mapping[Partition, int]) -> dict[str, int]:
        """Return the number of records of each topic from these offsets on."""
        return _by_topic({key: self.ends[key] - offset for key, offset in offsets.items()})

    def before(self, offsets: Mapping[Partition, int]) -> dict[str, int]:
        """Return the number of records of each topic before these offsets."""
        return _by_topic({key: offset - self.starts[key] for key, offset in offsets.items()})


def _readable(offsets: Offsets, topic: str) -> list[Partition]:
    try:
        return offsets.readable_partitions(topic)
    except Unreadable as error:
        raise ConfigError(f"intake topic {topic}: {error}: give duetime's user the right") from None


def _by_topic(counts: Mapping[Partition, int]) -> dict[str, int]:
    total: dict[str, int] = {}
    for (topic, _), count in counts.items():
        total[topic] = total.get(topic, 0) + count
    return total

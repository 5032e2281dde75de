"""Where intake begins: at its checkpoint, or where the first start of this namespace began.

Other services may have delivered what was in an intake topic before duetime read it: nothing tells
which records. So the first start on such a topic asks for a starting point, and it is committed for
the group `duetime.intake`. A later start whose checkpoint is lost begins there, and what has gone
on since is read back.
"""

import logging
import time
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress

from duetime.clock import format_instant, parse_instant
from duetime.config import EARLIEST, LATEST, Settings
from duetime.errors import ConfigError, InvalidMessage, KafkaError
from duetime.pipeline.checkpoint import Checkpoints, Found
from duetime.pipeline.intake import INTAKE
from duetime.stores.logs import LogNote, belongs
from duetime.stores.offsets import Offsets, Unreadable
from duetime.stores.places import Place
from duetime.topics import TopicNames

log = logging.getLogger(__name__)

#: How often it is committed where intake began, in seconds: brokers drop offsets after a week.
KEEP_S = 86_400.0

CHOICES = (
    "say with --from (or start_from in the configuration) where to begin: earliest, latest, an "
    "instant such as 2026-12-24T18:00:00Z, or the consumer group of the service that read there "
    "before"
)


class IntakeStart:
    """Finds where intake begins, and commits where it began first."""

    def __init__(self, settings: Settings, checkpoints: Checkpoints, offsets: Offsets) -> None:
        """`offsets` are those of the group `duetime.intake`."""
        self._settings = settings
        self._names = TopicNames(settings)
        self._checkpoints = checkpoints
        self._offsets = offsets
        self._marks: dict[Place, int] = {}
        self._notes: dict[Place, str] = {}
        self._keep_s = 0.0

    def require(self) -> None:
        """Raise ConfigError where it would have to be guessed where to begin."""
        self._first(*self._look())

    def begin(self) -> dict[Place, int] | None:
        """Make the checkpoint one that Spark can go on from; None if it does.

        Else, of each partition, where a new checkpoint begins. Raises ConfigError, KafkaError.
        """
        found, logs = self._look()
        first = self._first(found, logs)
        self._tell(first, logs)
        removed = logs.removed(found.offsets)
        for topic, count in removed.items():
            log.error(
                "records removed before they were taken in topic=%s records=%d: give the topic a "
                "longer retention.ms than the pipeline is ever down",
                topic,
                count,
            )
        others = {at: end for at, end in logs.starts.items() if at not in first}
        earlier = {at: end for at, end in logs.marks.items() if at[0] not in found.lost}
        # Spark begins at the earliest record of what its checkpoint does not know.
        goes_on = (
            found.offsets
            and not found.troubles
            and not removed
            and first.items() <= logs.starts.items()
        )
        if not goes_on:
            self._checkpoints.remove(INTAKE, found.troubles)
        self._checkpoints.note(INTAKE)
        self._marks = others | first | logs.marks
        self._notes = {at: LogNote(topic_id=logs.ids.get(at[0])).text() for at in self._marks}
        self._commit()
        return None if goes_on else logs.within(others | earlier | first | dict(found.offsets))

    def keep(self) -> None:
        """Commit again where intake began, now and then, because offsets expire."""
        if self._marks and time.monotonic() >= self._keep_s:
            with suppress(KafkaError):
                self._commit()

    def _commit(self) -> None:
        self._offsets.commit(self._marks, self._notes)
        self._keep_s = time.monotonic() + KEEP_S

    def _look(self) -> tuple[Found, "_IntakeLogs"]:
        logs = _IntakeLogs(self._offsets, self._names.plain_intake)
        return self._checkpoints.look(INTAKE, self._names.plain_intake), logs

    def _first(self, found: Found, logs: "_IntakeLogs") -> dict[Place, int]:
        """Return where the topics begin that no start has read; raise ConfigError to not guess."""
        known = {topic for topic, _ in found.offsets} | found.lost | logs.marked
        new = [topic for topic in self._names.plain_intake if topic not in known]
        if not new or (not known and self._is_used()):
            return {}
        chosen = self._settings.start_from
        # A topic of ours that a later version adds has a history that nobody else has read.
        ours = {topic for topic in new if known and self._is_own(topic)}
        asked = {at: end for at, end in logs.starts.items() if at[0] in new and at[0] not in ours}
        begin = {at: end for at, end in logs.starts.items() if at[0] in ours}
        if chosen:
            return begin | self._chosen(chosen, asked, logs)
        self._refuse_to_guess({at for at in asked if not self._is_own(at[0])}, logs)
        return begin | asked

    def _chosen(
        self, chosen: str, starts: Mapping[Place, int], logs: "_IntakeLogs"
    ) -> dict[Place, int]:
        if chosen == EARLIEST:
            return dict(starts)
        if chosen == LATEST:
            return {at: logs.ends[at] for at in starts}
        with suppress(InvalidMessage):
            since = self._offsets.first_since(dict.fromkeys(starts, parse_instant(chosen)))
            return {at: logs.ends[at] if first is None else first for at, first in since.items()}
        with closing(Offsets(self._settings, chosen)) as offsets:
            committed = offsets.committed(starts)
        topics = {topic for topic, _ in committed}
        if starts and not topics:
            known = ", ".join(self._names.plain_intake)
            raise ConfigError(
                f"the group {chosen} has committed nothing on {known}: "
                f"correct its name, or {CHOICES}"
            )
        # Of a topic that the group does not read, nothing is known.
        unread = {at for at in starts if at[0] not in topics and not self._is_own(at[0])}
        self._refuse_to_guess(unread, logs, f", and the group {chosen} has committed nothing there")
        return logs.within({**starts, **committed})

    def _refuse_to_guess(self, places: Iterable[Place], logs: "_IntakeLogs", why: str = "") -> None:
        history = logs.history(places)
        if not history:
            return
        first_ms, last_ms = self._offsets.first_appended_ms(places), self._last_ms(places)
        told = []
        for topic, count in history.items():
            of = [at for at in places if at[0] == topic and logs.starts[at] < logs.ends[at]]
            until = f" to {format_instant(max(last_ms[at] for at in of))}" if last_ms else ""
            since = format_instant(min(first_ms[at] for at in of))
            told.append(f"{count} records in {topic}, from {since}{until}")
        raise ConfigError(
            "another service may have delivered what is in the intake topics already, and this "
            f"start would deliver it a second time ({'; '.join(told)}{why}): {CHOICES}"
        )

    def _last_ms(self, places: Iterable[Place]) -> dict[Place, int]:
        """Return the latest timestamp in each, epoch ms; none of brokers before Kafka 3.0."""
        try:
            return self._offsets.last_ms(places)
        except KafkaError:
            return {}

    def _tell(self, first: Mapping[Place, int], logs: "_IntakeLogs") -> None:
        """Log what the first start of some topics does."""
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

    def _is_own(self, topic: str) -> bool:
        """Return whether nobody but duetime can have delivered what is there, by its name."""
        return topic.startswith(f"{self._settings.namespace}.")

    def _is_used(self) -> bool:
        """Return whether anything was ever taken in: by a version that did not note its start."""
        names, settings = self._names, self._settings
        wheel = [names.wheel(level) for level in range(settings.wheel_levels)]
        outboxes = [names.outbox(each) for each in settings.clusters]
        ends = [names.rejected, names.failed, names.dead, names.recurring]
        store = [] if settings.store_kind == "kafka" else [names.store]
        written = self._offsets.appended([*wheel, *outboxes, *ends, *store, names.lanes])
        return any(written.values())


class _IntakeLogs:
    """The partitions of the intake topics as they are: asked once. Raises KafkaError."""

    def __init__(self, offsets: Offsets, topics: Iterable[str]) -> None:
        places = [place for topic in topics for place in _readable(offsets, topic)]
        self.starts, self.ends = offsets.starts(places), offsets.ends(places)
        self.ids = offsets.topic_ids(topics)
        commits = offsets.commits(places)
        #: Topics that a start has read.
        self.marked = {topic for topic, _ in commits}
        #: Where the first start began, of the partitions that are still of the same topic.
        self.marks = {
            at: commit.offset
            for at, commit in commits.items()
            if belongs(commit, self.ends[at], self.ids.get(at[0]))
        }

    def within(self, offsets: Mapping[Place, int]) -> dict[Place, int]:
        """Return the offsets, those that are outside of their log moved to its next end."""
        return {
            at: min(max(self.starts[at], offset), self.ends[at])
            for at, offset in offsets.items()
            if at in self.starts
        }

    def removed(self, offsets: Mapping[Place, int]) -> dict[str, int]:
        """Return how many records from these offsets on each topic has no more, if any."""
        behind = {at: self.starts[at] - end for at, end in offsets.items() if at in self.starts}
        return _by_topic({at: count for at, count in behind.items() if count > 0})

    def history(self, places: Iterable[Place]) -> dict[str, int]:
        """Return how many records each topic has in these partitions, where it has any."""
        return {
            topic: count
            for topic, count in self.after({at: self.starts[at] for at in places}).items()
            if count
        }

    def after(self, offsets: Mapping[Place, int]) -> dict[str, int]:
        """Return how many records each topic has from these offsets on."""
        return _by_topic({at: self.ends[at] - offset for at, offset in offsets.items()})

    def before(self, offsets: Mapping[Place, int]) -> dict[str, int]:
        """Return how many records each topic has before these offsets."""
        return _by_topic({at: offset - self.starts[at] for at, offset in offsets.items()})


def _readable(offsets: Offsets, topic: str) -> list[Place]:
    try:
        return offsets.readable_places(topic)
    except Unreadable as error:
        raise ConfigError(f"intake topic {topic}: {error}: give duetime's user the right") from None


def _by_topic(counts: Mapping[Place, int]) -> dict[str, int]:
    found: dict[str, int] = {}
    for (topic, _), count in counts.items():
        found[topic] = found.get(topic, 0) + count
    return found

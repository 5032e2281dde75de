"""Judging a history: the answers that clients got, and the deliveries that readers saw.

    answer to the client    the message is delivered
    produced                once
    scheduled               once at each run, those that were missed included
    cancelled               never
    not cancelled           at most once: a cancel that is too late may count after a kill
    rescheduled             once at the new time, and at most once at the old one
    not rescheduled         as before
    no answer               at most once, at each time

None is early. docs/limits.md has the reasons, and why nothing is judged of the order: a crash may
change it.
"""

import random
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import NamedTuple

from duetime.bench.testbed import Appends, Arrival, Figures, create_destinations
from duetime.client.cancellation import cancel_and_confirm
from duetime.client.producer import Producer
from duetime.client.rescheduling import reschedule
from duetime.core.clock import instant_ms
from duetime.core.cron import Misfire, Recurrence
from duetime.core.errors import DuetimeError, KafkaError, TooLate, UnknownMessage
from duetime.core.messages import MessageId
from duetime.core.settings import Settings
from duetime.core.threads import wait_until

#: Clients that work at once, and the longest delay that they ask for, in seconds. Each reads the
#: wheel for its cancels, and more of them slow the pipeline down.
CLIENTS, LONGEST_S = 2, 40.0

#: How long ago a schedule begins, in seconds: minutes whose runs were missed.
MISSED_S = 200.0

#: Messages that are looked up so soon after they were sent are unknown, in seconds.
ARRIVAL_S = 3.0

#: The kinds of violations.
VIOLATIONS = ("lost", "duplicated", "early", "uncancelled", "unexpected")


class Kind(StrEnum):
    """A kind of operation."""

    PRODUCE = "produce"
    #: Its id is that of one run of the schedule.
    SCHEDULE = "schedule"
    CANCEL = "cancel"
    RESCHEDULE = "reschedule"


class Operation(NamedTuple):
    """One call of a client, and its answer. Instants are seconds since the clients started."""

    kind: Kind
    id: str
    invoked_s: float
    answered_s: float
    #: None if it was done.
    error: DuetimeError | None = None
    #: The id of a message that was rescheduled.
    new_id: str | None = None


@dataclass(slots=True)
class Expected:
    """The number of deliveries of a message: at least and at most."""

    least: int = 0
    most: int = 1
    is_cancelled: bool = False


def expected(history: Iterable[Operation]) -> dict[str, Expected]:
    """Return, by message id, what the clients may rely on."""
    found = dict[str, Expected]()
    for each in sorted(history, key=lambda one: one.answered_s):
        known = found.setdefault(each.id, Expected())
        if each.kind in (Kind.PRODUCE, Kind.SCHEDULE):
            known.least = int(each.error is None)
        elif each.kind is Kind.CANCEL and each.error is None:
            known.least, known.most, known.is_cancelled = 0, 0, True
        elif each.kind is Kind.CANCEL or not isinstance(each.error, TooLate | UnknownMessage):
            known.least = 0
        if each.new_id is not None:
            found[each.new_id] = Expected(least=1)
    return found


def judge(history: Sequence[Operation], arrivals: Iterable[Arrival]) -> tuple[Figures, list[str]]:
    """Return the number of operations and of violations by kind, and each violation with its story.

    A violation is a message that is lost, duplicated, early, delivered in spite of a cancel that
    was confirmed, or that no client has sent.
    """
    wanted, violations, by_id = expected(history), list[tuple[str, str]](), Counter[str]()
    for each in arrivals:
        by_id[each.id.decode()] += 1
        if each.late_ms < 0:
            violations.append(("early", each.id.decode()))
    unanswered = {
        MessageId.parse(each.id).unique
        for each in history
        if each.kind is Kind.RESCHEDULE and each.error is not None
    }
    for identity in by_id.keys() - wanted.keys():
        # Without an answer, the id of a message that was rescheduled is not known.
        if MessageId.parse(identity).unique.rpartition("~")[0] in unanswered:
            wanted[identity] = Expected()
        else:
            violations.append(("unexpected", identity))
    for identity, one in wanted.items():
        if by_id[identity] < one.least:
            violations.append(("lost", identity))
        elif by_id[identity] > one.most:
            violations.append(("uncancelled" if one.is_cancelled else "duplicated", identity))
    answers = Counter((each.kind, each.error is None) for each in history)
    counts = Counter(name for name, _ in violations)
    figures: Figures = {f"{kind}_done": answers[kind, True] for kind in Kind}
    figures |= {f"{kind}_failed": answers[kind, False] for kind in Kind}
    stories = [f"{name}: {_story(identity, history)}" for name, identity in violations]
    return figures | {name: counts[name] for name in VIOLATIONS}, stories


def _story(identity: str, history: Iterable[Operation]) -> str:
    operations = [
        f"{each.kind} at {each.invoked_s:.1f}, {each.answered_s:.1f} s: {each.error or 'done'}"
        for each in history
        if identity in (each.id, each.new_id)
    ]
    return f"{identity}: {'; '.join(operations) or 'never sent'}"


class Clients:
    """Clients that produce, schedule, cancel and reschedule messages, and note each answer."""

    def __init__(self, settings: Settings) -> None:
        (self._topic,) = create_destinations(settings, ["history"])
        self._settings, self._arrived = settings, Appends(settings, [self._topic])
        self._history, self._stopping = list[Operation](), threading.Event()
        self._started_s = time.monotonic()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(CLIENTS)]

    @contextmanager
    def running(self) -> Iterator["Clients"]:
        """Run them while the block lasts."""
        for each in self._threads:
            each.start()
        try:
            yield self
        finally:
            self._stopping.set()

    def judged(self, timeout_s: float) -> tuple[Figures, list[str]]:
        """Stop, wait for what must arrive, and judge."""
        self._stopping.set()
        for each in self._threads:
            each.join()
        wanted = expected(self._history)
        due_ms = max((MessageId.parse(each).due_ms for each in wanted), default=0)
        must = sum(each.least for each in wanted.values())
        # What may not arrive would arrive at its time.
        time.sleep(max(0.0, due_ms / 1_000 - time.time()) + ARRIVAL_S)
        wait_until(lambda: self._arrived.count() >= must, timeout_s, 1.0)
        return judge(self._history, self._arrived.arrivals())

    def _run(self) -> None:
        with Producer(self._settings) as producer:
            while not self._stopping.is_set():
                identity = self._produce(producer)
                if self._stopping.wait(random.uniform(0, 2 * ARRIVAL_S)):  # noqa: S311 (no secret)
                    return
                kind = random.choice(list(Kind))  # noqa: S311 (no secret)
                if kind is Kind.SCHEDULE:
                    self._schedule(producer)
                elif kind is not Kind.PRODUCE:
                    self._call(kind, identity)

    def _produce(self, producer: Producer) -> str:
        def report(error: KafkaError | None, identity: str) -> None:
            self._note(Kind.PRODUCE, identity, begun_s, error)

        begun_s = self._now_s()
        identity = producer.produce(self._topic, "x", in_=_delay(), on_delivery=report)
        producer.flush()
        return identity

    def _schedule(self, producer: Producer) -> None:
        """Create a schedule of some runs that were missed, and perhaps one that is not yet due."""
        now = datetime.now(UTC)
        start, until = now - timedelta(seconds=MISSED_S), now + timedelta(seconds=LONGEST_S)
        recurrence = Recurrence.of("* * * * *", until=until, misfire=Misfire.ALL)

        def report(error: KafkaError | None, _: str) -> None:
            due_ms = recurrence.first(instant_ms(start))
            while due_ms is not None:
                self._note(
                    Kind.SCHEDULE, str(MessageId(due_ms=due_ms, unique=name)), begun_s, error
                )
                due_ms = recurrence.first(due_ms + 1)

        begun_s, name = self._now_s(), uuid.uuid4().hex
        producer.produce(
            self._topic, "x", at=start, id=name, recurrence=recurrence, on_delivery=report
        )
        producer.flush()

    def _call(self, kind: Kind, identity: str) -> None:
        """Cancel or reschedule the message."""
        begun_s, new_id = self._now_s(), None
        try:
            if kind is Kind.CANCEL:
                cancel_and_confirm(identity, self._settings)
            else:
                new_id = reschedule(identity, in_=_delay(), settings=self._settings)
        except DuetimeError as error:
            self._note(kind, identity, begun_s, error)
        else:
            self._note(kind, identity, begun_s, new_id=new_id)

    def _note(
        self,
        kind: Kind,
        identity: str,
        begun_s: float,
        error: DuetimeError | None = None,
        new_id: str | None = None,
    ) -> None:
        self._history.append(Operation(kind, identity, begun_s, self._now_s(), error, new_id))

    def _now_s(self) -> float:
        return time.monotonic() - self._started_s


def _delay() -> timedelta:
    return timedelta(seconds=random.uniform(0, LONGEST_S))  # noqa: S311 (no secret)

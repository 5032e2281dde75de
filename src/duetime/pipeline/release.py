"""When turns are taken: every window a little ahead, far slots in time, and whatever was missed.

Each planner is an endless generator of decisions in a thread of its own: it says what is to be
taken up and when; the turns run in small pools, so that a heavy one does not delay the next one's
planning.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, Generic, Protocol, TypeGuard, cast

from duetime.clock import Clock
from duetime.config import Settings
from duetime.errors import OutcomeKnown
from duetime.message import LATEST_MS
from duetime.metrics import RESCUED
from duetime.pipeline.cascades import Cascades
from duetime.pipeline.faults import Point, reach
from duetime.pipeline.kafka import REST_S
from duetime.standing import RESCUES_TOLD, Rescue
from duetime.stores import ANY_TIME, Claim, ClaimT, OffsetRange, Store
from duetime.topics import TopicNames
from duetime.wheel import Slot, Wheel

log = logging.getLogger(__name__)

#: Windows that may be open at once: one being planned, one being sent, and room for heavy ones and
#: for those that wait for a broker's answer, which may take the delivery timeout of 10 s.
WINDOWS = 16

#: Rescues at once. They are in no hurry, and must not take the cores from windows.
BACKGROUND = 2

#: How often is looked at the clock, in seconds: it may have been set.
LOOK_S = 1.0


class Take(Protocol):
    """What is done with claims."""

    def __call__(self, claims: Sequence[Any]) -> None:
        """Send or route on all that they hold."""

    def route_cancels(self, claims: Sequence[Any]) -> None:
        """Route on the cancels among that; they stay where they are, too."""


def slots_of(wheel: Wheel, level: int, from_ms: int, lead_ms: int) -> Iterator[tuple[int, Slot]]:
    """Every slot of the level not taken up yet at `from_ms`, in order, and when it is to be."""
    slot = Slot(level, wheel.number(level, from_ms))
    while True:
        at_ms = wheel.closes_at_ms(slot, lead_ms)
        if at_ms > from_ms:
            yield at_ms, slot
        slot = Slot(level, slot.number + 1)


def portions(claims: Sequence[ClaimT], messages: int) -> Iterator[list[ClaimT]]:
    """The claims in groups of at most so many messages, a group a job; a larger claim by itself."""
    group: list[ClaimT] = []
    for each in claims:
        if group and sum(one.count for one in group) + each.count > messages:
            yield group
            group = []
        group.append(each)
    if group:
        yield group


class Release(Generic[ClaimT]):
    """Takes up slots when it is time, until stopped."""

    def __init__(
        self,
        *,
        settings: Settings,
        store: Store[ClaimT],
        turn: Take,
        clock: Clock,
        is_warm: Callable[[], bool] = lambda: True,
    ) -> None:
        """Before the pipeline `is_warm`, it is no wonder that something has to be rescued."""
        self._settings = settings
        self._wheel = settings.wheel
        self._store = store
        self._turn = turn
        self._clock = clock
        self._is_warm = is_warm
        self._stopping = threading.Event()
        self._windows = ThreadPoolExecutor(WINDOWS, thread_name_prefix="window")
        self._background = ThreadPoolExecutor(BACKGROUND, thread_name_prefix="background")
        names = TopicNames(settings)
        self._near = names.wheel(0)
        self._far = {names.wheel(level): level for level in range(1, self._wheel.levels)}
        self._cascades = Cascades(
            settings,
            # Only the wheel has far slots.
            cast("Store[OffsetRange]", store),
            take_up=lambda claims: self._take_up(cast("Sequence[ClaimT]", claims)),
            route_cancels=turn.route_cancels,
            clock=clock,
        )
        self._threads: list[threading.Thread] = []
        #: Messages that were past due before a window took them up; on a healthy system 0.
        self.rescued = 0
        #: The latest looks that found some. Replaced, and not changed: others read it.
        self.rescues: tuple[Rescue, ...] = ()

    def start(self, from_ms: int | None = None) -> None:
        """Start the planners: one a level, and rescue.

        `from_ms` is the instant, epoch ms, up to which everything was rescued; None is now.
        """
        from_ms = self._clock.now_ms() if from_ms is None else from_ms
        planners: list[Callable[[], None]] = [
            self._rescue,
            *(partial(self._follow, level, from_ms) for level in range(self._store.levels)),
        ]
        for planner in planners:
            thread = threading.Thread(target=planner, daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """Plan nothing more, and wait for the windows that are open: they end within 3 seconds."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        self._windows.shutdown(wait=True)
        self._cascades.stop()
        self._background.shutdown(wait=False, cancel_futures=True)

    def join(self) -> None:
        """Wait for what runs in the background, after `stop`."""
        self._cascades.join()
        self._background.shutdown(wait=True)

    def rescue_once(self) -> list[Future[None]]:
        """Take up everything that should have been taken up before now."""
        now_ms = self._clock.now_ms()
        claims = self._store.overdue(now_ms)
        if claims:
            self._note(claims, now_ms)
        # What has messages that are not late yet does not wait behind what is late anyway.
        far = [each for each in claims if self._is_ahead(each, now_ms)]
        cascades = [self._cascades.submit(self._far_slot(each), each) for each in far]
        late = [each for each in claims if not self._is_ahead(each, now_ms)]
        # Windows wait for partitions that a rescue holds: those that are needed soon go first.
        late.sort(key=partial(self._planned_next_ms, now_ms=now_ms))
        new = [each for each in late if each.begun_ms is None]
        begun = [each for each in late if each.begun_ms is not None]
        taken = self._submit(new, now_ms)
        # What was begun before takes longer, because it is read back: the others go first.
        if begun:
            after = self._background.submit(self._take_up_after, taken[:], begun, now_ms)
            taken.append(after)
        return [*taken, *cascades]

    def take_up(self, claims: Sequence[ClaimT]) -> None:
        """Take up what somebody else has claimed, at once."""
        self._windows.submit(self._take_up, claims)

    def _note(self, claims: Sequence[ClaimT], now_ms: int) -> None:
        found = sum(each.count for each in claims)
        known = [each.due for each in claims if each.due != ANY_TIME] or [ANY_TIME]
        from_ms = min(each.from_ms for each in known)
        to_ms = max(each.to_ms for each in known)
        self.rescued += found
        self.rescues = (*self.rescues, Rescue(now_ms, found, from_ms, to_ms))[-RESCUES_TOLD:]
        RESCUED.inc(found)
        if self._is_warm():
            log.warning("rescued messages=%d slots=%d", found, len(claims))
        else:
            log.info("rescued messages=%d slots=%d", found, len(claims))

    def _is_ahead(self, claim: Claim, now_ms: int) -> TypeGuard[OffsetRange]:
        """Return whether it is of a far slot that has messages due after `now_ms`."""
        is_far = isinstance(claim, OffsetRange) and claim.topic in self._far
        return is_far and claim.due != ANY_TIME and claim.due.to_ms > now_ms

    def _far_slot(self, claim: OffsetRange) -> Slot:
        level = self._far[claim.topic]
        return Slot(level, self._wheel.number(level, claim.due.from_ms))

    def _planned_next_ms(self, claim: Claim, now_ms: int) -> int:
        """Return when a window wants the claim's partition next; LATEST_MS if none does."""
        if not (isinstance(claim, OffsetRange) and claim.topic == self._near):
            return LATEST_MS
        lead_ms = self._settings.lead_ms
        slot = self._wheel.slot_filling(0, claim.partition, now_ms, lead_ms)
        return self._wheel.closes_at_ms(slot, lead_ms)

    def _submit(self, claims: Sequence[ClaimT], now_ms: int) -> list[Future[None]]:
        groups = portions(claims, self._settings.job_messages)
        return [self._background.submit(self._take_up_late, group, now_ms) for group in groups]

    def _take_up_after(
        self, others: list[Future[None]], claims: Sequence[ClaimT], claimed_ms: int
    ) -> None:
        wait(others)
        for group in portions(claims, self._settings.job_messages):
            self._take_up_late(group, claimed_ms)

    def _take_up_late(self, claims: Sequence[ClaimT], claimed_ms: int) -> None:
        """Take up what is late, then what the windows left that were planned since the claim.

        They found their partition claimed, and what came in since then is in no claim.
        """
        self._take_up(claims)
        try:
            for slot in self._passed_over(claims, claimed_ms):
                if left := self._store.due(slot):
                    self._windows.submit(self._take_up, left)
        except Exception:
            log.exception("could not plan what came in during a rescue; the next rescue will")

    def _passed_over(self, claims: Sequence[Claim], claimed_ms: int) -> list[Slot]:
        """Return the slots of level 0 in these partitions that were planned since `claimed_ms`."""
        held = {
            each.partition
            for each in claims
            if isinstance(each, OffsetRange) and each.topic == self._near
        }
        instants_ms = (claimed_ms, self._clock.now_ms())
        first, last = (self._wheel.number(0, each + self._settings.lead_ms) for each in instants_ms)
        # One turn of the ring before, they are the same partitions.
        numbers = range(max(first, last - self._wheel.ring) + 1, last + 1)
        slots = [Slot(0, number) for number in numbers]
        return [each for each in slots if self._wheel.partition(each) in held]

    def _follow(self, level: int, from_ms: int) -> None:
        for slot in self._slots(level, from_ms):
            try:
                claims = self._store.due(slot)
            except Exception:
                log.exception("could not plan level=%d slot=%d; rescue will", level, slot.number)
                continue
            if level == 0 and claims:
                self._windows.submit(self._take_up, claims)
            elif level:
                for each in claims:
                    self._cascades.submit(slot, cast("OffsetRange", each))

    def _slots(self, level: int, from_ms: int) -> Iterator[Slot]:
        """Each slot of the level when it is to be taken up, from that instant until stopped.

        When the clock is set back it begins again from there: new messages are put into slots that
        were taken up already. When it is set forward, those in between are due at once.
        """
        while not self._stopping.is_set():
            seen_ms = from_ms
            for at_ms, slot in slots_of(self._wheel, level, from_ms, self._settings.lead_ms):
                now_ms = self._reached(at_ms, seen_ms)
                if now_ms is None:
                    break
                seen_ms = now_ms
                yield slot
            from_ms = self._clock.now_ms()

    def _reached(self, at_ms: int, seen_ms: int) -> int | None:
        """Wait until it is time, and give the instant; None if stopped, or the clock was set back.

        `seen_ms` is the last instant that was seen: it may be set back while a planner is busy.
        """
        while (now_ms := self._clock.now_ms()) < at_ms:
            if now_ms < seen_ms:
                log.warning("the clock was set back ms=%d", seen_ms - now_ms)
                return None
            seen_ms = now_ms
            if self._stopping.wait(min((at_ms - now_ms) / 1_000, LOOK_S)):
                return None
        return now_ms

    def _rescue(self) -> None:
        while not self._stopping.wait(self._settings.rescue_every_ms / 1_000):
            try:
                self.rescue_once()
            except Exception:
                log.exception("rescue failed; it looks again")

    def _take_up(self, claims: Sequence[ClaimT]) -> None:
        """A crash before settling repeats the turn, which leaves out then what it has written."""
        try:
            self._store.begin(claims, self._clock.now_ms())
            reach(Point.TURN_BEGUN)
            self._turn(claims)
            reach(Point.TURN_SENT)
            self._store.settle(claims)
        except OutcomeKnown as error:
            log.warning("turn failed; it is repeated at once error=%s claims=%s", error, claims)
            self._repeat(claims)
        except Exception:
            log.exception("turn failed; it is repeated after a rest: %s", claims)
            rest = threading.Timer(REST_S, self._repeat, [claims])
            rest.daemon = True
            rest.start()

    def _repeat(self, claims: Sequence[ClaimT]) -> None:
        """Take up what has failed: as begun, so that what is written is read back."""
        self._store.give_up(claims)
        if self._stopping.is_set():
            return
        try:
            self.rescue_once()
        except Exception:
            log.exception("could not repeat a failed turn; rescue will")

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
from typing import Generic

from duetime.clock import Clock
from duetime.config import Settings
from duetime.errors import OutcomeKnown
from duetime.metrics import RESCUED
from duetime.pipeline.faults import Point, reach
from duetime.pipeline.kafka import REST_S
from duetime.standing import RESCUES_TOLD, Rescue
from duetime.stores import ANY_TIME, ClaimT, Store
from duetime.wheel import Slot, Wheel

log = logging.getLogger(__name__)

#: Windows that may be open at once: one being planned, one being sent, and room for heavy ones and
#: for those that wait for a broker's answer, which may take the delivery timeout of 10 s.
WINDOWS = 16

#: Far slots and rescues at once. They are in no hurry, and must not take the cores from windows.
BACKGROUND = 2

#: How often is looked at the clock, in seconds: it may have been set.
LOOK_S = 1.0

Take = Callable[[Sequence[ClaimT]], None]


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
        turn: Take[ClaimT],
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
        self._background.shutdown(wait=False, cancel_futures=True)

    def join(self) -> None:
        """Wait for what runs in the background, after `stop`."""
        self._background.shutdown(wait=True)

    def rescue_once(self) -> list[Future[None]]:
        """Take up everything that should have been taken up before now."""
        now_ms = self._clock.now_ms()
        claims = self._store.overdue(now_ms)
        if claims:
            self._note(claims, now_ms)
        new = [each for each in claims if each.begun_ms is None]
        begun = [each for each in claims if each.begun_ms is not None]
        taken = self._submit(new)
        # What was begun before takes longer, because it is read back: the others go first.
        if begun:
            taken.append(self._background.submit(self._take_up_after, taken[:], begun))
        return taken

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

    def _submit(self, claims: Sequence[ClaimT]) -> list[Future[None]]:
        groups = portions(claims, self._settings.job_messages)
        return [self._background.submit(self._take_up, group) for group in groups]

    def _take_up_after(self, others: list[Future[None]], claims: Sequence[ClaimT]) -> None:
        wait(others)
        for group in portions(claims, self._settings.job_messages):
            self._take_up(group)

    def _follow(self, level: int, from_ms: int) -> None:
        pool = self._windows if level == 0 else self._background
        for slot in self._slots(level, from_ms):
            try:
                claims = self._store.due(slot)
            except Exception:
                log.exception("could not plan level=%d slot=%d; rescue will", level, slot.number)
                continue
            if claims:
                pool.submit(self._take_up, claims)

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

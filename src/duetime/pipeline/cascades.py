"""Cascades: far slots are routed on in threads of their own, the most urgent first.

A slot has from its cascade to its start, less the lead, and one task routes T = 100,000 records/s
on 2 cores. With R messages/s that wait so long, of 64 slots of 1 s:

    level   a slot holds   there are   R at most
    1       64 R           18 s        T x 18 / 64 = 28,000/s
    2       4,096 R        250 s       T x 250 / 4,096 = 6,100/s
    3       262,144 R      4.5 h       T x 16,400 / 262,144 = 6,200/s

A range that holds much is cut into chunks. Each is begun, routed on and settled by itself, in the
order of offsets, because what is settled is one offset. So a crash repeats one chunk, and a slot
that is needed sooner waits for no more than one.

A message and its cancel may be in different chunks. They meet on a lower level, if the cancel is
there before the message is released: so the cancels of the whole range are routed on before the
first chunk, and a range is cut only while its slot is so far off that no chunk sends anything.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import count
from queue import PriorityQueue
from typing import Protocol

from duetime.clock import Clock
from duetime.config import Settings
from duetime.stores import OffsetRange
from duetime.wheel import Slot, Wheel

log = logging.getLogger(__name__)

#: How many far slots are routed on at once. They must not take the cores from windows.
CASCADES = 2

#: The most offsets of a chunk: about 5 s of one task.
CHUNK = 500_000

#: How long before its slot begins a range is still cut, in ms: a chunk may take several times as
#: long as it should and still route on all that it holds.
CUT_UNTIL_MS = 30_000

Take = Callable[[Sequence[OffsetRange]], None]


class FarStore(Protocol):
    """The store of the far slots."""

    def due(self, slot: Slot) -> Sequence[OffsetRange]:
        """Claim what waits in the slot now."""
        ...

    def give_up(self, claims: Iterable[OffsetRange]) -> None:
        """Drop the claims without settling."""
        ...


@dataclass(frozen=True, slots=True, order=True)
class Cascade:
    """A range of a far slot that waits for a thread; the smallest is the most urgent."""

    #: When the slot's first message is needed on level 0, epoch ms.
    needed_ms: int
    #: The order in which they came.
    number: int
    slot: Slot = field(compare=False)
    claim: OffsetRange = field(compare=False)
    #: Whether a chunk before this was routed on, and so the cancels of all of it.
    is_rest: bool = field(default=False, compare=False)


def is_cut(cascade: Cascade, wheel: Wheel, now_ms: int) -> bool:
    """Return whether a chunk of the range is routed on at `now_ms`, and not all of it.

    A range that was begun before is not cut: it is read back, which costs the same for a part.
    """
    is_early = now_ms + CUT_UNTIL_MS <= wheel.start_ms(cascade.slot)
    return is_early and cascade.claim.begun_ms is None and cascade.claim.count > CHUNK


class Cascades:
    """Routes on claimed ranges of far slots. Thread-safe."""

    def __init__(
        self,
        settings: Settings,
        store: FarStore,
        *,
        take_up: Take,
        route_cancels: Take,
        clock: Clock,
    ) -> None:
        """`take_up` begins, routes on and settles; where it fails it keeps the claim for a while.

        `route_cancels` routes on the cancels alone, and leaves them where they are, too.
        """
        self._wheel, self._lead_ms = settings.wheel, settings.lead_ms
        self._store = store
        self._take_up = take_up
        self._route_cancels = route_cancels
        self._clock = clock
        self._pool = ThreadPoolExecutor(CASCADES, thread_name_prefix="cascade")
        self._waiting = PriorityQueue[Cascade]()
        self._numbers = count()

    def submit(self, slot: Slot, claim: OffsetRange, *, is_rest: bool = False) -> Future[None]:
        """Have a claimed range of the slot routed on when nothing is more urgent."""
        needed_ms = self._wheel.start_ms(slot) - self._lead_ms
        self._waiting.put(Cascade(needed_ms, next(self._numbers), slot, claim, is_rest))
        # There are as many tasks as cascades, and each takes the most urgent one.
        return self._pool.submit(self._route_on)

    def stop(self) -> None:
        """Begin nothing more, without waiting for what is under way."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def join(self) -> None:
        """Wait for what is under way, after `stop`."""
        self._pool.shutdown(wait=True)

    def _route_on(self) -> None:
        """Route on the most urgent range, or a chunk of it; the rest waits with the others.

        A crash between two lines repeats work and loses nothing.
        """
        cascade = self._waiting.get_nowait()
        claim = cascade.claim
        if not self._may_cut(cascade):
            self._take_up([claim])
            return
        self._take_up([replace(claim, end=claim.start + CHUNK)])
        try:
            # Nothing, where the chunk failed: its claim is kept until rescue may have it.
            rests = self._store.due(cascade.slot)
        except Exception:
            log.exception("could not claim the rest of %s; rescue will", claim)
            return
        for rest in rests:
            # What came in since then may be this range's own, which no level reaches.
            end = min(rest.end, claim.end)
            if rest.start < end:
                self.submit(cascade.slot, replace(rest, end=end), is_rest=True)
            else:
                self._store.give_up([rest])

    def _may_cut(self, cascade: Cascade) -> bool:
        if not is_cut(cascade, self._wheel, self._clock.now_ms()):
            return False
        if cascade.is_rest:
            return True
        try:
            self._route_cancels([cascade.claim])
        except Exception:
            log.exception("could not route cancels on first; not cut: %s", cascade.claim)
            return False
        return is_cut(cascade, self._wheel, self._clock.now_ms())

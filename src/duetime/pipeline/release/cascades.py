"""Cascades: far slots are routed on in threads of their own, the most urgent first.

A slot has from its cascade to its start, less the lead, and one task routes T = 100,000 records/s
on 2 cores. With R messages/s due that far ahead, and 64 slots of 1 s:

    level   a slot holds   there are   R at most
    1       64 R           18 s        T x 18 / 64 = 28,000/s
    2       4,096 R        250 s       T x 250 / 4,096 = 6,100/s
    3       262,144 R      4.5 h       T x 16,400 / 262,144 = 6,200/s

A large range is cut into chunks. Each is started, routed on and settled by itself, in the order of
offsets, because a store settles up to one offset. So a crash repeats one chunk, and a slot that is
needed sooner waits for one chunk at most.

A message and its cancel may be in different chunks. They meet on a lower level, if the cancel is
there before the message is released. So the cancels of the whole range are routed on before the
first chunk, and a range is cut only while its slot is so far off that no chunk sends anything.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import count
from queue import PriorityQueue

from duetime.core.clock import Clock
from duetime.core.settings import Settings
from duetime.core.timer_wheel import Slot
from duetime.kafka.offsets import OffsetRange, Partition
from duetime.stores import Store

log = logging.getLogger(__name__)

#: Far slots that are routed on at once. They must not take the cores from windows.
CASCADES = 2

#: Offsets of a chunk at most: about 5 s of one task.
CHUNK = 500_000

#: A range is cut until this long before its slot begins, in ms: a chunk may take several times as
#: long as it should and still route on all that it holds.
CUT_UNTIL_MS = 30_000


@dataclass(frozen=True, slots=True, order=True)
class Cascade:
    """An acquired range of a far slot that waits for a thread; the smallest is the most urgent."""

    #: When the slot's first message is needed on level 0, epoch ms.
    needed_ms: int
    #: The order of arrival.
    number: int
    slot: Slot = field(compare=False)
    claim: OffsetRange = field(compare=False)
    #: Whether an earlier chunk, and so every cancel of the range, was routed on.
    is_rest: bool = field(default=False, compare=False)


class Cascades:
    """Routes on acquired ranges of far slots. Thread-safe."""

    def __init__(
        self,
        settings: Settings,
        store: Store[OffsetRange],
        *,
        release: Callable[[Sequence[OffsetRange]], None],
        route_cancels: Callable[[Sequence[OffsetRange]], None],
        clock: Clock,
    ) -> None:
        """`release` starts, routes on and settles; where it fails it holds the claim for a while.

        `route_cancels` routes on the cancels alone, and leaves a copy of them in the range.
        """
        self._wheel, self._lead_ms = settings.wheel, settings.release_lead_ms
        self._store = store
        self._release, self._route_cancels = release, route_cancels
        self._clock = clock
        self._pool = ThreadPoolExecutor(CASCADES, thread_name_prefix="cascade")
        self._waiting = PriorityQueue[Cascade]()
        #: Where a claim that is cut ends, by place: its rest may be acquired together with that of
        #: another shard.
        self._ends: dict[Partition, int] = {}
        self._numbers = count()

    def submit(self, slot: Slot, claim: OffsetRange, *, is_rest: bool = False) -> Future[None]:
        """Route on an acquired range of the slot when nothing is more urgent."""
        if not is_rest:
            self._ends.pop(claim.place, None)
        needed_ms = self._wheel.start_ms(slot) - self._lead_ms
        self._waiting.put(Cascade(needed_ms, next(self._numbers), slot, claim, is_rest))
        # There are as many tasks as cascades, and each takes the most urgent one.
        return self._pool.submit(self._route_on)

    def stop(self) -> None:
        """Start nothing more, without waiting for the cascades that run."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def join(self) -> None:
        """Wait for the cascades that run, after `stop`."""
        self._pool.shutdown(wait=True)

    def _route_on(self) -> None:
        """Route on the most urgent range, or a chunk of it; the rest waits with the others.

        A crash between two lines repeats work and loses nothing.
        """
        cascade = self._waiting.get_nowait()
        claim = cascade.claim
        if not self._may_cut(cascade):
            self._release([claim])
            return
        self._ends[claim.place] = claim.end
        self._release([replace(claim, end=claim.start + CHUNK)])
        try:
            # Empty if the chunk failed: its claim is held until the overdue scan may have it.
            rests = self._store.acquire(cascade.slot)
        except Exception:
            log.exception("could not acquire the rest, the overdue scan will range=%s", claim)
            return
        for rest in rests:
            self._submit_rest(cascade.slot, rest)

    def _submit_rest(self, slot: Slot, rest: OffsetRange) -> None:
        cut_end = self._ends.get(rest.place)
        if cut_end is None:
            # Of a shard that another job held when the slot was planned: its cancels go first.
            self.submit(slot, rest)
            return
        # A record that came in since then may be of this range, and due beyond every level.
        end = min(rest.end, cut_end)
        if rest.start < end:
            self.submit(slot, replace(rest, end=end), is_rest=True)
        else:
            self._store.release([rest])

    def _may_cut(self, cascade: Cascade) -> bool:
        """Return whether a chunk is routed on and not all of the range; route its cancels first."""
        if not self._is_large_and_early(cascade):
            return False
        if cascade.is_rest:
            return True
        try:
            self._route_cancels([cascade.claim])
        except Exception:
            log.exception("could not route cancels first, not cut range=%s", cascade.claim)
            return False
        return self._is_large_and_early(cascade)

    def _is_large_and_early(self, cascade: Cascade) -> bool:
        claim, begins_ms = cascade.claim, self._wheel.start_ms(cascade.slot)
        # One that was started before is not cut: reading it back costs the same for a part.
        is_large = claim.started_ms is None and claim.count > CHUNK
        return is_large and self._clock.now_ms() + CUT_UNTIL_MS <= begins_ms

"""Release scheduler: acquires claims when it is time, and gives each to a release job.

    planner of level 0    every slot, a little before it begins  -> window pool
    planner of level 1+   every slot, in time for the level below -> cascades (`cascades`)
    overdue scan          slots past due that were not acquired   -> background pool

Each planner is an endless generator of slots in a thread of its own. Jobs run in small pools, so
that a heavy one does not delay the planning of the next.
"""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from itertools import count
from math import ceil
from typing import Generic, TypeGuard, cast

from duetime.client.http_models import OverdueRelease
from duetime.client.status import MAX_OVERDUE_RELEASES
from duetime.core.clock import Clock
from duetime.core.errors import OutcomeKnown
from duetime.core.messages import LATEST_MS
from duetime.core.metrics import OVERDUE_RELEASED
from duetime.core.settings import Settings
from duetime.core.timer_wheel import Slot
from duetime.core.topics import TopicNames
from duetime.kafka.offsets import ANY_TIME, OffsetRange
from duetime.pipeline.faults import Point, reach
from duetime.pipeline.release.cascades import Cascades
from duetime.pipeline.release.job import ReleaseJob
from duetime.spark.kafka_io import RETRY_PAUSE_S
from duetime.stores import Claim, ClaimT, Store

log = logging.getLogger(__name__)

#: Windows that may be open at once: one being planned, one being sent, and room for heavy ones and
#: for those that wait for a broker's answer, which may take the delivery timeout.
WINDOWS = 24

#: Overdue releases at once. They are not urgent, and must not take the cores from windows.
BACKGROUND = 2

#: Wait before the next overdue scan after one that found messages, failed, or took longer than
#: this, in seconds: while a broker is replaced, records reach slots that were planned before.
RESCAN_S = 1.0

#: Windows that failed within this time are repeated together, in seconds.
GATHER_S = 4.0

#: Longest wait between two reads of the clock, in seconds: it may have been set.
CLOCK_INTERVAL_S = 1.0


class ReleaseScheduler(Generic[ClaimT]):
    """Releases the slots of one store when it is time, from `start` until `stop`."""

    def __init__(
        self,
        *,
        settings: Settings,
        store: Store[ClaimT],
        job: ReleaseJob,
        clock: Clock,
        is_warm: Callable[[], bool] = lambda: True,
    ) -> None:
        """Before the pipeline `is_warm`, overdue messages are expected, and no warning."""
        self._settings, self._wheel = settings, settings.wheel
        self._store, self._job = store, job
        self._clock, self._is_warm = clock, is_warm
        self._stopping = threading.Event()
        self._windows = ThreadPoolExecutor(WINDOWS, thread_name_prefix="window")
        self._background = ThreadPoolExecutor(BACKGROUND, thread_name_prefix="background")
        # The repeat of a window that a destination has failed waits for no backlog.
        self._repeats = ThreadPoolExecutor(BACKGROUND, thread_name_prefix="repeat")
        names = TopicNames(settings)
        self._near = names.wheel(0)
        self._far = {names.wheel(level): level for level in range(1, self._wheel.levels)}
        self._cascades = Cascades(
            settings,
            # Only the wheel has far slots.
            cast("Store[OffsetRange]", store),
            release=lambda claims: self._release(cast("Sequence[ClaimT]", claims)),
            route_cancels=job.route_cancels,
            clock=clock,
        )
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        #: Claims of failed jobs, by the instant of the monotonic clock at which they are repeated.
        self._resting = defaultdict[float, list[ClaimT]](list)
        #: Messages that were past due before a window acquired them; 0 on a healthy system.
        self.overdue_messages = 0
        #: The latest scans that found some. Replaced, and not changed: other threads read it.
        self.overdue_releases: tuple[OverdueRelease, ...] = ()

    def start(self, from_ms: int | None = None) -> None:
        """Start the planners, one a level, and the overdue scan.

        Everything due before `from_ms` (epoch ms; None is now) has been released already.
        """
        from_ms = self._clock.now_ms() if from_ms is None else from_ms
        planners: list[Callable[[], None]] = [
            self._scan_overdue,
            *(partial(self._plan, level, from_ms) for level in range(self._store.levels)),
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
        for pool in (self._background, self._repeats):
            pool.shutdown(wait=False, cancel_futures=True)

    def join(self) -> None:
        """Wait for the jobs in the background, after `stop`."""
        self._cascades.join()
        for pool in (self._background, self._repeats):
            pool.shutdown(wait=True)

    def release_soon(self, claims: Sequence[ClaimT]) -> None:
        """Release claims that another has acquired, in the window pool."""
        self._windows.submit(self._release, claims)

    def _plan(self, level: int, from_ms: int) -> None:
        """Acquire each slot of the level in time. A failure leaves the slot to the overdue scan."""
        for slot in self._slots(level, from_ms):
            try:
                claims = self._store.acquire(slot)
            except Exception:
                log.exception("could not plan level=%d slot=%d", level, slot.number)
                continue
            if level == 0 and claims:
                self._windows.submit(self._release, claims)
            elif level:
                for each in claims:
                    self._cascades.submit(slot, cast("OffsetRange", each))

    def _slots(self, level: int, from_ms: int) -> Iterator[Slot]:
        """Yield each slot of the level when it is to be acquired, from `from_ms` until stopped.

        When the clock is set back it begins again from there: new messages are put into slots that
        were acquired already. When it is set forward, those in between are due at once.
        """
        lead_ms = self._settings.release_lead_ms
        while not self._stopping.is_set():
            seen_ms = from_ms
            for number in count(self._wheel.number(level, from_ms)):
                slot = Slot(level, number)
                at_ms = self._wheel.release_at_ms(slot, lead_ms)
                if at_ms <= from_ms:
                    continue
                now_ms = self._wait_until(at_ms, seen_ms)
                if now_ms is None:
                    break
                seen_ms = now_ms
                yield slot
            from_ms = self._clock.now_ms()

    def _wait_until(self, at_ms: int, seen_ms: int) -> int | None:
        """Return the instant once `at_ms` is reached; None if stopped, or the clock was set back.

        `seen_ms` is the last instant seen: the clock may be set back while a planner is busy.
        """
        while (now_ms := self._clock.now_ms()) < at_ms:
            if now_ms < seen_ms:
                log.warning("clock was set back ms=%d", seen_ms - now_ms)
                return None
            seen_ms = now_ms
            if self._stopping.wait(min((at_ms - now_ms) / 1_000, CLOCK_INTERVAL_S)):
                return None
        return now_ms

    def _release(self, claims: Sequence[ClaimT]) -> None:
        """Release acquired claims: note the start, run the job, settle.

        A crash before the note leaves the slot overdue and untouched for the next leader. A crash
        after it repeats the job, which leaves out the messages that it has written.
        """
        try:
            self._store.mark_started(claims, self._clock.now_ms())
            reach(Point.JOB_STARTED)
            self._job(claims)
            reach(Point.JOB_SENT)
            self._store.settle(claims)
        except OutcomeKnown as error:
            log.warning("release job failed, repeating now error=%s claims=%s", error, claims)
            self._repeat(claims)
        except Exception:
            log.exception("release job failed, will be repeated claims=%s", claims)
            self._repeat_later(claims)

    def _repeat_later(self, claims: Sequence[ClaimT]) -> None:
        """Repeat failed claims after a rest, those of windows with others that failed just then.

        A far slot waits no longer than it has to: its messages may be due soon.
        """
        now_s = time.monotonic()
        end_s = now_s + RETRY_PAUSE_S
        if not any(map(self._is_far, claims)):
            end_s = ceil(end_s / GATHER_S) * GATHER_S
        with self._lock:
            if end_s not in self._resting:
                rest = threading.Timer(end_s - now_s, self._repeat_rested, [end_s])
                rest.daemon = True
                rest.start()
            self._resting[end_s].extend(claims)

    def _repeat_rested(self, end_s: float) -> None:
        """Repeat claims that have failed once in one job, which reads back once for all.

        One job after the other took a minute when a broker had died. A claim that has failed again
        is repeated alone: it may be the one that fails the others.
        """
        with self._lock:
            rested = self._resting.pop(end_s)
        if once := [each for each in rested if each.started_ms is None]:
            self._repeat(once)
        for each in rested:
            if each.started_ms is not None:
                self._repeat([each])

    def _repeat(self, claims: Sequence[ClaimT]) -> None:
        """Release failed claims again: as started, so that written messages are read back."""
        try:
            self._store.release(claims)
            if not self._stopping.is_set():
                self.release_overdue()
        except Exception:
            log.exception("could not repeat a release job, the overdue scan will")

    def _scan_overdue(self) -> None:
        """Scan at intervals, and sooner while brokers are slow or records come into past slots."""
        wait_s = interval_s = self._settings.overdue_scan_interval_ms / 1_000
        while not self._stopping.wait(wait_s):
            begun_s = time.monotonic()
            try:
                is_calm = not self.release_overdue() and time.monotonic() - begun_s < RESCAN_S
            except Exception:
                log.exception("overdue scan failed, will be repeated")
                is_calm = False
            wait_s = interval_s if is_calm else RESCAN_S

    def release_overdue(self) -> list[Future[None]]:
        """Release everything that should have been acquired before now."""
        now_ms = self._clock.now_ms()
        claims = self._store.acquire_overdue(now_ms)
        if claims:
            self._note(claims, now_ms)
        # A slot with messages that are not late must not wait behind a backlog that is.
        cascades, late = [], list[ClaimT]()
        for each in claims:
            if self._is_ahead(each, now_ms):
                level = self._far[each.topic]
                slot = Slot(level, self._wheel.number(level, each.due.from_ms))
                cascades.append(self._cascades.submit(slot, each))
            else:
                late.append(each)
        # Windows wait for partitions that an overdue release holds: those needed soon go first.
        late.sort(key=partial(self._planned_next_ms, now_ms=now_ms))
        new = self._portions([each for each in late if each.started_ms is None])
        jobs = [self._background.submit(self._release_late, group, now_ms) for group in new]

        def release_started(others: Sequence[Future[None]]) -> None:
            wait(others)
            for group in self._portions(started):
                self._release_late(group, now_ms)

        # Claims that were started before take longer, to read back: the others go first. All in one
        # pool then: a wait for jobs of another pool that was shut down would never end.
        if started := [each for each in late if each.started_ms is not None]:
            pool = self._background if jobs else self._repeats
            jobs.append(pool.submit(release_started, jobs[:]))
        return [*jobs, *cascades]

    def _note(self, claims: Sequence[ClaimT], now_ms: int) -> None:
        """Count and log overdue claims."""
        found = sum(each.count for each in claims)
        known = [each.due for each in claims if each.due != ANY_TIME] or [ANY_TIME]
        from_ms = min(each.from_ms for each in known)
        to_ms = max(each.to_ms for each in known)
        latest = OverdueRelease(at_ms=now_ms, messages=found, from_ms=from_ms, to_ms=to_ms)
        self.overdue_messages += found
        self.overdue_releases = (*self.overdue_releases, latest)[-MAX_OVERDUE_RELEASES:]
        OVERDUE_RELEASED.inc(found)
        level = logging.WARNING if self._is_warm() else logging.INFO
        log.log(level, "released overdue messages=%d slots=%d", found, len(claims))

    def _is_ahead(self, claim: Claim, now_ms: int) -> TypeGuard[OffsetRange]:
        """Return whether it is of a far slot that has messages due after `now_ms`."""
        return self._is_far(claim) and claim.due != ANY_TIME and claim.due.to_ms > now_ms

    def _is_far(self, claim: Claim) -> TypeGuard[OffsetRange]:
        return isinstance(claim, OffsetRange) and claim.topic in self._far

    def _planned_next_ms(self, claim: Claim, now_ms: int) -> int:
        """Return when a window acquires the claim's partition next; LATEST_MS if none does."""
        if not (isinstance(claim, OffsetRange) and claim.topic == self._near):
            return LATEST_MS
        lead_ms = self._settings.release_lead_ms
        slot = self._wheel.current_slot(0, claim.partition, now_ms, lead_ms)
        return self._wheel.release_at_ms(slot, lead_ms)

    def _portions(self, claims: Sequence[ClaimT]) -> Iterator[list[ClaimT]]:
        """Yield the claims of each job: `max_messages_per_job`, or one larger claim."""
        group: list[ClaimT] = []
        for each in claims:
            messages = sum(one.count for one in group) + each.count
            if group and messages > self._settings.max_messages_per_job:
                yield group
                group = []
            group.append(each)
        if group:
            yield group

    def _release_late(self, claims: Sequence[ClaimT], acquired_ms: int) -> None:
        """Release overdue claims, then slots of windows that were planned since `acquired_ms`.

        They found their partition claimed, and records that came in since then are in no claim.
        """
        self._release(claims)
        try:
            for slot in self._passed_over(claims, acquired_ms):
                if left := self._store.acquire(slot):
                    self._windows.submit(self._release, left)
        except Exception:
            log.exception("could not plan slots passed over, the next overdue scan will")

    def _passed_over(self, claims: Sequence[Claim], acquired_ms: int) -> list[Slot]:
        """Return the slots of level 0 in these partitions that were planned since `acquired_ms`."""
        held = {
            each.partition % self._wheel.ring
            for each in claims
            if isinstance(each, OffsetRange) and each.topic == self._near
        }
        first, last = (
            self._wheel.number(0, instant_ms + self._settings.release_lead_ms)
            for instant_ms in (acquired_ms, self._clock.now_ms())
        )
        # One round of the ring before, they are in the same partitions.
        numbers = range(max(first, last - self._wheel.ring) + 1, last + 1)
        slots = [Slot(0, number) for number in numbers]
        return [each for each in slots if each.number % self._wheel.ring in held]

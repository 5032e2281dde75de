"""Election: which of several pipelines leads.

The leader writes a heartbeat into `duetime.leader` four times a second, and may send for a lease
from then on. A standby that reads none for `takeover_seconds` fences the leader off and leads:

    0 s      the last heartbeat of a leader that is paused
    1.1 s    no row passes
    1.4 s    the watchdog ends its JVM, if it still stands still
    1.5 s    its lease is over; the standby fences, reads up to the fence, and leads

`duetime.kafka.leadership` decides, `duetime.kafka.heartbeats` reads and writes, and this module is
the thread between them.
"""

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from confluent_kafka import KafkaException

from duetime.core.clock import Clock
from duetime.core.settings import Settings
from duetime.kafka.heartbeats import LEAVE_S, Fenced, HeartbeatLog, LeaderHeartbeats
from duetime.kafka.leadership import HEARTBEAT_S, LONE_LEASE_S, Generations, Heartbeat, Leadership
from duetime.pipeline.leadership.lease import NEAR_S, lease_name
from duetime.spark.session import JVM_ERRORS
from duetime.spark.task_jvms import TaskJvms

log = logging.getLogger(__name__)

#: Longest wait of one read for heartbeats, in seconds.
READ_S = 0.05

#: The JVM of a leader ends so long before its lease does, in seconds: a signal takes a moment.
MARGIN_S = 0.1

#: A leader without a standby loses its JVM after a pause of this length, in seconds. Its lease was
#: renewed up to two heartbeats before.
LONE_PAUSE_S = LONE_LEASE_S - 2 * HEARTBEAT_S - MARGIN_S

#: How long `wait` waits, in seconds: a leader that was killed is waited for.
ANSWER_TIMEOUT_S = LONE_LEASE_S + 5.0

#: Pause after a failure, in seconds: a leader has to go on soon.
RETRY_INTERVAL_S = 0.25

#: With a standby, rows stop so long before the lease ends, in seconds: what producers hold then is
#: all that they will send, and the watchdog has the time to look.
DRAIN_S = NEAR_S + MARGIN_S

#: A leader that has written no heartbeat for this long stands by, in seconds.
STALE_S = 60.0


class Election:
    """One pipeline's part in the election, in a thread of its own.

    `is_leading` is set while it leads. It is cleared once another may lead.
    """

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self._settings, self._clock = settings, clock
        self._name, self._member = f"{socket.gethostname()}:{os.getpid()}", uuid.uuid4().hex
        self._jvms: TaskJvms | None = None
        self.is_leading = threading.Event()
        #: How often it has come to lead: one that lost the lead for a moment finds it changed.
        self.term = 0
        #: The generations of the wheel's commits. The store sets ours.
        self.generations = Generations()
        #: Returns the status that each heartbeat has, for `duetime status`.
        self.status: Callable[[], dict[str, Any]] = dict
        #: Why it can no longer take part.
        self.broken: Exception | None = None
        self._answered, self._closing = threading.Event(), threading.Event()
        #: It gives the lead back soon: no row passes any more.
        self._leaving = threading.Event()
        self._since_ms = 0
        #: Until when the lease of this term is held, by the monotonic clock, in seconds.
        self._until_s = 0.0
        #: The same, also after we have lost the lead: others count on no other end.
        self._granted_s = 0.0
        #: Whether a standby counts on its end.
        self._is_short = False
        #: Since when this process may fence another, again after it was fenced itself, in seconds.
        self._fence_s = 0.0
        self._extending = threading.Lock()
        self._number, self._written_s, self._first_number = 0, float("-inf"), 0
        self._log = HeartbeatLog(settings)
        #: From the fence on.
        self._fence: LeaderHeartbeats | None = None
        self._view = self._new_view()
        self._thread = threading.Thread(target=self._run, name="election", daemon=True)

    def start(self) -> None:
        """Take part from now on."""
        self._thread.start()

    def attach(self, jvms: TaskJvms) -> None:
        """Publish leases to these JVMs, so that their rows are sent only while we lead."""
        with self._extending:
            self._jvms = jvms
            # We may lead already. Without the property, rows would pass until the next renewal.
            if self.term:
                self._publish_lease(jvms)

    def holds_lease(self) -> bool:
        """Return whether we may send at this instant, for code that sends from Python."""
        return time.monotonic() < self._until_s

    def holds_lease_of(self, term: int) -> bool:
        """Return whether we may send at this instant what was planned in this term."""
        # In this order: a new term begins without a lease.
        return self.holds_lease() and self.term == term

    @property
    def has_standby(self) -> bool:
        """True if another process that is warm counts on the end of our lease."""
        return self._is_short

    def jvm_end_s(self) -> float:
        """Return when the JVM of a leader must end, unless the lease is renewed before.

        With a standby, or once the lead is lost, that is at the end of the lease. Without one, only
        a pause counts: a broker that is restarted is no reason to end.
        """
        if self._is_short or not self.is_leading.is_set():
            return self._granted_s - MARGIN_S
        return time.monotonic() + LONE_PAUSE_S

    def wait(self) -> bool:
        """Wait until it is known who leads, ANSWER_TIMEOUT_S at most; return whether we do."""
        self._answered.wait(ANSWER_TIMEOUT_S)
        return self.is_leading.is_set()

    def close(self, settle: Callable[[], None] = lambda: None) -> None:
        """Give the lead back, so that another can lead at once.

        `settle` is called before that, once no row is sent: it waits for acknowledgements. The
        heartbeats go on meanwhile, so that no other leads.
        """
        self._leaving.set()
        try:
            if self.broken is None:
                self.is_leading.clear()
                self._lease_until(0)
                settle()
        finally:
            self._closing.set()
            if self._thread.is_alive():
                self._thread.join()
            if self.broken is None:
                self._leave()

    def _new_view(self) -> Leadership:
        return Leadership(self._member, self._settings.takeover_seconds, time.monotonic())

    def _run(self) -> None:
        is_reading = False
        while not self._closing.is_set():
            try:
                if not is_reading:
                    self._view = self._new_view()
                    if self._log.start():
                        self._view.note_empty_log(time.monotonic())
                    is_reading = True
                self._step()
            except JVM_ERRORS as error:
                # A leader without a JVM would keep others from delivering. Its executors may still
                # send, and so the lease has to end by itself.
                self.broken = error
                self._until_s = 0.0
                self.is_leading.clear()
                self._log.close()
                return
            except Exception:
                is_reading = False
                log.exception("could not take part in the election, will be repeated")
                self._closing.wait(RETRY_INTERVAL_S)

    def _step(self) -> None:
        for each in self._log.read(READ_S):
            self._view.hear(each, time.monotonic())
        is_due = time.monotonic() - self._written_s >= HEARTBEAT_S
        if self._fence is not None and self._since_ms:
            if self._is_superseded():
                self._step_down()
            elif is_due:
                self._renew(self._fence)
            return
        if is_due:
            self._write_as_standby()
        if self._fence is None:
            self._stand_by()
        else:
            self._await_lead(self._fence)

    def _stand_by(self) -> None:
        if self._view.has_other_leader():
            self._answered.set()
        now_s = time.monotonic()
        if now_s >= self._fence_s and not self._leaving.is_set() and self._view.may_fence(now_s):
            self._take_fence()

    def _is_superseded(self) -> bool:
        """Return whether another leads, or this process has not shown for long that it does."""
        is_stale = time.monotonic() - self._granted_s > STALE_S
        return is_stale or self._view.has_other_leader(self._first_number)

    def _await_lead(self, fence: LeaderHeartbeats) -> None:
        if self._view.has_other_leader(self._first_number):
            self._step_down()
        elif self._view.may_lead(self._first_number, time.monotonic()):
            self.generations = Generations(former=self._view.generation)
            self.term += 1
            # Before the first lease of this term, no row of it may pass.
            self._lease_until(0)
            self._granted_s = time.monotonic()
            self._since_ms = self._clock.now_ms()
            self._renew(fence)

    def _take_fence(self) -> None:
        try:
            self._fence = LeaderHeartbeats(self._settings)
        except KafkaException as error:
            log.warning("could not take the lead, will be repeated error=%s", error.args[0].str())
            self._closing.wait(RETRY_INTERVAL_S)
            return
        self._first_number = self._number + 1
        self._write_as_standby()

    def _write_as_standby(self) -> None:
        self._log.write(self._heartbeat(None))

    def _heartbeat(self, lease_s: float | None) -> Heartbeat:
        """Return our next heartbeat."""
        self._number, self._written_s = self._number + 1, time.monotonic()
        lease_ms = None if lease_s is None else int(lease_s * 1_000)
        status = {"since_ms": self._since_ms} if lease_ms else {}
        try:
            status |= self.status()
        except Exception as error:
            # A heartbeat without it is better than none.
            log.debug("no status for a heartbeat", exc_info=error)
        return Heartbeat(
            member=self._member,
            name=self._name,
            number=self._number,
            lease_ms=lease_ms,
            generation=self.generations.known if lease_ms else 0,
            status=status,
        )

    def _renew(self, fence: LeaderHeartbeats) -> None:
        """Write a heartbeat, and hold the lease from before that on."""
        try:
            lease_s = self._view.lease_s(time.monotonic())
            written = fence.write(self._heartbeat(lease_s))
        except Fenced as error:
            log.warning("another process may lead error=%s", error)
            self._step_down()
            return
        if written is None:
            # The lease ends by itself, if we do not hear sooner that we have lost it.
            return
        # Of the heartbeat that others have read: it may be an earlier one.
        begun_s, heartbeat = written
        if (taken_s := time.monotonic() - begun_s) > self._settings.takeover_seconds / 2:
            log.warning("a heartbeat was slow: brokers or this machine stood still s=%.1f", taken_s)
        lease_s = (heartbeat.lease_ms or 0) / 1_000
        self._granted_s, self._is_short = begun_s + lease_s, lease_s < LONE_LEASE_S
        self._lease_until(self._granted_s - (DRAIN_S if self._is_short else 0.0))
        if not self._leaving.is_set():
            self.is_leading.set()
            self._answered.set()

    def _step_down(self) -> None:
        """Let no row pass, and stand by. A process that was fenced off does not fence at once."""
        self._since_ms, self._fence_s = 0, time.monotonic() + self._settings.takeover_seconds
        self.is_leading.clear()
        self._lease_until(0)
        self._close_fence()

    def _leave(self) -> None:
        if self._fence is not None:
            self._give_back(self._fence)
        self._close_fence()
        self._log.close()

    def _close_fence(self) -> None:
        if self._fence is not None:
            self._fence.close()
            self._fence = None

    def _give_back(self, fence: LeaderHeartbeats) -> None:
        """Tell the others that we send nothing any more."""
        until_s = time.monotonic() + LEAVE_S
        with suppress(Fenced):
            while time.monotonic() < until_s:
                written = fence.write(self._heartbeat(0))
                # An earlier one may be finished first.
                if written and not written.heartbeat.lease_ms:
                    return

    def _lease_until(self, instant_s: float) -> None:
        with self._extending:
            self._until_s = 0.0 if self._leaving.is_set() else instant_s
            # Term 0 has no lease.
            if self._jvms is not None and self.term:
                self._publish_lease(self._jvms)

    def _publish_lease(self, jvms: TaskJvms) -> None:
        name = lease_name(self._settings.in_term(self.term))
        if self._until_s:
            jvms.extend_lease(name, self._until_s)
        else:
            jvms.end_lease(name)

"""Leadership: what a process knows of the lead from heartbeats, and when it may take it.

All processes of a namespace write heartbeats into one log, the leader and the standbys, and read
it. Decisions depend on the order of the log and on the reader's own monotonic clock, never on
clocks of two machines:

- A leader may send for `lease_ms` from *before* it writes a heartbeat. Who reads that heartbeat,
  which is later, counts as long from then: its count ends last.
- Who wants to lead fences the leader's heartbeats off first (see `duetime.kafka.heartbeats`). Then
  it reads the log up to a record of its own, and so all that the leader wrote before the fence. It
  leads once the last lease that it read has ended.

Nothing in here waits, sends or needs Kafka: a caller gives the time and the records.
"""

import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from duetime.core.errors import LeaderPaused

#: Interval of heartbeats, in seconds.
HEARTBEAT_S = 0.25

#: Lease of a leader without a standby, in seconds: no process takes over sooner, so a short pause
#: does no harm.
LONE_LEASE_S = 5.0

#: A standby is there until it has been silent for this long, in seconds.
PRESENT_S = 3.0

#: How much later than the one before it each of several standbys takes over, in seconds: they would
#: fence off each other. A fence may take 0.5 s, where the last leader left a transaction open.
TURN_S = 1.0

#: Part of a standby's status: it would lead at once.
IS_WARM = "is_warm"

#: The longest heartbeat, in bytes.
HEARTBEAT_BYTES = 4_000

#: The low part of a generation is a random number below this.
RANDOM = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """A sign of life of one process: a record of the leader topic."""

    #: Tells two processes apart, also of one name.
    member: str
    #: `host:pid`.
    name: str
    #: Counts the member's heartbeats.
    number: int
    #: How long a leader may send; 0 when it gives the lead back; None from a standby.
    lease_ms: int | None = None
    #: A leader's `Generations.known`; 0 from a standby, and from one that gives the lead back.
    generation: int = 0
    #: Its report of itself.
    status: Mapping[str, Any] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Return it as JSON, if it would be too long without the last parts of `status`."""
        told = asdict(self)
        status = told["status"]
        while len(text := json.dumps(told, separators=(",", ":")).encode()) > HEARTBEAT_BYTES:
            status.popitem()
        return text

    @classmethod
    def decode(cls, value: bytes | None) -> "Heartbeat | None":
        """Return the heartbeat of a record; None if it is none."""
        try:
            told = json.loads(value or b"")
            # Later versions may tell more.
            return cls(**{each.name: told[each.name] for each in fields(cls) if each.name in told})
        except (ValueError, TypeError):
            return None


@dataclass(slots=True)
class Generations:
    """The numbers under which leaders commit the progress of the wheel; 0 is unknown.

    A former leader's commit may arrive late. It shows by its number: a generation counts the
    leaders in its high part, and its low part is random, for two that follow the same leader.
    """

    #: The number of the last leader whose heartbeats had one.
    former: int = 0
    #: Our number, once it is committed for all partitions.
    present: int = 0

    @property
    def known(self) -> int:
        """The last number that is known to be committed for all partitions."""
        return self.present or self.former

    def last(self, committed: int) -> int:
        """Return the number of the last leader. `committed` is the highest that was read."""
        # It may have ended before its next heartbeat.
        is_later = committed // RANDOM > self.known // RANDOM
        return committed if is_later or not self.known else self.known


def next_generation(last: int) -> int:
    """Return a number for the leader after this one, which is higher."""
    return (last // RANDOM + 1) * RANDOM + secrets.randbelow(RANDOM)


class Leadership:
    """The lead, as one member has read of it. Times are of its monotonic clock, in seconds."""

    def __init__(self, member: str, takeover_s: float, now_s: float) -> None:
        """A leader that has a standby is replaced after a silence of `takeover_s`."""
        self._member, self._takeover_s = member, takeover_s
        #: The member that leads, or led last; None where none is known, or it gave the lead back.
        self._leader: str | None = None
        #: The number of our own heartbeat that was read last before one of another leader.
        self._led_after = 0
        #: When all leases that were read have ended. Of what was written before, nothing is known.
        self._leases_end_s = now_s + LONE_LEASE_S
        #: The generation of the last leader that was read with one.
        self.generation = 0
        #: By member, when it was heard last, and whether it is warm.
        self._standbys: dict[str, tuple[float, bool]] = {}
        #: The last heartbeat of our own that was read, when, and since when they arrive steadily.
        self._own_number, self._own_s, self._steady_since_s = 0, float("-inf"), now_s

    def note_empty_log(self, now_s: float) -> None:
        """Note that no process has ever led."""
        self._leases_end_s = now_s

    def hear(self, heartbeat: Heartbeat, now_s: float) -> None:
        """Take in the next record of the log."""
        member, lease_ms = heartbeat.member, heartbeat.lease_ms
        if member == self._member:
            # While none can write, the leader cannot either: its silence says nothing.
            if now_s - self._own_s > self._takeover_s / 2:
                self._steady_since_s = now_s
            self._own_number, self._own_s = heartbeat.number, now_s
        self.generation = heartbeat.generation or self.generation
        if lease_ms is None:
            self._standbys[member] = now_s, bool(heartbeat.status.get(IS_WARM))
        elif lease_ms:
            self._leader = member
            if member != self._member:
                self._led_after = self._own_number
            self._leases_end_s = max(self._leases_end_s, now_s + lease_ms / 1_000)
            self._standbys.pop(member, None)
        elif member == self._leader:
            # It has stopped to send before it wrote this.
            self._leader, self._leases_end_s = None, now_s

    def lease_s(self, now_s: float) -> float:
        """Return the lease that this member takes as the leader.

        It is short where another could lead at once. One that still starts would deliver later than
        a leader that stands still for some seconds.
        """
        others = (each for each in self._present(now_s) if each != self._member)
        return self._takeover_s if any(map(self._is_warm, others)) else LONE_LEASE_S

    def has_read(self, number: int) -> bool:
        """Return whether our own heartbeat of this number was read, and so all before it."""
        return self._own_number >= number

    def may_fence(self, now_s: float) -> bool:
        """Return whether the leader has been silent for so long that it is this member's turn."""
        if not self._own_number or now_s - self._own_s > self._takeover_s / 2:
            return False
        members = {*self._present(now_s), self._member}
        order = sorted(members, key=lambda each: (not self._is_warm(each), each))
        turn = order.index(self._member)
        silent_s = self._leases_end_s
        if self._leader is not None:
            silent_s = max(silent_s, self._steady_since_s + self._takeover_s)
        return now_s >= silent_s + turn * TURN_S

    def has_other_leader(self, since: int = 1) -> bool:
        """Return whether another has led after our own heartbeat of this number was written.

        If that was after a fence of ours, the other has fenced us off.
        """
        return self._led_after >= since

    def may_lead(self, fenced_at: int, now_s: float) -> bool:
        """Return whether no other may send. `fenced_at` is our first heartbeat after the fence."""
        return self.has_read(fenced_at) and now_s >= self._leases_end_s

    def _present(self, now_s: float) -> list[str]:
        return [each for each, (at_s, _) in self._standbys.items() if now_s - at_s < PRESENT_S]

    def _is_warm(self, member: str) -> bool:
        return self._standbys.get(member, (0.0, False))[1]


def check_lease(holds_lease: Callable[[], bool]) -> None:
    """Raise LeaderPaused unless the lease is held: for code that sends from Python."""
    if not holds_lease():
        raise LeaderPaused("the lease is lost: the next leader sends what is not sent")

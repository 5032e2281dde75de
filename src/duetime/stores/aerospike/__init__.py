"""Aerospike as a store: the published delay service's sets, with or without its notifications.

By windows (the default): an index over `postTime` says what is due, and a reader holds a span of
time while it sends what is due in it. By notices: Aerospike says when an id has expired, and what
it is the id of is sent (see `duetime.pipeline.notices`). Either way a cached message is removed
only after the send is acknowledged, and rescue finds whatever is past due and still there: every
`rescue_every_ms`, however old, without a gap.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from secrets import token_hex

from duetime.clock import Clock, SystemClock
from duetime.config import Settings
from duetime.errors import StoreError
from duetime.message import MessageId
from duetime.metrics import UNREADABLE
from duetime.stores import ANY_TIME, DueTimes, Found, Pending
from duetime.stores.aerospike.cache import CachedClaim, MessageCache, Waiting
from duetime.stores.aerospike.fields import FOREIGN_MARK
from duetime.stores.aerospike.leases import LEASE_MS, Ledger, Span
from duetime.stores.aerospike.reader import AerospikeReader
from duetime.stores.held import Held
from duetime.stores.rows import with_cancel
from duetime.wheel import Slot

#: How many messages are asked for to see whether there is any: the client shares the number out
#: among the nodes of a cluster, and does not ask one whose share is 0.
PROBED = 256

#: The most nodes that a cluster has.
NODES = 256


class AerospikeStore:
    """What waits in Aerospike, as one planner sees it. Thread-safe. Raises StoreError."""

    def __init__(self, settings: Settings, clock: Clock | None = None) -> None:
        self._wheel = settings.wheel
        self._most = settings.job_messages
        #: No windows, where notices say what is due.
        self.levels = 0 if settings.aerospike_notices else 1
        self._clock = clock or SystemClock()
        self._cache = MessageCache(settings)
        self._cache.create_indexes()
        self._reader = AerospikeReader(settings)
        self._owner = token_hex(8)
        self._held = Held[str, CachedClaim](self._extend, lease_ms=LEASE_MS)
        #: Foreign records that cannot be understood, by name. They stay where they are.
        self._unreadable = set[str]()

    def due(self, slot: Slot) -> Sequence[CachedClaim]:
        """Claim what waits in the slot now, and what came late for earlier ones."""
        start_ms, end_ms = self._wheel.start_ms(slot), self._wheel.end_ms(slot)
        return [*self._claim(start_ms, end_ms), *self._claim(0, start_ms)]

    def overdue(self, now_ms: int) -> Sequence[CachedClaim]:
        """Claim what others have left, and all that is past due; of very much, the rest later."""
        with self._held.lock:
            taken = self._cache.ledger.change(partial(self._taken_over, busy=set(self._held.all())))
        left = self._kept(self._read(name, span) for name, span in taken.items())
        try:
            return [*left, *self._claim(0, now_ms)]
        except StoreError:
            # Nobody hears of them here: they are found again when their leases end.
            self._held.let_go(each.span for each in left)
            raise

    def noticed(
        self, names: Sequence[str], digests: Sequence[bytes], until_ms: int
    ) -> Sequence[CachedClaim]:
        """Claim messages of which notices have told, unless they are taken up already."""
        told = [*names, *(one.name for each in digests for one in self._cache.of_digest(each))]
        # A message and its cancel have a notice each, and not always in one batch.
        both = dict.fromkeys(name for each in told for name in with_cancel(each))
        waiting = self._readable(self._cache.waiting(list(both)))
        with self._held.lock:
            busy = self._busy()
            due_ms = {
                each.name: each.due_ms
                for each in waiting
                if each.due_ms < until_ms and each.name not in busy
            }
            if not due_ms:
                return []
            name, span = token_hex(8), self._span(min(due_ms.values()), max(due_ms.values()) + 1)
            # It excludes nobody, as windows do not exist here: rescue is to know of it.
            self._cache.ledger.change(lambda was: (was.with_spans({name: span}), None))
            return self._kept([CachedClaim(span=name, names=tuple(due_ms))])

    def begin(self, claims: Iterable[CachedClaim], now_ms: int) -> None:
        """Note it with the spans. Raises StoreError where another reader has one by now."""
        names = {each.span for each in claims}
        if not self._cache.ledger.change(partial(self._begun, names=names, now_ms=now_ms)):
            raise StoreError("another reader has taken over what was claimed: leaving it to that")

    def settle(self, claims: Iterable[CachedClaim]) -> None:
        """Remove the messages, then let go of the spans. Safe to repeat."""
        settled = list(claims)
        held = self._cache.ledger.read().held({each.span for each in settled}, self._owner)
        for each in settled:
            if each.span in held:
                self._cache.remove(each.names)
        self._let_go(settled)

    def give_up(self, claims: Iterable[CachedClaim]) -> None:
        """End the leases now: rescue finds what was held, and since when."""
        names = {each.span for each in claims}
        # First: what cannot be told now is found when the leases end.
        self._held.let_go(names)
        self._cache.ledger.change(partial(self._ended, names=names))

    def find(self, id: MessageId, now_ms: int) -> Found | None:  # noqa: A002 (what all call it)
        """The message with this id, if it waits."""
        return self._reader.find(id, now_ms)

    def pending(self, now_ms: int) -> Iterator[Pending]:
        """What waits, slot by slot, in order of time."""
        return iter(self._reader.pending(now_ms))

    def close(self) -> None:
        """Stop extending leases. What is claimed is found by others when they end."""
        self._held.close()

    def _claim(self, start_ms: int, end_ms: int) -> list[CachedClaim]:
        # Most of the time nothing is due, and nobody need be told that we look.
        found = self._cache.due(start_ms, end_ms, self._limit(PROBED))
        if all(each.name in self._unreadable for each in found):
            return []
        with self._held.lock:
            change = partial(self._taken, start_ms=start_ms, end_ms=end_ms)
            taken = self._cache.ledger.change(change)
            return self._kept([self._read(name, span) for name, span in taken.items()])

    def _read(self, name: str, span: Span) -> CachedClaim:
        found = self._cache.due(span.start_ms, span.end_ms, self._limit(self._most))
        if len(found) * 2 >= self._most:
            # Any of very much: a message stays with its cancel.
            both = dict.fromkeys(name for each in found for name in with_cancel(each.name))
            found = self._cache.waiting(list(both))
        busy = self._busy()
        free = self._readable([each for each in found if each.name not in busy])
        due_ms = [each.due_ms for each in free]
        return CachedClaim(
            span=name,
            names=tuple(each.name for each in free),
            begun_ms=span.begun_ms,
            due=DueTimes(min(due_ms), max(due_ms) + 1) if free else ANY_TIME,
        )

    def _limit(self, most: int) -> int:
        """Return how many to ask for, so that `most` of them may be readable ones.

        A node may have all the unreadable ones, and its share of what is asked for is the smallest.
        """
        return most + NODES * len(self._unreadable)

    def _readable(self, waiting: Sequence[Waiting]) -> list[Waiting]:
        """Return those that can be understood. Each foreign one is read, here in the driver."""
        known = [each for each in waiting if each.name not in self._unreadable]
        foreign = [each.name for each in known if each.name.startswith(FOREIGN_MARK)]
        unreadable = self._cache.unreadable(foreign)
        UNREADABLE.inc(len(unreadable))
        self._unreadable |= unreadable
        return [each for each in known if each.name not in unreadable]

    def _busy(self) -> set[str]:
        return {name for claim in self._held.all().values() for name in claim.names}

    def _kept(self, claims: Iterable[CachedClaim]) -> list[CachedClaim]:
        """Those that hold something; the spans of others are let go."""
        kept, empty = list[CachedClaim](), list[CachedClaim]()
        for each in claims:
            (kept if each.names else empty).append(each)
        self._held.take({each.span: each for each in kept})
        if empty:
            self._let_go(empty)
        return kept

    def _let_go(self, claims: Sequence[CachedClaim]) -> None:
        names = {each.span for each in claims}
        self._cache.ledger.change(lambda was: (was.without(names, self._owner), None))
        self._held.let_go(names)

    def _extend(self, held: Iterable[str]) -> None:
        self._cache.ledger.change(partial(self._extended, names=set(held)))

    def _span(self, start_ms: int, end_ms: int) -> Span:
        until_ms = self._clock.now_ms() + LEASE_MS
        return Span(start_ms=start_ms, end_ms=end_ms, owner=self._owner, until_ms=until_ms)

    # What follows changes the ledger, perhaps several times: see `LedgerRecord.change`.

    def _taken(self, was: Ledger, start_ms: int, end_ms: int) -> tuple[Ledger, dict[str, Span]]:
        new = {token_hex(8): self._span(*part) for part in was.free(start_ms, end_ms)}
        return was.with_spans(new), new

    def _taken_over(self, was: Ledger, busy: set[str]) -> tuple[Ledger, dict[str, Span]]:
        ended = was.ended(self._clock.now_ms(), busy)
        until_ms = self._clock.now_ms() + LEASE_MS
        ours = {
            name: replace(span, owner=self._owner, until_ms=until_ms)
            for name, span in ended.items()
        }
        return was.with_spans(ours), ours

    def _begun(self, was: Ledger, names: set[str], now_ms: int) -> tuple[Ledger, bool]:
        held = was.held(names, self._owner)
        begun = {
            name: replace(span, begun_ms=now_ms if span.begun_ms is None else span.begun_ms)
            for name, span in held.items()
        }
        return was.with_spans(begun), held.keys() == names

    def _ended(self, was: Ledger, names: set[str]) -> tuple[Ledger, None]:
        held = was.held(names, self._owner)
        return was.with_spans({name: replace(one, until_ms=0) for name, one in held.items()}), None

    def _extended(self, was: Ledger, names: set[str]) -> tuple[Ledger, None]:
        until_ms = self._clock.now_ms() + LEASE_MS
        held = was.held(names, self._owner)
        longer = {name: replace(span, until_ms=until_ms) for name, span in held.items()}
        return was.with_spans(longer), None

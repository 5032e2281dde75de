"""Aerospike as a store: the published delay service's sets, with or without its notifications.

By windows (the default): an index over `postTime` finds due messages, and a scheduler leases a span
of due times while it sends them. By notifications: Aerospike reports each id that has expired, and
its message is sent (see `duetime.pipeline.store_queries`). Either way a cached message is removed
only after its send is acknowledged. The overdue scan finds every message that is overdue, however
old, each `overdue_scan_interval_ms`.
"""

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from secrets import token_hex

from duetime.core.clock import Clock, SystemClock
from duetime.core.errors import StoreError
from duetime.core.messages import LATEST_MS, MessageId, PendingMessage, SortKey
from duetime.core.metrics import UNREADABLE
from duetime.core.settings import Settings
from duetime.core.timer_wheel import Slot
from duetime.kafka.offsets import ANY_TIME, DueTimes
from duetime.stores import MessageFilter, PendingSlot
from duetime.stores.aerospike.messages import DueName, MessageSet, SpanClaim
from duetime.stores.aerospike.schema import FOREIGN_MARK, LeasedSpan, LeaseTable, check_server
from duetime.stores.row_store import (
    CANCEL_MARK,
    LEASE_MS,
    ORIGIN,
    Backend,
    KeyedReader,
    LeaseKeeper,
    counted_slots,
    empty_slots,
    read_messages,
    record_names,
    with_cancel,
)

#: The limit of a query that tests whether any message is due: the client divides the limit among
#: the nodes of a cluster, and skips a node whose share is 0.
PROBE_LIMIT = 256

#: The most nodes of a cluster.
MAX_NODES = 256

#: The end of the name of a second record with one id: its origin.
SECOND_RECORD = re.compile(rf"~[0-9a-f]{{{2 * ORIGIN.size}}}$")


class AerospikeStore:
    """The messages in Aerospike, for one scheduler; see `duetime.stores.Store`.

    Thread-safe. Raises StoreError.
    """

    def __init__(self, settings: Settings, clock: Clock | None = None) -> None:
        self._wheel = settings.wheel
        self._max_claim = settings.max_messages_per_job
        #: No windows with notifications, which report what is due.
        self.levels = 0 if settings.aerospike_expiry_notifications else 1
        self._clock = clock or SystemClock()
        self._set = MessageSet(settings)
        self._set.create_indexes()
        self._owner = token_hex(8)
        self._leases = LeaseKeeper[str, SpanClaim](lambda held: self._update(held, self._renewed))
        #: Names of foreign records that cannot be read. They stay in the store.
        self._unreadable = set[str]()

    def acquire(self, slot: Slot) -> Sequence[SpanClaim]:
        """Claim what waits in the slot, and what came late for earlier slots."""
        start_ms, end_ms = self._wheel.start_ms(slot), self._wheel.end_ms(slot)
        return [*self._claim(start_ms, end_ms), *self._claim(0, start_ms)]

    def acquire_overdue(self, now_ms: int) -> Sequence[SpanClaim]:
        """Claim what others have left, and all that is overdue; of very much, a part."""
        with self._leases.lock:
            busy = set(self._leases.held())

            def take_over(table: LeaseTable) -> tuple[LeaseTable, dict[str, LeasedSpan]]:
                expired = table.expired(self._clock.now_ms(), busy)
                taken = {name: self._renewed(span) for name, span in expired.items()}
                return table.with_spans(taken), taken

            taken = self._set.leases.change(take_over)
        left = self._hold(self._read(name, span) for name, span in taken.items())
        try:
            return [*left, *self._claim(0, now_ms)]
        except StoreError:
            # The caller never learns of these claims: they are found when their leases end.
            self._leases.remove(each.span for each in left)
            raise

    def acquire_expired(
        self, names: Sequence[str], digests: Sequence[bytes], until_ms: int
    ) -> Sequence[SpanClaim]:
        """Claim the unclaimed messages whose ids have expired, by name or digest.

        Without what is due at `until_ms` (epoch ms) or later. To be called for each batch of
        notifications.
        """
        known = [
            *names,
            *(one.name for each in digests for one in self._set.with_id_digest(each)),
        ]
        waiting = self._readable(self._set.waiting(_with_cancels(known)))
        with self._leases.lock:
            busy = self._busy()
            due_ms = {
                each.name: each.due_ms
                for each in waiting
                if each.due_ms < until_ms and each.name not in busy
            }
            if not due_ms:
                return []
            # There are no windows that the span could block: it is there for the overdue scan.
            name, span = token_hex(8), self._span(min(due_ms.values()), max(due_ms.values()) + 1)
            self._set.leases.change(lambda table: (table.with_spans({name: span}), None))
            return self._hold([SpanClaim(span=name, names=tuple(due_ms))])

    def mark_started(self, claims: Iterable[SpanClaim], now_ms: int) -> None:
        """Record the instant with the spans. Raises StoreError if another scheduler holds one."""
        names = {each.span for each in claims}
        held = self._update(
            names,
            lambda span: span if span.started_ms is not None else replace(span, started_ms=now_ms),
        )
        if held != names:
            raise StoreError("another scheduler has taken over the claims: it will deliver them")

    def settle(self, claims: Iterable[SpanClaim]) -> None:
        """Remove the messages, then the spans."""
        claims = list(claims)
        held = self._set.leases.read().held({each.span for each in claims}, self._owner)
        for each in claims:
            if each.span in held:
                self._set.remove(each.names)
        self._drop(claims)

    def release(self, claims: Iterable[SpanClaim]) -> None:
        """End the leases: the next overdue scan takes the spans over."""
        names = {each.span for each in claims}
        # First: if the request below fails, the claims are found when their leases end.
        self._leases.remove(names)
        self._update(names, lambda span: replace(span, until_ms=0))

    def close(self) -> None:
        """Stop extending leases. Other schedulers take over open claims when they end."""
        self._leases.close()

    def _claim(self, start_ms: int, end_ms: int) -> list[SpanClaim]:
        """Claim the free messages of a span."""
        # Usually nothing is due, and the lease table need not change.
        found = self._set.due(start_ms, end_ms, self._limit(PROBE_LIMIT))
        if all(each.name in self._unreadable for each in found):
            return []

        def take(table: LeaseTable) -> tuple[LeaseTable, dict[str, LeasedSpan]]:
            taken = {token_hex(8): self._span(*part) for part in table.free(start_ms, end_ms)}
            return table.with_spans(taken), taken

        with self._leases.lock:
            taken = self._set.leases.change(take)
            return self._hold([self._read(name, span) for name, span in taken.items()])

    def _read(self, name: str, span: LeasedSpan) -> SpanClaim:
        """Return a claim of the readable messages in a span that are not claimed."""
        found = self._set.due(span.start_ms, span.end_ms, self._limit(self._max_claim))
        if len(found) * 2 >= self._max_claim:
            # Only a part may have been found: a message stays with its cancel.
            found = self._set.waiting(_with_cancels(each.name for each in found))
        busy = self._busy()
        free = self._readable([each for each in found if each.name not in busy])
        due_ms = [each.due_ms for each in free]
        return SpanClaim(
            span=name,
            names=tuple(each.name for each in free),
            started_ms=span.started_ms,
            due=DueTimes(min(due_ms), max(due_ms) + 1) if free else ANY_TIME,
        )

    def _limit(self, readable: int) -> int:
        """Return the limit of a query that finds as many readable messages, if they exist.

        One node may have all the unreadable ones, and its share of the limit is the smallest.
        """
        return readable + MAX_NODES * len(self._unreadable)

    def _readable(self, records: Sequence[DueName]) -> list[DueName]:
        """Return the readable records. Each foreign one is read, here in the driver."""
        known = [each for each in records if each.name not in self._unreadable]
        foreign = [each.name for each in known if each.name.startswith(FOREIGN_MARK)]
        unreadable = self._set.unreadable(foreign)
        UNREADABLE.inc(len(unreadable))
        self._unreadable |= unreadable
        return [each for each in known if each.name not in unreadable]

    def _busy(self) -> set[str]:
        return {name for claim in self._leases.held().values() for name in claim.names}

    def _hold(self, claims: Iterable[SpanClaim]) -> list[SpanClaim]:
        """Hold the claims that have messages, and drop the spans of the others."""
        held, empty = list[SpanClaim](), list[SpanClaim]()
        for each in claims:
            (held if each.names else empty).append(each)
        self._leases.add({each.span: each for each in held})
        if empty:
            self._drop(empty)
        return held

    def _drop(self, claims: Sequence[SpanClaim]) -> None:
        names = {each.span for each in claims}
        self._set.leases.change(lambda table: (table.without(names, self._owner), None))
        self._leases.remove(names)

    def _span(self, start_ms: int, end_ms: int) -> LeasedSpan:
        until_ms = self._clock.now_ms() + LEASE_MS
        return LeasedSpan(start_ms=start_ms, end_ms=end_ms, owner=self._owner, until_ms=until_ms)

    def _renewed(self, span: LeasedSpan) -> LeasedSpan:
        return replace(span, owner=self._owner, until_ms=self._clock.now_ms() + LEASE_MS)

    def _update(
        self, names: Collection[str], change: Callable[[LeasedSpan], LeasedSpan]
    ) -> set[str]:
        """Change the named spans that are still held here; return their names."""

        def update(table: LeaseTable) -> tuple[LeaseTable, set[str]]:
            held = table.held(names, self._owner)
            return table.with_spans({name: change(span) for name, span in held.items()}), set(held)

        return self._set.leases.change(update)


def _with_cancels(names: Iterable[str]) -> list[str]:
    """Return the names of messages and cancels: their notifications may come in two batches."""
    return list(dict.fromkeys(name for each in names for name in with_cancel(each)))


class AerospikeReader(KeyedReader):
    """The messages that wait in Aerospike. Thread-safe. Raises StoreError."""

    def __init__(self, settings: Settings) -> None:
        self._wheel = settings.wheel
        self._set = MessageSet(settings)

    def lookup(self, message_id: MessageId, retry_ms: int | None) -> PendingMessage | None:
        """See `KeyedReader.lookup`."""
        name, cancel = record_names(message_id, retry_ms)
        found = dict(self._set.found([name, cancel]))
        if name not in found and retry_ms is None:
            foreign = self._foreign_ids(self._set.due(message_id.due_ms, message_id.due_ms + 1))
            name = next((each for each, id_ in foreign.items() if id_ == message_id), name)
            found |= dict(self._set.found([name]))
        record = self._set.read(name, found[name]) if name in found else None
        return record.to_message(cancelled=cancel in found) if record else None

    def pending(self, now_ms: int) -> Sequence[PendingSlot]:
        """Count the records of each slot that the wheel would have. Reads all due times."""
        due_ms = [each.due_ms for each in self._set.due(0, LATEST_MS)]
        slots = empty_slots(self._wheel, min(due_ms, default=now_ms), now_ms)
        starts = [each.start_ms for each in slots]
        counts = Counter(bisect_right(starts, each) - 1 for each in due_ms)
        return counted_slots(slots, [counts[each] for each in range(len(slots))])

    def streams(self, message_filter: MessageFilter) -> Sequence[Iterator[PendingMessage]]:
        """Return one stream. All due times in the range are held."""
        return [read_messages(self._names(message_filter), self._messages)]

    def _names(self, message_filter: MessageFilter) -> list[str]:
        """Return the names of uncancelled messages after the filter's sort key, in order."""
        waiting = self._set.due(message_filter.from_ms, message_filter.to_ms)
        ids = {name: str(each) for name, each in self._foreign_ids(waiting).items()}
        cancelled = {each.name[1:] for each in waiting if each.name.startswith(CANCEL_MARK)}
        listed = sorted(
            (
                SortKey(each.due_ms, ids.get(each.name) or SECOND_RECORD.sub("", each.name)),
                each.name,
            )
            for each in waiting
            if not each.name.startswith(CANCEL_MARK)
        )
        return [
            name
            for sort_key, name in listed
            if sort_key.name not in cancelled and sort_key > message_filter.after
        ]

    def _foreign_ids(self, records: Sequence[DueName]) -> dict[str, MessageId]:
        names = [each.name for each in records if each.name.startswith(FOREIGN_MARK)]
        return self._set.foreign_ids(names)

    def _messages(self, names: Sequence[str]) -> list[PendingMessage]:
        # In the order of the names, as `found` yields them.
        records = [self._set.read(name, bins) for name, bins in self._set.found(names)]
        return [found for record in records if record and (found := record.to_message())]


BACKEND = Backend(store=AerospikeStore, reader=AerospikeReader, rows=MessageSet, check=check_server)

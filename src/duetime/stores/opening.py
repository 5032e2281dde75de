"""Which store the settings name. What another than Kafka needs is imported only then."""

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any, Unpack

from duetime.config import Settings
from duetime.errors import SetupError
from duetime.message import MessageId
from duetime.stores import Found, Pending, Reader, Search, Store
from duetime.stores.listing import merged
from duetime.stores.reader import WheelReader
from duetime.stores.selection import Asked
from duetime.topics import own_destinations

if TYPE_CHECKING:
    from duetime.stores.rows import Rows


# ruff: noqa: PLC0415 (imported where it is needed, as the module's docstring says)


def open_store(settings: Settings) -> Store[Any] | None:
    """The store beside the wheel, if there is one. Raises StoreError, ConfigError, SetupError."""
    with _extra(settings):
        if settings.store_kind == "redis":
            from duetime.stores.redis import RedisStore

            return RedisStore(settings)
        if settings.store_kind == "aerospike":
            from duetime.stores.aerospike import AerospikeStore

            return AerospikeStore(settings)
    return None


def open_rows(settings: Settings) -> "Rows":
    """The same store for who saves and reads, in any process. Raises SetupError."""
    with _extra(settings):
        if settings.store_kind == "redis":
            from duetime.stores.redis.shards import Shards

            return Shards(settings)
        from duetime.stores.aerospike.cache import MessageCache

        return MessageCache(settings)


def check_store(settings: Settings) -> str:
    """What the store is, in a sentence; raises the same where it is not to be trusted."""
    with _extra(settings):
        if settings.store_kind == "redis":
            from duetime.stores.redis.connect import look_at

            return look_at(settings)
        if settings.store_kind == "aerospike":
            from duetime.stores.aerospike.connect import look_at as look_at_aerospike

            return look_at_aerospike(settings)
    return "messages wait in Kafka, on the wheel"


def open_reader(settings: Settings) -> Reader:
    """Looks at everything that waits: what is in the wheel since before, too."""
    wheel, own = WheelReader(settings), own_destinations(settings)
    if settings.store_kind == "kafka":
        return Readers([wheel], own)
    return Readers([_row_reader(settings), wheel], own)


def _row_reader(settings: Settings) -> Reader:
    with _extra(settings):
        if settings.store_kind == "redis":
            from duetime.stores.redis.reader import RedisReader

            return RedisReader(settings)
        from duetime.stores.aerospike.reader import AerospikeReader

        return AerospikeReader(settings)


class Readers:
    """Several readers as one; they count what duetime sends to itself, and do not show it."""

    def __init__(self, readers: Sequence[Reader], own: Container[tuple[str | None, str]]) -> None:
        self._readers = readers
        self._own = own

    def find(
        self,
        id: MessageId,  # noqa: A002 (what all call it)
        now_ms: int,
        *,
        retry_ms: int | None = None,
    ) -> Found | None:
        """The message with this id, wherever it waits."""
        return self.search(id, retry_ms=retry_ms).find(now_ms)

    def search(
        self,
        id: MessageId,  # noqa: A002 (what all call it)
        *,
        retry_ms: int | None = None,
    ) -> Search:
        """Return a search in all of them."""
        return _Searches([each.search(id, retry_ms=retry_ms) for each in self._readers], self._own)

    def pending(self, now_ms: int) -> Sequence[Pending]:
        """The slots of all, in order of time."""
        return sorted(
            (slot for each in self._readers for slot in each.pending(now_ms)),
            key=lambda slot: (slot.end_ms, slot.slot),
        )

    def messages(
        self, now_ms: int, *, limit: int | None = None, **asked: Unpack[Asked]
    ) -> Iterator[Found]:
        """The messages of all, by their positions, each once."""
        streams = [each.messages(now_ms, **asked) for each in self._readers]
        shown = (found for found in merged(streams) if not self._is_own(found))
        return islice(shown, limit)

    def _is_own(self, found: Found) -> bool:
        return (found.cluster, found.topic) in self._own

    def close(self) -> None:
        """Close all."""
        for each in self._readers:
            each.close()


class _Searches:
    """Several searches as one, without what duetime sends to itself."""

    def __init__(self, searches: Sequence[Search], own: Container[tuple[str | None, str]]) -> None:
        self._searches, self._own = searches, own

    def find(self, now_ms: int) -> Found | None:
        """Return the message, wherever it waits."""
        found = (each.find(now_ms) for each in self._searches)
        shown = (each for each in found if each and (each.cluster, each.topic) not in self._own)
        return next(shown, None)


@contextmanager
def _extra(settings: Settings) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        extra = settings.store_kind
        raise SetupError(
            f"the store needs the package {error.name}: pip install 'duetime[{extra}]'"
        ) from error

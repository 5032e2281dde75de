"""Opens the store that the settings name. Packages for stores other than Kafka load on demand."""

from collections.abc import Container, Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from duetime.core.errors import SetupError
from duetime.core.messages import MessageId, PendingMessage
from duetime.core.settings import Settings
from duetime.core.topics import internal_destinations
from duetime.stores import MessageFilter, PendingSlot, Reader, Search, Store, merged
from duetime.stores.wheel_reader import WheelReader

if TYPE_CHECKING:
    from duetime.stores.row_store import Backend, RowStore


def open_store(settings: Settings) -> Store[Any] | None:
    """Open the configured row store; None if messages wait in Kafka.

    Raises StoreError, ConfigError, and SetupError where the client package is missing.
    """
    return None if settings.store_kind == "kafka" else _backend(settings).store(settings)


def open_row_store(settings: Settings) -> "RowStore":
    """Open the configured row store to save and read rows, in any process.

    Raises as `open_store` does.
    """
    return _backend(settings).rows(settings)


def open_reader(settings: Settings) -> Reader:
    """Open a reader of everything that waits, including what the wheel had before.

    Messages that duetime sends to itself are counted and not shown. Raises as `open_store` does.
    """
    readers: list[Reader] = [WheelReader(settings)]
    if settings.store_kind != "kafka":
        readers.insert(0, _backend(settings).reader(settings))
    return CombinedReader(readers, internal_destinations(settings))


def check_store(settings: Settings) -> str:
    """Return a sentence that describes the store; raise as `open_store` if it is unfit."""
    if settings.store_kind == "kafka":
        return "messages wait in Kafka, on the wheel"
    return _backend(settings).check(settings)


def _backend(settings: Settings) -> "Backend":
    try:
        backend: Backend = import_module(f"duetime.stores.{settings.store_kind}").BACKEND
    except ModuleNotFoundError as error:
        raise SetupError(
            f"the store needs the package {error.name}: "
            f"pip install 'duetime[{settings.store_kind}]'"
        ) from error
    return backend


class CombinedReader(Reader):
    """Several readers as one, without messages to `hidden` destinations: (cluster, topic)."""

    def __init__(
        self, readers: Sequence[Reader], hidden: Container[tuple[str | None, str]]
    ) -> None:
        self._readers, self._hidden = readers, hidden

    def search(self, message_id: MessageId, *, retry_ms: int | None = None) -> Search:
        """Return a search in all of them."""
        searches = [each.search(message_id, retry_ms=retry_ms) for each in self._readers]

        def find(now_ms: int) -> PendingMessage | None:
            found = (search(now_ms) for search in searches)
            return next((each for each in found if each and self._is_shown(each)), None)

        return find

    def pending(self, now_ms: int) -> Sequence[PendingSlot]:
        """Return the slots of all, in order of time."""
        slots = (slot for each in self._readers for slot in each.pending(now_ms))
        return sorted(slots, key=lambda slot: (slot.end_ms, slot.slot))

    def matching(self, message_filter: MessageFilter, now_ms: int) -> Iterator[PendingMessage]:
        """Yield the matching messages of all, in order."""
        found = merged(each.matching(message_filter, now_ms) for each in self._readers)
        return filter(self._is_shown, found)

    def close(self) -> None:
        """Close all."""
        for each in self._readers:
            each.close()

    def _is_shown(self, found: PendingMessage) -> bool:
        return (found.cluster, found.topic) not in self._hidden

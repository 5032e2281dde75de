"""What is of no more use is not freed while somebody reads back: it tells where messages went."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from duetime.stores.places import Place

#: Frees what is before these offsets.
Free = Callable[[Mapping[Place, int]], object]


class Keeping:
    """Puts off what is to be freed until nobody reads. Thread-safe.

    A message that moves on is in its new place before it is freed in the old one. Who reads one
    place after the other would find it in neither, if it moved on and was freed in between.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readers = 0
        self._put_off: dict[Place, int] = {}

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Nothing is freed in this block that was not being freed before."""
        with self._lock:
            self._readers += 1
        try:
            yield
        finally:
            with self._lock:
                self._readers -= 1

    def forget(self, places: Iterable[Place]) -> None:
        """Drop what was put off for these partitions: their logs are other ones now."""
        with self._lock:
            for place in places:
                self._put_off.pop(place, None)

    def free(self, offsets: Mapping[Place, int], free: Free) -> None:
        """Free what is before these offsets, and what was put off; or put it off until later."""
        with self._lock:
            for place, offset in offsets.items():
                self._put_off[place] = max(offset, self._put_off.get(place, 0))
            if self._readers:
                return
            now, self._put_off = self._put_off, {}
        free(now)

"""Claims that have a lease, which is extended for as long as their reader lives."""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Generic, TypeVar

from duetime.errors import StoreError

log = logging.getLogger(__name__)

_Name = TypeVar("_Name")
_Claim = TypeVar("_Claim")


class Held(Generic[_Name, _Claim]):
    """What one reader holds, by name. Thread-safe; a thread of its own extends the leases."""

    def __init__(self, extend: Callable[[dict[_Name, _Claim]], object], *, lease_ms: int) -> None:
        """Leases of so many ms are extended by `extend`, which may raise StoreError."""
        self._extend = extend
        #: Several times within a lease: one that is not heard is no matter.
        self._every_s = lease_ms / 5_000
        self._claims: dict[_Name, _Claim] = {}
        #: Held by who must know that nothing is taken or let go of meanwhile; it is reentrant.
        self.lock = threading.RLock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="leases", daemon=True)
        self._thread.start()

    def all(self) -> dict[_Name, _Claim]:
        """What is held now."""
        with self.lock:
            return dict(self._claims)

    def take(self, claims: Mapping[_Name, _Claim]) -> None:
        """Hold these, too."""
        with self.lock:
            self._claims |= claims

    def let_go(self, names: Iterable[_Name]) -> None:
        """Hold these no longer."""
        with self.lock:
            for name in names:
                self._claims.pop(name, None)

    def close(self) -> None:
        """Stop extending leases. What is held is found by others when they end."""
        self._closing.set()
        self._thread.join()

    def _keep(self) -> None:
        while not self._closing.wait(self._every_s):
            held = self.all()
            try:
                if held:
                    self._extend(held)
            except StoreError as error:
                log.warning("leases not extended claims=%d error=%s", len(held), error)

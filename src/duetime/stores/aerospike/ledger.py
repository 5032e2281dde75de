"""The ledger's record: read, changed and replaced, unless somebody else was quicker."""

from collections.abc import Callable
from typing import TypeVar

import aerospike
from aerospike.exception import RecordExistsError, RecordGenerationError, RecordNotFound

from duetime.stores.aerospike.connect import Address, answering, client
from duetime.stores.aerospike.fields import CLAIMS
from duetime.stores.aerospike.leases import Ledger

_Result = TypeVar("_Result")

#: What is done to it: the new ledger, and what is wanted to know.
Change = Callable[[Ledger], tuple[Ledger, _Result]]

#: What is said of a record that never expires.
FOREVER = {"ttl": aerospike.TTL_NEVER_EXPIRE}


class LedgerRecord:
    """The ledger of one namespace of duetime's. Thread-safe. Raises StoreError."""

    def __init__(self, at: Address, name: str) -> None:
        self._at = at
        self._key = (at.namespace, CLAIMS, name)

    def read(self) -> Ledger:
        """As it is now."""
        return self._read()[0]

    def change(self, change: Change[_Result]) -> _Result:
        """Change it in one step; `change` may be called several times."""
        while True:
            ledger, generation = self._read()
            changed, result = change(ledger)
            if changed == ledger or self._replace(changed, generation):
                return result

    def _read(self) -> tuple[Ledger, int | None]:
        with answering(self._at):
            try:
                _, meta, bins = client(self._at).get(self._key)
            except RecordNotFound:
                return Ledger(), None
        return Ledger.of(bins["ledger"]), meta["gen"]

    def _replace(self, ledger: Ledger, generation: int | None) -> bool:
        bins = {"ledger": ledger.stored()}
        with answering(self._at):
            try:
                if generation is None:
                    policy = {"exists": aerospike.POLICY_EXISTS_CREATE}
                    client(self._at).put(self._key, bins, FOREVER, policy)
                else:
                    policy = {"gen": aerospike.POLICY_GEN_EQ}
                    meta = FOREVER | {"gen": generation}
                    client(self._at).put(self._key, bins, meta, policy)
            except (RecordExistsError, RecordGenerationError):
                return False
        return True

"""A fake of Aerospike's client, as far as the store calls it, over a dictionary.

It answers as a real server did: the codes of a batch, generations, what an index finds. Where
DUETIME_AEROSPIKE names a real one, tests/integration/stores/test_store_contract.py tries the same
on that.
"""

import threading
from types import SimpleNamespace

import aerospike
from aerospike.exception import (
    BinNameError,
    InvalidRequest,
    RecordExistsError,
    RecordGenerationError,
    RecordNotFound,
)

OK, NOT_FOUND, EXISTS, TOO_BIG = 0, 2, 5, 13

#: A server's limits: the name of a bin in characters, a time to live in seconds, a record in bytes.
LONGEST_NAME = 15
LONGEST_TTL_S = 10 * 365 * 24 * 3_600
LARGEST_BYTES = 1024 * 1024

FOREVER = (aerospike.TTL_NEVER_EXPIRE, aerospike.TTL_DONT_UPDATE)

#: The partitions of every namespace.
PARTITIONS = 4_096


def partition_of(key):
    return int.from_bytes(aerospike.calc_digest(*key)[:2], "little") % PARTITIONS


class InMemory:
    """One server. `records` maps (namespace, set, key) to bins.

    As on a server, a key may be a digest instead, and a query's keys carry theirs.
    """

    def __init__(self):
        self.records = {}
        #: The time to live of each record.
        self.ttl = {}
        self._generations = {}
        #: How many more records it writes before it fails; None is no limit.
        self.left = None
        # A call is atomic, as it is for one record on a server.
        self._lock = threading.RLock()

    def get(self, key):
        with self._lock:
            if key not in self.records:
                raise RecordNotFound
            return key, {"gen": self._generations[key]}, dict(self.records[key])

    def put(self, key, bins, meta, policy):
        with self._lock:
            if policy.get("exists") == aerospike.POLICY_EXISTS_CREATE and key in self.records:
                raise RecordExistsError
            if (
                policy.get("gen") == aerospike.POLICY_GEN_EQ
                and self._generations.get(key) != meta["gen"]
            ):
                raise RecordGenerationError
            self._write(key, bins, meta)

    def batch_write(self, batch):
        for each in batch.batch_records:
            with self._lock:
                bins = {one["bin"]: one["val"] for one in each.ops}
                creates = each.policy.get("exists") == aerospike.POLICY_EXISTS_CREATE
                each.result = EXISTS if creates and each.key in self.records else OK
                if len(bins.get("value") or b"") >= LARGEST_BYTES:
                    each.result = TOO_BIG
                if each.result == OK:
                    self._write(each.key, bins, each.meta)

    def batch_read(self, keys, bins=None):
        with self._lock:
            found = [(key, self.records.get(self._named(key))) for key in keys]
        return _answers(
            SimpleNamespace(
                result=NOT_FOUND if record is None else OK,
                record=(key, {}, _selected(record or {}, bins)),
            )
            for key, record in found
        )

    def batch_remove(self, keys):
        with self._lock:
            there = [self.records.pop(self._named(key), None) is not None for key in keys]
        return _answers(SimpleNamespace(result=OK if each else NOT_FOUND) for each in there)

    def query(self, namespace, set_name):
        return _Query(self, namespace, set_name)

    def index_single_value_create(self, *_index):
        """Do nothing: queries here need no index."""

    def _named(self, key):
        """Return the key in `records`."""
        *within, name, digest = (*key, None)[:4]
        if name is not None or digest is None:
            return key[:3]
        named = (each for each in self.records if each[:2] == tuple(within))
        return next((each for each in named if digest_of(each) == digest), key[:3])

    def _write(self, key, bins, meta):
        if self.left is not None:
            if not self.left:
                raise aerospike.exception.ConnectionError(-10, "Failed to connect")
            self.left -= 1
        if any(len(name) > LONGEST_NAME for name in bins):
            raise BinNameError
        if meta["ttl"] not in FOREVER and not 0 < meta["ttl"] <= LONGEST_TTL_S:
            raise InvalidRequest
        self.records[key] = dict(bins)
        self.ttl[key] = meta["ttl"]
        self._generations[key] = self._generations.get(key, 0) + 1


class _Query:
    """Records of one set where a bin equals a value, or is in a range."""

    max_records = 0
    _names = None
    _bin = None

    def __init__(self, server, namespace, set_name):
        self._server = server
        self._within = (namespace, set_name)

    def select(self, *names):
        self._names = names

    def where(self, predicate):
        _, _, self._bin, *self._bounds = predicate

    def results(self, policy=None):
        part = (policy or {}).get("partition_filter", {"begin": 0, "count": PARTITIONS})
        with self._server._lock:
            found = [
                ((*key[:2], None, digest_of(key)), {}, _selected(bins, self._names))
                for key, bins in self._server.records.items()
                if key[:2] == self._within
                and 0 <= partition_of(key) - part["begin"] < part["count"]
                and self._holds(bins.get(self._bin))
            ]
        return found[: self.max_records or None]

    def _holds(self, value):
        if self._bin is None:
            return True
        if len(self._bounds) == 1:
            return value == self._bounds[0]
        return value is not None and self._bounds[0] <= value <= self._bounds[1]


def digest_of(key):
    return aerospike.calc_digest(*key)


def _selected(bins, names):
    """Leave out missing bins, as a server does."""
    return {name: bins[name] for name in names or bins if name in bins}


def _answers(records):
    return SimpleNamespace(batch_records=list(records))

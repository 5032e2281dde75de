"""Entries of the index: when a record is to be delivered, and where it is. 16 bytes each.

They come in the order of their offsets, and every array here keeps that order among equal times. So
a stable sort by time alone is the order of delivery, (deliverAfter, offset).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: One record: the instant in epoch ms, and the offset.
ENTRY = np.dtype([("deliver_after_ms", "<i8"), ("offset", "<i8")])

#: An array of ENTRY; NumPy's types do not know its fields.
Entries = NDArray[Any]

#: One yes or no for each entry.
Flags = NDArray[np.bool_]

NONE: Entries = np.empty(0, ENTRY)


def entries_of(deliver_after_ms: Sequence[int], offsets: Sequence[int]) -> Entries:
    """Entries of these records."""
    made = np.empty(len(offsets), ENTRY)
    made["deliver_after_ms"] = deliver_after_ms
    made["offset"] = offsets
    return made


def joined(*pieces: Entries) -> Entries:
    """The pieces, one behind the other."""
    filled = [each for each in pieces if each.size]
    return filled[0] if len(filled) == 1 else np.concatenate([NONE, *filled])


def in_order(*pieces: Entries) -> Entries:
    """All of them in the order of delivery.

    Of equal times, the entries in a piece and the pieces themselves are in that of the offsets.
    """
    together = joined(*pieces)
    return together[np.argsort(together["deliver_after_ms"], kind="stable")]


def until(entries: Entries, deliver_after_ms: int, offset: int) -> Flags:
    """Which are not behind this place in the order of delivery."""
    times = entries["deliver_after_ms"]
    at_once = (times == deliver_after_ms) & (entries["offset"] <= offset)
    flags: Flags = (times < deliver_after_ms) | at_once
    return flags


def due(ordered: Entries, now_ms: int) -> int:
    """How many of these, which are in order, are due."""
    return int(np.searchsorted(ordered["deliver_after_ms"], now_ms, side="right"))

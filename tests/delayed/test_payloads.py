"""The records that are kept in memory, as far as there is room."""

import pytest

from duetime.delayed.entries import entries_of
from duetime.delayed.payloads import OBJECT_BYTES, Payloads, Room
from duetime.errors import KafkaError


class Record:
    """As much of a record as this looks at."""

    def __init__(self, offset, size):
        self._offset, self._value = offset, bytes(size)

    def offset(self):
        return self._offset

    def key(self):
        return None

    def value(self):
        return self._value


def test_what_is_read_again_does_not_drive_out_what_is_taken_with_it():
    # All are due at once, and so none is due last; the small ones have room for one another.
    sizes = [0, 0, 0, 5_000, 0, 0]
    log = [Record(offset, size) for offset, size in enumerate(sizes)]
    entries = entries_of([7] * len(log), range(len(log)))
    payloads = Payloads(Room(4 * OBJECT_BYTES))
    payloads.keep(entries[:3], log[:3])
    batch, ahead = entries[:4], entries[4:]
    found = payloads.take(batch, ahead, lambda start, end: [log[start:end]])
    assert found == log[:4]
    assert payloads.removed == 0


def test_what_could_not_be_read_can_be_read_later():
    log = [Record(0, 0)]
    payloads = Payloads(Room(0))

    def broken(_start, _end):
        raise KafkaError("away")

    with pytest.raises(KafkaError):
        payloads.take(entries_of([7], [0]), entries_of([], []), broken)
    found = payloads.take(entries_of([7], [0]), entries_of([], []), lambda *_: [log])
    assert (found, payloads.removed) == (log, 0)

"""Markers: records that say who works on which message, and until when. The bytes are kmq's own.

    key      int32 partition, int64 offset of the message, big-endian
    value    1, int64 time-out in ms     work begins: a start marker
             0                           work is done: an end marker
             nothing                     means nothing

A marker is written to the partition of its message, so the last one of a message is the one that
counts: another start marker replaces the time-out, an end marker ends it. Source: kmq's MarkerKey,
StartMarker, EndMarker and DefaultRedeliverer; tests/golden/markers.toml has bytes that they wrote.
"""

import struct
from enum import StrEnum
from typing import NamedTuple

#: The first byte of a value.
END, START = 0, 1

END_VALUE = bytes([END])

#: How often a message was delivered again: a header of kmq's on the message itself.
REDELIVERY_COUNT = "kmq-redelivery-count"

#: A header on a start marker, which kmq does not read: the message is not worked on any more, and
#: the time-out says when to deliver it again.
GIVEN_BACK = "duetime-given-back"


class GivenBack(StrEnum):
    """Why a message was given back: the value of the GIVEN_BACK header."""

    #: Its work failed: deliver it again as the queue's back-off has it.
    FAILED = "failed"
    #: Its work failed: deliver it again when the time-out says.
    RETRY = "retry"
    #: Nobody has worked on it: deliver it again, and do not count that.
    UNSEEN = "unseen"


#: The length of an int32, in bytes.
INT_BYTES = 4

#: The last offset that a record can have: the one behind it is an int64, too.
LAST_OFFSET = 2**63 - 2

_KEY = struct.Struct(">iq")
_START = struct.Struct(">Bq")
_COUNT = struct.Struct(">i")


class MarkerKey(NamedTuple):
    """The message that a marker speaks of, by its place in the queue's topic."""

    partition: int
    offset: int

    def encoded(self) -> bytes:
        """The marker's key."""
        return _KEY.pack(self.partition, self.offset)

    @classmethod
    def decoded(cls, key: bytes | None) -> "MarkerKey | None":
        """What a marker's key says; None where it is no marker's."""
        return cls(*_KEY.unpack(key)) if key and len(key) == _KEY.size else None


def start_value(timeout_ms: int) -> bytes:
    """The value of a start marker: delivered again if nothing is heard for so long."""
    return _START.pack(START, timeout_ms)


def decoded_timeout(value: bytes | None) -> int | None:
    """The time-out of a start marker in ms; None of anything else."""
    if value and len(value) == _START.size and value[0] == START:
        return int(_START.unpack(value)[1])
    return None


def encoded_count(count: int) -> bytes:
    """The value of the REDELIVERY_COUNT header: one byte if that is enough, else an int32."""
    return count.to_bytes(1, signed=True) if count < 2**7 else _COUNT.pack(count)


def decoded_count(value: bytes | None) -> int:
    """How often a message was delivered again, as the first REDELIVERY_COUNT header says.

    As kmq reads it, one byte or the first four, signed; but 0 where it is below 0, or of another
    length. `pipeline.again` has the same as columns.
    """
    data = (value or b"")[:INT_BYTES]
    return max(0, int.from_bytes(data, signed=True)) if len(data) in (1, INT_BYTES) else 0

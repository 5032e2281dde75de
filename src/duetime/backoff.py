"""How long is waited before something is tried again; `columns.backoff_ms` is the same in Spark."""

import zlib

#: From then on it is not doubled any more.
MOST_DOUBLINGS = 30

#: Into how many parts the spread is cut.
PARTS = 1_000


def doubled_ms(attempts: int, first_ms: int, most_ms: int) -> int:
    """How long it is after so many attempts where it is doubled each time, in ms."""
    return int(min(first_ms * 2 ** min(attempts - 1, MOST_DOUBLINGS), most_ms))


def backoff_ms(attempts: int, first_ms: int, most_ms: int, spread: str) -> int:
    """Exponential back-off after so many attempts, in ms; `spread` spreads it over half of it."""
    share = 0.5 + zlib.crc32(spread.encode()) % PARTS / (2 * PARTS)
    return int(doubled_ms(attempts, first_ms, most_ms) * share)

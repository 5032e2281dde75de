"""The wheel's and the ladder's arithmetic, and records' shapes, as Spark columns.

Whatever `wheel` and `ladder` compute in Python is computed here for every row inside the JVM; a
property test holds the two equal.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Event
from typing import Any

from pyspark.sql import Column
from pyspark.sql import functions as F

from duetime import java
from duetime.backoff import MOST_DOUBLINGS, PARTS
from duetime.ladder import Ladder
from duetime.message import HEADER_FRAME_BYTES, STATE, UNDELIVERED_HEADERS, WAITING_HEADERS
from duetime.wheel import Slot, Wheel

#: A Kafka record's headers, as Spark's connector gives and takes them.
HEADERS_TYPE = "array<struct<key:string,value:binary>>"


#: The JVM's property that says how far the simulated clock is ahead of its own, in ms.
AHEAD = "duetime.clock.ahead"

_is_simulated = Event()


@contextmanager
def simulated_clock(jvm: Any) -> Iterator[Callable[[int], None]]:  # noqa: ANN401 (py4j's has no type)
    """Simulated time: columns that are built in this block read a clock that can be set.

    It gives the function that sets it: so many ms ahead of the JVM's.
    """

    def set_ahead(ms: int) -> None:
        jvm.java.lang.System.setProperty(AHEAD, str(ms))

    set_ahead(0)
    _is_simulated.set()
    try:
        yield set_ahead
    finally:
        _is_simulated.clear()


def now_ms() -> Column:
    """The clock of the JVM, read for each row. Where a row runs: on an executor."""
    clock = java.current_time_ms()
    if not _is_simulated.is_set():
        return clock
    return clock + java.system_property(F.lit(AHEAD)).cast("bigint")


def slept(pause_ms: Column, then: Column | None = None) -> Column:
    """True after so many ms, or what it is `then`; at once where that is no more than 0.

    Use it as a filter: a column that nothing reads is optimised away, and the wait with it.
    """
    over = java.slept(pause_ms)
    return F.when(pause_ms <= 0, True).otherwise(over if then is None else over & then)


def slept_until(instant_ms: Column, now: Column) -> Column:
    """True, once it is `instant_ms`. A filter, as above.

    The clock is cut to whole ms, so sleeping the difference never ends early. It is looked at
    again, because it may have been set back meanwhile.
    """
    return slept(instant_ms - now, then=slept(instant_ms - now_ms()))


def header(name: str, value: Column) -> Column:
    """One header, its value as text (null stays null)."""
    return F.struct(F.lit(name).alias("key"), value.cast("string").cast("binary").alias("value"))


def header_map(headers: Column) -> Column:
    """Headers as map<string,binary>; the last of a name counts, as in Kafka's own lastHeader.

    One pass in compiled code. A lambda over the array (filter, transform) is interpreted, and costs
    ten times as much. Needs spark.sql.mapKeyDedupPolicy=LAST_WIN.
    """
    return F.map_from_entries(headers)


def header_text(by_name: Column, name: str) -> Column:
    """A header of a `header_map` as text; null where there is none."""
    return by_name[name].cast("string")


def text_at(headers: Column, names: Sequence[str], name: str) -> Column:
    """A header as text, by its position among these names; null in a record of another shape."""
    at = F.get(headers, F.lit(names.index(name)))
    return F.when(at["key"] == name, at["value"].cast("string"))


def waiting_text(headers: Column, name: str) -> Column:
    """The same of one of the WAITING_HEADERS."""
    return text_at(headers, WAITING_HEADERS, name)


def state_number(state: Column, name: str) -> Column:
    """One of the numbers of a DUE_STATE header, as bigint; null where it is missing."""
    position = F.lit(STATE.index(name) + 1)
    return F.split_part(state, F.lit(":"), position).cast("bigint")


def state_word(state: Column, name: str) -> Column:
    """The same as text."""
    position = F.lit(STATE.index(name) + 1)
    return F.nullif(F.split_part(state, F.lit(":"), position), F.lit(""))


def state_text(**numbers: Column) -> Column:
    """The value of a DUE_STATE header with these numbers, and perhaps the name."""
    last = max(STATE.index(name) for name in numbers)
    none = F.lit(None).cast("string")
    texts = [numbers.get(name, none).cast("string") for name in STATE[: last + 1]]
    # A null at the end is left out.
    return F.concat_ws(":", *(F.coalesce(text, F.lit("")) for text in texts[:-1]), texts[-1])


def waiting_headers(values: Mapping[str, Column], sender: Column) -> Column:
    """The headers of a record that waits: WAITING_HEADERS, then the sender's own."""
    own = F.array(*(header(name, values[name]) for name in WAITING_HEADERS))
    return F.concat(own, sender)


def delivered_headers(headers: Column) -> Column:
    """The headers of a delivered record, from those of a waiting one."""
    return F.slice(headers, UNDELIVERED_HEADERS + 1, F.size(headers))


def message_id(due_ms: Column, unique: Column) -> Column:
    """`<due as 12 hex digits>-<unique part>`, for 0 <= due < 2**48."""
    return F.concat(F.lower(F.lpad(F.hex(due_ms), 12, "0")), F.lit("-"), unique)


def due_ms_of(identity: Column) -> Column:
    """The due time that a full id begins with."""
    return F.conv(F.substring(identity, 1, 12), 16, 10).cast("bigint")


def backoff_ms(attempts: Column, first_ms: Column, most_ms: Column, spread: list[Column]) -> Column:
    """`backoff.backoff_ms` as a column; what spreads it is joined with colons."""
    doubled = first_ms * F.pow(F.lit(2), F.least(attempts - 1, F.lit(MOST_DOUBLINGS)))
    text = F.concat_ws(":", *(each.cast("string") for each in spread))
    share = F.lit(0.5) + F.crc32(text.cast("binary")) % PARTS / (2 * PARTS)
    return (F.least(doubled, most_ms) * share).cast("bigint")


def slot_number(wheel: Wheel, level: int, instant_ms: Column) -> Column:
    """`Wheel.number` as a column, for instants of 0 or more."""
    return F.call_function("div", instant_ms, F.lit(wheel.width_ms(level)).cast("bigint"))


def by_level(
    wheel: Wheel,
    due_ms: Column,
    now: Column,
    chosen: Callable[[int, Column], Column],
    *,
    or_last: bool = False,
) -> Column:
    """What `chosen` gives for the level of `Wheel.place(...)` and the partition of its slot.

    Where no level reaches the due time: null, or what it gives for the last level.
    """
    found = F.lit(None)
    for level in reversed(range(wheel.levels)):
        always = or_last and level == wheel.levels - 1
        place = chosen(level, slot_partition(wheel, level, due_ms))
        reaches = _reaches(wheel, level, due_ms, now)
        found = place if always else F.when(reaches, place).otherwise(found)
    return found


def slot_partition(wheel: Wheel, level: int, due_ms: Column) -> Column:
    """`Wheel.partition` of the slot of this level that covers the instant, as a column."""
    return (slot_number(wheel, level, due_ms) % wheel.ring).cast("int")


def _reaches(wheel: Wheel, level: int, due_ms: Column, now: Column) -> Column:
    ahead = slot_number(wheel, level, due_ms) - slot_number(wheel, level, now)
    return ahead < wheel.reach(level)


def wheel_level(wheel: Wheel, due_ms: Column, now: Column) -> Column:
    """`Wheel.place(...).level` as a column; null where no level reaches the due time."""
    return by_level(wheel, due_ms, now, lambda level, _partition: F.lit(level))


def open_above(wheel: Wheel, due_ms: Column, now: Column) -> Column:
    """The levels of `Wheel.open_above(...)` as array<int>, for what a level reaches."""
    levels = []
    for level in range(1, wheel.levels):
        first = Slot(level, 0)
        start_ms = slot_number(wheel, level, due_ms) * F.lit(wheel.width_ms(level)).cast("bigint")
        is_open = now < start_ms + wheel.routed_until_ms(first)
        is_above = _reaches(wheel, level - 1, due_ms, now)
        levels.append(F.when(is_open & is_above, F.lit(level)))
    return F.array_compact(F.array(*levels).cast("array<int>"))


def lane(ladder: Ladder, remaining_ms: Column) -> Column:
    """`Ladder.lane` as a column; null where even the shortest lane waits too long."""
    chosen = F.lit(None).cast("int")
    for rung in range(ladder.rungs):
        step = ladder.step_ms(rung)
        multiple = F.least(F.floor(remaining_ms / step), F.lit(ladder.base - 1)).cast("int")
        number = multiple + (rung * (ladder.base - 1) - 1)
        chosen = F.when(remaining_ms >= step, number).otherwise(chosen)
    return chosen


def lane_wait_ms(ladder: Ladder, lane_number: Column) -> Column:
    """`Ladder.wait_ms` as a column; null where there is no such lane."""
    waits = F.array(*(F.lit(ladder.wait_ms(each)).cast("bigint") for each in range(ladder.lanes)))
    return F.get(waits, lane_number)


def source() -> Column:
    """Where a record was read, `topic/partition/offset`, as a rejected one names it."""
    return F.concat_ws("/", "topic", "partition", "offset")


def record_bytes(key: Column, value: Column, headers: Column) -> Column:
    """Size of a record in bytes: key, value, and each header's name, value and framing."""
    # All names and all values as one text each: a lambda over the array is interpreted.
    names = F.array_join(headers["key"], "")
    values = F.array_join(headers["value"].cast("array<string>"), "")
    return sum_of_lengths(key, value, names, values) + F.size(headers) * HEADER_FRAME_BYTES


def sum_of_lengths(*columns: Column) -> Column:
    """The columns' lengths in bytes together, null counting as 0."""
    total = F.lit(0)
    for column in columns:
        total = total + F.coalesce(F.octet_length(column), F.lit(0))
    return total

"""Timer-wheel and lane arithmetic, Kafka headers and clocks, as Spark columns.

`core.timer_wheel` computes slots and lanes in Python for one message; these columns compute the
same inside the JVM for every row. `tests/integration/spark/test_columns.py` holds the two equal.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Event
from typing import Any

from pyspark.sql import Column
from pyspark.sql import functions as F

from duetime.core import headers as H
from duetime.core.clock import MAX_DOUBLINGS, PARTS
from duetime.core.timer_wheel import DelayLanes, Slot, Wheel
from duetime.spark import catalyst

#: A Kafka record's headers, in the type of Spark's connector.
HEADERS_TYPE = "array<struct<key:string,value:binary>>"

#: The JVM property with the lead of the simulated clock over the real one, in ms.
AHEAD = "duetime.clock.ahead"

_is_simulated = Event()


def is_in_reach(wheel: Wheel, level: int, due_ms: Column, now: Column) -> Column:
    """boolean: the level takes a message due at `due_ms` (bigint, 0 or more) if routed `now`."""
    ahead = slot_number(wheel, level, due_ms) - slot_number(wheel, level, now)
    return ahead < wheel.reach(level)


def wheel_level(wheel: Wheel, due_ms: Column, now: Column) -> Column:
    """int: the level of `Wheel.place`, the lowest in reach; null where none is."""
    found = F.lit(None).cast("int")
    for level in reversed(range(wheel.levels)):
        found = F.when(is_in_reach(wheel, level, due_ms, now), level).otherwise(found)
    return found


def higher_slots(wheel: Wheel, due_ms: Column, now: Column) -> Column:
    """array<int>: the levels of `Wheel.higher_slots`, for a due time that some level reaches."""
    levels = []
    for level in range(1, wheel.levels):
        start_ms = slot_number(wheel, level, due_ms) * F.lit(wheel.width_ms(level)).cast("bigint")
        is_open = now < start_ms + wheel.accepts_until_ms(Slot(level, 0))
        is_above = is_in_reach(wheel, level - 1, due_ms, now)
        levels.append(F.when(is_open & is_above, F.lit(level)))
    return F.array_compact(F.array(*levels).cast("array<int>"))


def slot_number(wheel: Wheel, level: int, instant_ms: Column) -> Column:
    """bigint: `Wheel.number`, for instants of 0 or more."""
    return F.call_function("div", instant_ms, F.lit(wheel.width_ms(level)).cast("bigint"))


def slot_partition(wheel: Wheel, level: int, due_ms: Column, message_id: Column) -> Column:
    """int: `Wheel.partition` of the slot that covers `due_ms` on the level."""
    number = slot_number(wheel, level, due_ms)
    (_, first), *later = wheel.shard_counts(level)
    partition = (number % wheel.ring).cast("int")
    if not later and first == 1:
        return partition
    count = F.lit(first)
    for since, each in later:
        count = F.when(number >= since, F.lit(each)).otherwise(count)
    shard = (F.crc32(message_id.cast("binary")) % count).cast("int")
    return partition + wheel.ring * shard


def lane(lanes: DelayLanes, remaining_ms: Column) -> Column:
    """int: `DelayLanes.lane`; null where even the shortest lane waits too long."""
    chosen = F.lit(None).cast("int")
    for rung in range(lanes.rungs):
        step = lanes.step_ms(rung)
        multiple = F.least(F.floor(remaining_ms / step), F.lit(lanes.base - 1)).cast("int")
        number = multiple + (rung * (lanes.base - 1) - 1)
        chosen = F.when(remaining_ms >= step, number).otherwise(chosen)
    return chosen


def lane_wait_ms(lanes: DelayLanes, lane_number: Column) -> Column:
    """bigint: `DelayLanes.wait_ms`; null where there is no such lane."""
    waits = F.array(*(F.lit(lanes.wait_ms(each)).cast("bigint") for each in range(lanes.lanes)))
    return F.get(waits, lane_number)


def backoff_ms(attempts: Column, first_ms: Column, max_ms: Column, spread: list[Column]) -> Column:
    """bigint: `core.clock.backoff_ms`, spread by the columns of `spread`, joined with colons."""
    doubled = first_ms * F.pow(F.lit(2), F.least(attempts - 1, F.lit(MAX_DOUBLINGS)))
    text = F.concat_ws(":", *(each.cast("string") for each in spread))
    share = F.lit(0.5) + F.crc32(text.cast("binary")) % PARTS / (2 * PARTS)
    return (F.least(doubled, max_ms) * share).cast("bigint")


def now_ms() -> Column:
    """bigint: the clock of the JVM that runs the row, read for each row, epoch ms."""
    clock = catalyst.current_time_ms()
    if not _is_simulated.is_set():
        return clock
    return clock + catalyst.system_property(F.lit(AHEAD)).cast("bigint")


@contextmanager
def simulated_clock(jvm: Any) -> Iterator[Callable[[int], None]]:  # noqa: ANN401 (py4j's has no type)
    """Make columns that are built in this block read a clock that can be set.

    Yields the function that sets how far it is ahead of the JVM's, in ms.
    """

    def set_ahead(ms: int) -> None:
        jvm.java.lang.System.setProperty(AHEAD, str(ms))

    set_ahead(0)
    _is_simulated.set()
    try:
        yield set_ahead
    finally:
        _is_simulated.clear()


def slept(pause_ms: Column, then: Column | None = None) -> Column:
    """boolean: sleep for `pause_ms`, then true or the value of `then`; at once for 0 or less.

    Use it as a filter: Spark removes a column that nothing reads, and the sleep with it.
    """
    over = catalyst.slept(pause_ms)
    return F.when(pause_ms <= 0, True).otherwise(over if then is None else over & then)


def slept_until(instant_ms: Column, now: Column) -> Column:
    """boolean: sleep until the clock shows `instant_ms`, then true. Use it as a filter.

    The clock is cut to whole ms, so sleeping the difference never ends early. It is read again
    afterwards, because it may have been set back during the sleep.
    """
    return slept(instant_ms - now, then=slept(instant_ms - now_ms()))


def header(name: str, value: Column) -> Column:
    """struct<key,value>: one header with the value as UTF-8 text; null stays null."""
    return F.struct(F.lit(name).alias("key"), value.cast("string").cast("binary").alias("value"))


def header_map(headers: Column) -> Column:
    """map<string,binary>: headers by name; the last of a name counts, as in Kafka's lastHeader.

    One pass in compiled code. A lambda over the array (filter, transform) is interpreted, and costs
    ten times as much. Needs spark.sql.mapKeyDedupPolicy=LAST_WIN.
    """
    return F.map_from_entries(headers)


def header_text(headers: Column, name: str) -> Column:
    """string: a header of a `header_map`; null where it is missing."""
    return headers[name].cast("string")


def text_at(headers: Column, names: Sequence[str], name: str) -> Column:
    """string: a header by its position among `names`; null in a record of another shape."""
    at = F.get(headers, F.lit(names.index(name)))
    return F.when(at["key"] == name, at["value"].cast("string"))


def scheduled_text(headers: Column, name: str) -> Column:
    """string: one of the H.SCHEDULED of a scheduled record, by its position."""
    return text_at(headers, H.SCHEDULED, name)


def delivered_headers(headers: Column) -> Column:
    """Headers of a delivered record, from those of a scheduled one."""
    return F.slice(headers, H.UNDELIVERED_COUNT + 1, F.size(headers))


def state_text(**fields: Column) -> Column:
    """string: the value of a DUE_STATE header with these fields of STATE."""
    last = max(H.STATE.index(name) for name in fields)
    null = F.lit(None).cast("string")
    texts = [fields.get(name, null).cast("string") for name in H.STATE[: last + 1]]
    # A null at the end is left out.
    return F.concat_ws(":", *(F.coalesce(text, F.lit("")) for text in texts[:-1]), texts[-1])


def state_fields(headers: Column) -> Column:
    """array<string>: the fields of a scheduled record's DUE_STATE; null where there is none."""
    return F.split(scheduled_text(headers, H.DUE_STATE), ":")


def state_number(fields: Column, name: str) -> Column:
    """bigint: one of the `state_fields`; null where it is missing."""
    return F.get(fields, F.lit(H.STATE.index(name))).cast("bigint")


def state_word(fields: Column, name: str) -> Column:
    """string: one of the `state_fields`; null where it is missing."""
    return F.nullif(F.get(fields, F.lit(H.STATE.index(name))), F.lit(""))


def message_id(due_ms: Column, unique: Column) -> Column:
    """string: `<due_ms as 12 hex digits>-<unique>`, for 0 <= due_ms < 2**48."""
    return F.concat(F.lower(F.lpad(F.hex(due_ms), 12, "0")), F.lit("-"), unique)


def unique_of(identity: Column) -> Column:
    """string: the unique part that a full message id ends with."""
    return F.substring(identity, 14, 200)


def due_ms_of(identity: Column) -> Column:
    """bigint: the due time that a full message id begins with, epoch ms."""
    return F.conv(F.substring(identity, 1, 12), 16, 10).cast("bigint")


def source() -> Column:
    """string: the position of a row of Kafka's source, `topic/partition/offset`."""
    return F.concat_ws("/", "topic", "partition", "offset")


def record_bytes(key: Column, value: Column, headers: Column) -> Column:
    """int: the size of a record: key, value, and each header's name, value and framing."""
    # All names and all values as one text each: a lambda over the array is interpreted.
    names = F.array_join(headers["key"], "")
    values = F.array_join(headers["value"].cast("array<string>"), "")
    total = F.lit(0)
    for column in (key, value, names, values):
        total = total + F.coalesce(F.octet_length(column), F.lit(0))
    return total + F.size(headers) * H.FRAME_BYTES

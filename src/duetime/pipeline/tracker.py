"""Tracker: the first half of the query. Markers come in, messages to deliver again go out.

The markers of one partition are applied one by one, in the manner of kmq's MarkersQueue:

    marker        its message afterwards
    start         in flight until the marker's time + its time-out; a later one replaces that
    given back    no longer in flight: returned at once, to be delivered again
    end           no longer in flight: it is done
    (time goes)   past its deadline and no longer in flight: returned, to be delivered again

`InFlightMessages` is that machine: it knows neither Kafka nor Spark, and reads no clock. There is
one for each partition of a queue. Spark keeps it between batches in a state (RocksDB, and the
checkpoint), and calls it when its next message is overdue.

A streaming query that waits for the clock would run a batch each second whether anything happens or
not: half a core for idle queues. So Spark runs batches for records only, and `WakeUpTimer` writes
one to an internal topic that the query reads, when a deadline is reached.

It is not a stream-stream join of start with end markers. The time of a join is that of its markers:
it stands still on an idle topic, differs between partitions after an outage, and takes one batch
more. And a start marker could not replace another.

Each batch reads all partitions up to their ends as of just before the batch's time. So an end
marker that was written before the deadline is applied before its message is overdue, also by a
tracker that was down.
"""

import logging
import threading
from array import array
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple, Self

from confluent_kafka import KafkaException, Producer
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout

from duetime.core.clock import Clock
from duetime.core.errors import DuetimeError
from duetime.core.messages import LATEST_MS
from duetime.core.settings import Settings
from duetime.core.topics import TopicNames
from duetime.kafka.connection import librdkafka_properties
from duetime.kafka.offsets import Partition
from duetime.queue.message import END, GIVEN_BACK, LAST_OFFSET, START
from duetime.spark.columns import header_map, header_text
from duetime.spark.kafka_io import NO_LIMIT, read_stream

if TYPE_CHECKING:
    # It takes a second, and most pipelines have no queues.
    import pandas as pd

log = logging.getLogger(__name__)

#: How long after its deadline a message is returned, in ms: an end marker that was written in time
#: may be on its way, and offsets are looked up a moment before the batch's time.
GRACE_MS = 250

#: The cause of a return where the message was not given back.
TIMED_OUT = "timed-out"

#: The time-out of an end marker.
ENDED = -1

#: Signed 64-bit numbers, as `array` calls them.
INT64 = "q"

#: The format of the state, which begins with it as a negative number. States from before there were
#: versions begin with an offset, which is not negative.
VERSION = 1

#: The state of a partition: the messages in flight, and the offset behind its last marker.
STATE = "open binary, heeded bigint"

#: The rows that go out: messages to deliver again (the columns up to `cause`), and one row for each
#: partition: its messages in flight, the oldest of them, the offset of their first marker, and when
#: to look again.
FOUND = {
    "topic": "string",
    "partition": "int",
    "offset": "bigint",
    "returned_ms": "bigint",
    "due_ms": "bigint",
    "cause": "string",
    "open": "bigint",
    "oldest_ms": "bigint",
    "position": "bigint",
    "next_ms": "bigint",
}

#: Markers converted to Python at a time: those of an hour would take more memory than all else.
CONVERSION_BATCH_SIZE = 10_000

#: The lengths of a marker's key and of a start marker's value, in bytes.
KEY_BYTES, START_BYTES = 12, 9


#: The pause before waking again where no batch has answered, in ms: the query may be down.
RETRY_INTERVAL_MS = 5_000

#: The longest pause between two wake-ups, in ms: it finds a deadline that was not committed before
#: a crash.
MAX_INTERVAL_MS = 30_000


class Marker(NamedTuple):
    """A marker in its partition."""

    #: Its own offset.
    at: int
    appended_ms: int
    #: The offset of its message.
    offset: int
    #: ENDED in an end marker.
    timeout_ms: int
    #: Why the message was given back; empty in other markers.
    given_back: str = ""


class InFlight(NamedTuple):
    """A message that a worker has."""

    offset: int
    #: The offset of its last start marker.
    at: int
    since_ms: int
    deadline_ms: int


class Returned(NamedTuple):
    """A message to deliver again."""

    offset: int
    #: When it returned to the queue.
    returned_ms: int
    #: When to deliver it, before any back-off.
    due_ms: int
    cause: str


class InFlightMessages:
    """The messages in flight of one partition, by their offsets."""

    def __init__(self, messages: dict[int, InFlight] | None = None) -> None:
        self._messages = messages or {}

    def apply(self, marker: Marker) -> Returned | None:
        """Apply the next marker; return its message if the marker gives it back."""
        message = self._messages.pop(marker.offset, None)
        until_ms = marker.appended_ms + marker.timeout_ms
        is_end, is_given_back = marker.timeout_ms == ENDED, bool(marker.given_back)
        if is_end:
            return None
        if is_given_back:
            returned = Returned(marker.offset, marker.appended_ms, until_ms, marker.given_back)
            # One that is not in flight was delivered again in the meantime.
            return returned if message else None
        started = InFlight(marker.offset, marker.at, marker.appended_ms, until_ms)
        self._messages[marker.offset] = started
        return None

    def take_overdue(self, now_ms: int) -> list[Returned]:
        """Remove and return the messages that are past their deadlines."""
        late_ms = now_ms - GRACE_MS
        overdue = [each for each in self._messages.values() if each.deadline_ms <= late_ms]
        for each in overdue:
            del self._messages[each.offset]
        return [
            Returned(each.offset, each.deadline_ms, each.deadline_ms, TIMED_OUT) for each in overdue
        ]

    def __len__(self) -> int:
        return len(self._messages)

    def wait_ms(self, now_ms: int) -> int:
        """Return how long until a message is overdue. Raises ValueError where none is in flight."""
        deadline_ms = min(each.deadline_ms for each in self._messages.values())
        return max(1, deadline_ms + GRACE_MS - now_ms)

    def first_marker(self) -> int:
        """Return the offset of the first marker that counts. Raises as `wait_ms` does."""
        return min(each.at for each in self._messages.values())

    def oldest_ms(self) -> int:
        """Return since when the oldest message is in flight. Raises as `wait_ms` does."""
        return min(each.since_ms for each in self._messages.values())

    def encoded(self) -> bytes:
        """Return the state to keep between batches."""
        numbers = (number for message in self._messages.values() for number in message)
        return array(INT64, [-VERSION, *numbers]).tobytes()

    @classmethod
    def decoded(cls, state: bytes) -> Self:
        """Read a state. Raises DuetimeError where another release wrote it."""
        numbers = array(INT64)
        numbers.frombytes(state)
        if numbers and numbers[0] < 0 and (version := -numbers.pop(0)) != VERSION:
            raise DuetimeError(
                f"the tracker of queues was saved by another release (version {version}; this one "
                f"knows {VERSION}): run that release, or remove `redelivery` from the checkpoint"
            )
        width = len(InFlight._fields)
        rows = (InFlight(*numbers[at : at + width]) for at in range(0, len(numbers), width))
        return cls({each.offset: each for each in rows})


def tracked(spark: SparkSession, settings: Settings) -> DataFrame:
    """Return the stream of FOUND. Runs in executors: parsing in the JVM, tracking in Python."""
    records = read_stream(spark, settings, tracked_topics(settings), batch=NO_LIMIT)
    schema = ", ".join(f"{name} {kind}" for name, kind in FOUND.items())
    partitions = _markers(records, settings).groupBy("topic", "partition")
    return partitions.applyInPandasWithState(
        _track, schema, STATE, "update", GroupStateTimeout.ProcessingTimeTimeout
    )


def tracked_topics(settings: Settings) -> list[str]:
    """Return the topics that the query reads: of markers, and the one that wakes it."""
    markers = [queue.markers_topic(name) for name, queue in settings.queues.items()]
    return [*markers, TopicNames(settings).tracker_wakeup]


def _markers(records: DataFrame, settings: Settings) -> DataFrame:
    """Parse records: the queue's topic, the partition, and the fields of Marker.

    Records that are no markers are dropped. So are those of queues that are not configured: a batch
    planned before has them, and a queue that is configured again is read from its beginning.
    """
    queue = F.lit(None).cast("string")
    for name, each in settings.queues.items():
        queue = F.when(F.col("topic") == each.markers_topic(name), F.lit(name)).otherwise(queue)
    key, value = F.col("key"), F.col("value")
    partition, offset = _number(key, 1, 4).cast("int"), _number(key, 5, 8)
    is_start, is_end = _number(value, 1, 1) == START, _number(value, 1, 1) == END
    is_marker = (
        queue.isNotNull()
        & (F.octet_length(key) == KEY_BYTES)
        & offset.between(0, LAST_OFFSET)
        & (partition == F.col("partition"))
        & (is_end | (is_start & (F.octet_length(value) == START_BYTES)))
    )
    # Capped, so that every deadline fits into an id and nothing overflows.
    timeout_ms = F.least(F.greatest(_number(value, 2, 8), F.lit(0)), F.lit(LATEST_MS // 2))
    # Most markers have no headers at all.
    given_back = F.when(
        F.size("headers") > 0, header_text(header_map(F.col("headers")), GIVEN_BACK)
    )
    return records.where(is_marker).select(
        queue.alias("topic"),
        "partition",
        F.col("offset").alias("at"),
        F.unix_millis("timestamp").alias("appended_ms"),
        offset.alias("offset"),
        # Without nulls, with which pandas would turn integers into floats.
        F.when(is_start, timeout_ms).otherwise(F.lit(ENDED)).alias("timeout_ms"),
        F.coalesce(given_back, F.lit("")).alias("given_back"),
    )


def _number(data: Column, start: int, length: int) -> Column:
    """Some bytes as a signed big-endian integer; null where there are none."""
    digits = F.nullif(F.hex(F.substring(data, start, length)), F.lit(""))
    return F.conv(digits, 16, -10).cast("bigint")


def _track(
    key: tuple[str, int], frames: Iterator["pd.DataFrame"], state: GroupState
) -> Iterator["pd.DataFrame"]:
    """Apply the markers of one partition in one batch. Runs in an executor's Python."""
    import pandas as pd  # noqa: PLC0415 (see above)

    now_ms = state.getCurrentProcessingTimeMs()
    saved, heeded = state.get if state.exists else (b"", 0)
    in_flight, found = InFlightMessages.decoded(saved), list[Returned]()
    for marker in _in_order(frames):
        heeded = marker.at + 1
        if (returned := in_flight.apply(marker)) is not None:
            found.append(returned)
    found += in_flight.take_overdue(now_ms)
    position, oldest_ms, next_ms = heeded, None, None
    if in_flight:
        position, oldest_ms = in_flight.first_marker(), in_flight.oldest_ms()
        wait_ms = in_flight.wait_ms(now_ms)
        state.setTimeoutDuration(wait_ms)
        # Spark calls once the time is past, not when it is reached.
        next_ms = now_ms + wait_ms + 1
    state.update((in_flight.encoded(), heeded))
    rows: list[tuple[object, ...]] = [(*key, *each, None, None, None, None) for each in found]
    rows.append((*key, None, None, None, None, len(in_flight), oldest_ms, position, next_ms))
    yield pd.DataFrame(rows, columns=list(FOUND), dtype=object)


def _in_order(frames: Iterator["pd.DataFrame"]) -> Iterator[Marker]:
    """Yield the markers in the order of their partition, which the shuffle does not keep."""
    import pandas as pd  # noqa: PLC0415 (see above)

    if several := list(frames):
        ordered = pd.concat(several).sort_values("at")
        for start in range(0, len(ordered), CONVERSION_BATCH_SIZE):
            part = ordered.iloc[start : start + CONVERSION_BATCH_SIZE]
            columns = (part[name].tolist() for name in Marker._fields)
            yield from map(Marker._make, zip(*columns, strict=True))


class WakeUpTimer:
    """Holds the next deadline of each partition, and wakes the query then. Thread-safe."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self._clock = clock
        self._topic = TopicNames(settings).tracker_wakeup
        self._producer = Producer(librdkafka_properties(settings) | {"linger.ms": 0})
        self._next_ms: dict[Partition, int] = {}
        self._woken_ms = 0
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="waking", daemon=True)

    def start(self) -> None:
        """Wake the query at once, for messages that are overdue already; then when it is time."""
        self._thread.start()

    def close(self) -> None:
        """Stop waking, and wait for the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def schedule(self, next_ms: Mapping[Partition, int | None]) -> None:
        """Replace the deadlines of these partitions, in epoch ms; None where there is none."""
        with self._changed:
            for partition, deadline_ms in next_ms.items():
                if deadline_ms is None:
                    self._next_ms.pop(partition, None)
                else:
                    self._next_ms[partition] = deadline_ms
            self._changed.notify()

    def _run(self) -> None:
        while self._wait():
            try:
                # Any record wakes the query.
                self._producer.produce(self._topic)
                self._producer.poll(0)
            except (KafkaException, BufferError) as error:
                log.warning("could not wake the tracker, trying again error=%s", error)

    def _wait(self) -> bool:
        """Wait until it is time; return False where the timer is closed."""
        with self._changed:
            while not self._closing and (left_ms := self._left_ms()) > 0:
                self._changed.wait(left_ms / 1_000)
            self._woken_ms = self._clock.now_ms()
            return not self._closing

    def _left_ms(self) -> int:
        now_ms = self._clock.now_ms()
        # The clock may have been set back behind the last wake-up.
        self._woken_ms = min(self._woken_ms, now_ms)
        latest_ms = self._woken_ms + MAX_INTERVAL_MS
        next_ms = min(self._next_ms.values(), default=latest_ms)
        if next_ms <= self._woken_ms:
            # That deadline woke the query already, and no batch has replaced it.
            next_ms = self._woken_ms + RETRY_INTERVAL_MS
        return min(next_ms, latest_ms) - now_ms

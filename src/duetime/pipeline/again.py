"""What becomes of a message that is not acknowledged, as columns: pure, nothing is sent here.

A redelivery is a message as any other: due now, or after the queue's back-off through a lane or the
wheel, to the partition it came from, with its key, value and headers and one more on its count.
After the last one it goes to the queue's dead letters.

Its id is made of its place and its time, so a batch that is repeated finds what it has written.
"""

from collections.abc import Callable

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from duetime.columns import (
    HEADERS_TYPE,
    backoff_ms,
    message_id,
    now_ms,
    state_text,
    waiting_headers,
)
from duetime.config import Settings
from duetime.errors import Reason
from duetime.kmq.markers import INT_BYTES, REDELIVERY_COUNT, GivenBack
from duetime.message import (
    DUE_AT_MS,
    DUE_ID,
    DUE_PARTITION,
    DUE_STATE,
    DUE_TOPIC,
    LATEST_MS,
)
from duetime.pipeline.routing import Routes
from duetime.pipeline.rows import Failure, SinkRow, Waiting, choose, last_words
from duetime.pipeline.unacknowledged import TIMED_OUT
from duetime.tables import QueueSettings

#: Where a message is.
PLACE = ["topic", "partition", "offset"]

#: What is fetched.
RECORD = ["key", "value", "headers", "timestamp"]

#: What a redelivery has of its own: what an earlier one had goes.
OWN_HEADERS = (DUE_AT_MS, DUE_ID, REDELIVERY_COUNT)

DETAILS = {
    Reason.TIMED_OUT: "it was not acknowledged in time, as often as it was delivered",
    Reason.GIVEN_BACK: "its work failed, or took too long, as often as it was delivered",
    Reason.GONE: "its record was removed from the queue before it could be delivered again",
}

#: A count below this is one byte, as kmq writes it.
ONE_BYTE = 2**7


class Again:
    """The steps of a redelivery. The columns are built once, which takes a second: there are many.

    Its rows run in executors.
    """

    def __init__(self, settings: Settings) -> None:
        self._counted = _counted(settings)
        wait_ms = F.when(F.col("is_backed_off"), _backoff_ms(settings)).otherwise(0)
        due_ms = F.least(F.col("asked_ms") + wait_ms, F.lit(LATEST_MS))
        self._due_ms = due_ms.alias("due_ms")
        unique = F.concat(F.lit("@queue:"), F.concat_ws(".", *PLACE))
        self._id = message_id(F.col("due_ms"), unique).alias("id")
        self._not_cancel = F.lit(False).alias("is_cancel")
        self._now = now_ms().alias("now")
        self._routes = Routes(settings)
        message, is_sent = _message(), ~F.col("is_dead") & (F.col("due_ms") <= F.col("now"))
        sent_to = F.when(is_sent, message.topic)
        self._known = self._routes.known(sent_to, message.cluster)
        self._why = F.when(is_sent, self._routes.obstacle(message, F.col("now")))
        dead = F.col("is_dead"), _dead(message, settings)
        self._to = self._routes.place(message, F.col("now"), dead)
        self._to_at_once = choose(dead, otherwise=self._routes.sent(message))

    def judged(self, records: DataFrame) -> DataFrame:
        """Adds `count` of redeliveries, `is_dead`, `reason`; `due_ms` and `id` of the next one."""
        timed = records.select(*self._counted).select("*", self._due_ms)
        return timed.select("*", self._id, self._not_cancel)

    def delivered(self, judged: DataFrame, *, at_once: bool) -> DataFrame:
        """Rows for the sink: to the queue now or later, or to its dead letters.

        Where all are known to go `at_once`, planning it takes a quarter less.
        """
        known = judged.select("*", self._now).select("*", self._known)
        return self._routes.rows(known, self._why, self._to_at_once if at_once else self._to)


def _counted(settings: Settings) -> list[Column]:
    """What a judged record has, but for the time of its redelivery."""
    is_gone = F.col("timestamp").isNull()
    is_counted = F.col("why") != str(GivenBack.UNSEEN)
    count = _count(F.col("headers"))
    is_over = is_counted & (count >= _of_queue(settings, lambda own: own.redeliveries))
    reason = (
        F.when(is_gone, str(Reason.GONE))
        .when(F.col("why") == TIMED_OUT, str(Reason.TIMED_OUT))
        .otherwise(str(Reason.GIVEN_BACK))
    )
    return [
        *map(F.col, (*PLACE, *RECORD, "out_ms")),
        (count + is_counted.cast("int")).alias("count"),
        (is_gone | is_over).alias("is_dead"),
        reason.alias("reason"),
        # Whoever asked for a time gets it.
        F.col("due_ms").alias("asked_ms"),
        (~is_over & F.col("why").isin(TIMED_OUT, str(GivenBack.FAILED))).alias("is_backed_off"),
    ]


def _message() -> Waiting:
    """The redelivery as a message that waits."""
    due_ms = F.col("due_ms")
    values = {
        DUE_TOPIC: F.col("topic"),
        DUE_PARTITION: F.col("partition"),
        DUE_STATE: state_text(taken=F.col("out_ms")),
        DUE_AT_MS: due_ms,
        DUE_ID: F.col("id"),
    }
    return Waiting(
        topic=F.col("topic"),
        partition=F.col("partition").cast("string"),
        cluster=F.lit(None).cast("string"),
        due_ms=due_ms,
        taken_ms=F.col("out_ms"),
        expires_ms=F.lit(None).cast("bigint"),
        id=F.col("id"),
        key=F.col("key"),
        value=F.col("value"),
        headers=waiting_headers(values, F.concat(_own_headers(), F.array(_count_header()))),
    )


def _dead(message: Waiting, settings: Settings) -> SinkRow:
    """A dead letter: the message, and what became of it on top."""
    detail = F.lit("")
    for reason, text in DETAILS.items():
        detail = F.when(F.col("reason") == str(reason), text).otherwise(detail)
    failure = Failure(
        reason=F.col("reason"),
        detail=detail,
        # The first delivery was no redelivery, and the one that would come now is none.
        attempts=F.col("count"),
        first_ms=F.col("out_ms"),
        last_ms=F.col("out_ms"),
    )
    words = last_words(message, F.col("due_ms"), failure)
    topic = _named(settings, lambda name, own: own.dead_topic(name))
    headers = F.concat(_own_headers(), words)
    return SinkRow(topic, F.lit(None), F.col("key"), F.col("value"), headers)


def _own_headers() -> Column:
    """The message's own."""
    headers = F.coalesce("headers", F.array().cast(HEADERS_TYPE))
    return F.filter(headers, lambda one: ~one["key"].isin(*OWN_HEADERS))


def _count(headers: Column) -> Column:
    """How often it was delivered again so far: `markers.decoded_count` of the first such header."""
    first = F.array_position(headers["key"], REDELIVERY_COUNT).cast("int") - 1
    value = F.get(headers["value"], first)
    number = F.conv(F.hex(F.substring(value, 1, INT_BYTES)), 16, 10).cast("bigint")
    length = F.octet_length(value)
    # As a signed number, what is beyond is below 0.
    above = F.when(length == 1, ONE_BYTE).when(length >= INT_BYTES, F.lit(2**31))
    return F.when(number < above, number).otherwise(F.lit(0)).cast("bigint")


def _count_header() -> Column:
    count = F.col("count")
    value = F.when(count < ONE_BYTE, _bytes(count, 1)).otherwise(_bytes(count, 4))
    return F.struct(F.lit(REDELIVERY_COUNT).alias("key"), value.alias("value"))


def _bytes(number: Column, length: int) -> Column:
    """A number of 0 or more as so many bytes, big-endian."""
    return F.unhex(F.lpad(F.hex(number), 2 * length, "0"))


def _backoff_ms(settings: Settings) -> Column:
    """Exponential, spread by the message's place over half of it."""
    first_ms = _of_queue(settings, lambda own: own.backoff_ms)
    most_ms = _of_queue(settings, lambda own: own.backoff_max_ms)
    return backoff_ms(F.col("count"), first_ms, most_ms, spread=[F.col(name) for name in PLACE])


def _of_queue(settings: Settings, chosen: Callable[[QueueSettings], int]) -> Column:
    """A number of the row's queue."""
    return _named(settings, lambda _, own: chosen(own))


def _named(settings: Settings, chosen: Callable[[str, QueueSettings], str | int]) -> Column:
    found = F.lit(None)
    for name, own in settings.queues.items():
        found = F.when(F.col("topic") == name, F.lit(chosen(name, own))).otherwise(found)
    return found

"""The recurring query: each run of a series schedules the next one, exactly once.

A micro-batch query over `duetime.recurring`. Intake sends what is said of series there; and a
series sends itself: some seconds before a run is due its message comes back from the wheel, goes
on to its destination as a message of its own, and waits again until the run after that. What is
sent is made of the record and its time alone, so a batch that is repeated makes the same, and
leaves out what it has written. So a series goes on through crashes, and never twice.

The driver says when runs are due; what is in them stays in executors.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import astuple

from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from duetime.columns import (
    header,
    message_id,
    now_ms,
    source,
    state_text,
    text_at,
    waiting_headers,
)
from duetime.config import Settings
from duetime.hearing import REFUSED, Outcome, Said, heard
from duetime.message import (
    DEFINE,
    DUE_AT_MS,
    DUE_CLUSTER,
    DUE_ID,
    DUE_OP,
    DUE_PARTITION,
    DUE_SERIES,
    DUE_STATE,
    DUE_TOPIC,
    NEXT,
    RECURRENCE,
    SERIES_CLUSTER,
    SERIES_HEADERS,
    SERIES_MARK,
    SERIES_NEXT,
    SERIES_PARTITION,
    SERIES_SINCE,
    SERIES_TOPIC,
)
from duetime.pipeline.destinations import Destinations, look_for
from duetime.pipeline.faults import Point, reach
from duetime.pipeline.kafka import write_batch
from duetime.pipeline.routing import Routes
from duetime.pipeline.rows import SinkRow, Waiting
from duetime.pipeline.written import Repeats, Written, scope
from duetime.series import Book, Page, Series, read_book
from duetime.topics import TopicNames
from duetime.wording import escaped

log = logging.getLogger(__name__)

#: What the query, and the directory of its offsets, are called.
RECURRING = "recurring"

#: What a record of the topic begins its headers with, always in this order.
HEADERS = (DUE_AT_MS, DUE_ID, *SERIES_HEADERS)

#: Where the unique part of an id begins.
UNIQUE_AT = 14

OUTCOME = "offset bigint, kind string, run_ms bigint, due_ms bigint, reason string, detail string"

#: The most records of a batch: the driver hears each.
BATCH = 10_000


class Recurring:
    """What to do with each batch. Runs on the driver; its rows in executors."""

    def __init__(
        self,
        spark: SparkSession,
        settings: Settings,
        destinations: Mapping[str | None, Destinations],
        written: Written,
        begun_ms: int,
    ) -> None:
        """`begun_ms` is when the query began, epoch ms."""
        self._spark = spark
        self._settings = settings
        self._destinations = destinations
        self._repeats = Repeats(written, begun_ms)
        self._names = TopicNames(settings)
        self._routes = Routes(settings)
        self._book: Book | None = None

    def __call__(self, batch: DataFrame, number: int) -> None:
        """Hear what was said, and send what follows from it. Safe to repeat."""
        self._book = self._book or read_book(self._settings)
        said = [_said(row) for row in batch.select(*_asked()).collect()]
        outcomes, pages = heard(self._book, said)
        _tell_unknown(said, outcomes)
        if pages:
            self._write(pages)
            self._book.note(pages)
            reach(Point.RECURRING_NOTED)
        if outcomes:
            self._send(batch, outcomes, number)
        reach(Point.RECURRING_SENT)

    def _write(self, pages: Mapping[str, Page | None]) -> None:
        """Before anything is sent: what is not in the book is not sent on its way again."""
        rows = [(name.encode(), page and page.encoded()) for name, page in pages.items()]
        written = self._spark.createDataFrame(rows, "key binary, value binary")
        none = F.lit(None)
        row = SinkRow(F.lit(self._names.series), none, F.col("key"), F.col("value"), none)
        write_batch(self._routes.rows(written, none, row), self._settings, RECURRING)

    def _send(self, batch: DataFrame, outcomes: Sequence[Outcome], number: int) -> None:
        found = self._spark.createDataFrame([astuple(each) for each in outcomes], OUTCOME)
        rows = self._identified(batch.join(F.broadcast(found), "offset"))
        sent = scope(rows, F.col("to"), F.col("cluster"))
        if sent is None:
            return
        look_for(sent.destinations, self._destinations)
        if repeat := self._repeats.of(number, lambda: sent):
            rows = repeat.sieve.without_taken_in(rows, sent)
        # One task has them all: what is made up for is in order.
        ordered = rows.coalesce(1).sortWithinPartitions("run_ms")
        write_batch(self._routed(ordered), self._settings, RECURRING)

    def _identified(self, found: DataFrame) -> DataFrame:
        """Adds id, to (the topic) and cluster of each message that is to be sent."""
        is_next, refused = F.col("kind") == NEXT, F.col("kind") == REFUSED
        unique = F.when(is_next, F.concat(F.lit(SERIES_MARK), _since())).otherwise(_name())
        to = F.when(is_next, self._names.recurring).otherwise(_text(SERIES_TOPIC))
        return found.select(
            "*",
            F.when(~refused, message_id(F.col("due_ms"), unique)).otherwise(source()).alias("id"),
            F.lit(False).alias("is_cancel"),
            F.when(~refused, to).alias("to"),
            F.when(~is_next, _text(SERIES_CLUSTER)).alias("cluster"),
        )

    def _routed(self, rows: DataFrame) -> DataFrame:
        routes, message, now = self._routes, _message(), F.col("now")
        refused = F.col("kind") == REFUSED
        is_sent = ~refused & (message.due_ms <= now)
        # As the sender had it, for whoever looks at what was rejected.
        shown = F.when(refused, _as_sent()).otherwise(F.col("headers"))
        known = rows.withColumns({"headers": shown, "now": now_ms()})
        sent_to = F.when(is_sent, message.topic)
        known = known.select("*", routes.known(sent_to, message.cluster))
        rejected = routes.rejected(F.col("reason"), F.col("detail"))
        to = routes.place(message, now, (refused, rejected))
        return routes.rows(known, F.when(is_sent, routes.obstacle(message, now)), to)


def _asked() -> list[Column]:
    """What the driver hears of each record."""
    return [
        F.col("offset"),
        F.unix_millis("timestamp").alias("at_ms"),
        _text(DUE_OP).alias("operation"),
        _name().alias("name"),
        _since().alias("since"),
        _text(DUE_AT_MS).cast("bigint").alias("due_ms"),
        _text(SERIES_NEXT).cast("bigint").alias("next_ms"),
        _text(SERIES_TOPIC).alias("topic"),
        _text(SERIES_PARTITION).alias("partition"),
        _text(SERIES_CLUSTER).alias("cluster"),
        *(_text(name).alias(name.removeprefix("due-")) for name in RECURRENCE),
    ]


def _said(row: Row) -> Said:
    series = Series(
        name=row.name or "",
        since=row.since or "",
        topic=row.topic or "",
        partition=row.partition,
        cluster=row.cluster,
        cron=row.cron or "",
        zone=row.zone,
        until=row.until,
        misfire=row.misfire,
    )
    return Said(
        offset=row.offset,
        at_ms=row.at_ms,
        operation=row.operation if row.name and row.due_ms is not None else None,
        series=series,
        # Before it was sent at once, what asks for a series was due at its start.
        start_ms=row.due_ms or 0 if row.next_ms is None else row.next_ms,
        next_ms=row.next_ms,
    )


def _tell_unknown(said: Sequence[Said], outcomes: Sequence[Outcome]) -> None:
    unknown = {each.offset: each for each in outcomes if each.kind == NEXT and each.reason}
    names = [each.series.name for each in said if each.offset in unknown]
    if names:
        reason = next(iter(unknown.values())).reason
        log.warning(
            "series wait: not understood here count=%d first=%s reason=%s",
            len(names),
            # Whoever may write to the topic chooses it.
            escaped(names[0]),
            reason,
        )


def _text(name: str) -> Column:
    """One of HEADERS as text; null in a record of another shape."""
    return text_at(F.col("headers"), HEADERS, name)


def _is_defined() -> Column:
    return _text(DUE_OP) == DEFINE


def _name() -> Column:
    # Who gave none has that of where it came in.
    own = F.substring(_text(DUE_ID), UNIQUE_AT, 200)
    return F.coalesce(_text(DUE_SERIES), F.when(_is_defined(), own))


def _since() -> Column:
    return F.when(_is_defined(), _text(DUE_ID)).otherwise(_text(SERIES_SINCE))


def _message() -> Waiting:
    """A run, or the series itself as it waits for its next one."""
    is_next, due_ms, taken_ms = F.col("kind") == NEXT, F.col("due_ms"), F.unix_millis("timestamp")
    partition = F.when(~is_next, _text(SERIES_PARTITION))
    values = {
        DUE_TOPIC: F.col("to"),
        DUE_PARTITION: partition,
        DUE_STATE: state_text(taken=taken_ms, cluster=F.col("cluster")),
        DUE_AT_MS: due_ms,
        DUE_ID: F.col("id"),
    }
    own = F.when(is_next, _waiting_series()).otherwise(_own_headers())
    return Waiting(
        topic=F.col("to"),
        partition=partition,
        cluster=F.col("cluster"),
        due_ms=due_ms,
        taken_ms=taken_ms,
        expires_ms=F.lit(None).cast("bigint"),
        id=F.col("id"),
        key=F.col("key"),
        value=F.col("value"),
        headers=waiting_headers(values, own),
    )


def _waiting_series() -> Column:
    """The series' headers for its next run, and the sender's."""
    said = F.array(
        header(DUE_OP, F.lit(NEXT)),
        header(DUE_SERIES, _name()),
        header(SERIES_SINCE, _since()),
        header(SERIES_NEXT, F.col("run_ms")),
    )
    return F.concat(said, _from(SERIES_TOPIC))


def _own_headers() -> Column:
    """The sender's."""
    return F.slice("headers", len(HEADERS) + 1, F.size("headers"))


def _from(name: str) -> Column:
    return F.slice("headers", HEADERS.index(name) + 1, F.size("headers"))


def _as_sent() -> Column:
    """The headers of a definition as its sender had them."""
    places = {
        DUE_TOPIC: SERIES_TOPIC,
        DUE_PARTITION: SERIES_PARTITION,
        DUE_CLUSTER: SERIES_CLUSTER,
        DUE_AT_MS: SERIES_NEXT,
        DUE_ID: DUE_SERIES,
    }
    said = {name: _text(place) for name, place in places.items()}
    said |= {name: _text(name) for name in RECURRENCE}
    address = F.array(*(header(name, text) for name, text in said.items()))
    restored = F.concat(F.filter(address, lambda one: one["value"].isNotNull()), _own_headers())
    return F.when(_is_defined(), restored).otherwise(F.col("headers"))

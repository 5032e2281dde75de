"""The schedule query: each run of a schedule sends the message and schedules the next run, once.

A micro-batch query over `duetime.schedule-commands`. Intake routes commands there, and a schedule's
record routes itself there: some seconds before a run is due it returns from the wheel, sends the
run to its destination as a separate message, and waits again until the run after that. Every record
sent is derived from the record read and its time alone. So a batch that is repeated makes the same
ones, and leaves out those it has written: a schedule survives crashes, and no run is sent twice.

The driver computes the runs; keys, values and headers stay in executors.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import astuple

from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from duetime.client.schedules import read_schedule_table
from duetime.core import headers as H
from duetime.core.errors import escaped
from duetime.core.messages import SCHEDULE_MARK
from duetime.core.schedules import (
    REFUSED,
    Schedule,
    ScheduleAction,
    ScheduleCommand,
    ScheduleEntry,
    ScheduleTable,
    apply_commands,
)
from duetime.core.settings import Settings
from duetime.core.topics import TopicNames
from duetime.pipeline import SCHEDULES
from duetime.pipeline.delivery.destinations import TopicMetadataCache, look_up
from duetime.pipeline.delivery.router import Router
from duetime.pipeline.delivery.rows import MessageColumns, SinkRow, pending_headers
from duetime.pipeline.faults import Point, reach
from duetime.pipeline.recovery.deduplicator import ReplayDetector, scan_range
from duetime.pipeline.recovery.read_back import DeliveryLog
from duetime.spark.columns import header, message_id, now_ms, source, state_text, text_at, unique_of
from duetime.spark.kafka_io import write_batch

log = logging.getLogger(__name__)

#: The limit of records in a batch: the driver reads each.
BATCH_SIZE = 10_000

#: The first headers of each record of the topic, in this order.
HEADERS = (H.DUE_AT_MS, H.DUE_ID, *H.SCHEDULE)

OUTCOME = "offset bigint, kind string, run_ms bigint, due_ms bigint, reason string, detail string"


class ScheduleHandler:
    """Handles the query's batches. Runs on the driver; its rows in executors."""

    def __init__(
        self,
        spark: SparkSession,
        settings: Settings,
        destinations: Mapping[str | None, TopicMetadataCache],
        delivery_log: DeliveryLog,
        started_ms: int,
    ) -> None:
        """`started_ms` is when the query began, epoch ms."""
        self._spark, self._settings = spark, settings
        self._destinations = destinations
        self._detector = ReplayDetector(delivery_log, started_ms)
        self._names, self._routes = TopicNames(settings), Router(settings)
        self._table: ScheduleTable | None = None

    def __call__(self, batch: DataFrame, number: int) -> None:
        """Apply commands, write the schedules that changed, send the runs. Safe to repeat."""
        self._table = self._table or read_schedule_table(self._settings)
        commands = [_command(row) for row in batch.select(*_command_columns()).collect()]
        outcomes, entries = apply_commands(self._table, commands)
        _log_unevaluated(commands, outcomes)
        if entries:
            self._write(entries)
            self._table.note(entries)
            reach(Point.SCHEDULES_NOTED)
        if outcomes:
            self._send(batch, outcomes, number)
        reach(Point.SCHEDULES_SENT)

    def _write(self, entries: Mapping[str, ScheduleEntry | None]) -> None:
        """Write the table before anything is sent: a schedule that is not in it sends no runs."""
        rows = [(name.encode(), entry and entry.encoded()) for name, entry in entries.items()]
        written = self._spark.createDataFrame(rows, "key binary, value binary")
        none = F.lit(None)
        row = SinkRow(F.lit(self._names.schedules), none, F.col("key"), F.col("value"), none)
        write_batch(self._routes.rows(written, row), self._settings, SCHEDULES)

    def _send(self, batch: DataFrame, outcomes: Sequence[ScheduleAction], number: int) -> None:
        found = self._spark.createDataFrame([astuple(each) for each in outcomes], OUTCOME)
        rows = self._identified(batch.join(F.broadcast(found), "offset"))
        sent = scan_range(rows, F.col("to"), F.col("cluster"))
        if sent is None:
            return
        look_up(sent.destinations, self._destinations)
        if replay := self._detector.check(number, lambda: sent):
            rows = replay.deduplicator.drop_ingested(rows, sent)
        # In one task, so that missed runs are sent in order.
        ordered = rows.coalesce(1).sortWithinPartitions("run_ms")
        write_batch(self._routed(ordered), self._settings, SCHEDULES)

    def _identified(self, found: DataFrame) -> DataFrame:
        """Add id, to (the topic), cluster and is_cancel to each message to send."""
        is_next, is_refused = F.col("kind") == H.NEXT, F.col("kind") == REFUSED
        unique = F.when(is_next, F.concat(F.lit(SCHEDULE_MARK), _since())).otherwise(_name())
        to = F.when(is_next, self._names.schedule_commands).otherwise(_text(H.SCHEDULE_TOPIC))
        identity = F.when(~is_refused, message_id(F.col("due_ms"), unique)).otherwise(source())
        return found.select(
            "*",
            identity.alias("id"),
            F.lit(False).alias("is_cancel"),
            F.when(~is_refused, to).alias("to"),
            F.when(~is_next, _text(H.SCHEDULE_CLUSTER)).alias("cluster"),
        )

    def _routed(self, rows: DataFrame) -> DataFrame:
        routes, message, now = self._routes, _message(), F.col("now")
        is_refused = F.col("kind") == REFUSED
        is_sent = ~is_refused & (message.due_ms <= now)
        # A rejected definition is shown as its sender had it.
        headers = F.when(is_refused, _as_sent()).otherwise(F.col("headers"))
        stamped = rows.withColumns({"headers": headers, "now": now_ms()})
        row = routes.route(
            message,
            now,
            rejected=(is_refused, routes.rejected(F.col("reason"), F.col("detail"))),
            due_now=routes.due_now(message, F.col("metadata"), F.col("error")),
        )
        return routes.rows(routes.examined(stamped, message, is_sent), row)


def _command_columns() -> list[Column]:
    """Return the columns of a record that the driver reads."""
    return [
        F.col("offset"),
        F.unix_millis("timestamp").alias("at_ms"),
        _text(H.DUE_OP).alias("operation"),
        _name().alias("name"),
        _since().alias("since"),
        _text(H.DUE_AT_MS).cast("bigint").alias("due_ms"),
        _text(H.SCHEDULE_NEXT).cast("bigint").alias("next_ms"),
        _text(H.SCHEDULE_TOPIC).alias("topic"),
        _text(H.SCHEDULE_PARTITION).alias("partition"),
        _text(H.SCHEDULE_CLUSTER).alias("cluster"),
        *(_text(name).alias(name.removeprefix("due-")) for name in H.RECURRENCE),
    ]


def _command(row: Row) -> ScheduleCommand:
    schedule = Schedule(
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
    return ScheduleCommand(
        offset=row.offset,
        at_ms=row.at_ms,
        operation=row.operation if row.name and row.due_ms is not None else None,
        schedule=schedule,
        # A definition of an early release is due at its start, and has no SCHEDULE_NEXT.
        start_ms=row.due_ms or 0 if row.next_ms is None else row.next_ms,
        next_ms=row.next_ms,
    )


def _log_unevaluated(
    commands: Sequence[ScheduleCommand], outcomes: Sequence[ScheduleAction]
) -> None:
    failed = {each.offset: each.reason for each in outcomes if each.kind == H.NEXT and each.reason}
    names = [each.schedule.name for each in commands if each.offset in failed]
    if names:
        log.warning(
            "cannot evaluate schedules on this host, trying again count=%d first=%s reason=%s",
            len(names),
            # Every sender can choose it.
            escaped(names[0]),
            next(iter(failed.values())),
        )


def _message() -> MessageColumns:
    """Return a run, or the schedule itself as it waits for its next run."""
    is_next, due_ms, taken_ms = F.col("kind") == H.NEXT, F.col("due_ms"), F.unix_millis("timestamp")
    message = MessageColumns(
        topic=F.col("to"),
        partition=F.when(~is_next, _text(H.SCHEDULE_PARTITION)),
        cluster=F.col("cluster"),
        due_ms=due_ms,
        taken_ms=taken_ms,
        expires_ms=F.lit(None).cast("bigint"),
        id=F.col("id"),
        key=F.col("key"),
        value=F.col("value"),
        headers=F.when(is_next, _schedule_headers()).otherwise(_headers_from(len(HEADERS))),
    )
    return pending_headers(message, state_text(taken=taken_ms, cluster=message.cluster))


def _schedule_headers() -> Column:
    """Return the headers of a schedule that waits for its next run, and the sender's."""
    changed = F.array(
        header(H.DUE_OP, F.lit(H.NEXT)),
        header(H.DUE_SCHEDULE, _name()),
        header(H.SCHEDULE_SINCE, _since()),
        header(H.SCHEDULE_NEXT, F.col("run_ms")),
    )
    return F.concat(changed, _headers_from(HEADERS.index(H.SCHEDULE_TOPIC)))


def _as_sent() -> Column:
    """Return the headers of a definition as its sender had them."""
    places = {
        H.DUE_TOPIC: H.SCHEDULE_TOPIC,
        H.DUE_PARTITION: H.SCHEDULE_PARTITION,
        H.DUE_CLUSTER: H.SCHEDULE_CLUSTER,
        H.DUE_AT_MS: H.SCHEDULE_NEXT,
        H.DUE_ID: H.DUE_SCHEDULE,
    } | {name: name for name in H.RECURRENCE}
    address = F.array(*(header(name, _text(place)) for name, place in places.items()))
    present = F.filter(address, lambda each: each["value"].isNotNull())
    sent = F.concat(present, _headers_from(len(HEADERS)))
    return F.when(_is_defined(), sent).otherwise(F.col("headers"))


def _headers_from(at: int) -> Column:
    """Return the headers from a position on; behind HEADERS they are the sender's."""
    return F.slice("headers", at + 1, F.size("headers"))


def _text(name: str) -> Column:
    """Return one of HEADERS as text; null in a record of another shape."""
    return text_at(F.col("headers"), HEADERS, name)


def _is_defined() -> Column:
    return _text(H.DUE_OP) == H.DEFINE


def _name() -> Column:
    # A definition without a name is named after the id under which it was taken in.
    return F.coalesce(_text(H.DUE_SCHEDULE), F.when(_is_defined(), unique_of(_text(H.DUE_ID))))


def _since() -> Column:
    return F.when(_is_defined(), _text(H.DUE_ID)).otherwise(_text(H.SCHEDULE_SINCE))

"""The next topic of a message, as columns. Nothing is sent here, and executors evaluate the rows.

    rejected    -> the rejected topic, as it came
    due now     -> its destination; an outbox, for another cluster; the isolated topic, to be sent
                   by itself; the retry topic, if a delivery error is known already
    due soon    -> a delay lane
    otherwise   -> a slot of the wheel, or the inbox of another store

A caller selects the columns that a row is routed by before it calls, because Spark evaluates an
expression in each place where it is used:

    metadata    array<string>, `topic_metadata` of the destination
    error       struct<reason,detail>, `delivery_error`; null where the message can be sent
    level       int, the `level` of the wheel
"""

from dataclasses import replace

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from duetime.core import headers as H
from duetime.core.errors import Reason
from duetime.core.settings import Settings
from duetime.core.topics import OVERHEAD_BYTES, TopicNames
from duetime.pipeline.delivery.delivery_errors import (
    delivery_errors,
    healthy_partition,
    is_isolated,
    topic_metadata,
)
from duetime.pipeline.delivery.rows import (
    FOREIGN,
    ErrorCase,
    MessageColumns,
    Route,
    SinkColumns,
    SinkRow,
    choose,
    error_struct,
    first_error,
    is_foreign,
    message_columns,
    sender_headers,
    sink_rows,
    with_error,
)
from duetime.pipeline.leadership.lease import lease_is_held
from duetime.spark.columns import (
    HEADERS_TYPE,
    delivered_headers,
    header,
    header_map,
    header_text,
    higher_slots,
    is_in_reach,
    lane,
    now_ms,
    record_bytes,
    slot_partition,
    source,
    wheel_level,
)


class Router:
    """Chooses the sink row of a message under these settings."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._names = TopicNames(settings)
        self._wheel = settings.wheel
        self._lease_is_held: Column | None = None

    def rows(self, records: DataFrame, to: Route | SinkColumns) -> DataFrame:
        """Return rows for the sink, while this process leads.

        The filter comes last: rows that an earlier step held up are held up here.
        """
        if self._lease_is_held is None:
            self._lease_is_held = lease_is_held(self._settings)
        return sink_rows(records.where(self._lease_is_held), to)

    def route(
        self,
        message: MessageColumns,
        now: Column,
        *,
        rejected: tuple[Column, Route],
        due_now: Route,
        level: Column | None = None,
    ) -> Route:
        """Return the row of a message by its due time, unless it is `rejected` (condition, row).

        `level` is as in `store`.
        """
        remaining_ms = message.due_ms - now
        # A cancel goes where its message is.
        is_soon = ~message.is_cancel & (remaining_ms < self._settings.short_delay_threshold_ms)
        return choose(
            rejected,
            (remaining_ms <= 0, due_now),
            (is_soon, self.lane(message, now)),
            otherwise=self.store(message, now, level),
        )

    def rejected(self, reason: Column, detail: Column) -> Route:
        """To the rejected topic: the row of Kafka's source as it is, and the error in its headers.

        A record too large for the topic is not copied. Its position in the intake topic is named,
        and its callback is kept.
        """
        headers = F.coalesce(F.col("headers"), F.array().cast(HEADERS_TYPE))
        url = header_text(header_map(headers), H.DUE_CALLBACK)
        callback = F.array(header(H.DUE_CALLBACK, url)).cast(HEADERS_TYPE)
        is_short = F.octet_length(url) < H.CALLBACK_BYTES
        none = F.array().cast(HEADERS_TYPE)
        return self._refused(reason, detail, F.when(is_short, callback).otherwise(none))

    def _refused(self, reason: Column, detail: Column, kept: Column) -> Route:
        """To the rejected topic; of a record that is too large, the headers `kept`."""
        error = F.array(
            header(H.DUE_ERROR, reason),
            header(H.DUE_ERROR_DETAIL, detail),
            header(H.DUE_ERROR_SOURCE, source()),
        ).cast(HEADERS_TYPE)
        headers = F.coalesce(F.col("headers"), F.array().cast(HEADERS_TYPE))
        size = record_bytes(F.col("key"), F.col("value"), headers)
        topic = F.lit(self._names.rejected)
        whole = SinkRow(topic, None, F.col("key"), F.col("value"), F.concat(headers, error))
        named = SinkRow(topic, None, None, None, F.concat(kept, error))
        fits = size <= self._settings.max_message_bytes + OVERHEAD_BYTES
        return choose((fits, whole), otherwise=named)

    def foreign(self) -> Route:
        """To the rejected topic: a record of an internal topic that duetime did not write."""
        none = F.array().cast(HEADERS_TYPE)
        return self._refused(F.lit(str(Reason.MALFORMED)), F.lit(FOREIGN), none)

    def due_now(self, message: MessageColumns, metadata: Column, error: Column) -> Route:
        """To the destination, or with an error to the retry topic."""
        cases = [(error.isNotNull(), self.failed(message, error))]
        if message.attempts is not None:
            # A message that was refused once may be again, and must not fail the sink for others.
            is_retry = (message.attempts > 0) & message.cluster.isNull()
            cases.append((is_retry, self.isolated(message)))
        return choose(*cases, otherwise=self.delivered(message, metadata))

    def delivered(self, message: MessageColumns, metadata: Column) -> Route:
        """To the destination, to another cluster's outbox, or to where it is sent by itself."""
        outbox = F.concat(F.lit(self._names.outbox("")), message.cluster)
        cases = [
            (is_isolated(metadata), self.isolated(message)),
            (message.cluster.isNotNull(), _internal(outbox, message)),
        ]
        if self._settings.transactional_delivery:
            # A schedule wakes up by an internal topic.
            is_external = message.topic != self._names.schedule_commands
            cases.append((is_external, _internal(F.lit(self._names.sending), message)))
        return choose(*cases, otherwise=self.destination(message, metadata))

    def destination(self, message: MessageColumns, metadata: Column) -> SinkRow:
        """To the topic that the sender named, on the cluster of the sink."""
        partition = F.coalesce(message.partition, healthy_partition(metadata, message.key))
        partition = partition.cast("int")
        headers = delivered_headers(message.headers)
        return SinkRow(message.topic, partition, message.key, message.value, headers)

    def isolated(self, message: MessageColumns) -> SinkRow:
        """To its cluster's topic of records that are sent with reports: one may be refused."""
        elsewhere = F.concat(F.lit(self._names.isolated("")), message.cluster)
        return _internal(F.coalesce(elsewhere, F.lit(self._names.isolated())), message)

    def failed(self, message: MessageColumns, error: Column) -> SinkRow:
        """To the retry topic: as it was scheduled, with the error in its last headers."""
        return _internal(F.lit(self._names.retry), with_error(message, error))

    def dead_letter(self, message: MessageColumns, headers: Column) -> SinkRow:
        """To the dead letters: the sender's headers, and `H.dead_letter`."""
        dead = replace(message, headers=F.concat(sender_headers(message), headers))
        return _internal(F.lit(self._names.dead_letter), dead)

    def lane(self, message: MessageColumns, now: Column, present: Column | None = None) -> SinkRow:
        """To the longest lane that ends in time; for less than the shortest, to the shortest.

        Not to a longer one than the `present` lane, which would fit if the clock was set back:
        recovery takes a message's record in the shortest lane for its latest (see `hop_rank`).
        """
        number = F.coalesce(lane(self._settings.delay_lanes, message.due_ms - now), F.lit(0))
        number = number if present is None else F.least(number, present)
        return _internal(F.lit(self._names.lanes), message, number)

    def store(self, message: MessageColumns, now: Column, level: Column | None = None) -> Route:
        """To a slot of the wheel, or to the inbox of another store.

        The slot is on this level, by default on the lowest that reaches the message.

        The wheel also serves another store: it takes the messages that are too large for it.
        """
        if self._settings.store_kind == "kafka":
            return self._slot(message, now, level)
        saved = _internal(F.lit(self._names.store_inbox), message)
        if self._settings.largest_bytes == self._settings.max_message_bytes:
            return saved
        size = record_bytes(message.key, message.value, message.headers)
        fits = size <= self._settings.largest_bytes + OVERHEAD_BYTES
        return choose((fits, saved), otherwise=self._slot(message, now, level))

    def _slot(self, message: MessageColumns, now: Column, level: Column | None) -> Route:
        wheel, due_ms = self._wheel, message.due_ms

        def is_on(each: int) -> Column:
            return is_in_reach(wheel, each, due_ms, now) if level is None else level == each

        def slot(each: int) -> SinkRow:
            topic = F.lit(self._names.wheel(each))
            return _internal(topic, message, slot_partition(wheel, each, due_ms, message.id))

        # The last level, if the clock was set back.
        *lower, last = self._levels
        return choose(*((is_on(each), slot(each)) for each in lower), otherwise=slot(last))

    @property
    def _levels(self) -> range:
        return range(self._wheel.levels)

    def level(self, due_ms: Column, now: Column) -> Column:
        """int: the wheel's level for a due time; the last one, if the clock was set back."""
        return F.coalesce(wheel_level(self._wheel, due_ms, now), F.lit(self._levels[-1]))

    def levels(self, is_cancel: Column, due_ms: Column, now: Column, level: Column) -> Column:
        """array<int>: a level for each row that a message becomes.

        A cancel goes to each slot where its message may be. The cancel of a message that is due
        goes nowhere: it has neither a slot nor a destination.
        """
        one = every = F.array(level)
        if self._settings.store_kind == "kafka":
            every = F.concat(one, higher_slots(self._wheel, due_ms, now))
        nowhere = F.array().cast("array<int>")
        return F.when(~is_cancel, one).when(due_ms > now, every).otherwise(nowhere)

    def delivery_error(self, message: MessageColumns, metadata: Column, now: Column) -> Column:
        """struct<reason,detail>: why a message cannot be sent now; null where it can."""
        unknown = ErrorCase(
            ~message.cluster.isin(*self._settings.clusters),
            Reason.UNKNOWN_CLUSTER,
            "no cluster of this name is configured: add it to clusters",
        )
        others = delivery_errors(
            metadata,
            partition=message.partition.cast("int"),
            key=message.key,
            size=record_bytes(message.key, message.value, message.headers),
            is_expired=message.expires_ms < now,
        )
        return first_error([unknown, *others])

    def examined(self, records: DataFrame, message: MessageColumns, is_sent: Column) -> DataFrame:
        """Add `metadata` and `error` at the column `now`; null for messages that are not sent."""
        metadata = topic_metadata(self._settings, F.when(is_sent, message.topic), message.cluster)
        error = F.when(is_sent, self.delivery_error(message, F.col("metadata"), F.col("now")))
        known = records.select("*", metadata.alias("metadata"))
        return known.select("*", error.alias("error"))

    def checked(self, records: DataFrame, message: MessageColumns) -> DataFrame:
        """Add `now`, `metadata` and `error`: null for a message of `parsed` that can be sent."""
        timed = records.select("*", now_ms().alias("now"))
        foreign = error_struct(F.lit(str(Reason.MALFORMED)), F.lit(FOREIGN))
        error = F.when(is_foreign(), foreign).otherwise(F.col("error"))
        return self.examined(timed, message, ~is_foreign()).withColumn("error", error)

    def returned(self, checked: DataFrame) -> DataFrame:
        """Return rows for records that are not sent from where they are.

        With an `error` they go to the retry topic, or are rejected if duetime did not write them;
        the others are sent with reports.
        """
        message, error = message_columns(), F.col("error")
        was_foreign = error["reason"] == str(Reason.MALFORMED)
        to = choose(
            (was_foreign, self.rejected(error["reason"], error["detail"])),
            (error.isNotNull(), self.failed(message, error)),
            otherwise=self.isolated(message),
        )
        return self.rows(checked, to)


def _internal(topic: Column, message: MessageColumns, partition: Column | None = None) -> SinkRow:
    """Return the row for one of duetime's topics."""
    return SinkRow(topic, partition, message.key, message.value, message.headers)

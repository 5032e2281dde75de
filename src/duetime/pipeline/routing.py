"""Where a message goes next, as columns, and why it may not go there (`rows`: what it is).

Pure columns: nothing is sent here.
"""

from collections.abc import Callable
from dataclasses import replace

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from duetime.columns import (
    HEADERS_TYPE,
    by_level,
    delivered_headers,
    header,
    header_map,
    header_text,
    lane,
    open_above,
    record_bytes,
    slot_partition,
    source,
)
from duetime.config import Settings
from duetime.envelopes import Refusal, first_refusal
from duetime.errors import Reason
from duetime.message import (
    CALLBACK_BYTES,
    DUE_CALLBACK,
    DUE_ERROR,
    DUE_ERROR_DETAIL,
    DUE_ERROR_SOURCE,
    WAITING_HEADERS,
)
from duetime.pipeline.election import lease_is_held
from duetime.pipeline.obstacles import (
    is_isolated,
    known_of,
    looked_for,
    obstacles,
    placed_elsewhere,
)
from duetime.pipeline.rows import SinkRow, Waiting, choose
from duetime.topics import OVERHEAD_BYTES, TopicNames

#: The column with what is known of the destination. See `Routes.known`.
KNOWN = "destination"


class Routes:
    """The places a message can be sent to under these settings."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._names = TopicNames(settings)
        self._wheel = settings.wheel
        self._ladder = settings.ladder
        self._room = settings.max_message_bytes + OVERHEAD_BYTES

    def rows(self, records: DataFrame, why: Column, to: SinkRow) -> DataFrame:
        """Rows for the sink: each to its place, which may depend on the column `why`.

        Only while we lead: whatever was held up before this is held up here.
        """
        known = records.select("*", why.alias("why"))
        return known.where(lease_is_held(self._settings)).select(*to.columns())

    def place(self, message: Waiting, now: Column, *before: tuple[Column, SinkRow]) -> SinkRow:
        """Where it goes or waits, by when it is due; where none of the cases before that holds."""
        remaining = message.due_ms - now
        # A cancel waits where its message does.
        soon = ~message.is_cancel & (remaining < self._settings.horizon_ms)
        return choose(
            *before,
            (remaining <= 0, self.sent(message)),
            (soon, self.lane(message, now)),
            otherwise=self.store(message, now),
        )

    def delivered(self, message: Waiting) -> SinkRow:
        """To its destination, or on its way to another cluster, or to be sent by itself."""
        outbox = F.concat(F.lit(self._names.outbox("")), message.cluster)
        cases = [
            (is_isolated(F.col(KNOWN)), self.isolated(message)),
            (message.cluster.isNotNull(), _own(outbox, F.lit(None), message)),
        ]
        if self._settings.transactional_delivery:
            # A series wakes by a topic of our own.
            is_ours = message.topic == self._names.recurring
            sending = _own(F.lit(self._names.sending), F.lit(None), message)
            cases.append((~is_ours, sending))
        return choose(*cases, otherwise=self.destination(message))

    def destination(self, message: Waiting) -> SinkRow:
        """To where the sender wanted it, on whatever cluster the sink is for."""
        partition = F.coalesce(message.partition, placed_elsewhere(F.col(KNOWN), message.key))
        headers = delivered_headers(message.headers)
        return SinkRow(message.topic, partition, message.key, message.value, headers)

    def isolated(self, message: Waiting) -> SinkRow:
        """To where each record is sent by itself, because one of them may be refused."""
        return _own(F.lit(self._names.isolated), F.lit(None), message)

    def lane(self, message: Waiting, now: Column) -> SinkRow:
        """To the longest lane that ends in time; below the shortest, to the shortest."""
        number = F.coalesce(lane(self._ladder, message.due_ms - now), F.lit(0))
        return _own(F.lit(self._names.lanes), number, message)

    def store(self, message: Waiting, now: Column) -> SinkRow:
        """To where messages wait: a slot of the wheel, or what is to be saved in another store.

        What another store does not take (a redelivery, what waited in the wheel before) waits in
        the wheel, which turns beside it.
        """
        if self._settings.store_kind == "kafka":
            return self.wheel(message, now)
        saved = _own(F.lit(self._names.store), F.lit(None), message)
        if self._settings.largest_bytes == self._settings.max_message_bytes:
            return saved
        size = record_bytes(message.key, message.value, message.headers)
        fits = size <= self._settings.largest_bytes + OVERHEAD_BYTES
        return choose((fits, saved), otherwise=self.wheel(message, now))

    def wheel(self, message: Waiting, now: Column) -> SinkRow:
        """To its slot. What no level reaches (the clock went back) waits in the last level."""

        def chosen(of_level: Callable[[int, Column], Column]) -> Column:
            return by_level(self._wheel, message.due_ms, now, of_level, or_last=True)

        topic = chosen(lambda level, _: F.lit(self._names.wheel(level)))
        return _own(topic, chosen(lambda _, partition: partition), message)

    def levels(self, is_cancel: Column, due_ms: Column, now: Column) -> Column:
        """A row for each place that a record is to be sent to: its `level`, null where it belongs.

        There are several for a cancel: it goes to each slot where its message may wait. A cancel
        whose message is due goes nowhere: it has neither a slot nor a destination.
        """
        own = every = F.array(F.lit(None).cast("int"))
        if self._settings.store_kind == "kafka":
            every = F.concat(own, open_above(self._wheel, due_ms, now))
        nowhere = F.array().cast("array<int>")
        levels = F.when(~is_cancel, own).when(due_ms > now, every).otherwise(nowhere)
        return F.explode(levels).alias("level")

    def slot(self, message: Waiting, level: Column) -> SinkRow:
        """To its slot on this level, also where a lower one reaches it."""

        def chosen(of_level: Callable[[int], Column]) -> Column:
            return F.coalesce(
                *(F.when(level == each, of_level(each)) for each in range(self._wheel.levels))
            )

        topic = chosen(lambda each: F.lit(self._names.wheel(each)))
        partition = chosen(lambda each: slot_partition(self._wheel, each, message.due_ms))
        return _own(topic, partition, message)

    def known(self, topic: Column, cluster: Column) -> Column:
        """The column that `obstacle` reads: to be selected once, before it. Null of no topic."""
        return known_of(self._settings, topic, cluster).alias(KNOWN)

    def looked_for(self, topic: Column, cluster: Column) -> Column:
        """A filter, always true: a topic that is not `known` is looked for from now on."""
        return looked_for(self._settings, F.col(KNOWN), topic, cluster)

    def obstacle(self, message: Waiting, now: Column) -> Column:
        """Why it cannot be sent now, struct<reason,detail>; null where it can."""
        unknown = Refusal(
            when=~message.cluster.isin(*self._settings.clusters),
            reason=Reason.UNKNOWN_CLUSTER,
            detail="no cluster of this name is configured: add it to clusters",
        )
        others = obstacles(
            F.col(KNOWN),
            partition=message.partition.cast("int"),
            key=message.key,
            size=record_bytes(message.key, message.value, message.headers),
            is_expired=message.expires_ms < now,
        )
        return first_refusal([unknown, *others])

    def sent(self, message: Waiting) -> SinkRow:
        """To its destination, or where the column `why` has an obstacle, to what has failed."""
        why = F.col("why")
        cases = [(why.isNotNull(), self.failed(message, why))]
        if message.attempts is not None:
            # What was refused once may be again, and must not fail the sink for others.
            is_retry = (message.attempts > 0) & message.cluster.isNull()
            cases.append((is_retry, self.isolated(message)))
        return choose(*cases, otherwise=self.delivered(message))

    def failed(self, message: Waiting, why: Column) -> SinkRow:
        """To the topic of what could not be delivered: as it waited, with the reason on top."""
        said = F.array(header(DUE_ERROR, why["reason"]), header(DUE_ERROR_DETAIL, why["detail"]))
        failed = replace(message, headers=F.concat(message.headers, said))
        return _own(F.lit(self._names.failed), F.lit(None), failed)

    def dead(self, message: Waiting, last_words: Column) -> SinkRow:
        """To the dead letters: the sender's own, and what became of it on top."""
        own = F.slice(message.headers, len(WAITING_HEADERS) + 1, F.size(message.headers))
        dead = replace(message, headers=F.concat(own, last_words))
        return _own(F.lit(self._names.dead), F.lit(None), dead)

    def rejected(self, reason: Column, detail: Column) -> SinkRow:
        """The raw record, untouched, with the reason in its headers.

        A record too large for the topic is not copied; its place in the intake topic is named, and
        its callback is kept.
        """
        headers = F.coalesce(F.col("headers"), F.array().cast(HEADERS_TYPE))
        fits = record_bytes(F.col("key"), F.col("value"), headers) <= self._room
        key, value = (F.when(fits, F.col(name)) for name in ("key", "value"))
        said = F.array(
            header(DUE_ERROR, reason),
            header(DUE_ERROR_DETAIL, detail),
            header(DUE_ERROR_SOURCE, source()),
        )
        url = header_text(header_map(headers), DUE_CALLBACK)
        callback = F.array(header(DUE_CALLBACK, url)).cast(HEADERS_TYPE)
        none = F.array().cast(HEADERS_TYPE)
        is_short = F.octet_length(url) < CALLBACK_BYTES
        own = F.when(fits, headers).when(is_short, callback).otherwise(none)
        kept = F.concat(own, said.cast(HEADERS_TYPE))
        return SinkRow(F.lit(self._names.rejected), F.lit(None), key, value, kept)


def _own(topic: Column, partition: Column, message: Waiting) -> SinkRow:
    """A row for one of duetime's own topics."""
    return SinkRow(topic, partition, message.key, message.value, message.headers)

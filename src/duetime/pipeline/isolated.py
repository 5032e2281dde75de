"""The isolated query: each record is sent by itself, and what becomes of each is known.

A micro-batch query over `duetime.isolated`: retries, and records for destinations that have failed
a sink (`isolation`) or may refuse what is sent to them (`obstacles`). Each is a request with a
report of its own. What is refused fails with the broker's reason, and all else is delivered.

A record that is not acknowledged in time may have been written all the same. Its destination is
read back once that is certain. For a while nothing more is sent there, because other destinations
wait meanwhile.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaError, KafkaException, Message, Producer
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F

from duetime import metrics
from duetime.columns import delivered_headers, now_ms
from duetime.config import Settings
from duetime.connection import librdkafka_properties
from duetime.errors import Reason
from duetime.pipeline.destinations import Destinations
from duetime.pipeline.election import lease_is_held
from duetime.pipeline.kafka import DELIVERY_TIMEOUT_S, REST_S, write_batch
from duetime.pipeline.routing import Routes
from duetime.pipeline.rows import choose, waiting_record
from duetime.pipeline.written import Repeats, Scope, Written, identified, scope_of_waiting
from duetime.producing import enqueue, is_fatal
from duetime.topics import OVERHEAD_BYTES

if TYPE_CHECKING:
    import pyarrow as pa

#: What the query is called.
ISOLATED = "isolated"

#: The most records of a batch: all of them pass through Python, and wait for each other.
BATCH = 2_000

#: What is told of each record that is not delivered: its offset, the broker's words, and whether it
#: may have been written all the same.
UNDELIVERED = "offset bigint, detail string, is_unknown boolean"

#: Answers of a broker after which the record may be there all the same.
UNKNOWN_OUTCOMES = (KafkaError.REQUEST_TIMED_OUT, KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND)

#: What the client says of a record that it has never sent.
NEVER_SENT = (
    KafkaError._UNKNOWN_TOPIC,  # noqa: SLF001 (their public names)
    KafkaError._UNKNOWN_PARTITION,  # noqa: SLF001
    KafkaError.MSG_SIZE_TOO_LARGE,
)


class Isolated:
    """Sends each batch record by record. Runs on the driver; its rows in executors."""

    def __init__(
        self,
        settings: Settings,
        destinations: Mapping[str | None, Destinations],
        written: Mapping[str | None, Written],
        begun_ms: int,
    ) -> None:
        """`destinations` and `written` are by cluster; `begun_ms` is when the query began."""
        self._settings = settings
        self._destinations, self._written = destinations, written
        self._repeats = {name: Repeats(each, begun_ms) for name, each in written.items()}

    def __call__(self, batch: DataFrame, number: int) -> None:
        """Send the batch. A crash between two lines repeats it, without what is written by then."""
        scope = scope_of_waiting(batch)
        if scope is None:
            return
        decided = self._decided(self._left(batch, number, scope)).localCheckpoint()
        write_batch(self._returned(decided), self._settings, ISOLATED)
        begun_ms = int(time.time() * 1_000)
        for cluster, topics in scope.destinations.items():
            if cluster in self._destinations:
                self._deliver(
                    decided, cluster, Scope(since_ms=begun_ms, destinations={cluster: topics})
                )

    def _left(self, batch: DataFrame, number: int, scope: Scope) -> DataFrame:
        """The records without those that were delivered before."""
        left = identified(batch)
        for cluster, repeats in self._repeats.items():
            # Asked of each batch, whatever it has.
            repeat = repeats.of(number, lambda: scope)
            if repeat and cluster in scope.destinations:
                left = repeat.sieve.without(left, repeat.scope)
        return left

    def _decided(self, records: DataFrame) -> DataFrame:
        """Add `why` a record cannot be sent, null where it can, and `at`, its cluster."""
        routes, message = Routes(self._settings), waiting_record()
        unreadable = F.struct(
            F.lit(str(Reason.UNREADABLE)).alias("reason"),
            F.lit("not written by duetime: see who writes to its topics").alias("detail"),
        )
        obstacle = routes.obstacle(message, now_ms())
        is_foreign = ~message.is_whole | message.is_cancel
        return records.select(
            "*", routes.known(F.when(~is_foreign, message.topic), message.cluster)
        ).select(
            "*",
            F.when(is_foreign, unreadable).otherwise(obstacle).alias("why"),
            message.cluster.alias("at"),
        )

    def _returned(self, decided: DataFrame) -> DataFrame:
        """Rows for the sink: what cannot be sent."""
        routes, message, why = Routes(self._settings), waiting_record(), F.col("returned")
        is_foreign = why["reason"] == str(Reason.UNREADABLE)
        rejected = routes.rejected(why["reason"], why["detail"])
        to = choose((is_foreign, rejected), otherwise=routes.failed(message, why))
        returned = decided.where("why is not null").withColumnRenamed("why", "returned")
        return routes.rows(returned, why, to)

    def _deliver(self, decided: DataFrame, cluster: str | None, scope: Scope) -> None:
        """Send what is for a cluster; what is not delivered, to what has failed."""
        at = F.col("at").isNull() if cluster is None else F.col("at") == cluster
        sent = decided.where(at & F.col("why").isNull())
        undelivered = self._sent(sent, cluster)
        count = sent.count()
        if refused := [row for row in undelivered if not row.is_unknown]:
            self._fail(sent, refused, Reason.REFUSED_BY_BROKER)
        if unknown := [row for row in undelivered if row.is_unknown]:
            # A batch that is held up here holds up others: the next one is not sent there.
            for topic in self._topics(sent, unknown):
                self._destinations[cluster].hold(topic)
            time.sleep(REST_S)
            self._fail(
                self._written[cluster].without(sent, scope), unknown, Reason.NOT_ACKNOWLEDGED
            )
        for topic in self._topics(sent, undelivered):
            self._destinations[cluster].isolate(topic)
        metrics.DELIVERED.labels(cluster or "").inc(count - len(undelivered))

    def _sent(self, rows: DataFrame, cluster: str | None) -> list[Row]:
        """Send these, each once; UNDELIVERED of those that were not acknowledged."""
        message = waiting_record()
        settings = self._settings.at(cluster) if cluster else self._settings
        columns = rows.where(lease_is_held(self._settings)).select(
            "offset",
            message.topic.alias("topic"),
            message.partition.cast("int").alias("partition"),
            "key",
            "value",
            delivered_headers(message.headers).alias("headers"),
        )
        return columns.mapInArrow(RecordSender(settings), UNDELIVERED).collect()

    def _fail(self, rows: DataFrame, undelivered: list[Row], reason: Reason) -> None:
        """Send these of the rows to what has failed, with what was answered."""
        routes, message = Routes(self._settings), waiting_record()
        details = F.create_map(
            *(F.lit(each) for row in undelivered for each in (row.offset, row.detail))
        )
        why = F.struct(F.lit(str(reason)).alias("reason"), details[F.col("offset")].alias("detail"))
        failed = rows.where(F.col("offset").isin([row.offset for row in undelivered]))
        failed = failed.withColumn("failure", why)
        to = routes.failed(message, F.col("failure"))
        write_batch(routes.rows(failed.drop("why"), F.col("failure"), to), self._settings, ISOLATED)

    def _topics(self, rows: DataFrame, undelivered: list[Row]) -> list[str]:
        offsets = [row.offset for row in undelivered]
        if not offsets:
            return []
        named = rows.where(F.col("offset").isin(offsets)).select(waiting_record().topic.alias("to"))
        return [row.to for row in named.distinct().collect()]


@dataclass(frozen=True)
class RecordSender:
    """Sends records in an executor, in Python, each in a request of its own."""

    settings: Settings

    def __call__(self, batches: "Iterator[pa.RecordBatch]") -> "Iterator[pa.RecordBatch]":
        """Send them; gives UNDELIVERED."""
        # Only an executor needs it.
        import pyarrow as pa  # noqa: PLC0415

        from duetime.stores.arrow import headers_in  # noqa: PLC0415

        of_each = [("offset", pa.int64()), ("detail", pa.string()), ("is_unknown", pa.bool_())]
        types = pa.schema(of_each)
        known = tuple(properties(self.settings).items())
        for batch in batches:
            names = "offset", "topic", "partition", "key", "value"
            columns = (batch.column(name).to_pylist() for name in names)
            rows = zip(*columns, headers_in(batch.column("headers")), strict=True)
            undelivered = send_each(_client(known), rows)
            yield pa.RecordBatch.from_pylist(undelivered, types)


def send_each(
    client: Producer, rows: Iterator[tuple[Any, ...]]
) -> list[dict[str, int | str | bool]]:
    """Send rows of offset, topic, partition, key, value and headers; what was not acknowledged."""
    undelivered: dict[int, dict[str, int | str | bool]] = {}

    def note(offset: int, error: KafkaError | None, _message: Message | None) -> None:
        if error is None:
            undelivered.pop(offset, None)
        else:
            undelivered[offset] = _undelivered(offset, error.str(), is_unknown=_is_unknown(error))

    for offset, topic, partition, key, value, headers in rows:
        # Until it is reported: a client that ends reports nothing.
        undelivered[offset] = _undelivered(offset, "no answer", is_unknown=True)
        at = -1 if partition is None else partition
        report = partial(note, offset)
        try:
            enqueue(
                client,
                topic,
                value=value,
                key=key,
                headers=headers,
                partition=at,
                on_delivery=report,
            )
        except KafkaException as error:
            note(offset, error.args[0], None)
    client.flush(2 * DELIVERY_TIMEOUT_S)
    return list(undelivered.values())


def _undelivered(offset: int, detail: str, *, is_unknown: bool) -> dict[str, int | str | bool]:
    return {"offset": offset, "detail": detail, "is_unknown": is_unknown}


def _is_unknown(error: KafkaError) -> bool:
    """Whether the record may be there all the same."""
    if is_fatal(error):
        # The next task gets a client that works.
        _client.cache_clear()
    is_answer = error.code() > 0
    return error.code() in UNKNOWN_OUTCOMES or not (is_answer or error.code() in NEVER_SENT)


def properties(settings: Settings) -> dict[str, str | int | float | bool]:
    """What its client is like, of a cluster."""
    return librdkafka_properties(settings) | {
        "acks": "all",
        "enable.idempotence": True,
        # As Kafka's Java producer places a key.
        "partitioner": "murmur2_random",
        # A record that is refused fails its whole batch.
        "batch.num.messages": 1,
        "linger.ms": 0,
        "message.max.bytes": settings.max_message_bytes + 4 * OVERHEAD_BYTES,
        "delivery.timeout.ms": int(DELIVERY_TIMEOUT_S * 1_000),
        "request.timeout.ms": 5_000,
        "allow.auto.create.topics": False,
    }


@lru_cache(maxsize=8)
def _client(known: tuple[tuple[str, str | int | float | bool], ...]) -> Producer:
    """The client of this process with these properties."""
    return Producer(dict(known))

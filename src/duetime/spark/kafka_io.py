"""Spark's Kafka source and sink, with the options that matter, each with its reason."""

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

from duetime.core.errors import DuetimeError, KafkaError, error_text
from duetime.core.settings import Settings
from duetime.core.topics import OVERHEAD_BYTES
from duetime.kafka.connection import spark_properties
from duetime.kafka.offsets import OffsetRange, Partition
from duetime.spark.catalyst import java_class
from duetime.spark.columns import HEADERS_TYPE
from duetime.spark.session import jvm

#: A row of Spark's Kafka source, with its headers.
RECORD = (
    "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp, "
    f"timestampType int, headers {HEADERS_TYPE}"
)

#: How long a sink tries to deliver a record, and a leader may be missing, in seconds: longer than a
#: cluster takes to replace a broker that has died (`broker.session.timeout.ms`, 9 s, and the
#: election of other leaders). A leader that was paused for longer sends none of the records that
#: its producer still held.
DELIVERY_TIMEOUT_S = 15.0

#: The pause after a failure or a step-down, in seconds: records that the producer still holds may
#: arrive for `delivery.timeout.ms`, and must be there when recovery reads.
RETRY_PAUSE_S = DELIVERY_TIMEOUT_S + 1.0

#: How long an empty fetch waits at the broker, in ms: in real time, and in a batch, which reads the
#: records that are there. The next request on that connection waits as well.
IDLE_WAIT_MS, BATCH_WAIT_MS = 100, 20

#: Timeouts of a fetch, and of the connection to a broker, in ms: it may be cut off.
FETCH_TIMEOUT_MS, CONNECT_TIMEOUT_MS = 5_000, 2_500

#: More records than a topic has, for a batch of all of them.
NO_LIMIT = 2**62

_CLIENTS = "org.apache.kafka.clients.consumer"
_COMMON = "org.apache.kafka.common"

#: An offset beyond the end of any log.
BEYOND = 2**62

#: Wait of one poll for an answer, in ms.
POLL_MS = 100

#: The exception's text has one such part a partition: `topic-0=OffsetAndMetadata{offset=17, ...}`.
END = re.compile(r"([A-Za-z0-9._-]+)-(\d+)=OffsetAndMetadata\{offset=(\d+),")

#: Handles a batch of a query, by its number.
BatchHandler = Callable[[DataFrame, int], None]


def read_stream(  # noqa: PLR0913 (each by its name)
    spark: SparkSession,
    settings: Settings,
    topics: Sequence[str],
    *,
    batch: int | None = None,
    committed_only: bool = False,
    group_prefix: str | None = None,
) -> DataFrame:
    """Return an endless read of whole topics, with the columns of RECORD.

    It is for real time, or for batches of at most `batch` records. A query without a checkpoint
    begins at the earliest record. The names of its consumers' groups begin with `group_prefix`, or
    as Spark has it.
    """
    wait_ms = IDLE_WAIT_MS if batch is None else BATCH_WAIT_MS
    options = _source_options(settings, wait_ms, committed_only=committed_only) | {
        "subscribe": ",".join(topics),
        "startingOffsets": "earliest",
        # If retention removed records while the query was down, continue with the rest. `duetime
        # topics` refuses settings under which this would happen unnoticed.
        "failOnDataLoss": "false",
    }
    if group_prefix is not None:
        options["groupIdPrefix"] = group_prefix
    if batch is not None:
        # Real-time mode refuses it.
        options["maxOffsetsPerTrigger"] = str(batch)
    return spark.readStream.format("kafka").options(**options).load()


def _source_options(settings: Settings, wait_ms: int, *, committed_only: bool) -> dict[str, str]:
    """Return the options of every read; an empty fetch waits `wait_ms` at the broker."""
    # A broker that is cut off answers nothing: by default, 30 s pass until another is asked.
    timeout = {"kafka.request.timeout.ms": str(FETCH_TIMEOUT_MS)}
    properties = timeout | _client_properties(settings)
    return properties | {
        "includeHeaders": "true",
        "kafka.isolation.level": "read_committed" if committed_only else "read_uncommitted",
        # The other one fetches in a thread of its own, and `LastRecords` counts fetches.
        "kafka.group.protocol": "classic",
        # A reader must not create a topic, least of all one that is just being deleted.
        "kafka.allow.auto.create.topics": "false",
        "kafka.fetch.max.wait.ms": str(wait_ms),
        # After each poll Spark requests offsets, which drops the records fetched ahead: with 500
        # records a poll, the default, each would be fetched five times.
        "kafka.max.poll.records": "5000",
    }


def _client_properties(settings: Settings) -> dict[str, str]:
    """Return the properties of every source and sink; those of the user win."""
    timeout = {"kafka.socket.connection.setup.timeout.ms": str(CONNECT_TIMEOUT_MS)}
    return timeout | spark_properties(settings)


def offsets_json(offsets: Iterable[tuple[Partition, int]]) -> str:
    """Return offsets in the format of Spark's options and checkpoints."""
    by_topic: dict[str, dict[str, int]] = {}
    for (topic, partition), offset in offsets:
        by_topic.setdefault(topic, {})[str(partition)] = offset
    return json.dumps(by_topic)


def read_ranges(
    spark: SparkSession,
    settings: Settings,
    ranges: Sequence[OffsetRange],
    *,
    fail_on_missing: bool = True,
    committed_only: bool = False,
) -> DataFrame:
    """Return exactly these records, as a batch; without `fail_on_missing`, those that exist."""
    # Spark has one consumer for a group and partition, with one isolation level.
    reader = "release.reader.committed" if committed_only else "release.reader"
    assigned: dict[str, list[int]] = {}
    for each in ranges:
        assigned.setdefault(each.topic, []).append(each.partition)
    # The default of 500 ms would be most of a window's planning.
    options = _source_options(settings, BATCH_WAIT_MS, committed_only=committed_only) | {
        "assign": json.dumps(assigned),
        "startingOffsets": offsets_json((each.place, each.start) for each in ranges),
        "endingOffsets": offsets_json((each.place, each.end) for each in ranges),
        "failOnDataLoss": str(fail_on_missing).lower(),
        # A consumer keeps the buffer of its last fetch until its slot comes round again, and there
        # are 128: with 4 MiB each, they filled the heap at 10,000 messages/s.
        "kafka.max.partition.fetch.bytes": str(1024 * 1024),
        # A fixed group lets the connector's pool give the next window an open consumer.
        "kafka.group.id": f"{settings.namespace}.{reader}",
    }
    return spark.read.format("kafka").options(**options).load()


def client_id(settings: Settings, name: str) -> str:
    """Return the client id of a sink's producer, for the broker's log and the JVM's metrics."""
    # Another cluster's namespace has an @, which metrics would put in quotes.
    return f"{settings.namespace}.{name}".replace("@", "-")


def sink_options(settings: Settings, name: str) -> dict[str, str]:
    """Return the options of a sink; sinks of one name share a producer.

    Destinations and the wheel have different producers: for each record, a producer goes through
    all partitions that it has ever written to.
    """
    return _client_properties(settings) | {
        "kafka.client.id": client_id(settings, name),
        # Acknowledged by every in-sync replica, and once, however often it is retried.
        "kafka.acks": "all",
        "kafka.enable.idempotence": "true",
        # Punctual first: no record waits for a fuller batch.
        "kafka.linger.ms": "0",
        # A record must not arrive in its slot long after it was routed there: the query fails then,
        # and routes it again.
        "kafka.delivery.timeout.ms": str(int(DELIVERY_TIMEOUT_S * 1_000)),
        # A broker answers a connection's requests one after the other. One that waits for a replica
        # which has died holds up those behind it, so that it ends well before `max.block.ms`.
        "kafka.request.timeout.ms": "2500",
        # After a pause the producer requests metadata before it sends, and meanwhile finds that the
        # records it holds are too old. With metadata young enough it would send a batch to each
        # partition first, and check then (Sender.sendProducerData).
        "kafka.metadata.max.age.ms": "5000",
        # For a topic that was deleted after the check: the default of a minute holds up others.
        "kafka.max.block.ms": "5000",
        "kafka.max.request.size": str(settings.max_message_bytes + 4 * OVERHEAD_BYTES),
    }


def start_real_time(
    rows: DataFrame, settings: Settings, name: str, interval_s: int
) -> StreamingQuery:
    """Start a real-time query into Kafka, with its offsets in the checkpoint directory.

    Its batches last for `interval_s` seconds.
    """
    query: StreamingQuery = (
        rows.writeStream.format("kafka")
        .options(**sink_options(settings, name))
        .option("checkpointLocation", f"{settings.checkpoint}/{name}")
        .queryName(name)
        .outputMode("update")
        # The stubs of its overloads lack real-time mode.
        .trigger(realTime=f"{interval_s} seconds")  # type: ignore[call-overload]
        .start()
    )
    return query


def start_micro_batches(
    records: DataFrame,
    handle: BatchHandler,
    settings: Settings,
    name: str,
    every: str = "1 second",
) -> StreamingQuery:
    """Start a query that handles a batch at this interval, if there are records."""

    def handle_with_short_error(batch: DataFrame, number: int) -> None:
        try:
            handle(batch, number)
        except Exception as error:  # noqa: BLE001 (any error is summarized)
            # Spark searches the error for an interruption with a pattern that overflows the stack
            # of the query's thread on a long trace.
            raise DuetimeError(error_text(error)) from None

    return (
        records.writeStream.foreachBatch(handle_with_short_error)
        .option("checkpointLocation", f"{settings.checkpoint}/{name}")
        .queryName(name)
        # A query with state needs this mode, and one without ignores it.
        .outputMode("update")
        .trigger(processingTime=every)
        .start()
    )


def write_batch(rows: DataFrame, settings: Settings, name: str) -> None:
    """Send the rows by the producer of this name; return once all are acknowledged."""
    rows.write.format("kafka").options(**sink_options(settings, name)).mode("append").save()


def log_ends(
    spark: SparkSession, settings: Settings, epochs: Mapping[Partition, int]
) -> dict[Partition, int]:
    """Return the offset behind the last record that each partition's leader has.

    That may be beyond what readers are shown. Kafka shows a record once every in-sync replica has
    it: up to the high watermark, which ListOffsets calls the latest offset. A record whose
    acknowledgement has timed out may lie above it. It comes to light when the replica that lags has
    caught up, or is no longer in sync: by default after 30 to 45 s (`replica.lag.time.max.ms`).

    A leader returns the end of its log to a client that asks for the end of the leader's own epoch
    (KIP-101). Kafka's consumer asks that before it reads from a position that it has an epoch for
    (KIP-320): where the position is beyond the end, it raises LogTruncationException, with the end.

    `epochs` are those of the leaders. Raises KafkaError where they do not answer.
    """
    java = jvm(spark)
    partition_type = java_class(java, f"{_COMMON}.TopicPartition")
    position_type = java_class(java, f"{_CLIENTS}.OffsetAndMetadata")
    optional = java_class(java, "java.util.Optional")
    poll_wait = java_class(java, "java.time.Duration").ofMillis(POLL_MS)
    partitions = {place: partition_type(*place) for place in epochs}
    ends: dict[Partition, int] = {}
    with closing(_consumer(spark, settings)) as consumer:
        consumer.assign(java_class(java, "java.util.ArrayList")(list(partitions.values())))
        until_s = time.monotonic() + DELIVERY_TIMEOUT_S
        while missing := [place for place in epochs if place not in ends]:
            if time.monotonic() > until_s:
                raise KafkaError(
                    f"the leader of {missing[0][0]}, partition {missing[0][1]}, does not say where "
                    "its log ends: check that its broker is up"
                )
            for place in missing:
                position = position_type(BEYOND, optional.of(epochs[place]), "")
                consumer.seek(partitions[place], position)
            ends |= _poll_ends(consumer, poll_wait)
    return ends


def _consumer(spark: SparkSession, settings: Settings) -> Any:  # noqa: ANN401 (py4j's objects have no type)
    deserializer = f"{_COMMON}.serialization.ByteArrayDeserializer"
    options = {
        name.removeprefix("kafka."): value for name, value in spark_properties(settings).items()
    } | {
        "key.deserializer": deserializer,
        "value.deserializer": deserializer,
        "client.id": client_id(settings, "log-ends"),
        "allow.auto.create.topics": "false",
        # A position beyond the end is an error, and not a reason to begin elsewhere.
        "auto.offset.reset": "none",
        "enable.auto.commit": "false",
    }
    properties = java_class(jvm(spark), "java.util.HashMap")()
    for name, value in options.items():
        properties.put(name, value)
    return java_class(jvm(spark), f"{_CLIENTS}.KafkaConsumer")(properties)


def _poll_ends(consumer: Any, poll_wait: Any) -> dict[Partition, int]:  # noqa: ANN401 (py4j has no types)
    """Return the ends on one broker: a poll sends the questions, and a later one has the answer."""
    for _ in range(10):
        try:
            consumer.poll(poll_wait)
        except Py4JJavaError as error:
            found = error.java_exception
            if found.getClass().getSimpleName() != "LogTruncationException":
                raise KafkaError(
                    f"a leader did not say where its log ends ({error_text(error)}): check that "
                    "its broker is up"
                ) from error
            ends = END.findall(str(found.divergentOffsets().toString()))
            return {(topic, int(partition)): int(end) for topic, partition, end in ends}
    return {}

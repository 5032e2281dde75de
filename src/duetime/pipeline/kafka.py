"""Spark's Kafka source and sink, with the options that matter, each with its reason."""

import json
from collections.abc import Callable, Mapping, Sequence

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import DataStreamWriter, StreamingQuery

from duetime.columns import HEADERS_TYPE
from duetime.config import Settings
from duetime.connection import spark_properties
from duetime.errors import DuetimeError, words
from duetime.stores import OffsetRange
from duetime.stores.places import Place
from duetime.topics import OVERHEAD_BYTES

#: A row of Spark's Kafka source, with its headers.
RECORD = (
    "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp, "
    f"timestampType int, headers {HEADERS_TYPE}"
)

#: How long a sink tries to deliver a record, in seconds. A leader that is paused for longer than
#: this sends nothing of what its producer still held, and a failed window rests for so long.
DELIVERY_TIMEOUT_S = 10.0

#: How long whoever has failed or stepped down rests, in seconds: what its producer still holds may
#: arrive for `delivery.timeout.ms`, and must be there to be read back.
REST_S = DELIVERY_TIMEOUT_S + 1.0

#: How long a fetch that finds nothing waits at the broker, in ms: in real time, and in a batch,
#: which reads what is there. What is asked next on that connection waits as well.
IDLE_WAIT_MS, BATCH_WAIT_MS = 100, 20

#: More records than there are, for a batch of all that is there.
ALL = 2**62

#: By whether only what is committed is read: a sender may schedule inside its own transaction.
ISOLATION = {True: "read_committed", False: "read_uncommitted"}


def read_stream(  # noqa: PLR0913 (each by its name)
    spark: SparkSession,
    settings: Settings,
    topics: Sequence[str],
    *,
    batch: int | None = None,
    committed_only: bool = False,
    starting: Mapping[Place, int] | None = None,
) -> DataFrame:
    """An endless read of whole topics: Spark's Kafka columns, headers included.

    In real time, or in batches of so many records at most. A query without a checkpoint starts at
    the earliest record, so that nothing sent is passed over; or where each partition is `starting`.
    """
    options = spark_properties(settings) | {
        "subscribe": ",".join(topics),
        "startingOffsets": _starting(topics, starting),
        "includeHeaders": "true",
        # Records that retention removed while the query was down are gone: go on with the rest.
        # `duetime topics` refuses settings under which this would happen unseen.
        "failOnDataLoss": "false",
        "kafka.isolation.level": ISOLATION[committed_only],
        # A reader creates nothing, least of all a topic that is just being deleted.
        "kafka.allow.auto.create.topics": "false",
        # An idle fetch waits this long at the broker; one with data does not wait.
        "kafka.fetch.max.wait.ms": str(IDLE_WAIT_MS if batch is None else BATCH_WAIT_MS),
        # After each poll Spark asks for offsets, and drops with that what it has fetched already:
        # of 500 records a poll, the default, each would be fetched five times.
        "kafka.max.poll.records": "5000",
    }
    if batch is not None:
        # Real-time mode refuses it.
        options["maxOffsetsPerTrigger"] = str(batch)
    return spark.readStream.format("kafka").options(**options).load()


def _starting(topics: Sequence[str], offsets: Mapping[Place, int] | None) -> str:
    if offsets is None:
        return "earliest"
    by_topic: dict[str, dict[str, int]] = {}
    for (topic, partition), at in offsets.items():
        if topic in topics:
            by_topic.setdefault(topic, {})[str(partition)] = at
    return json.dumps(by_topic)


def read_ranges(
    spark: SparkSession,
    settings: Settings,
    ranges: Sequence[OffsetRange],
    *,
    all_there: bool = True,
    committed_only: bool = False,
) -> DataFrame:
    """Exactly these records, as a batch; unless `all_there`, what is left of them."""
    assigned: dict[str, list[int]] = {}
    start: dict[str, dict[str, int]] = {}
    end: dict[str, dict[str, int]] = {}
    for each in ranges:
        assigned.setdefault(each.topic, []).append(each.partition)
        start.setdefault(each.topic, {})[str(each.partition)] = each.start
        end.setdefault(each.topic, {})[str(each.partition)] = each.end
    options = spark_properties(settings) | {
        "assign": json.dumps(assigned),
        "startingOffsets": json.dumps(start),
        "endingOffsets": json.dumps(end),
        "includeHeaders": "true",
        "failOnDataLoss": str(all_there).lower(),
        "kafka.isolation.level": ISOLATION[committed_only],
        "kafka.allow.auto.create.topics": "false",
        # The default of 500 ms is most of a window's planning.
        "kafka.fetch.max.wait.ms": str(BATCH_WAIT_MS),
        # A consumer that waits for its slot's next turn keeps the buffer of its last fetch, and
        # there are 128: with 4 MiB each, they filled the heap at 10,000 messages/s.
        "kafka.max.partition.fetch.bytes": str(1024 * 1024),
        # A fixed group lets the connector's pool give the next window an open consumer.
        # Spark takes one consumer for all that one group reads of a partition, in one way.
        "kafka.group.id": f"{settings.namespace}.release.reader" + ".committed" * committed_only,
        # After each poll Spark asks twice for offsets: fewer polls of more records.
        "kafka.max.poll.records": "5000",
    }
    return spark.read.format("kafka").options(**options).load()


def client_id(settings: Settings, name: str) -> str:
    """What the producer of a sink is called, in the broker's log and in the JVM's metrics."""
    # Another cluster's namespace has an @, which metrics would put in quotes.
    return f"{settings.namespace}.{name}".replace("@", "-")


def sink_options(settings: Settings, name: str) -> dict[str, str]:
    """Options of every sink; those of one name share a producer.

    One that writes to a destination is not the one that writes to the wheel: a producer looks
    through all partitions that it has ever written to, for each record.
    """
    return spark_properties(settings) | {
        "kafka.client.id": client_id(settings, name),
        # Acknowledged by every in-sync replica, each record once however often it is retried.
        "kafka.acks": "all",
        "kafka.enable.idempotence": "true",
        # Punctual first: nothing waits for company.
        "kafka.linger.ms": "0",
        # A record may not turn up in its slot long after it was routed there: later than this, the
        # query fails and routes it again.
        "kafka.delivery.timeout.ms": str(int(DELIVERY_TIMEOUT_S * 1_000)),
        "kafka.request.timeout.ms": "5000",
        # After a pause nothing is sent before the metadata are asked for again, and meanwhile it is
        # found that what the producer held is too old. With metadata young enough it would send a
        # batch of each partition first, and then look (Sender.sendProducerData).
        "kafka.metadata.max.age.ms": "5000",
        # A topic that is gone since it was looked up: the default of a minute would hold up others.
        "kafka.max.block.ms": "5000",
        "kafka.max.request.size": str(settings.max_message_bytes + 4 * OVERHEAD_BYTES),
    }


def start_real_time(rows: DataFrame, settings: Settings, name: str) -> StreamingQuery:
    """Start a real-time query into Kafka; its offsets are kept under the checkpoint."""
    query: StreamingQuery = (
        rows.writeStream.format("kafka")
        .options(**sink_options(settings, name))
        .option("checkpointLocation", f"{settings.checkpoint}/{name}")
        .queryName(name)
        .outputMode("update")
        # The stubs of its overloads lack real-time mode.
        .trigger(realTime=f"{settings.batch_seconds} seconds")  # type: ignore[call-overload]
        .start()
    )
    return query


def start_micro_batches(
    records: DataFrame,
    handle: Callable[[DataFrame, int], None],
    settings: Settings,
    name: str,
    every: str = "1 second",
) -> StreamingQuery:
    """Start a query that handles a batch every so often, if there is one."""
    batches = _batches(records, handle, settings, name)
    return batches.queryName(name).trigger(processingTime=every).start()


def handle_what_is_there(
    records: DataFrame, handle: Callable[[DataFrame, int], None], settings: Settings, name: str
) -> None:
    """Go on with a query from its last commit, as batches, up to the present end of its topics.

    Each is committed when it is handled, and has records of every partition that is behind.
    """
    batches = _batches(records, handle, settings, name)
    query = batches.queryName(f"{name} (recover)").trigger(availableNow=True).start()
    query.awaitTermination()


def _batches(
    records: DataFrame, handle: Callable[[DataFrame, int], None], settings: Settings, name: str
) -> DataStreamWriter:
    checkpoint = f"{settings.checkpoint}/{name}"

    def briefly(batch: DataFrame, number: int) -> None:
        try:
            handle(batch, number)
        except Exception as error:  # noqa: BLE001 (whatever it was, it is told)
            # Spark searches what it is told for an interruption, with a pattern that overflows the
            # stack over the length of a trace, and with that the query's thread.
            raise DuetimeError(words(error)) from None

    writer = records.writeStream.foreachBatch(briefly).option("checkpointLocation", checkpoint)
    # What a query with state wants to hear, and one without does not mind.
    return writer.outputMode("update")


def write_batch(rows: DataFrame, settings: Settings, name: str) -> None:
    """Send the rows by the producer of this name, and return once all are acknowledged."""
    rows.write.format("kafka").options(**sink_options(settings, name)).mode("append").save()

"""Where logs end at their leaders, which may be beyond what readers are shown.

Kafka shows a record once every in-sync replica has it: up to the high watermark, which is what
ListOffsets calls the latest offset. A record whose acknowledgement has timed out may lie above it.
It comes to light when the replica that lags has caught up, or is in sync no more: by default after
30 to 45 s (`replica.lag.time.max.ms`). Whoever reads back what was sent has to wait for it.

A leader tells where its log ends to whoever asks for the end of its own epoch (KIP-101). Kafka's
consumer asks that before it reads from a position that it has an epoch for (KIP-320): where the
position is beyond the end, it raises LogTruncationException, with the end.
"""

import re
import time
from collections.abc import Mapping
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

from duetime.config import Settings
from duetime.connection import spark_properties
from duetime.errors import KafkaError, words
from duetime.java import java_class
from duetime.pipeline.jvm import jvm
from duetime.stores.places import Place

_CLIENTS = "org.apache.kafka.clients.consumer"
_COMMON = "org.apache.kafka.common"

#: Beyond the end of any log.
BEYOND = 2**62

#: How long the brokers may take to answer, in seconds.
TIMEOUT_S = 10.0

#: How long one poll waits for an answer, in ms.
POLL_MS = 100

#: The exception that has the ends.
TOLD = "LogTruncationException"

#: How the exception shows one end: `topic-0=OffsetAndMetadata{offset=17, leaderEpoch=3, ...}`.
END = re.compile(r"([A-Za-z0-9._-]+)-(\d+)=OffsetAndMetadata\{offset=(\d+),")


def log_ends(
    spark: SparkSession, settings: Settings, epochs: Mapping[Place, int]
) -> dict[Place, int]:
    """Return the offset behind the last record that each partition's leader has.

    `epochs` are those of the leaders. Raises KafkaError where they do not answer.
    """
    consumer = _consumer(spark, settings)
    try:
        return _asked(spark, consumer, epochs)
    finally:
        consumer.close()


def _consumer(spark: SparkSession, settings: Settings) -> Any:  # noqa: ANN401 (py4j's objects have no type)
    deserializer = f"{_COMMON}.serialization.ByteArrayDeserializer"
    options = {
        name.removeprefix("kafka."): value for name, value in spark_properties(settings).items()
    } | {
        "key.deserializer": deserializer,
        "value.deserializer": deserializer,
        "client.id": f"{settings.namespace}.log-ends".replace("@", "-"),
        "allow.auto.create.topics": "false",
        # A position beyond the end is an error, and not a reason to begin elsewhere.
        "auto.offset.reset": "none",
        "enable.auto.commit": "false",
    }
    properties = java_class(jvm(spark), "java.util.HashMap")()
    for name, value in options.items():
        properties.put(name, value)
    return java_class(jvm(spark), f"{_CLIENTS}.KafkaConsumer")(properties)


def _asked(spark: SparkSession, consumer: Any, epochs: Mapping[Place, int]) -> dict[Place, int]:  # noqa: ANN401 (as above)
    java = jvm(spark)
    partition_type = java_class(java, f"{_COMMON}.TopicPartition")
    position_type = java_class(java, f"{_CLIENTS}.OffsetAndMetadata")
    optional = java_class(java, "java.util.Optional")
    poll = java_class(java, "java.time.Duration").ofMillis(POLL_MS)
    partitions = {place: partition_type(*place) for place in epochs}
    consumer.assign(java_class(java, "java.util.ArrayList")(list(partitions.values())))
    ends: dict[Place, int] = {}
    until_s = time.monotonic() + TIMEOUT_S
    while missing := [place for place in epochs if place not in ends]:
        if time.monotonic() > until_s:
            raise KafkaError(
                f"the leader of {missing[0][0]}, partition {missing[0][1]}, does not say where its "
                "log ends: is its broker up?"
            )
        for place in missing:
            position = position_type(BEYOND, optional.of(epochs[place]), "")
            consumer.seek(partitions[place], position)
        ends |= _told(consumer, poll)
    return ends


def _told(consumer: Any, poll: Any) -> dict[Place, int]:  # noqa: ANN401 (as above)
    """The ends that one broker tells; one poll sends the questions, and another has the answer."""
    for _ in range(10):
        try:
            consumer.poll(poll)
        except Py4JJavaError as error:
            found = error.java_exception
            if found.getClass().getSimpleName() != TOLD:
                raise KafkaError(
                    f"a leader did not say where its log ends ({words(error)}): is its broker up?"
                ) from error
            told = END.findall(str(found.divergentOffsets().toString()))
            return {(topic, int(partition)): int(end) for topic, partition, end in told}
    return {}

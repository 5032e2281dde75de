"""What the throughput benchmarks share: Spark without queries, many messages, and a pace."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from duetime.bench.appends import Appends
from duetime.bench.load import LoadPlan, Sent, start_load
from duetime.bench.say import say
from duetime.clock import SystemClock
from duetime.config import Settings
from duetime.errors import KafkaError
from duetime.local.jars import pipeline_jars
from duetime.pipeline.session import spark_session

#: How long one part of a benchmark may take on the slowest machine, in seconds.
TIMEOUT_S = 1_800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Messages a second of one run, and of the plain copy in the same run."""

    messages_per_s: int
    copy_messages_per_s: int

    @property
    def ratio(self) -> float:
        """The run's pace as a part of the copy's."""
        return round(self.messages_per_s / self.copy_messages_per_s, 3)

    def figures(self) -> dict[str, int | float]:
        """The result as it is shown."""
        return {
            "messages_per_s": self.messages_per_s,
            "copy_messages_per_s": self.copy_messages_per_s,
            "ratio": self.ratio,
        }


@contextmanager
def session(settings: Settings) -> Iterator[SparkSession]:
    """Spark with the pipeline's settings, and no query in it."""
    say("starting Spark ...")
    spark = spark_session(settings, pipeline_jars())
    try:
        yield spark
    finally:
        spark.stop()


def fill(settings: Settings, plan: LoadPlan) -> Sent:
    """Send all of the plan as fast as it goes. Raises KafkaError unless all is acknowledged."""
    say(f"writing {plan.messages:,} messages ...")
    with start_load(settings, replace(plan, rate=0)) as load:
        sent = load.wait()
    if sent.failed:
        raise KafkaError(
            f"{sent.failed} messages were not acknowledged: is the broker's disk full?"
        )
    return sent


def plain(records: DataFrame, topic: str) -> DataFrame:
    """The records as they are, to another topic: what a copy does."""
    return records.select(F.lit(topic).alias("topic"), *_payload())


def wait_for_all(appends: Appends, messages: int) -> None:
    """Wait until so many came. Raises KafkaError where they do not come at all."""
    if not appends.wait_for(messages, TIMEOUT_S):
        raise KafkaError(
            f"{appends.count()} of {messages} messages came within {TIMEOUT_S:.0f} s: "
            "is the broker up, and has its disk room?"
        )


def pace_from_start(appends: Appends, messages: int, work: Callable[[], None]) -> int:
    """Messages a second from the start of the work to the last append."""
    began_ms = SystemClock().now_ms()
    work()
    wait_for_all(appends, messages)
    taken_ms = appends.span(began_ms).last_ms - began_ms
    return round(messages * 1_000 / max(taken_ms, 1))


def _payload() -> list[Column]:
    return [F.col("key"), F.col("value"), F.col("headers")]


def wait_until(instant_ms: int, clock_ms: int) -> None:
    """Wait until a later instant."""
    if instant_ms > clock_ms:
        time.sleep((instant_ms - clock_ms) / 1_000)

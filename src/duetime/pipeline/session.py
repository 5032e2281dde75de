"""The Spark session, and every Spark setting that matters, each with its reason."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession

from duetime.config import Settings, is_submitted
from duetime.local.startup import spark_archive
from duetime.pipeline.jvm import start_jvm

#: Threads of local mode. A real-time query holds one for each partition it reads, for as long as it
#: runs, mostly asleep: this is no number of cores. Those beyond it would never be read, and the
#: intake topics of a user who comes from elsewhere may have many.
LOCAL_THREADS = 256

JVM_OPTIONS = (
    # The shortest pauses of the collectors tried with this load (design figures: p99 35 ms against
    # 59 with G1 and 139 with ZGC), with a young generation large enough to be collected seldom.
    "-XX:+UseParallelGC",
    "-XX:NewRatio=1",
    # Rows live as long as their window, some seconds. Survivor spaces that shrink would push them
    # into the old generation, and emptying that stops everything for 300 ms.
    "-XX:-UseAdaptiveSizePolicy",
    "-XX:SurvivorRatio=6",
    # Spark's classes need this much; with less, five full collections happen on the way there.
    "-XX:MetaspaceSize=256m",
    # Spark's generated code is new to the JVM at start and old after a minute: keep what was
    # compiled.
    "-XX:ReservedCodeCacheSize=256m",
    # A thread of Kafka's that has met it may be gone, and the lead would be kept by a JVM
    # that delivers nothing. A JVM that has ended is missed at once, and read back.
    "-XX:+ExitOnOutOfMemoryError",
    # A turn's steps are one method of 16 KB, and by default the JVM compiles none over 8 KB.
    "-XX:-DontCompileHugeMethods",
)

#: Spark's name for them. What the settings have here is added to ours.
JAVA_OPTIONS = "spark.driver.extraJavaOptions"

SPARK_PROPERTIES = {
    "spark.app.name": "duetime",
    # Kafka's batch source and sink in their second version: the first takes every row apart into
    # objects and puts it together again, and plans each read twice.
    "spark.sql.sources.useV1SourceList": "avro,csv,json,orc,parquet,text",
    # The first record of an id is found by one pass over sorted rows, not by two.
    "spark.sql.optimizer.windowGroupLimitThreshold": "-1",
    # Real-time mode refuses adaptive execution, and a window of one task gains nothing by it.
    "spark.sql.adaptive.enabled": "false",
    # For each column, PySpark would tell the JVM in ten calls which line of Python it is of: plans
    # are made while messages wait.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
    # A bad cast is a rejected message, never a failed query.
    "spark.sql.ansi.enabled": "false",
    # Of two headers with one name the last counts, as in Kafka's own lastHeader.
    "spark.sql.mapKeyDedupPolicy": "LAST_WIN",
    # A retried task would send again what it sent already: a failed window is looked at by rescue.
    "spark.task.maxFailures": "1",
    "spark.speculation": "false",
    # Due times are instants: no zone may have a say.
    "spark.sql.session.timeZone": "UTC",
    # No web server that nobody asked for; set spark.ui.enabled in spark_properties to see it.
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.ui.retainedExecutions": "1",
    "spark.ui.retainedJobs": "10",
    "spark.ui.retainedStages": "10",
    "spark.ui.retainedTasks": "100",
    # Rows that wait to be sorted and sent are no matter for the collector: it would copy them while
    # everything stands still (p99 36 ms against 48). Taken from the system as it is needed.
    "spark.memory.offHeap.enabled": "true",
    "spark.memory.offHeap.size": "1g",
    # Each turn's code reaches its task as a broadcast, in blocks that are allocated whole: 4 MiB a
    # turn for some 100 KiB, and alive until a collection has found that nobody needs it.
    "spark.broadcast.blockSize": "128k",
    # A window has one task: the shuffle's defaults would make 200.
    "spark.sql.shuffle.partitions": "2",
    # Each turn's plan differs only in its offsets: keep the generated code of all of them.
    "spark.sql.codegen.cache.maxEntries": "1000",
    # The connector keeps consumers and producers for the next window instead of opening new ones,
    # but not what it has read and nobody asks for again.
    "spark.kafka.consumer.cache.capacity": "512",
    "spark.kafka.consumer.fetchedData.cache.timeout": "3s",
    "spark.kafka.consumer.fetchedData.cache.evictorThreadRunInterval": "2s",
    "spark.kafka.producer.cache.timeout": "30m",
    # What a query remembers is on the disk, and each batch writes down only what it has changed.
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    # A query that waits for the clock would make a batch each second, also of nothing: the one that
    # does is woken (`waking`).
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
    # PySpark itself, in the Python that follows a queue's markers, means it for its developers.
    "spark.executorEnv.PYTHONWARNINGS": "ignore::FutureWarning",
    # A query that stops is waited for, so that nothing is cut off in the middle.
    "spark.sql.streaming.stopTimeout": "8s",
}

LOCAL_PROPERTIES = {
    # Nobody else need be able to connect.
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    # Rows from the driver are few; by default there is a task of them for each thread.
    "spark.default.parallelism": "2",
}

#: For a checkpoint that is a directory of this machine.
DIRECTORY_PROPERTIES = {
    # What Spark would take, renames by way of 16 processes that it starts (`stat`, `readlink`), and
    # a batch of any micro-batch query renames twice: 100 ms of a core (measured; with this, 30).
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing."
        "FileSystemBasedCheckpointFileManager"
    ),
}


def spark_session(settings: Settings, jars: Sequence[Path] = ()) -> SparkSession:
    """Start Spark, or join the session that `spark-submit` prepared.

    `jars` are the connector's, where Spark has to be given them. What `spark-submit` sets (the
    master, first of all) is left as it is.
    """
    conf = _conf_from_outside()
    own = dict(settings.spark_properties)
    java_options = own.pop(JAVA_OPTIONS, "")
    if not conf.contains("spark.master"):
        # Executors that need Python get this one: the first on PATH may be another.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        conf.setMaster(f"local[{LOCAL_THREADS}]")
        conf.set("spark.driver.memory", settings.driver_memory)
        conf.set(JAVA_OPTIONS, " ".join((*_jvm_options(settings), java_options)))
        if jars:
            conf.set("spark.jars", ",".join(str(jar) for jar in jars))
    is_local = str(conf.get("spark.master")).partition("[")[0] == "local"
    for name, value in defaults(settings, is_local=is_local).items():
        conf.setIfMissing(name, value)
    conf.setAll(list(own.items()))
    start_jvm(conf)
    session = SparkSession.builder.config(conf=conf).getOrCreate()
    if is_submitted():
        # Its log was set up by whoever started the JVM, and tells of every second.
        session.sparkContext.setLogLevel("ERROR")
    return session


def defaults(settings: Settings, *, is_local: bool) -> dict[str, str]:
    """What is set where neither `spark-submit` nor the settings say otherwise."""
    local = LOCAL_PROPERTIES if is_local else {}
    in_directory = urlsplit(settings.checkpoint).scheme in ("", "file")
    return SPARK_PROPERTIES | local | (DIRECTORY_PROPERTIES if in_directory else {})


def _conf_from_outside() -> SparkConf:
    if is_submitted():
        # What `spark-submit` was told is in its JVM, and unknown before this process is connected.
        SparkContext._ensure_initialized()  # noqa: SLF001 (PySpark's only way)
    return SparkConf()


def _jvm_options(settings: Settings) -> tuple[str, ...]:
    # Spark's own chatter is off; its warnings are for those who ask.
    config = Path(__file__).with_name("log4j2.properties")
    os.environ.setdefault("SPARK_LOG_LEVEL", "error")
    # The whole heap from the start: without adaptive sizes, the young generation does not grow.
    heap = f"-Xms{settings.driver_memory}"
    # What it has loaded before is mapped.
    return (
        *JVM_OPTIONS,
        *spark_archive().read_options(),
        heap,
        f"-Dlog4j2.configurationFile={config.as_uri()}",
    )

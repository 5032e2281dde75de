"""The Spark session and the driver's JVM: settings with their reasons, start, end, and metrics."""

import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from subprocess import PIPE, TimeoutExpired
from typing import IO, Any
from urllib.parse import urlsplit

from py4j.protocol import Py4JError
from pyspark import SparkConf, SparkContext
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from duetime.core.errors import ConfigError, SetupError
from duetime.core.settings import Settings, is_submitted
from duetime.core.threads import wait_until
from duetime.kafka.connection import TASK_VARIABLE
from duetime.local.jars import spark_archive
from duetime.spark.catalyst import cache_functions, java_class
from duetime.spark.secrets import TASK_SECRETS, task_environment

#: Threads of local mode. A real-time query holds one for each partition that it reads, mostly
#: asleep: this is not a number of cores. Partitions beyond it would never be read, and the intake
#: topics of an earlier service may have many.
LOCAL_THREADS = 512

#: How long Spark may take to have enough task slots, in seconds.
SLOTS_TIMEOUT_S = 60.0

#: Errors of a call when the JVM is gone, or cannot do it: at first the one, then the other.
JVM_ERRORS = (Py4JError, ConnectionError)

#: A line of Java's at each start of Spark that no user can act on.
NOISE = b"WARNING: Using incubator modules"

JVM_OPTIONS = (
    # The shortest pauses of the collectors tried with this load (p99 35 ms against 59 with G1 and
    # 139 with ZGC), with a young generation large enough to be collected seldom.
    "-XX:+UseParallelGC",
    "-XX:NewRatio=1",
    # Rows live as long as their window, some seconds. Survivor spaces that shrink would push them
    # into the old generation, and emptying that stops everything for 300 ms.
    "-XX:-UseAdaptiveSizePolicy",
    "-XX:SurvivorRatio=6",
    # Spark's classes need this much; with less, five full collections happen on the way there.
    "-XX:MetaspaceSize=256m",
    # Spark's generated code is new at start and old after a minute: keep what was compiled.
    "-XX:ReservedCodeCacheSize=256m",
    # After it a thread of Kafka may be gone, and a JVM that delivers nothing would keep the lead.
    # A JVM that has ended is missed at once, and its work is recovered.
    "-XX:+ExitOnOutOfMemoryError",
    # A release job is one method of 16 KB, and by default the JVM compiles none over 8 KB.
    "-XX:-DontCompileHugeMethods",
)

#: Spark's properties for JVM options. Those of the settings are added to JVM_OPTIONS.
JAVA_OPTIONS = "spark.driver.extraJavaOptions"
EXECUTOR_OPTIONS = "spark.executor.extraJavaOptions"

#: The property with the lease of rows whose own lease has no property, and its values: no row may
#: pass, or each may. Executors start with the first; where it is not set, each may pass.
DEFAULT_LEASE = "duetime.lease"
ENDED, HELD = "0", str(2**63 - 1)

#: The error of a row whose task was started before.
STARTED_BEFORE = "this task was started before"

#: Properties that deliver each message once, and rightly: other values are refused.
REQUIRED_PROPERTIES = {
    # A retried task would send its records twice: a failed job is repeated by the pipeline, without
    # what it has sent.
    "spark.task.maxFailures": "1",
    "spark.stage.maxConsecutiveAttempts": "1",
    "spark.speculation": "false",
    # Due times are instants: the machine's zone must not matter.
    "spark.sql.session.timeZone": "UTC",
    # A bad cast is a rejected message, never a failed query.
    "spark.sql.ansi.enabled": "false",
    # Of two headers with one name the last counts, as in Kafka's own lastHeader.
    "spark.sql.mapKeyDedupPolicy": "LAST_WIN",
    # Real-time mode refuses adaptive execution, and a window of one task gains nothing by it.
    "spark.sql.adaptive.enabled": "false",
    # Kafka's batch source and sink in their second version: the first converts every row to
    # objects and back, and plans each read twice.
    "spark.sql.sources.useV1SourceList": "avro,csv,json,orc,parquet,text",
}

SPARK_PROPERTIES = REQUIRED_PROPERTIES | {
    "spark.app.name": "duetime",
    # The first record of an id is found by one pass over sorted rows, not by two.
    "spark.sql.optimizer.windowGroupLimitThreshold": "-1",
    # Plans are made while messages wait: for each column, PySpark would report its line of Python
    # to the JVM in ten calls.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
    # Only hexadecimal digits are put into lower case: to load the mappings of all languages takes a
    # second of each core at a start.
    "spark.sql.icu.caseMappings.enabled": "false",
    # No web server unless spark.ui.enabled is set in spark_properties.
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.ui.retainedExecutions": "1",
    "spark.ui.retainedJobs": "10",
    "spark.ui.retainedStages": "10",
    "spark.ui.retainedTasks": "100",
    # Rows that wait to be sorted and sent are kept from the collector, which would copy them while
    # everything stands still (p99 36 ms against 48). Allocated as it is needed.
    "spark.memory.offHeap.enabled": "true",
    "spark.memory.offHeap.size": "1g",
    # A job's code reaches its task as a broadcast, in blocks that are allocated whole: 4 MiB for
    # some 100 KiB, and alive until the next collection.
    "spark.broadcast.blockSize": "128k",
    # A window of several shards is the union of a task each, which Spark would make one task.
    "spark.sql.unionOutputPartitioning": "false",
    # A window has one task: the shuffle's defaults would make 200.
    "spark.sql.shuffle.partitions": "2",
    # Rows from the driver are few; by default there is a task of them for each core.
    "spark.default.parallelism": "2",
    # The plans of release jobs differ only in their offsets: keep all generated code.
    "spark.sql.codegen.cache.maxEntries": "1000",
    # The stage's number in the name of a class would make the same code another class in a plan of
    # more stages: each batch of a recovery has one, and was compiled again (10 s of 80).
    "spark.sql.codegen.useIdInClassName": "false",
    # The connector keeps consumers and producers for the next window, but not the records that it
    # has read.
    "spark.kafka.consumer.cache.capacity": "512",
    "spark.kafka.consumer.fetchedData.cache.timeout": "3s",
    "spark.kafka.consumer.fetchedData.cache.evictorThreadRunInterval": "2s",
    "spark.kafka.producer.cache.timeout": "30m",
    # A query's state is on the disk, and each batch writes only its changes.
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    # The one query that waits for the clock is woken by a record (`redelivery`): without this it
    # would run an empty batch each second.
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
    # A warning of PySpark for its own developers, in the Python worker of the queue tracker.
    "spark.executorEnv.PYTHONWARNINGS": "ignore::FutureWarning",
    # Wait for a query to stop, so that nothing is cut off in the middle.
    "spark.sql.streaming.stopTimeout": "8s",
}

LOCAL_PROPERTIES = {
    # No other machine needs to connect.
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}

#: For a checkpoint that is a directory of this machine.
DIRECTORY_PROPERTIES = {
    # Spark's default starts 16 processes (`stat`, `readlink`) for a rename, and each micro-batch
    # renames twice: 100 ms of a core (measured; with this, 30).
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing."
        "FileSystemBasedCheckpointFileManager"
    ),
}


def spark_session(
    settings: Settings, jars: Sequence[Path] = (), *, delivers: bool = False
) -> SparkSession:
    """Start Spark, or join the session that `spark-submit` prepared.

    `jars` are the connector's, where Spark does not have them. Properties that `spark-submit` sets
    (the master, first of all) stay as they are. Raises ConfigError for a session that `delivers`,
    where properties that it needs have other values.
    """
    if is_submitted():
        # Its properties are in its JVM, and unknown before this process is connected.
        SparkContext._ensure_initialized()  # noqa: SLF001 (PySpark's only way)
    conf = SparkConf()
    own = dict(settings.spark_properties)
    java_options = own.pop(JAVA_OPTIONS, "")
    if not conf.contains("spark.master"):
        # Executors that need Python get this one: the first on PATH may be another.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        conf.setMaster(settings.spark_master or f"local[{LOCAL_THREADS}]")
        conf.set("spark.driver.memory", settings.driver_memory)
        conf.set(JAVA_OPTIONS, " ".join((*_jvm_options(settings), java_options)))
        if jars:
            conf.set("spark.jars", ",".join(str(jar) for jar in jars))
    conf.setAll(list(own.items()))
    in_this_jvm = is_local(str(conf.get("spark.master")))
    for name, value in default_properties(settings, is_local=in_this_jvm).items():
        conf.setIfMissing(name, value)
    if delivers:
        require_properties(conf)
        if not in_this_jvm:
            _export_secrets(settings)
            options = (f"-D{DEFAULT_LEASE}={ENDED}", *JVM_OPTIONS, conf.get(EXECUTOR_OPTIONS, ""))
            conf.set(EXECUTOR_OPTIONS, " ".join(options))
    start_jvm(conf)
    secrets = {name: os.environ[name] for name in os.environ if name.startswith(TASK_VARIABLE)}
    for name, value in secrets.items():
        # Only now: what it knows before, the JVM has on its command line.
        conf.set(f"spark.executorEnv.{name}", value)
    session = SparkSession.builder.config(conf=conf).getOrCreate()
    cache_functions(jvm(session))
    for name in secrets:
        # Spark sends a session's properties with each task, and PySpark these with each function.
        session.conf.unset(f"spark.executorEnv.{name}")
        session.sparkContext.environment.pop(name, None)
    if is_submitted():
        # Its log was configured by the starter of the JVM, and has lines for every second.
        session.sparkContext.setLogLevel("ERROR")
    return session


def _export_secrets(settings: Settings) -> None:
    """Put secrets into the environment, for the driver's JVM and executors. Raises ConfigError."""
    variables = task_environment(settings)
    if is_submitted():
        system = java_class(SparkContext._jvm, "java.lang.System")  # noqa: SLF001 (PySpark's only way to it)
        needed = variables.keys() - {TASK_SECRETS}
        if missing := sorted(each for each in needed if system.getenv(each) != variables[each]):
            raise ConfigError(
                f"{missing[0]} is missing in the environment of spark-submit: export it, with the "
                "property of Kafka's client as its value, or start with duetime run --master"
            )
    os.environ.update(variables)


def is_local(master: str) -> bool:
    """Return whether a master runs all tasks in the driver's JVM."""
    return master.partition("[")[0] == "local"


def require_properties(conf: SparkConf) -> None:
    """Raise ConfigError where a session could deliver a message twice, or wrongly."""
    for name, value in REQUIRED_PROPERTIES.items():
        if (found := conf.get(name)) != value:
            raise ConfigError(
                f"{name} is {found}, and duetime delivers rightly only with {value}: remove it "
                "from spark_properties, the options of spark-submit and spark-defaults.conf"
            )


def default_properties(settings: Settings, *, is_local: bool) -> dict[str, str]:
    """Return Spark properties for which neither `spark-submit` nor the settings have a value."""
    local = LOCAL_PROPERTIES if is_local else {}
    in_directory = urlsplit(settings.checkpoint).scheme in ("", "file")
    return SPARK_PROPERTIES | local | (DIRECTORY_PROPERTIES if in_directory else {})


def _jvm_options(settings: Settings) -> tuple[str, ...]:
    # Spark's log shows errors; SPARK_LOG_LEVEL shows more.
    config = Path(__file__).with_name("log4j2.properties")
    os.environ.setdefault("SPARK_LOG_LEVEL", "error")
    # The whole heap from the start: without adaptive sizes, the young generation does not grow.
    heap = f"-Xms{settings.driver_memory}"
    # Classes that an earlier JVM has loaded are mapped.
    archive = spark_archive().read_options()
    return (*JVM_OPTIONS, *archive, heap, f"-Dlog4j2.configurationFile={config.as_uri()}")


def require_slots(spark: SparkSession, needed: int) -> None:
    """Raise SetupError where Spark cannot run this many tasks at once.

    A real-time query never reads a partition without a slot. Executors register one by one, and are
    waited for.
    """
    context: Any = spark.sparkContext._jsc.sc()  # noqa: SLF001 (PySpark's only way to it)
    profile = context.resourceProfileManager().defaultResourceProfile()

    def found() -> int:
        return int(context.maxNumConcurrentTasks(profile))

    if is_local(str(spark.sparkContext.master)):
        if found() < needed:
            raise SetupError(
                f"Spark has {found()} task slots, and the topics need {needed}: set spark_master "
                f"(or --master of spark-submit) to local[{needed}], since tasks mostly sleep"
            )
    elif not wait_until(lambda: found() >= needed, SLOTS_TIMEOUT_S):
        raise SetupError(
            f"Spark has {found()} task slots, and the topics need {needed}: give workers more "
            "cores than they have (SPARK_WORKER_CORES, spark.executor.cores): tasks mostly sleep"
        )


def start_jvm(conf: SparkConf) -> None:
    """Start the driver's JVM with these settings, unless this process has one already.

    It is in a session of its own: this process handles the signals that a terminal or a supervisor
    sends to all processes at once, and ends the JVM afterwards. The JVM ends if this process dies.
    """
    if SparkContext._gateway or is_submitted():  # noqa: SLF001 (PySpark has no other name for it)
        return
    popen = {"start_new_session": True, "stderr": PIPE}
    gateway = launch_gateway(conf, popen)  # type: ignore[no-untyped-call]
    threading.Thread(target=_copy_stderr, args=(gateway.proc.stderr,), daemon=True).start()
    SparkContext._ensure_initialized(gateway=gateway)  # noqa: SLF001 (PySpark's only way)


def _copy_stderr(lines: IO[bytes]) -> None:
    for line in lines:
        if not line.startswith(NOISE):
            sys.stderr.buffer.write(line)
            sys.stderr.flush()


def kill_jvm() -> None:
    """Kill the driver's JVM, which outlives its Spark, if this process has started one.

    While it lives, its Kafka producers request metadata every few seconds, and brokers that create
    topics on request would create deleted ones again.
    """
    if process := _detach():
        process.kill()
        process.wait()


def stop_jvm(within_s: float) -> None:
    """Let the driver's JVM end by itself within `within_s` seconds. Raises SetupError."""
    if process := _detach():
        # It ends with the program that started it, whose end closes this pipe.
        process.stdin.close()
        try:
            process.wait(within_s)
        except TimeoutExpired as error:
            process.kill()
            raise SetupError(
                f"Spark's JVM did not end within {within_s:.0f} s: try again"
            ) from error


def _detach() -> Any:  # noqa: ANN401 (py4j's gateway has no type)
    """Detach PySpark from the JVM; return its process, None if this process has started none."""
    gateway: Any = SparkContext._gateway  # noqa: SLF001 (PySpark's only way to it)
    if gateway is None or is_submitted():
        return None
    SparkContext._gateway = SparkContext._jvm = None  # noqa: SLF001 (PySpark's only way to it)
    gateway.shutdown()
    return gateway.proc


def jvm(spark: SparkSession) -> Any:  # noqa: ANN401 (py4j's view of the JVM has no type)
    """Return the driver's JVM."""
    return spark.sparkContext._jvm  # noqa: SLF001 (PySpark's only way to its JVM)


def is_alive(spark: SparkSession) -> bool:
    """Return whether the driver's JVM answers."""
    try:
        java_class(jvm(spark), "java.lang.System").nanoTime()
    except JVM_ERRORS:
        return False
    return True


def jvm_pid(spark: SparkSession) -> int:
    """Return the process id of the driver's JVM."""
    return int(java_class(jvm(spark), "java.lang.ProcessHandle").current().pid())

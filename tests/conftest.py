"""What tests share: one broker and one Spark session a process, and a writer into the wheel."""

import json
import os
import shutil
import subprocess
import time
import uuid
from contextlib import contextmanager
from itertools import count
from types import MappingProxyType

import hypothesis
import pytest
import pytest_timeout
from confluent_kafka import Producer
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)

from duetime.admin import create_topics
from duetime.client import producer_properties
from duetime.clock import SystemClock
from duetime.config import Settings
from duetime.connection import librdkafka_properties
from duetime.errors import SetupError
from duetime.local.broker import LocalBroker
from duetime.local.jars import pipeline_jars
from duetime.local.properties import HOST
from duetime.local.redis import LocalRedis
from duetime.message import LAST_WORDS, WAITING_HEADERS, MessageId
from duetime.outgoing import Wanted, scheduled
from duetime.pipeline.session import JAVA_OPTIONS, spark_session
from duetime.topics import TopicNames

#: A row of Spark's Kafka source.
RECORD = (
    "topic string, partition int, offset bigint, timestamp timestamp, key binary, value binary, "
    "headers array<struct<key:string,value:binary>>"
)

#: The settings that every process of these tests finds in its environment.
FROM_OUTSIDE = {"spark_properties"}
# Tests start many JVMs and keep each for a minute: compiling their code twice would take longer
# than it saves.
os.environ["DUETIME_SPARK_PROPERTIES"] = json.dumps({JAVA_OPTIONS: "-XX:TieredStopAtLevel=1"})

# A shared machine may stand still for seconds, at any example.
hypothesis.settings.register_profile("shared", deadline=None)
hypothesis.settings.load_profile("shared")

#: W3C Trace Context: the sender's trace goes on with whoever reads the message.
TRACE = (
    ("traceparent", b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
    ("tracestate", b"congo=t61rcWkgMzE,rojo=00f067aa0ba902b7"),
)


class SetClock:
    """Stands still until it is set."""

    def __init__(self, ms):
        self.ms = ms

    def now_ms(self):
        return self.ms


def eventually(holds, what="what was waited for", within_s=60.0):
    """Wait until it holds, and look often; gives what it gave. `what` may be made at the end."""
    until_s = time.monotonic() + within_s
    while not (found := holds()):
        assert time.monotonic() < until_s, what() if callable(what) else what
        time.sleep(0.02)
    return found


def configure(admin, topic, name, value):
    """Change one setting of a topic."""
    entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
    for changed in admin.incremental_alter_configs([resource]).values():
        changed.result()


#: Where tests share one pipeline.
SHARED = "tests/system/"
#: What starts a pipeline of its own.
OWN = (
    "checkpoint",
    "outbox",
    "queue_restart",
    "redis",
    "redis_killed",
    "restart",
    "secured",
    "stuck",
)
APART = {f"{SHARED}test_{name}.py" for name in OWN}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """All tests of the one pipeline in one process, one after the other; others file by file."""
    from xdist.scheduler import LoadFileScheduling  # noqa: PLC0415 (only where there are several)

    class OnePipeline(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return SHARED if file.startswith(SHARED) and file not in APART else file

    return OnePipeline(config, log)


def pytest_collection_modifyitems(config, items):
    """One process gets the longest first, and the others all that may go beside it."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: not item.nodeid.startswith(SHARED))


#: Seconds that whatever a test leaves behind may take to end, the session's servers included.
END_S = 120


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item):
    """A failed test's end has a limit too: pytest-timeout forgets a test once it has failed."""
    limit = pytest_timeout.Settings(
        END_S, "signal", func_only=False, disable_debugger_detection=False
    )
    item.ihook.pytest_timeout_set_timer(item=item, settings=limit)
    return (yield)


@pytest.fixture(scope="module")
def spark(_jvm_ends_well):
    """The one session of this process; a new one in the same JVM if a pipeline stopped the last."""
    return spark_session(Settings(), pipeline_jars())


@pytest.fixture(scope="session")
def _jvm_ends_well():
    yield
    from pyspark.sql import SparkSession  # noqa: PLC0415 (most tests run without Spark)

    if session := SparkSession.getActiveSession():
        session.stop()


@pytest.fixture(scope="session")
def broker(tmp_path_factory):
    """A real Kafka. Where it cannot start, tests are skipped on a laptop and fail in CI."""
    local = LocalBroker(tmp_path_factory.mktemp("kafka"))
    try:
        local.start()
    except SetupError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
    yield local
    local.stop()


def program(name, package):
    """Where it is. What is missing skips on a laptop and fails in CI."""
    found = shutil.which(name)
    if found is None:
        assert not os.environ.get("CI")
        pytest.skip(f"there is no {name} (Debian: {package})")
    return found


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory):
    """A real Redis, for whoever does not harm it. Skipped and failed as the broker is."""
    with local_redis(tmp_path_factory.mktemp("redis")) as server:
        yield server


def aerospike_url():
    """Of the server that DUETIME_AEROSPIKE=host:port names: none can be installed in CI."""
    place = os.environ.get("DUETIME_AEROSPIKE")
    if not place:
        pytest.skip("DUETIME_AEROSPIKE=host:port names no server")
    return f"aerospike://{place}" + ("" if "/" in place else "/test")


@contextmanager
def local_redis(directory, properties=MappingProxyType({})):
    """The same with a directory of its own, for who wants to harm it."""
    server = LocalRedis(directory, properties)
    try:
        server.start()
    except SetupError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A key and its certificate for this machine, each in a PEM file."""
    directory = tmp_path_factory.mktemp("tls")
    key, chain = directory / "key.pem", directory / "chain.pem"
    words = (
        f"req -x509 -newkey rsa:2048 -nodes -keyout {key} -out {chain} -days 2 -subj /CN=duetime"
    )
    alternative = ["-addext", f"subjectAltName=IP:{HOST}"]
    openssl = program("openssl", "openssl")
    subprocess.run([openssl, *words.split(), *alternative], check=True, capture_output=True)
    return key, chain


@pytest.fixture
def settings(broker):
    """Settings with a namespace of its own and a small wheel: 3 levels, 68 minutes. No topics."""
    return small_settings(broker.bootstrap)


def small_settings(bootstrap, **others):
    name = f"t{uuid.uuid4().hex[:8]}"
    small = {
        "bootstrap": bootstrap,
        "namespace": name,
        "airtel_topic": f"{name}.in.airtel",
        "countdown_topic": f"{name}.in.countdown",
        "scheduler_topic": f"{name}.in.scheduler",
        "wheel_slots": 16,
        "wheel_levels": 3,
        "lead_ms": 1_000,
        # Most tests ask what arrives, not how punctually.
        "warm_up_seconds": 0,
    }
    return Settings(**(small | others))


@pytest.fixture
def topics(settings):
    """The names of duetime's topics under `settings`, created, and deleted at the end."""
    with created_topics(settings) as names:
        yield names


@contextmanager
def created_topics(settings):
    """The same, for who has settings of another scope."""
    names = create_topics(settings)
    yield names
    # A broker for a whole session's partitions would run out of files.
    admin = AdminClient(librdkafka_properties(settings))
    for deleted in admin.delete_topics(names).values():
        deleted.result()


@pytest.fixture
def on_broker(settings, monkeypatch):
    """Makes the command use the test's own namespace on the test's broker."""
    changed = settings.model_dump(mode="json", exclude_defaults=True, exclude=FROM_OUTSIDE)
    for name, value in changed.items():
        monkeypatch.setenv(f"DUETIME_{name.upper()}", str(value))
    return settings


def dead_letters_of(settings):
    """Writes dead letters, as the pipeline does."""
    producer = Producer(librdkafka_properties(settings))

    def write(  # noqa: PLR0913 (all that a letter may have)
        topic="to",
        reason="unknown-topic",
        last_ms=2_000,
        *,
        cluster="eu",
        waits=True,
        passed_on=(),
        **record,
    ):
        failure = (reason, "so it is", "10", "1500", last_ms)
        words = (topic, "3", cluster, "1000", "0000000003e8-a", *failure)
        headers = [("h", b"\x00"), *passed_on] + [
            (name, str(word)) for name, word in zip(LAST_WORDS, words, strict=True)
        ]
        content = {"key": b"k", "value": b"\xff"} | record
        producer.produce(TopicNames(settings).dead, headers=headers, **content)
        assert not waits or producer.flush(30) == 0

    return write


@pytest.fixture
def now_ms():
    return SystemClock().now_ms()


@pytest.fixture
def wheel(settings, topics, now_ms):  # noqa: ARG001 (the topics must be there)
    """Writes what waits, as the intake would."""
    return WheelWriter(settings, now_ms)


class WheelWriter:
    """Writes records into the slots where they belong at `now_ms`, or on a level of choice."""

    def __init__(self, settings, now_ms):
        self._settings = settings
        self._now_ms = now_ms
        self._numbers = count()
        self._producer = Producer(producer_properties(settings))
        self._waits = True

    def message(  # noqa: PLR0913 (all that a message may have)
        self,
        topic,
        due_ms,
        *,
        unique=None,
        level=None,
        partition=None,
        state=None,
        passed_on=(),
        **parts,
    ):
        """Write a message; returns its id. What is `passed_on` no client would send."""
        identity = MessageId(due_ms=due_ms, unique=unique or f"m{next(self._numbers)}")
        wanted = Wanted(topic=topic, partition=partition, **parts)
        record = scheduled(
            wanted, self._settings, due_ms=due_ms, now_ms=due_ms, unique=identity.unique
        )
        address = topic, None if partition is None else str(partition)
        own = [pair for pair in record.headers if pair[0] not in WAITING_HEADERS]
        headers = _waiting(address, identity, state) + own + list(passed_on)
        self._write(identity, level, headers, (record.key, record.value))
        return identity

    def cancel(self, identity, *, level=None):
        """Write a cancel."""
        headers = _waiting((None, None), identity)
        self._write(identity, level, headers, (str(identity), None))

    def foreign(self, due_ms, headers, *, level=None):
        """Write a record that is none of duetime's."""
        topic, partition = self._slot(due_ms, level)
        self._producer.produce(topic, b"foreign", partition=partition, headers=headers)
        self._producer.flush()

    @contextmanager
    def at_once(self):
        """What is written in this block is waited for at its end."""
        self._waits = False
        yield
        self._waits = True
        self._producer.flush()

    def _write(self, identity, level, headers, key_and_value):
        topic, partition = self._slot(identity.due_ms, level)
        key, value = key_and_value
        self._producer.produce(topic, value, key, partition=partition, headers=headers)
        if self._waits:
            self._producer.flush()

    def _slot(self, due_ms, level):
        shape = self._settings.wheel
        if level is None:
            level = shape.place(due_ms, self._now_ms).level
        return f"{self._settings.namespace}.wheel.{level}", shape.number(level, due_ms) % shape.ring


def _waiting(address, identity, state=None):
    values = (*address, state, str(identity.due_ms), str(identity))
    return list(zip(WAITING_HEADERS, values, strict=True))

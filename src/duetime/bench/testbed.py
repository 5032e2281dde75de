"""Where a benchmark runs: topics and directories of its own, of which nothing is left."""

import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, NewTopic

from duetime.admin import create_topics
from duetime.config import Settings, load_settings
from duetime.connection import librdkafka_properties
from duetime.errors import KafkaError
from duetime.local.broker import LocalBroker
from duetime.topics import TopicNames

#: How long creating or deleting topics may take, in seconds.
TIMEOUT_S = 60.0

#: What the other cluster is called, where there are two.
OTHER = "other"

#: What is to be missing stays so.
BROKER = {"auto.create.topics.enable": "false"}

#: How long to wait before looking again, in seconds.
LOOK_S = 0.05


@contextmanager
def testbed(kafka: str | None, **others: Any) -> Iterator[Settings]:  # noqa: ANN401 (any setting)
    """Settings for a fresh namespace with its topics, on this cluster or on a temporary broker.

    Raises SetupError where no broker can be started, KafkaError where the cluster does not answer.
    """
    if kafka is None:
        with own_testbed(**others) as (settings, _):
            yield settings
        return
    with _scratch() as scratch:
        settings = load_settings(bootstrap=kafka, **_named(scratch), **others)
        try:
            create_topics(settings)
            yield settings
        finally:
            _end_spark()
            _delete_all(settings)
            _forget(settings)


@contextmanager
def own_testbed(**others: Any) -> Iterator[tuple[Settings, LocalBroker]]:  # noqa: ANN401 (any setting)
    """The same on a temporary broker, for who wants to harm it."""
    with _scratch() as scratch, LocalBroker(scratch / "broker", properties=BROKER) as broker:
        settings = load_settings(
            bootstrap=broker.bootstrap,
            security_protocol="PLAINTEXT",
            **_named(scratch),
            **others,
        )
        create_topics(settings)
        yield settings, broker


@contextmanager
def testbed_of_two(kafka: str | None, **others: Any) -> Iterator[Settings]:  # noqa: ANN401 (any setting)
    """The same, with another temporary broker that the settings call OTHER."""
    with (
        _scratch() as scratch,
        LocalBroker(scratch / "broker") as broker,
        testbed(kafka, clusters={OTHER: {"bootstrap": broker.bootstrap}}, **others) as settings,
    ):
        yield settings


@contextmanager
def own_store(store: str) -> Iterator[str]:
    """Where messages are to wait: of `redis`, a temporary server. Raises SetupError."""
    if store != "redis":
        yield store
        return
    # Whoever has no Redis need not have its client.
    from duetime.local.redis import LocalRedis  # noqa: PLC0415

    with _scratch() as scratch, LocalRedis(scratch / "redis") as server:
        yield server.url


def create_destinations(
    settings: Settings, names: Sequence[str], *, partitions: int = 1, cluster: str | None = None
) -> list[str]:
    """Create topics to deliver to, stamped by the broker; returns their full names."""
    topics = [destination(settings, name) for name in names]
    at = settings.at(cluster) if cluster else settings
    admin = AdminClient(librdkafka_properties(at))
    stamped = {"message.timestamp.type": "LogAppendTime"}
    wanted = [NewTopic(topic, num_partitions=partitions, config=stamped) for topic in topics]
    try:
        for future in admin.create_topics(wanted, operation_timeout=TIMEOUT_S).values():
            future.result()
        _await_partitions(admin, topics, partitions)
    except KafkaException as error:
        raise KafkaError(f"topics could not be created: {error.args[0].str()}") from error
    return topics


def _await_partitions(admin: AdminClient, topics: Sequence[str], partitions: int) -> None:
    """A topic is created a moment before every broker has heard of it."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        known = admin.list_topics(timeout=TIMEOUT_S).topics
        if all(topic in known and len(known[topic].partitions) == partitions for topic in topics):
            return
        time.sleep(LOOK_S)
    raise KafkaError(f"{topics[0]} is created but cannot be seen: look at the brokers")


def destination(settings: Settings, name: str) -> str:
    """The full name of a destination: it goes when the testbed goes."""
    return f"{settings.namespace}-{name}"


@contextmanager
def _scratch() -> Iterator[Path]:
    with (
        _ended_by_sigterm(),
        tempfile.TemporaryDirectory(prefix="duetime-bench-") as directory,
    ):
        yield Path(directory)


def _named(scratch: Path) -> dict[str, str]:
    namespace = f"bench-{secrets.token_hex(4)}"
    return {
        "namespace": namespace,
        "airtel_topic": f"{namespace}-airtel",
        "countdown_topic": f"{namespace}-countdown",
        "scheduler_topic": f"{namespace}-scheduler",
        "checkpoint": (scratch / "checkpoint").as_uri(),
    }


def _end_spark() -> None:
    if "pyspark" in sys.modules:
        # Whoever has no use for Spark need not import it.
        from duetime.pipeline.jvm import end_jvm  # noqa: PLC0415

        end_jvm()


def _delete_all(settings: Settings) -> None:
    admin = AdminClient(librdkafka_properties(settings))
    # Gone with its topics anyway, but later; and no group is no trouble.
    names = TopicNames(settings)
    admin.delete_consumer_groups([names.release_group, names.index_group])
    named = admin.list_topics(timeout=TIMEOUT_S).topics
    ours = [topic for topic in named if topic.startswith(settings.namespace)]
    for future in admin.delete_topics(ours, operation_timeout=TIMEOUT_S).values():
        future.result()


def _forget(settings: Settings) -> None:
    """Remove what is left in another store."""
    if settings.store_kind == "redis":
        # As in `own_store`.
        from duetime.stores.redis.shards import Shards  # noqa: PLC0415

        Shards(settings).forget()


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Ends the block like Ctrl-C does, so that what was started is stopped."""

    def end(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

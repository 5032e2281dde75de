"""Keeps what rows know of their destinations up to date, by what the admin client says.

It is put where a row can look it up without a join: in system properties of the JVM (`obstacles`).
Only where driver and executors share one. Elsewhere nothing is known, and everything is sent.
"""

import logging
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient, TopicMetadata
from pyspark.sql import SparkSession

from duetime import java
from duetime.config import Settings
from duetime.connection import librdkafka_properties
from duetime.errors import Reason
from duetime.pipeline.details import AT_ONCE, TIMEOUT_S, Details, Stuck, stuck_partitions
from duetime.pipeline.jvm import jvm
from duetime.pipeline.leases import hold
from duetime.pipeline.obstacles import (
    BATCH_BYTES,
    COMPACTED,
    DENIED,
    ISOLATED,
    STUCK,
    UNKNOWN,
    asked_name,
    reached_name,
    table_name,
)

log = logging.getLogger(__name__)

#: How often the cluster is asked for its topics, in seconds.
EVERY_S = 1.0

#: How often is looked whether rows have asked for a topic, in seconds.
ASKED_EVERY_S = 0.1

#: How long a cluster counts as reached after it was asked and has answered, in seconds.
REACHED_S = 4.0

#: How many topics are looked for before the cluster is asked anew: while brokers create them, what
#: counts as reached must not run out.
CREATED_AT_ONCE = 50

#: How long the records for a topic are sent one by one after one of them failed a sink, in seconds;
#: doubled each time that happens, up to a day.
ISOLATED_S, MOST_ISOLATED_S = 300.0, 86_400.0

#: How long nothing is sent to a topic that has not acknowledged a record, in seconds.
HELD_S = 30.0

#: How long a cluster is waited for at the end that did not answer before, in seconds.
CLOSE_S = 1.0

#: What a delivered record has beside what its sender wrote, at most, in bytes: its due time and id.
DELIVERED_BYTES = 512


@dataclass(slots=True)
class Trouble:
    """What a destination has done to a sink, by the monotonic clock in seconds."""

    #: How often it has failed one.
    times: int = 0
    isolated_until_s: float = 0.0
    held_until_s: float = 0.0


class Destinations:
    """Keeps the table of topics up to date, for all rows of this JVM. Thread-safe."""

    def __init__(self, spark: SparkSession, settings: Settings) -> None:
        self._settings = settings
        self._jvm = jvm(spark)
        self._system = java.java_class(self._jvm, "java.lang.System")
        hold(self._jvm, reached_name(settings), 0)
        # A cluster that is back is found soon.
        properties = {"reconnect.backoff.max.ms": 1_000} | librdkafka_properties(settings)
        self._admin = AdminClient(properties)
        # The question of a client that may create topics creates them, where brokers do so.
        self._creating = properties | {"allow.auto.create.topics": True}
        self._room = settings.max_message_bytes + DELIVERED_BYTES + BATCH_BYTES
        self._published: dict[str, str] = {}
        #: How many partitions each topic has, by the last answer. Replaced, and not changed.
        self.partitions: Mapping[str, int] = {}
        self._details = Details()
        self._troubles: dict[str, Trouble] = {}
        #: It did not answer the last time, which was told.
        self._is_silent = False
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="destinations", daemon=True)

    def start(self, *, wait: bool = True) -> None:
        """Publish what the cluster says again and again; first now, if it is waited for."""
        if wait:
            self.refresh()
        self._thread.start()

    def close(self) -> None:
        """Ask no more. What a cluster that is away was asked last is hardly waited for."""
        self._closing.set()
        self._thread.join(CLOSE_S if self._is_silent else TIMEOUT_S)

    def refresh(self) -> None:
        """Ask the cluster and publish what it says. Without an answer, the known stays known."""
        with self._lock:
            begun_s = time.monotonic()
            try:
                self._publish(self._known())
            except KafkaException as error:
                if not self._is_silent:
                    log.warning(
                        "destinations are not known anew cluster=%s error=%s",
                        self._settings.bootstrap,
                        error.args[0].str(),
                    )
                self._is_silent = True
            else:
                self._is_silent = False
                hold(self._jvm, reached_name(self._settings), begun_s + REACHED_S)

    def look_for(self, topics: Iterable[str]) -> None:
        """Look again for topics that are not known, and have brokers create them if they do so.

        Returns at once where the cluster did not answer the last time: others wait for this.
        """
        if self._is_silent or self._closing.is_set():
            return
        missing = sorted(set(topics) - self._published.keys())
        if not missing:
            return
        # For this alone: one that stayed would ask again, and bring back what somebody deletes.
        creator = Producer(self._creating)
        for topic in missing:
            try:
                creator.list_topics(topic, timeout=TIMEOUT_S)
            except KafkaException:
                break
        self.refresh()

    def isolate(self, topic: str) -> None:
        """Have each record for the topic sent by itself for a while: one has failed a sink."""
        with self._lock:
            trouble = self._troubles.setdefault(topic, Trouble())
            is_new = time.monotonic() >= trouble.isolated_until_s
            trouble.times += is_new
            pause_s = min(ISOLATED_S * 2.0 ** min(trouble.times - 1, 10), MOST_ISOLATED_S)
            trouble.isolated_until_s = time.monotonic() + pause_s
        if is_new:
            log.warning("records are sent one by one topic=%s seconds=%.0f", topic, pause_s)
            self.refresh()

    def hold(self, topic: str) -> None:
        """Have nothing sent to the topic for a moment: it has not acknowledged a record."""
        with self._lock:
            trouble = self._troubles.setdefault(topic, Trouble())
            trouble.held_until_s = time.monotonic() + HELD_S
        log.warning("nothing is sent, for lack of an answer topic=%s seconds=%.0f", topic, HELD_S)
        self.refresh()

    def knows(self, topic: str) -> bool:
        """Whether the cluster has the topic, or had it a moment ago."""
        return topic in self._published

    def _keep(self) -> None:
        refreshed_s = looked_s = time.monotonic()
        while not self._closing.wait(ASKED_EVERY_S):
            now_s = time.monotonic()
            try:
                if now_s - refreshed_s >= EVERY_S:
                    refreshed_s = now_s
                    self.refresh()
                # Not for each of the messages to a topic that nobody creates.
                if now_s - looked_s >= EVERY_S and self._look_for_asked():
                    looked_s = now_s
            except Exception:
                if self._closing.is_set():
                    return
                log.exception("could not refresh the destinations; trying again")

    def _look_for_asked(self) -> bool:
        """Whether rows have asked for any."""
        if self._system.clearProperty(asked_name(self._settings)) is None:
            return False
        begin = f"{asked_name(self._settings)}."
        # One call for all of them: there is one for each topic.
        every = java.java_class(self._jvm, "java.lang.String").join(
            "\n", self._system.getProperties().stringPropertyNames()
        )
        asked = [each for each in every.split("\n") if each.startswith(begin)]
        for each in asked:
            self._system.clearProperty(each)
        topics = [each.removeprefix(begin) for each in asked[:AT_ONCE]]
        for first in range(0, len(topics), CREATED_AT_ONCE):
            self.look_for(topics[first : first + CREATED_AT_ONCE])
        return True

    def _known(self) -> dict[str, str]:
        """What is to be said of each topic."""
        found = self._admin.list_topics(timeout=TIMEOUT_S).topics
        topics = {name: one for name, one in found.items() if one.error is None}
        self.partitions = {name: len(one.partitions) for name, one in topics.items()}
        self._details.refresh(self._admin, topics)
        now_s = time.monotonic()
        return {name: self._said(name, one, now_s) for name, one in topics.items()}

    def _said(self, topic: str, found: TopicMetadata, now_s: float) -> str:
        """The entry of the table (`obstacles`)."""
        if topic in self._details.denied:
            return DENIED
        detail, trouble = self._details.of(topic), self._troubles.get(topic, Trouble())
        is_narrow = detail.limit is not None and detail.limit < self._room
        is_isolated = detail.refuses_timestamps or now_s < trouble.isolated_until_s
        marks = COMPACTED * detail.is_compacted + ISOLATED * is_isolated
        said = f"{len(found.partitions)}:{detail.limit if is_narrow else ''}:{marks}"
        stuck = stuck_partitions(found, detail.min_insync)
        if now_s < trouble.held_until_s:
            stuck = Stuck(Reason.NOT_ACKNOWLEDGED, frozenset(found.partitions))
        return said + _stuck(stuck, found) if stuck else said.rstrip(":")

    def _publish(self, known: dict[str, str]) -> None:
        """Put into the JVM what has changed; a topic that is gone is unknown."""
        prefix = table_name(self._settings)
        gone = self._published.keys() - known.keys()
        changed = {
            f"{prefix}.{topic}": said
            for topic, said in (known | dict.fromkeys(gone, UNKNOWN)).items()
            if self._published.get(topic) != said
        }
        if changed:
            # One call for all of them.
            table = java.java_class(self._jvm, "java.util.Properties")()
            text = "\n".join(f"{name}={said}" for name, said in changed.items())
            table.load(java.java_class(self._jvm, "java.io.StringReader")(text))
            self._system.getProperties().putAll(table)
        # Last: from now on a topic without a property is unknown.
        self._system.setProperty(prefix, UNKNOWN)
        self._published = known


def _stuck(stuck: Stuck, found: TopicMetadata) -> str:
    numbers = ",".join(map(str, sorted(stuck.partitions)))
    healthy = min(found.partitions.keys() - stuck.partitions, default="")
    return STUCK.join(("", str(stuck.reason), f",{numbers},", str(healthy)))


def look_for(
    topics: Mapping[str | None, Iterable[str]], known: Mapping[str | None, Destinations]
) -> None:
    """`Destinations.look_for` of each cluster's topics; of one that nobody knows, nothing."""
    for cluster, wanted in topics.items():
        if cluster in known:
            known[cluster].look_for(wanted)

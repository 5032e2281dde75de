"""Keeps what rows know of their destinations up to date, by what the admin client says.

It is put where a row can look it up without a join: in system properties of the JVM (`obstacles`).
Only where driver and executors share one. Elsewhere nothing is known, and everything is sent.
"""

import logging
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress

from confluent_kafka import KafkaException, Producer, TopicCollection
from confluent_kafka.admin import AclOperation, AdminClient, ConfigResource, ResourceType
from pyspark.sql import SparkSession

from duetime import java
from duetime.config import Settings
from duetime.connection import librdkafka_properties
from duetime.pipeline.jvm import jvm
from duetime.pipeline.leases import hold
from duetime.pipeline.obstacles import (
    BATCH_BYTES,
    COMPACTED,
    DENIED,
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

#: How often for their limits and our rights, in seconds; of a new topic at once.
DETAILS_EVERY_S = 60.0

#: How many topics are looked for before the cluster is asked anew: while brokers create them, what
#: counts as reached must not run out.
CREATED_AT_ONCE = 50

#: How many topics are asked about in one request.
AT_ONCE = 500

#: How long one request may take, in seconds.
TIMEOUT_S = 10.0

#: How long a cluster is waited for at the end that did not answer before, in seconds.
CLOSE_S = 1.0

#: What a delivered record has beside what its sender wrote, at most, in bytes: its due time and id.
DELIVERED_BYTES = 512


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
        topics = {name: len(one.partitions) for name, one in found.items() if one.error is None}
        self.partitions = topics
        self._details.refresh(self._admin, topics)
        return {name: self._said(name, partitions) for name, partitions in topics.items()}

    def _said(self, topic: str, partitions: int) -> str:
        if topic in self._details.denied:
            return DENIED
        limit = self._details.limits.get(topic)
        narrow = limit is not None and limit < self._room
        compacted = topic in self._details.compacted
        said = f"{partitions}:{limit if narrow else ''}:{COMPACTED if compacted else ''}"
        return said.rstrip(":")

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


def look_for(
    topics: Mapping[str | None, Iterable[str]], known: Mapping[str | None, Destinations]
) -> None:
    """`Destinations.look_for` of each cluster's topics; of one that nobody knows, nothing."""
    for cluster, wanted in topics.items():
        if cluster in known:
            known[cluster].look_for(wanted)


class Details:
    """What a list of topics does not say: how large a record may be, and whether we may write."""

    def __init__(self) -> None:
        self.limits: dict[str, int | None] = {}
        self.compacted: set[str] = set()
        self.denied: set[str] = set()
        self._asked_s = -DETAILS_EVERY_S

    def refresh(self, admin: AdminClient, topics: Iterable[str]) -> None:
        """Ask for topics that are new, and for all of them once a minute."""
        everything = time.monotonic() - self._asked_s >= DETAILS_EVERY_S
        if everything:
            self._asked_s = time.monotonic()
        asked = [name for name in topics if everything or name not in self.limits]
        for begin in range(0, len(asked), AT_ONCE):
            self._ask(admin, asked[begin : begin + AT_ONCE])

    def _ask(self, admin: AdminClient, topics: list[str]) -> None:
        resources = [ConfigResource(ResourceType.TOPIC, name) for name in topics]
        for resource, answer in admin.describe_configs(
            resources, request_timeout=TIMEOUT_S
        ).items():
            # Who may not read a topic's settings finds out by being refused.
            self.limits.setdefault(resource.name, None)
            with suppress(KafkaException):
                config = answer.result()
                self.limits[resource.name] = int(config["max.message.bytes"].value)
                compacted = "compact" in config["cleanup.policy"].value
                _put(self.compacted, resource.name, is_in=compacted)
        described = admin.describe_topics(
            TopicCollection(topics), include_authorized_operations=True, request_timeout=TIMEOUT_S
        )
        for name, answer in described.items():
            with suppress(KafkaException):
                rights = answer.result().authorized_operations
                allowed = not rights or AclOperation.WRITE in rights
                _put(self.denied, name, is_in=not allowed)


def _put(names: set[str], name: str, *, is_in: bool) -> None:
    (names.add if is_in else names.discard)(name)

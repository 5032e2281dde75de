"""Which topics can be written to, as each row knows it before the sink.

A sink fails whole on one bad record, and waits a minute for a topic that does not exist. So what
the admin client says of the cluster's topics is put where a row can look it up without a join: in
system properties of the JVM. One property a topic:

    duetime.to.<topic> = <partitions>[:<bytes>][:compacted]     bytes, if it takes less than we do
                         denied                     it may not be written to
                         unknown                    it is gone; as one that has no property

Only where driver and executors share a JVM. Elsewhere nothing is known, and everything is sent.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from confluent_kafka import KafkaException, Producer, TopicCollection
from confluent_kafka.admin import AclOperation, AdminClient, ConfigResource, ResourceType
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F

from duetime import java
from duetime.config import Settings
from duetime.connection import librdkafka_properties
from duetime.envelopes import Refusal
from duetime.errors import Reason
from duetime.pipeline.jvm import jvm
from duetime.pipeline.leases import held, hold

log = logging.getLogger(__name__)

#: How often the cluster is asked for its topics, in seconds.
EVERY_S = 1.0

#: How long a cluster counts as reached after it was asked and has answered, in seconds.
REACHED_S = 4.0

#: How often for their limits and our rights, in seconds; of a new topic at once.
DETAILS_EVERY_S = 60.0

#: How many topics are asked about in one request.
AT_ONCE = 500

#: How long one request may take, in seconds.
TIMEOUT_S = 10.0

#: How long a cluster is waited for at the end that did not answer before, in seconds.
CLOSE_S = 1.0

#: What a record weighs in a batch of its own besides key, value and headers, in bytes. Source:
#: Kafka's DefaultRecordBatch (61 bytes) and DefaultRecord (at most 22 here).
BATCH_BYTES = 128

#: What a delivered record has beside what its sender wrote, at most, in bytes: its due time and id.
DELIVERED_BYTES = 512

UNKNOWN, DENIED, COMPACTED = "unknown", "denied", "compacted"


def known_of(settings: Settings, topic: Column, cluster: Column) -> Column:
    """What is known of a topic, as the table has it; null for no topic. Runs in executors.

    Of another cluster's, by a table of its own (`duetime@eu.to.<topic>`); what is not known yet,
    because that cluster did not answer yet, is null.

    Select it once, and give the selected column to `obstacles`.
    """
    prefix = _named(settings, cluster, _prefix)
    known = java.system_property(F.concat(prefix, F.lit("."), topic))
    return F.when(topic.isNotNull(), F.coalesce(known, java.system_property(prefix)))


def looked_for(settings: Settings, known: Column, topic: Column, cluster: Column) -> Column:
    """A filter for rows, always true: has a topic looked for that is not known.

    Brokers that create topics do so then, and not when the message is due, which would be late. Of
    several topics in one second one is looked for, and the others when they are due (`failures`).
    """
    asked = _named(settings, cluster, _asked)
    before = F.coalesce(java.set_system_property(asked, topic), F.lit(""))
    is_ours = cluster.isNull() | cluster.isin(*settings.clusters)
    # No topic is called so, but the optimiser does not know.
    return F.when((known == UNKNOWN) & is_ours, before != "..").otherwise(True)


def obstacles(
    known: Column, *, partition: Column, key: Column, size: Column, is_expired: Column
) -> list[Refusal]:
    """Why a row cannot be sent, in the order of the checks. Runs in executors."""
    partitions = F.split_part(known, F.lit(":"), F.lit(1)).cast("int")
    limit = F.split_part(known, F.lit(":"), F.lit(2)).cast("int")
    return [
        Refusal(
            when=is_expired,
            reason=Reason.EXPIRED,
            detail="it could only be delivered after due-expires-ms",
        ),
        Refusal(
            when=known == UNKNOWN,
            reason=Reason.UNKNOWN_TOPIC,
            detail="the destination does not exist: create it, and it is tried again",
        ),
        Refusal(
            when=known == DENIED,
            reason=Reason.NOT_AUTHORISED,
            detail="duetime may not write to the destination: give its user the right",
        ),
        Refusal(
            when=partition >= partitions,
            reason=Reason.NO_SUCH_PARTITION,
            detail="the destination has fewer partitions than due-partition asks for",
        ),
        Refusal(
            when=key.isNull() & F.endswith(known, F.lit(COMPACTED)),
            reason=Reason.NO_KEY,
            detail="the destination is compacted, and takes no message without a key",
        ),
        Refusal(
            when=limit.isNotNull() & (size > limit - BATCH_BYTES),
            reason=Reason.TOO_LARGE_FOR_TOPIC,
            detail="larger than the destination's max.message.bytes: raise it there",
        ),
    ]


def is_reached(settings: Settings) -> Column:
    """A filter for rows: true while the cluster answers, waits a while for it, then raises."""
    return held(_reached(settings), "the other cluster does not answer")


class Destinations:
    """Keeps the table of topics up to date, for all rows of this JVM. Thread-safe."""

    def __init__(self, spark: SparkSession, settings: Settings) -> None:
        self._settings = settings
        self._jvm = jvm(spark)
        self._system = java.java_class(self._jvm, "java.lang.System")
        hold(self._jvm, _reached(settings), 0)
        # A cluster that is back is found soon.
        properties = {"reconnect.backoff.max.ms": 1_000} | librdkafka_properties(settings)
        self._admin = AdminClient(properties)
        # The question of a client that may create topics creates them, where brokers do so.
        self._creating = properties | {"allow.auto.create.topics": True}
        self._room = settings.max_message_bytes + DELIVERED_BYTES + BATCH_BYTES
        self._published: dict[str, str] = {}
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
                hold(self._jvm, _reached(self._settings), begun_s + REACHED_S)

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
        while not self._closing.wait(EVERY_S):
            try:
                self.refresh()
                self._look_for_asked()
            except Exception:
                if self._closing.is_set():
                    return
                log.exception("could not refresh the destinations; trying again")

    def _look_for_asked(self) -> None:
        asked = self._system.clearProperty(_asked(self._settings))
        if asked is not None:
            self.look_for([asked])

    def _known(self) -> dict[str, str]:
        """What is to be said of each topic."""
        found = self._admin.list_topics(timeout=TIMEOUT_S).topics
        topics = {name: len(one.partitions) for name, one in found.items() if one.error is None}
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
        prefix = _prefix(self._settings)
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


def _prefix(settings: Settings) -> str:
    return f"{settings.namespace}.to"


def _asked(settings: Settings) -> str:
    return f"{settings.namespace}.asked"


def _named(settings: Settings, cluster: Column, name: Callable[[Settings], str]) -> Column:
    """The name of a property of the row's cluster."""
    found: Column = F.lit(name(settings))
    for each in settings.clusters:
        found = F.when(cluster == each, F.lit(name(settings.at(each)))).otherwise(found)
    return found


def _reached(settings: Settings) -> str:
    return f"{settings.namespace}.reached"

"""The topic metadata cache: keeps what rows know of their destinations up to date.

The driver asks Kafka for topics, their settings and its rights, and publishes the answers as system
properties of the JVMs that run tasks (`delivery_errors` has the format), where a row can look them
up without a join. `stuck_partitions` finds partitions without a leader or enough replicas;
`Router.due_now` sends the rows for them to the retry topic.
"""

import logging
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from confluent_kafka import KafkaError as BrokerError
from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient, ClusterMetadata, TopicMetadata

from duetime.core.clock import doubled_ms
from duetime.core.errors import KafkaError, Reason
from duetime.core.settings import Settings
from duetime.core.threads import PeriodicThread
from duetime.kafka.connection import librdkafka_properties
from duetime.kafka.descriptions import REQUEST_TIMEOUT_S, TopicSettings, TopicSettingsCache
from duetime.pipeline.delivery.delivery_errors import (
    BATCH_BYTES,
    COMPACTED,
    DENIED,
    ISOLATED,
    SEPARATOR,
    STUCK_REASON,
    UNKNOWN,
    reached_name,
    request_name,
    table_name,
)
from duetime.spark.task_jvms import TaskJvms

log = logging.getLogger(__name__)

#: The interval of refreshes, in seconds.
REFRESH_INTERVAL_S = 1.0

#: The interval of checks for requests of rows, in seconds.
REQUEST_INTERVAL_S = 0.1

#: How long a refresh waits for the settings of new topics, in seconds. The controller answers.
#: After its death, requests fail for some seconds until another is elected.
NEW_SETTINGS_S = 1.0

#: How long the first refresh waits for them, in seconds: two requests may be given up.
FIRST_SETTINGS_S = 3 * REQUEST_TIMEOUT_S

#: How long a cluster counts as reached after a request that it answered, in seconds.
REACHED_S = 4.0

#: Requests of rows that are served at once.
MAX_REQUESTS = 500

#: Topics that are looked up between two refreshes: while brokers create them, the lease of
#: REACHED_S must not run out.
MAX_CREATED = 50

#: How long the records for a topic are sent with reports after one of them failed a sink, in ms;
#: doubled with each failure, up to a day.
ISOLATED_MS, MAX_ISOLATED_MS = 300_000, 86_400_000

#: How long nothing is sent to a topic that has not acknowledged a record, in ms; doubled each time,
#: up to five minutes. With each, retries and isolated records for others wait too.
HELD_MS, MAX_HELD_MS = 30_000, 300_000

#: How long `close` waits for a cluster that did not answer before, in seconds.
CLOSE_S = 1.0

#: What delivery adds to a sender's record, at most, in bytes: the due time and the id.
DELIVERED_BYTES = 512


@dataclass(slots=True)
class TopicFailures:
    """The failures of a destination; instants are of the monotonic clock, in seconds."""

    #: Times that it has failed a sink.
    count: int = 0
    isolated_until_s: float = 0.0
    #: Times that it was held in a row.
    holds: int = 0
    held_until_s: float = 0.0


class TopicMetadataCache:
    """Publishes the topic metadata of one cluster for all rows. Thread-safe."""

    def __init__(self, jvms: TaskJvms, settings: Settings, cluster: str | None = None) -> None:
        """`cluster` is one of those in the settings; None is this one."""
        settings = settings.at(cluster)
        self._settings, self._jvms, self._is_here = settings, jvms, cluster is None
        jvms.extend_lease(reached_name(settings), 0)
        # A cluster that is back is found soon.
        properties = {"reconnect.backoff.max.ms": 1_000} | librdkafka_properties(settings)
        self._admin = AdminClient(properties)
        # A metadata request of a client that may create topics creates them, where brokers do so.
        self._creating = properties | {"allow.auto.create.topics": True}
        self._max_bytes = settings.max_message_bytes + DELIVERED_BYTES + BATCH_BYTES
        self._published: dict[str, str] = {}
        #: The number of partitions of each topic. Replaced by each refresh, never changed.
        self.partitions: Mapping[str, int] = {}
        #: The partitions of each topic that take no records. Replaced, too.
        self._stuck: Mapping[str, StuckPartitions] = {}
        self._topic_settings = TopicSettingsCache(self._admin)
        self._failures: dict[str, TopicFailures] = {}
        self._lock = threading.Lock()
        self._thread = PeriodicThread("topic-metadata", REQUEST_INTERVAL_S, self._poll)
        self._refreshed_s = self._requested_s = 0.0
        #: When the last request that the cluster answered was sent, and when one failed.
        self._reached_s = self._failed_s = float("-inf")

    def start(self, *, wait: bool = True) -> None:
        """Begin to refresh; with `wait`, return after the first refresh."""
        if wait:
            self.refresh(FIRST_SETTINGS_S)
        self._refreshed_s = self._requested_s = time.monotonic()
        self._thread.start()

    def close(self) -> None:
        """Stop. A request to a cluster that does not answer is waited for briefly."""
        self._thread.stop(CLOSE_S if self._is_silent else REQUEST_TIMEOUT_S)

    def _poll(self) -> None:
        now_s = time.monotonic()
        if now_s - self._refreshed_s >= REFRESH_INTERVAL_S:
            self._refreshed_s = now_s
            self.refresh()
        # Not for each message to a topic that is never created.
        if now_s - self._requested_s >= REFRESH_INTERVAL_S and self._serve_requests():
            self._requested_s = now_s

    def refresh(self, settings_timeout_s: float = NEW_SETTINGS_S) -> None:
        """Ask the cluster and publish its answer. Without an answer, the table stays as it is.

        That of another cluster has neither stuck nor unknown topics then: an outage is no failed
        attempt, and messages wait for its end.

        A new topic is published once its settings are described, or their description has failed.
        It waits for that for `settings_timeout_s` seconds at most. It publishes nothing until each
        topic was described once: a topic that is missing in the table does not exist.
        """
        with self._lock:
            started_s = time.monotonic()
            try:
                entries = self._entries(settings_timeout_s)
                if not self._topic_settings.is_complete:
                    return
                self._publish(entries)
            except KafkaException as error:
                if not self._is_silent:
                    log.warning(
                        "could not refresh topic metadata, using the cached copy "
                        "cluster=%s error=%s",
                        self._settings.bootstrap,
                        error.args[0].str(),
                    )
                self._failed_s = time.monotonic()
                if not self._is_here:
                    self._begin_outage()
            else:
                self._reached_s = started_s
                self._jvms.extend_lease(reached_name(self._settings), started_s + REACHED_S)

    def _begin_outage(self) -> None:
        self._reached_s, self._stuck = float("-inf"), {}
        self._jvms.extend_lease(reached_name(self._settings), 0)
        self._publish({name: _healthy(each) for name, each in self._published.items()}, others="")

    def _entries(self, settings_timeout_s: float) -> dict[str, str]:
        """Return the table's entry for each topic that is described. Raises KafkaException."""
        found = self._admin.list_topics(timeout=REQUEST_TIMEOUT_S)
        topics = {name: one for name, one in found.topics.items() if one.error is None}
        if not self._is_here and is_shut_down(found):
            raise KafkaException(BrokerError(BrokerError.LEADER_NOT_AVAILABLE))
        self.partitions = {name: len(one.partitions) for name, one in topics.items()}
        described = self._topic_settings.refresh(topics, settings_timeout_s)
        stuck = {
            name: stuck_partitions(topics[name], known.min_insync)
            for name, known in described.items()
            if name in topics
        }
        self._stuck = {name: partitions for name, partitions in stuck.items() if partitions}
        return {
            name: self._entry(topics[name], described[name], partitions)
            for name, partitions in stuck.items()
        }

    def _entry(
        self, found: TopicMetadata, known: TopicSettings, stuck: "StuckPartitions | None"
    ) -> str:
        if known.is_denied:
            return DENIED
        failures = self._failures.get(str(found.topic), TopicFailures())
        now_s = time.monotonic()
        is_narrow = known.max_bytes is not None and known.max_bytes < self._max_bytes
        is_isolated = known.refuses_timestamps or now_s < failures.isolated_until_s
        marks = COMPACTED * known.is_compacted + ISOLATED * is_isolated
        entry = f"{len(found.partitions)}:{known.max_bytes if is_narrow else ''}:{marks}"
        if now_s < failures.held_until_s:
            stuck = StuckPartitions(Reason.NOT_ACKNOWLEDGED, frozenset(found.partitions))
        if not stuck:
            return entry.rstrip(":")
        numbers = ",".join(map(str, sorted(stuck.partitions)))
        healthy = min(found.partitions.keys() - stuck.partitions, default="")
        return SEPARATOR.join((entry, str(stuck.reason), f",{numbers},", str(healthy)))

    def _publish(self, entries: dict[str, str], others: str = UNKNOWN) -> None:
        """Set the JVM properties that have changed; a deleted topic becomes unknown.

        `others` is the entry of each topic that has none of its own.
        """
        prefix = table_name(self._settings)
        gone = self._published.keys() - entries.keys()
        changed = {
            f"{prefix}.{topic}": entry
            for topic, entry in (entries | dict.fromkeys(gone, UNKNOWN)).items()
            if self._published.get(topic) != entry
        }
        self._jvms.publish(changed)
        # Last: from now on it is the entry of each topic without a property.
        self._jvms.publish({prefix: others})
        self._published = entries

    def _serve_requests(self) -> bool:
        """Look up the topics that rows have requested; return whether there are any."""
        topics = self._jvms.take_requests(request_name(self._settings))[:MAX_REQUESTS]
        for first in range(0, len(topics), MAX_CREATED):
            self.look_up(topics[first : first + MAX_CREATED])
        return bool(topics)

    def look_up(self, topics: Iterable[str]) -> None:
        """Refresh for topics that are unknown, which creates them where brokers do so.

        Returns at once where the cluster did not answer the last time: others wait for this.
        """
        if self._is_silent or self._thread.stopping.is_set():
            return
        missing = sorted(set(topics) - self._published.keys())
        if not missing:
            return
        # A client for this alone: one that stayed would ask again, and create deleted topics.
        creator = Producer(self._creating)
        for topic in missing:
            try:
                creator.list_topics(topic, timeout=REQUEST_TIMEOUT_S)
            except KafkaException:
                break
        self.refresh()

    def isolate(self, topic: str) -> None:
        """Have each record for the topic sent by itself for a while: one has failed a sink."""
        with self._lock:
            failures = self._failures.setdefault(topic, TopicFailures())
            is_new = time.monotonic() >= failures.isolated_until_s
            if time.monotonic() > failures.isolated_until_s + MAX_ISOLATED_MS / 1_000:
                failures.count = 0
            failures.count += is_new
            pause_s = doubled_ms(failures.count, ISOLATED_MS, MAX_ISOLATED_MS) / 1_000
            failures.isolated_until_s = time.monotonic() + pause_s
        if is_new:
            log.warning("sending records with reports topic=%s seconds=%.0f", topic, pause_s)
            self.refresh()

    def hold(self, topic: str) -> None:
        """Have nothing sent to the topic for a while: it has not acknowledged a record."""
        with self._lock:
            failures = self._failures.setdefault(topic, TopicFailures())
            now_s = time.monotonic()
            is_in_a_row = now_s < failures.held_until_s + MAX_HELD_MS / 1_000
            failures.holds = failures.holds + 1 if is_in_a_row else 1
            pause_s = doubled_ms(failures.holds, HELD_MS, MAX_HELD_MS) / 1_000
            failures.held_until_s = now_s + pause_s
        log.warning("holding records, no acknowledgement topic=%s seconds=%.0f", topic, pause_s)
        self.refresh()

    @property
    def _is_silent(self) -> bool:
        """True if the last request was not answered, which is logged."""
        return self._failed_s > self._reached_s

    @property
    def is_reached(self) -> bool:
        """True if the cluster has answered within the last seconds."""
        return time.monotonic() < self._reached_s + REACHED_S

    def require_reached(self, since_s: float) -> None:
        """Raise KafkaError if another cluster does not answer, or did not since then (monotonic).

        A batch that sends there is repeated then: an outage is no failed attempt.
        """
        if not self._is_here and (self._failed_s >= since_s or not self.is_reached):
            raise KafkaError(f"{self._settings.bootstrap} does not answer: messages for it wait")

    def is_obstructed(self, topic: str) -> bool:
        """Return whether the cluster takes no records for some of the topic, from any process.

        The cluster's metadata says so. Records that only this process cannot send do not count.
        """
        is_unknown = self._published.get(topic, UNKNOWN) in (UNKNOWN, DENIED)
        return is_unknown or topic in self._stuck

    def stuck_partitions(self, topic: str) -> frozenset[int]:
        """Return the topic's partitions without a leader, or with too few replicas in sync."""
        stuck = self._stuck.get(topic)
        return stuck.partitions if stuck else frozenset()

    def knows(self, topic: str) -> bool:
        """Return whether the cluster had the topic at the last refresh."""
        return topic in self._published


def _healthy(entry: str) -> str:
    """Return an entry without its stuck partitions."""
    return SEPARATOR.join(entry.split(SEPARATOR)[:STUCK_REASON]).rstrip(SEPARATOR)


def look_up(
    topics: Mapping[str | None, Iterable[str]], caches: Mapping[str | None, TopicMetadataCache]
) -> None:
    """Look up each cluster's topics; skip clusters that are not configured."""
    for cluster, wanted in topics.items():
        if cluster in caches:
            caches[cluster].look_up(wanted)


@dataclass(frozen=True, slots=True)
class StuckPartitions:
    """The partitions of a topic that take no records now, and the reason of the first of them."""

    reason: Reason
    partitions: frozenset[int]


def is_shut_down(found: ClusterMetadata) -> bool:
    """Return whether a cluster's last broker stops: no partition has a leader then."""
    partitions = [each for topic in found.topics.values() for each in topic.partitions.values()]
    is_last = len(found.brokers) <= 1 and bool(partitions)
    return is_last and all(each.leader < 0 for each in partitions)


def stuck_partitions(topic: TopicMetadata, min_insync: int) -> StuckPartitions | None:
    """Return the partitions without a leader or enough replicas in sync; None for none.

    Kafka caps min.insync.replicas by the number of replicas (KIP-966).
    """
    leaderless = {number for number, each in topic.partitions.items() if each.leader < 0}
    lacking = {
        number
        for number, each in topic.partitions.items()
        if len(each.isrs) < min(min_insync, len(each.replicas))
    }
    if not leaderless | lacking:
        return None
    reason = Reason.NO_LEADER if leaderless else Reason.NOT_ENOUGH_REPLICAS
    return StuckPartitions(reason, frozenset(leaderless | lacking))

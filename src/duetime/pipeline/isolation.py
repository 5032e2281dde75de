"""Which destinations made a sink fail: from now on each of their records is sent by itself.

A sink fails as a whole on one record that a broker refuses, with everybody's messages of that
window or query. What is known before (`obstacles`) never gets there. Whatever else a broker refuses
(a schema that it validates, a policy, a setting that has just changed) fails a sink once. Kafka's
own metrics say then which topics had errors. The table marks these as isolated, and what failed is
repeated: its records for these topics go to `duetime.isolated`, and from there one by one
(`isolated`), so that only a record that is refused fails.

The decisions are made on the driver. Source: KafkaProducer's sender metrics (`record-error-total`).
"""

import logging
import re
from collections.abc import Mapping

from duetime.config import Settings
from duetime.pipeline.destinations import Destinations
from duetime.pipeline.jvm import ProducerMetrics

log = logging.getLogger(__name__)

#: Where Kafka's producer names a topic in an error, before it has sent anything to it. Source:
#: ProducerBatch, KafkaProducer.waitOnMetadata, TopicAuthorizationException.
NAMED = (
    re.compile(r"Expiring \d+ record\(s\) for ([a-zA-Z0-9._-]+)-\d+:"),
    re.compile(r"Topic ([a-zA-Z0-9._-]+) not present in metadata"),
    re.compile(r"Not authorized to access topics: \[([a-zA-Z0-9._-]+)\]"),
)


class Isolation:
    """Finds the destinations that failed a sink, and isolates them. Thread-safe."""

    def __init__(
        self,
        settings: Settings,
        destinations: Mapping[str | None, Destinations],
        sends: ProducerMetrics,
    ) -> None:
        """`destinations` are by the name of the cluster; None is this one."""
        self._destinations = destinations
        self._sends = sends
        self._own = f"{settings.namespace}."
        #: How the client ids of a cluster's producers begin.
        self._clusters = {
            f"{settings.at(name).namespace.replace('@', '-')}.": name for name in settings.clusters
        }
        self._errors: dict[tuple[str, str], int] = {}

    def blame(self, error: BaseException) -> int:
        """Isolate whatever destinations made a sink fail with this error; how many there are."""
        try:
            found = self._by_metrics() | {(None, topic) for topic in named_topics(str(error))}
            return sum(self._isolate(cluster, topic) for cluster, topic in found)
        except Exception:
            # What has failed is repeated anyway.
            log.exception("could not find which destination has failed")
            return 0

    def is_quiet(self, client_id: str) -> bool:
        """Whether a producer holds no record any more: the outcome of each is known."""
        return self._sends.unacknowledged_bytes(client_id) == 0

    def _by_metrics(self) -> set[tuple[str | None, str]]:
        """The topics, by cluster, that had errors since the last time."""
        errors = self._sends.errors()
        before, self._errors = self._errors, errors
        more = [place for place, count in errors.items() if count > before.get(place, 0)]
        return {(self._cluster(client), topic) for client, topic in more}

    def _cluster(self, client_id: str) -> str | None:
        known = (name for begin, name in self._clusters.items() if client_id.startswith(begin))
        return next(known, None)

    def _isolate(self, cluster: str | None, topic: str) -> bool:
        if cluster is None and topic.startswith(self._own):
            return False
        destinations = self._destinations.get(cluster)
        # An error may name what is no topic of ours to know.
        if destinations is None or not destinations.knows(topic):
            return False
        destinations.isolate(topic)
        return True


def named_topics(error: str) -> set[str]:
    """The topics that the words of a failure name."""
    return {topic for pattern in NAMED for topic in pattern.findall(error)}

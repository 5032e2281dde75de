"""Topic settings: the limits of destinations and duetime's rights to them, as Kafka describes them.

Source: DescribeConfigs requests, and the authorized operations of topics (KIP-430).
"""

import logging
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from confluent_kafka import KafkaException
from confluent_kafka.admin import AclOperation, AdminClient, ConfigEntry

from duetime.kafka.descriptions import described_configs, described_topics

log = logging.getLogger(__name__)

#: The interval in which the settings of all topics are described, in seconds; a new topic's are
#: described at once.
SETTINGS_INTERVAL_S = 60.0

#: The timeout of a request to Kafka, in seconds.
REQUEST_TIMEOUT_S = 10.0

#: Topics in one describe request, and requests of rows that are served at once.
MAX_TOPICS = 500

#: How far a sender's clock and the way to the broker may shift a record's timestamp from the
#: broker's clock, in ms: a topic that allows less may refuse the record.
TIMESTAMP_SLACK_MS = 5_000

#: Topic settings: how far before and after the broker's clock a timestamp may be.
TIMESTAMP_LIMITS = ("message.timestamp.before.max.ms", "message.timestamp.after.max.ms")


@dataclass(frozen=True, slots=True)
class TopicSettings:
    """The settings of one topic; by default, those of a topic of which nothing is known."""

    #: max.message.bytes.
    max_bytes: int | None = None
    is_compacted: bool = False
    #: min.insync.replicas.
    min_insync: int = 1
    #: It refuses timestamps that are a few seconds off the broker's clock.
    refuses_timestamps: bool = False
    #: duetime may not write to it.
    is_denied: bool = False

    @classmethod
    def of(cls, config: Mapping[str, ConfigEntry]) -> "TopicSettings":
        """Return the settings in an answer to `describe_configs`."""
        values = {name: str(entry.value) for name, entry in config.items()}
        is_stamped = values["message.timestamp.type"] == "LogAppendTime"
        # Brokers before 3.6 have neither.
        limits = [int(values[name]) for name in TIMESTAMP_LIMITS if name in values]
        is_narrow = any(each < TIMESTAMP_SLACK_MS for each in limits)
        return cls(
            max_bytes=int(values["max.message.bytes"]),
            is_compacted="compact" in values["cleanup.policy"],
            min_insync=int(values["min.insync.replicas"]),
            refuses_timestamps=is_narrow and not is_stamped,
        )


class TopicSettingsCache:
    """Describes the settings and the rights of topics, and remembers them.

    It does so in a thread of its own: a description may wait for a broker that has just ended,
    while the table has to say which partitions have lost their leader.
    """

    def __init__(self, admin: AdminClient) -> None:
        self._admin = admin
        #: Replaced by each description, never changed.
        self._known: Mapping[str, TopicSettings] = {}
        self._described_s = -SETTINGS_INTERVAL_S
        self._thread: threading.Thread | None = None
        #: All topics were described once, or that has failed.
        self.is_complete = False

    def refresh(self, topics: Iterable[str], timeout_s: float) -> Mapping[str, TopicSettings]:
        """Describe new topics, and all of them once in SETTINGS_INTERVAL_S; return those known.

        New topics are waited for, for `timeout_s` seconds at most. Not thread-safe.
        """
        deadline_s, every = time.monotonic() + timeout_s, list(topics)
        # The description that is under way may have begun before some of the topics were there.
        for _ in range(2):
            self._begin(every)
            if self._thread and (self._new(every) or not self.is_complete):
                self._thread.join(max(deadline_s - time.monotonic(), 0.0))
        return self._known

    def _new(self, topics: list[str]) -> list[str]:
        return [name for name in topics if name not in self._known]

    def _begin(self, topics: list[str]) -> None:
        """Begin a description, if one is due and none is under way."""
        new, is_full = self._new(topics), self._is_full_due()
        if (new or is_full) and not (self._thread and self._thread.is_alive()):
            wanted = topics if is_full else new
            if is_full:
                self._described_s = time.monotonic()
            self._thread = threading.Thread(
                target=self._describe_all, args=[wanted], name="topic-settings", daemon=True
            )
            self._thread.start()

    def _is_full_due(self) -> bool:
        return time.monotonic() - self._described_s >= SETTINGS_INTERVAL_S

    def _describe_all(self, topics: list[str]) -> None:
        try:
            for first in range(0, len(topics), MAX_TOPICS):
                self._describe(topics[first : first + MAX_TOPICS])
            self.is_complete = True
        except Exception:
            log.exception("could not describe topics, will be repeated")

    def _describe(self, topics: list[str]) -> None:
        settings = described_configs(self._admin, topics, REQUEST_TIMEOUT_S)
        rights = described_topics(self._admin, topics, REQUEST_TIMEOUT_S, rights=True)
        known = dict(self._known)
        for name, answer in settings.items():
            # Without the right to describe a topic, its limits show when it refuses a record.
            before = known.setdefault(name, TopicSettings())
            with suppress(KafkaException):
                known[name] = replace(TopicSettings.of(answer.result()), is_denied=before.is_denied)
        for name, description in rights.items():
            with suppress(KafkaException):
                allowed = description.result().authorized_operations
                is_denied = bool(allowed) and AclOperation.WRITE not in allowed
                known[name] = replace(known[name], is_denied=is_denied)
        self._known = known

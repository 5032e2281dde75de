"""Descriptions of topics and of the cluster, also while the broker that is asked has just died.

`TopicSettingsCache` keeps the limits of all topics and duetime's rights to them. Source:
DescribeConfigs requests, and the authorized operations of topics (KIP-430).
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from confluent_kafka import KafkaError as BrokerError
from confluent_kafka import KafkaException, TopicCollection
from confluent_kafka.admin import (
    AclOperation,
    AdminClient,
    ConfigEntry,
    ConfigResource,
    DescribeClusterResult,
    ResourceType,
    TopicDescription,
)

from duetime.core.threads import wait_until

log = logging.getLogger(__name__)

KeyT = TypeVar("KeyT")
AnswerT = TypeVar("AnswerT")

#: The timeouts of the first tries of `admin_answers`, in seconds; the last one has what is left.
TRIES_S = 0.5, 1.0

#: How long it waits for another controller, in seconds.
CONTROLLER_S = 0.1

#: A topic to ask for when only the cluster is of interest: it need not exist.
ANY_TOPIC = "__consumer_offsets"

#: Errors of the client that a request was not answered in time.
TIMED_OUT = (BrokerError._TIMED_OUT, BrokerError._TIMED_OUT_QUEUE)  # noqa: SLF001 (their public names)

#: The interval in which the settings of all topics are described, in seconds; a new topic's are
#: described at once.
SETTINGS_INTERVAL_S = 60.0

#: The timeout of a request to Kafka, in seconds.
REQUEST_TIMEOUT_S = 10.0

#: Topics in one describe request.
MAX_TOPICS = 500

#: How far a sender's clock and the way to the broker may shift a record's timestamp from the
#: broker's clock, in ms: a topic that allows less may refuse the record.
TIMESTAMP_SLACK_MS = 5_000

#: Topic settings: how far before and after the broker's clock a timestamp may be.
TIMESTAMP_LIMITS = ("message.timestamp.before.max.ms", "message.timestamp.after.max.ms")


def admin_answers(
    admin: AdminClient, ask: Callable[[float], Mapping[KeyT, Future[AnswerT]]], timeout_s: float
) -> Mapping[KeyT, Future[AnswerT]]:
    """Return the answers of a reading admin request, each done; `ask` takes a timeout in seconds.

    librdkafka sends such a request to the controller of its last metadata. On KRaft that may be any
    broker, and until its end is noticed (`broker.session.timeout.ms`, 9 s) one that has just died.
    The client waits for it. So the request is given up soon, and repeated once Kafka names another.
    """
    deadline_s = time.monotonic() + timeout_s
    controller: int | None = None
    for try_s in TRIES_S:
        if deadline_s - time.monotonic() <= try_s:
            break
        answers = ask(try_s)
        if not any(_is_timed_out(each) for each in answers.values()):
            return answers
        controller = _other_controller(admin, controller)
    return ask(max(deadline_s - time.monotonic(), min(timeout_s, TRIES_S[0])))


def _is_timed_out(answer: Future[AnswerT]) -> bool:
    error = answer.exception()
    return isinstance(error, KafkaException) and error.args[0].code() in TIMED_OUT


def _other_controller(admin: AdminClient, than: int | None) -> int | None:
    """Have Kafka name a controller to the client until it is another one; return it."""
    named = than

    def is_other() -> bool:
        nonlocal named
        named = admin.list_topics(ANY_TOPIC, timeout=TRIES_S[-1]).controller_id
        return named != than

    with suppress(KafkaException):
        wait_until(is_other, CONTROLLER_S, CONTROLLER_S / 20)
    return named


def described_cluster(admin: AdminClient, timeout_s: float) -> DescribeClusterResult:
    """Return the description of the cluster. Raises KafkaException."""

    def ask(timeout_s: float) -> dict[None, Future[DescribeClusterResult]]:
        return {None: admin.describe_cluster(request_timeout=timeout_s)}

    return admin_answers(admin, ask, timeout_s)[None].result()


def described_configs(
    admin: AdminClient, topics: Iterable[str], timeout_s: float
) -> dict[str, Future[dict[str, ConfigEntry]]]:
    """Describe the settings of topics, by name; the answers are done."""
    resources = [ConfigResource(ResourceType.TOPIC, name) for name in topics]

    def ask(timeout_s: float) -> Mapping[ConfigResource, Future[dict[str, ConfigEntry]]]:
        return admin.describe_configs(resources, request_timeout=timeout_s)

    return {each.name: one for each, one in admin_answers(admin, ask, timeout_s).items()}


def described_topics(
    admin: AdminClient, topics: Iterable[str], timeout_s: float, *, rights: bool = False
) -> Mapping[str, Future[TopicDescription]]:
    """Describe topics, with this user's rights if asked; the answers are done."""
    asked = TopicCollection(list(topics))

    def ask(timeout_s: float) -> Mapping[str, Future[TopicDescription]]:
        found: Mapping[str, Future[TopicDescription]] = admin.describe_topics(
            asked, include_authorized_operations=rights, request_timeout=timeout_s
        )
        return found

    return admin_answers(admin, ask, timeout_s)


def describe_topic_ids(
    admin: AdminClient, topics: Iterable[str], timeout_s: float
) -> dict[str, str]:
    """Return the id of each topic that is there, as 32 hex digits. Raises KafkaException."""
    ids = {}
    for topic, described in described_topics(admin, topics, timeout_s).items():
        try:
            found: Any = described.result().topic_id
        except KafkaException as error:
            if error.args[0].code() == BrokerError.UNKNOWN_TOPIC_OR_PART:
                continue
            raise
        # Not as text, which may have a slash.
        halves = found.get_most_significant_bits(), found.get_least_significant_bits()
        ids[topic] = "".join(f"{each % 2**64:016x}" for each in halves)
    return ids


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
    while its caller has to know which partitions have lost their leader.
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

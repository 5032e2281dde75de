"""Descriptions of topics and of the cluster, also while the broker that is asked has just died."""

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from confluent_kafka import KafkaError as BrokerError
from confluent_kafka import KafkaException, TopicCollection
from confluent_kafka.admin import (
    AdminClient,
    ConfigEntry,
    ConfigResource,
    DescribeClusterResult,
    ResourceType,
    TopicDescription,
)

from duetime.core.threads import wait_until

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

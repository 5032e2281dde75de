"""Whether Kafka answers, asked first: nobody should wait a minute for a typing error."""

import time
from collections.abc import Container, Iterable
from typing import Any

from confluent_kafka import KafkaError as BrokerError
from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient, ClusterMetadata

from duetime.config import Settings
from duetime.connection import librdkafka_properties
from duetime.errors import ConfigError, KafkaError
from duetime.topics import TopicNames

#: How long Kafka may take to answer, in seconds: the second only where someone is there at all.
ANSWER_S = (1.5, 2.5)

#: That nobody is there: no patience changes it.
DOWN = (BrokerError._ALL_BROKERS_DOWN,)  # noqa: SLF001 (its public name)

#: Nor this: a wrong password, a certificate that is not trusted.
TURNED_AWAY = (
    BrokerError._AUTHENTICATION,  # noqa: SLF001 (their public names)
    BrokerError._SSL,  # noqa: SLF001
)

#: That a topic is not there.
MISSING = (BrokerError.UNKNOWN_TOPIC_OR_PART, BrokerError.TOPIC_EXCEPTION)

#: How soon a topic is there that brokers create, in seconds.
CREATED_S = 1.0


class Unanswered(Exception):
    """The cluster says nothing. Those who asked know what to do about it.

    `troubles` are all that the client had, `last` is why it gave up.
    """

    def __init__(self, troubles: list[BrokerError], last: BrokerError) -> None:
        super().__init__(last.str())
        self._turned_away = next((one for one in troubles if one.code() in TURNED_AWAY), None)
        # The first is the cause, and the others come of it.
        self._cause = troubles[0] if troubles else last

    def in_words(self, settings: Settings, advice: str) -> KafkaError:
        """One sentence: why, and what to do; `advice` is for a cluster that is not there."""
        if self._turned_away is not None:
            return KafkaError(
                f"Kafka at {settings.bootstrap} turns us away ({self._turned_away.str()}): "
                "look at security_protocol, sasl_* and ssl_*"
            )
        return KafkaError(
            f"Kafka does not answer at {settings.bootstrap} ({_shortly(self._cause)}): {advice}"
        )


class Contact:
    """An admin client that says what troubles it has.

    The client itself tries again, whatever it is told, until its time is up.
    """

    def __init__(self, settings: Settings) -> None:
        """Raises ConfigError where the client cannot work with the settings."""
        self._troubles: list[BrokerError] = []
        # No lines of librdkafka's own: what it has to say becomes part of one sentence.
        quiet: Any = {"log_level": 0, "error_cb": self._troubles.append}
        try:
            self.admin = AdminClient(librdkafka_properties(settings) | quiet)
        except KafkaException as error:
            why = error.args[0].str()
            raise ConfigError(
                f"Kafka's client cannot work with the settings ({why}): correct them"
            ) from error

    def cluster(self, looks_s: Iterable[float], hopeless: Container[int]) -> ClusterMetadata:
        """What the cluster says, asked for so long each time, in seconds.

        Raises Unanswered after the last time, and before it where a trouble is hopeless.
        """
        self._troubles.clear()
        for look_s in looks_s:
            try:
                return self.admin.list_topics(timeout=look_s)
            except KafkaException as error:
                # It calls back when it is polled.
                self.admin.poll(0)
                unanswered = Unanswered(self._troubles, error.args[0])
            if any(trouble.code() in hopeless for trouble in self._troubles):
                break
        raise unanswered


def require_intake(settings: Settings) -> ClusterMetadata:
    """What the cluster says. Raises ConfigError where it has no intake, and as `require_kafka`.

    A cluster that creates topics by itself would create it as duetime must not have it.
    """
    intake = TopicNames(settings).native
    cluster = require_kafka(settings)
    if intake not in cluster.topics:
        raise ConfigError(f"topic {intake} is missing: create it with duetime topics")
    return cluster


def create_by_asking(settings: Settings, topic: str) -> bool:
    """Whether the topic is there now: brokers that create topics do so when they are asked.

    Also true where nobody could say.
    """
    asking = Producer(librdkafka_properties(settings) | {"allow.auto.create.topics": True})
    until_s = time.monotonic() + CREATED_S
    while True:
        try:
            error = asking.list_topics(topic, timeout=sum(ANSWER_S)).topics[topic].error
        except KafkaException:
            return True
        if error is None or error.code() not in MISSING:
            return True
        if time.monotonic() > until_s:
            return False
        # The first answer is of before it was created.
        time.sleep(CREATED_S / 20)


def require_kafka(settings: Settings) -> ClusterMetadata:
    """What the cluster says. Raises ConfigError, and KafkaError if it says nothing within 4 s."""
    try:
        return Contact(settings).cluster(ANSWER_S, hopeless=DOWN + TURNED_AWAY)
    except Unanswered as error:
        raise error.in_words(
            settings, "start it with duetime up, or say with --kafka where it is"
        ) from error


def _shortly(trouble: BrokerError) -> str:
    # "host:9093/bootstrap: Connect to ipv4#127.0.0.1:9093 failed: Connection refused (after ...)"
    text = str(trouble.str()).rpartition("/bootstrap: ")[2].partition(" (after ")[0]
    return text.rpartition(": ")[2] if text.startswith("Connect to") else text

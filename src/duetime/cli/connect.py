"""Whether Kafka answers, asked first: nobody should wait a minute for a typing error."""

from pathlib import Path
from typing import Any

from confluent_kafka import KafkaError as BrokerError
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, ClusterMetadata

from duetime.cli.options import settings_from
from duetime.config import Settings
from duetime.connection import librdkafka_properties
from duetime.errors import ConfigError, KafkaError
from duetime.topics import TopicNames

#: How long Kafka may take to answer, in seconds: the second only where someone is there at all.
ANSWER_S = (1.5, 2.5)


def connected(kafka: str | None, config: Path | None) -> Settings:
    """The settings, once their cluster has answered. Raises ConfigError, KafkaError."""
    settings = settings_from(kafka, config)
    require_kafka(settings)
    return settings


def require_intake(settings: Settings) -> None:
    """Raises ConfigError where the intake topic is missing, and as `require_kafka` does.

    A cluster that creates topics by itself would create it as duetime must not have it.
    """
    intake = TopicNames(settings).native
    if intake not in require_kafka(settings).topics:
        raise ConfigError(f"topic {intake} is missing: create it with duetime topics")


def require_kafka(settings: Settings) -> ClusterMetadata:
    """What the cluster says. Raises ConfigError, and KafkaError if it says nothing within 4 s."""
    troubles: list[BrokerError] = []
    # No lines of librdkafka's own: what it has to say becomes part of one sentence.
    quiet: Any = {"log_level": 0, "error_cb": troubles.append}
    try:
        admin = AdminClient(librdkafka_properties(settings) | quiet)
    except KafkaException as error:
        raise ConfigError(
            f"Kafka's client cannot work with the settings ({error.args[0].str()}): correct them"
        ) from error
    for timeout_s in ANSWER_S:
        try:
            return admin.list_topics(timeout=timeout_s)
        except KafkaException as error:
            # It calls back when it is polled.
            admin.poll(0)
            troubles.append(error.args[0])
        if any(trouble.code() == BrokerError._ALL_BROKERS_DOWN for trouble in troubles):  # noqa: SLF001 (its public name)
            break
    raise KafkaError(
        f"Kafka does not answer at {settings.bootstrap} ({_cause(troubles[0])}): start it with "
        "duetime up, or say with --kafka where it is"
    )


def _cause(trouble: BrokerError) -> str:
    # "host:9093/bootstrap: Connect to ipv4#127.0.0.1:9093 failed: Connection refused (after ...)"
    text = str(trouble.str()).rpartition("/bootstrap: ")[2].partition(" (after ")[0]
    return text.rpartition(": ")[2] if text.startswith("Connect to") else text

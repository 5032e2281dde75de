"""Whether Kafka answers, asked first: nobody should wait a minute for a typing error."""

from pathlib import Path

import confluent_kafka
from confluent_kafka.admin import AdminClient

from duetime.cli.options import settings_from
from duetime.config import Settings
from duetime.connection import librdkafka_properties
from duetime.errors import KafkaError

#: How long Kafka may take to answer, in seconds.
ANSWER_S = 4.0


def connected(kafka: str | None, config: Path | None) -> Settings:
    """The settings, once their cluster has answered. Raises ConfigError, KafkaError."""
    settings = settings_from(kafka, config)
    require_kafka(settings)
    return settings


def require_kafka(settings: Settings) -> str:
    """The cluster's id. Raises KafkaError if nobody answers within 4 s."""
    troubles: list[str] = []
    properties: dict[str, object] = dict(librdkafka_properties(settings))
    # No lines of librdkafka's own: what it has to say becomes part of one sentence.
    properties |= {"log_level": 0, "error_cb": lambda error: troubles.append(_cause(error))}
    try:
        return AdminClient(properties).list_topics(timeout=ANSWER_S).cluster_id or "unnamed"
    except confluent_kafka.KafkaException as error:
        cause = troubles[0] if troubles else error.args[0].str()
        raise KafkaError(
            f"Kafka does not answer at {settings.bootstrap} ({cause}): start it with duetime up, "
            "or say with --kafka where it is"
        ) from error


def _cause(error: confluent_kafka.KafkaError) -> str:
    # "ssl://host:9093/bootstrap: Connect to ipv4#127.0.0.1:9093 failed: Connection refused (...)"
    text = error.str().partition(" (after ")[0]
    return text.rpartition(": ")[2] if error.code() == error._TRANSPORT else text  # noqa: SLF001 (confluent-kafka's names of codes begin so)

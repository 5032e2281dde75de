"""Connections to a cluster: the settings for Java and librdkafka, and a check that it is reachable.

Spark's connector uses Kafka's Java client and Python uses librdkafka; they name the same security
settings differently. The check comes before anything slow, so that a typo in an address fails fast.
"""

import logging
import os
import re
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaError as BrokerError
from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient, ClusterMetadata

from duetime.core.errors import ConfigError, KafkaError
from duetime.core.setting_types import Connection
from duetime.core.settings import Settings
from duetime.core.threads import wait_until
from duetime.core.topics import TopicNames

log = logging.getLogger(__name__)

Properties = dict[str, str | int | float | bool]

#: Properties whose values are secret.
SECRET = re.compile(r"jaas|password|secret|keystore\.key|key\.pem")

#: The prefix of the environment variables with secrets for tasks.
TASK_VARIABLE = "TASK_SECRET_"

#: Has Kafka's clients resolve ${env:NAME}.
ENVIRONMENT = {
    "config.providers": "env",
    "config.providers.env.class": "org.apache.kafka.common.config.provider.EnvVarConfigProvider",
}

#: Timeouts of two tries to reach the cluster, in seconds: the second only if a broker is there.
ANSWER_S = (1.5, 2.5)

#: How soon a topic exists that brokers create on demand, in seconds.
CREATED_S = 1.0

# Errors that no further try changes: no broker is there; a wrong password, or a certificate that is
# not trusted.
DOWN = (BrokerError._ALL_BROKERS_DOWN,)  # noqa: SLF001 (its public name)
TURNED_AWAY = (
    BrokerError._AUTHENTICATION,  # noqa: SLF001 (their public names)
    BrokerError._SSL,  # noqa: SLF001
)

#: Errors that a topic does not exist.
MISSING = (BrokerError.UNKNOWN_TOPIC_OR_PART, BrokerError.TOPIC_EXCEPTION)

_SCRAM = "org.apache.kafka.common.security.scram.ScramLoginModule"
_JAAS_MODULES = {
    "PLAIN": "org.apache.kafka.common.security.plain.PlainLoginModule",
    "SCRAM-SHA-256": _SCRAM,
    "SCRAM-SHA-512": _SCRAM,
}


def java_properties(settings: Connection) -> dict[str, str]:
    """Return the properties of a Java Kafka client. Raises ConfigError.

    Source: Kafka documentation, Security; KIP-651 for PEM.
    """
    properties = {
        "bootstrap.servers": settings.bootstrap,
        "security.protocol": settings.security_protocol,
    }
    if settings.sasl_mechanism:
        properties["sasl.mechanism"] = settings.sasl_mechanism
        properties["sasl.jaas.config"] = _jaas(settings)
    if settings.ssl_ca:
        properties["ssl.truststore.type"] = "PEM"
        properties["ssl.truststore.certificates"] = _read_pem("ssl_ca", settings.ssl_ca)
    if settings.ssl_certificate and settings.ssl_key:
        chain = _read_pem("ssl_certificate", settings.ssl_certificate)
        properties["ssl.keystore.type"] = "PEM"
        properties["ssl.keystore.certificate.chain"] = chain
        properties["ssl.keystore.key"] = _read_pem("ssl_key", settings.ssl_key)
    return properties | settings.java_properties


def spark_properties(settings: Settings) -> dict[str, str]:
    """Return `java_properties` as options of Spark's Kafka source and sink.

    A secret that is in the environment is named, and not copied: these options travel with tasks.
    It is the one that was there at the start: a file may have another since then. Source: KIP-421,
    KIP-887.
    """
    properties = java_properties(settings)
    for name in filter(SECRET.search, list(properties)):
        variable = secret_variable(settings, name)
        if variable in os.environ:
            properties |= ENVIRONMENT | {name: f"${{env:{variable}}}"}
    return {f"kafka.{name}": value for name, value in properties.items()}


def secret_variable(settings: Settings, name: str) -> str:
    """Return the environment variable for a secret property of the settings' cluster."""
    cluster = settings.namespace.partition("@")[2]
    words = re.sub(r"\W", "_", name).upper()
    # Names of clusters may differ in a dash, or in the case of a letter.
    return f"{TASK_VARIABLE}{words}" + (f"_{cluster.encode().hex().upper()}" if cluster else "")


def librdkafka_properties(settings: Connection) -> Properties:
    """Return the properties of a confluent-kafka client. Source: librdkafka's CONFIGURATION.md."""
    properties: Properties = {
        "bootstrap.servers": settings.bootstrap,
        "security.protocol": settings.security_protocol,
        # One sentence from us instead of librdkafka's lines on stderr.
        "log_level": 2,
        # Requests that do not go through `kafka.descriptions` wait for the next metadata where the
        # controller of the last one has died: by default, for 5 minutes.
        "topic.metadata.refresh.interval.ms": 5_000,
    }
    if settings.sasl_mechanism:
        properties["sasl.mechanism"] = settings.sasl_mechanism
        properties["sasl.username"] = settings.sasl_username or ""
        properties["sasl.password"] = _password(settings)
    paths = {
        "ssl.ca.location": settings.ssl_ca,
        "ssl.certificate.location": settings.ssl_certificate,
        "ssl.key.location": settings.ssl_key,
    }
    files = {name: str(path) for name, path in paths.items() if path}
    return properties | files | settings.librdkafka_properties


def _jaas(settings: Connection) -> str:
    module = _JAAS_MODULES.get(settings.sasl_mechanism or "")
    if module is None:
        raise ConfigError(
            f"sasl_mechanism {settings.sasl_mechanism} is not one of {', '.join(_JAAS_MODULES)}: "
            "for others, set java_properties and librdkafka_properties"
        )
    user, password = _quoted(settings.sasl_username or ""), _quoted(_password(settings))
    return f"{module} required username={user} password={password};"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _password(settings: Connection) -> str:
    return settings.sasl_password.get_secret_value() if settings.sasl_password else ""


def _read_pem(setting: str, path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{setting} cannot be read as a PEM file: {error}") from None


def ensure_reachable(settings: Settings) -> ClusterMetadata:
    """Return the cluster's metadata. Raises ConfigError, or KafkaError without it after 4 s."""
    advice = "start it with duetime up, or name its address with --kafka"
    return ClusterProbe(settings).cluster(ANSWER_S, advice, hopeless=DOWN + TURNED_AWAY)


def ensure_intake_topics(settings: Settings) -> ClusterMetadata:
    """Return the cluster's metadata. Raises as `ensure_reachable`, and ConfigError without intake.

    A cluster that creates topics on demand would create the topic with the wrong settings.
    """
    intake = TopicNames(settings).native
    cluster = ensure_reachable(settings)
    if intake not in cluster.topics:
        raise ConfigError(f"topic {intake} is missing: create it with duetime topics")
    return cluster


def create_on_demand(settings: Settings, topic: str) -> bool:
    """Ask for the topic, so that brokers that create topics do; return whether it exists.

    Also true where the cluster does not answer.
    """
    client = Producer(librdkafka_properties(settings) | {"allow.auto.create.topics": True})

    def exists() -> bool:
        try:
            error = client.list_topics(topic, timeout=sum(ANSWER_S)).topics[topic].error
        except KafkaException:
            return True
        return error is None or error.code() not in MISSING

    # The first answer is from before it was created.
    return wait_until(exists, CREATED_S, CREATED_S / 20)


class ClusterProbe:
    """An admin client that gives up on errors that no further try changes.

    librdkafka itself tries until its time is up.
    """

    def __init__(self, settings: Settings) -> None:
        """Raises ConfigError where the client cannot work with the settings."""
        self._bootstrap = settings.bootstrap
        self._errors: list[BrokerError] = []
        # No log lines of librdkafka: its errors become part of one sentence.
        quiet: Any = {"log_level": 0, "error_cb": self._errors.append}
        try:
            self.admin = AdminClient(librdkafka_properties(settings) | quiet)
        except KafkaException as error:
            why = error.args[0].str()
            raise ConfigError(
                f"Kafka's client cannot work with the settings ({why}): correct them"
            ) from error

    def cluster(
        self, timeouts_s: Iterable[float], advice: str, hopeless: Container[int] = ()
    ) -> ClusterMetadata:
        """Return the cluster's metadata, asked for once for each timeout.

        Raises KafkaError after the last one, or earlier after a hopeless error; `advice` is for a
        cluster that is not there.
        """
        self._errors.clear()
        for timeout_s in timeouts_s:
            try:
                return self.admin.list_topics(timeout=timeout_s)
            except KafkaException as error:
                # The client calls back when it is polled.
                self.admin.poll(0)
                last = error
            if any(error.code() in hopeless for error in self._errors):
                break
        raise self._unavailable(last.args[0], advice) from last

    def _unavailable(self, last: BrokerError, advice: str) -> KafkaError:
        for error in self._errors:
            if error.code() in TURNED_AWAY:
                return KafkaError(
                    f"Kafka at {self._bootstrap} turns us away ({error.str()}): "
                    "check security_protocol, sasl_* and ssl_*"
                )
        # The first error is the cause, and the others come of it. It may be
        # "host:1/bootstrap: Connect to ipv4#127.0.0.1:1 failed: Connection refused (after ...)".
        cause = self._errors[0] if self._errors else last
        why = str(cause.str()).rpartition("/bootstrap: ")[2].partition(" (after ")[0]
        if why.startswith("Connect to"):
            why = why.rpartition(": ")[2]
        return KafkaError(f"Kafka does not answer at {self._bootstrap} ({why}): {advice}")

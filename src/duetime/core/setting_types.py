"""Settings that are tables, and the error texts for settings that cannot be."""

import re
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, SecretStr

from duetime.core.errors import ConfigError, validation_words
from duetime.core.messages import MARKERS

Count = Annotated[int, Field(ge=1)]

# Patterns are in Rust's syntax, where `$` is the very end.

#: A name that becomes part of topics' names.
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,40}$")]

# A topic's name, as Kafka allows it; those of delayed topics and queues become part of ids.
Destination = Annotated[str, Field(pattern=r"^[a-zA-Z0-9._-]{1,249}$")]
DelayedName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9._-]{1,150}$")]
QueueName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9._-]{1,100}$")]

#: A pattern of the names of topics or clusters: `*` is any characters, and `?` is one.
NamePattern = Annotated[str, Field(pattern=r"^[a-zA-Z0-9._*?-]{1,249}$")]

#: The beginning of a setting's name in the environment.
PREFIX = "DUETIME_"

#: Variables that are no settings: the last is for tests, on a server that they do not start.
OTHERS = frozenset({"config", "jars", "debug", "fault", "spark_log", "aerospike"})

#: Variables that Kubernetes adds for a service that is called duetime, or duetime-..., and their
#: values.
SERVICE = re.compile(r"(\w+_)?(service_host|service_port(_\w+)?|port_\d+_(tcp|udp|sctp)(_\w+)?)")
LINK = re.compile(r"(tcp|udp|sctp)://")


def fits(name: str, patterns: Iterable[str]) -> bool:
    """Return whether one of the patterns fits the name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Allowed(_Table):
    """The destinations of messages from an intake topic."""

    topics: tuple[NamePattern, ...]
    """Patterns such as `orders-*`."""
    clusters: tuple[NamePattern, ...] = ()
    """Patterns of the other clusters where these destinations are allowed, too."""

    def allows(self, topic: str, cluster: str | None) -> bool:
        """Return whether messages may go to the topic; a cluster of None is this one."""
        return fits(topic, self.topics) and (cluster is None or fits(cluster, self.clusters))


class RetryPolicy(_Table):
    """Delivery retries for one destination; None is the general setting."""

    attempts: Count | None = None
    backoff_ms: Annotated[int, Field(ge=100)] | None = None


class DelayedTopic(_Table):
    """A delayed topic (KIP-1277), with the KIP's names."""

    model_config = ConfigDict(populate_by_name=True)

    enable: bool = Field(True, alias="delayed.delivery.enable")
    max_ms: Count = Field(900_000, alias="delayed.delivery.max.ms")


class QueueSettings(_Table):
    """A topic that is a work queue."""

    partitions: Count = 8
    """Partitions of the topic and of its markers topic, which must have as many."""
    group: str = "workers"
    """The workers' consumer group, for `stats` and `peek`."""
    markers: str | None = None
    """Topic of its markers; none is `<topic>__markers`."""
    redeliveries: NonNegativeInt = 3
    """Redeliveries of a message before it goes to `<topic>__undelivered`."""
    backoff_ms: NonNegativeInt = 0
    """Wait before the first redelivery; doubled for each further one, spread over half of it."""
    backoff_max_ms: NonNegativeInt = 3_600_000
    """Longest of these waits."""
    max_visibility_timeout_ms: Annotated[int, Field(ge=1_000)] = 43_200_000
    """Longest visibility timeout that a worker may ask for: 12 hours."""

    def markers_topic(self, topic: str) -> str:
        """Return the topic of this queue's markers."""
        return self.markers or f"{topic}{MARKERS}"

    def dead_topic(self, topic: str) -> str:
        """Return the topic of its dead letters, by kmq's name."""
        return f"{topic}__undelivered"


class Connection(_Table):
    """The connection to a cluster, for every client."""

    bootstrap: str = Field("127.0.0.1:9092", min_length=1)
    """Kafka's bootstrap servers, host:port[,...]."""
    security_protocol: str = "PLAINTEXT"
    """PLAINTEXT, SSL, SASL_PLAINTEXT or SASL_SSL, for every client."""
    sasl_mechanism: str | None = None
    """PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512, with a SASL protocol."""
    sasl_username: str | None = None
    """User name for SASL."""
    sasl_password: SecretStr | None = None
    """Password for SASL; never logged."""
    ssl_ca: Path | None = None
    """PEM file of the authorities to trust."""
    ssl_certificate: Path | None = None
    """PEM file of the client's certificate."""
    ssl_key: Path | None = None
    """PEM file (PKCS#8) of the client's private key."""
    java_properties: dict[str, str] = {}
    """Further properties of Spark's (Java) Kafka clients, such as an OAuth handler."""
    librdkafka_properties: dict[str, str] = {}
    """Further properties of the Python (librdkafka) clients."""


class Cluster(Connection):
    """Another cluster; its address has no default."""

    bootstrap: str = Field(min_length=1)
    """Its bootstrap servers, host:port[,...]."""
    probe_topic: Destination | None = None
    """A topic there whose partition 0 is for the pipeline's probes; None is no probes there."""


class ApiToken(_Table):
    """A bearer token of the HTTP API, and its permissions."""

    token: Annotated[SecretStr, Field(min_length=16)]
    topics: tuple[str, ...] | None = None
    """Patterns such as `orders-*` of the destinations that it may see and send to; None is any."""
    clusters: tuple[str, ...] = ()
    """Patterns of the other clusters where it may do so, too. A token that has neither topics nor
    clusters is for all of them; with topics and without clusters it is for this cluster."""
    rate: PositiveFloat | None = None
    """Messages that it may send per second; None is any number."""


def check_environment(environment: Mapping[str, str], known: Collection[str]) -> None:
    """Raise ConfigError for a variable that is named like a setting, but is none of the known."""
    for variable, value in environment.items():
        prefix, name = variable[: len(PREFIX)].upper(), variable[len(PREFIX) :].lower()
        is_other = name in known or name in OTHERS or SERVICE.fullmatch(name) or LINK.match(value)
        if prefix == PREFIX and not is_other:
            raise ConfigError(f"{variable} in the environment: {_no_such(name, known)}")


def setting_error(found: Mapping[str, Any], known: Collection[str]) -> str:
    """Translate an error of pydantic into a sentence that names the setting, if it is about one."""
    name = ".".join(str(part) for part in found["loc"] if part != "[key]")
    if found["type"] == "extra_forbidden" and len(found["loc"]) == 1:
        return _no_such(name, known)
    sentence = validation_words(found, named="a table")
    return f"setting {name}: {sentence}" if name else sentence


def _no_such(name: str, known: Collection[str]) -> str:
    near = get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]}?" if near else "docs/configuration.md has them all"
    return f"there is no setting {name}: {hint}"

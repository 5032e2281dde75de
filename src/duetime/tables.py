"""The tables of the configuration: what a setting has that is more than one value."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, SecretStr

#: What is called here becomes part of topics' names. In Rust's syntax, where `$` is the very end.
NAME_PATTERN = r"^[a-zA-Z0-9_-]{1,40}$"

#: A topic's name, as Kafka has them.
DESTINATION_PATTERN = r"^[a-zA-Z0-9._-]{1,249}$"

#: A delayed topic's name: with a partition and an offset it becomes part of ids.
DELAYED_PATTERN = r"^[a-zA-Z0-9._-]{1,150}$"
#: How a queue's topic may be called: it becomes part of ids, which have their length.
QUEUE_PATTERN = r"^[a-zA-Z0-9._-]{1,100}$"

#: A pattern of the names of topics or clusters: `*` is any characters, and `?` is one.
NAMES_PATTERN = r"^[a-zA-Z0-9._*?-]{1,249}$"

Names = Annotated[str, Field(pattern=NAMES_PATTERN)]


def fits(name: str, patterns: Iterable[str]) -> bool:
    """Return whether one of the patterns fits the name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


class Allowed(BaseModel):
    """Where messages may go that come in by an intake topic."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: Patterns such as `orders-*` of destinations.
    topics: tuple[Names, ...]
    #: Patterns of the other clusters where these destinations are allowed, too.
    clusters: tuple[Names, ...] = ()

    def allows(self, topic: str, cluster: str | None) -> bool:
        """Return whether messages may go there; without a cluster it is this one."""
        return fits(topic, self.topics) and (cluster is None or fits(cluster, self.clusters))


class RetryPolicy(BaseModel):
    """How messages for one destination are retried; None is what holds for all."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    attempts: Annotated[int, Field(ge=1)] | None = None
    backoff_ms: Annotated[int, Field(ge=100)] | None = None


class DelayedTopic(BaseModel):
    """A delayed topic (KIP-1277), in the KIP's own words."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    enable: bool = Field(True, alias="delayed.delivery.enable")
    max_ms: Annotated[int, Field(ge=1)] = Field(900_000, alias="delayed.delivery.max.ms")


class QueueSettings(BaseModel):
    """A topic that is a work queue: its markers, and what becomes of what is not acknowledged."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: Of its topics where duetime creates them; those that exist must have as many.
    partitions: Annotated[int, Field(ge=1)] = 8
    #: The consumer group of its workers, for those who look.
    group: str = "workers"
    #: The topic of its markers; None is `<topic>__markers`.
    markers: str | None = None
    #: How often a message is delivered again, before it goes to `<topic>__undelivered`.
    redeliveries: Annotated[int, Field(ge=0)] = 3
    #: How long after its time-out it is delivered again for the first time, doubled for each
    #: further one.
    backoff_ms: Annotated[int, Field(ge=0)] = 0
    backoff_max_ms: Annotated[int, Field(ge=0)] = 3_600_000
    #: The longest time-out that a worker may ask for: 12 hours.
    timeout_max_ms: Annotated[int, Field(ge=1_000)] = 43_200_000

    def markers_topic(self, topic: str) -> str:
        """Where the markers of this queue are."""
        return self.markers or f"{topic}__markers"

    def dead_topic(self, topic: str) -> str:
        """Where its dead letters are: kmq's name for it."""
        return f"{topic}__undelivered"


class Connection(BaseModel):
    """How a cluster is reached, by every client."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    bootstrap: str = Field(
        "127.0.0.1:9092", min_length=1, description="Kafka's bootstrap servers, host:port[,...]"
    )
    security_protocol: str = Field(
        "PLAINTEXT", description="PLAINTEXT, SSL, SASL_PLAINTEXT or SASL_SSL, for every client"
    )
    sasl_mechanism: str | None = Field(
        None, description="PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512, with a SASL protocol"
    )
    sasl_username: str | None = Field(None, description="User name for SASL")
    sasl_password: SecretStr | None = Field(None, description="Password for SASL; never logged")
    ssl_ca: Path | None = Field(None, description="PEM file of the authorities to trust")
    ssl_certificate: Path | None = Field(None, description="PEM file of the client's certificate")
    ssl_key: Path | None = Field(None, description="PEM file (PKCS#8) of the client's private key")
    java_properties: dict[str, str] = Field(
        default_factory=dict,
        description="Further properties of Spark's (Java) Kafka clients, such as an OAuth handler",
    )
    librdkafka_properties: dict[str, str] = Field(
        default_factory=dict, description="Further properties of the Python (librdkafka) clients"
    )


class Cluster(Connection):
    """Another cluster: nobody guesses where it is."""

    bootstrap: str = Field(min_length=1, description="Its bootstrap servers, host:port[,...]")
    #: A topic there whose partition 0 is for the pipeline's probes; None is no probes there.
    probe_topic: Annotated[str, Field(pattern=DESTINATION_PATTERN)] | None = None


class ApiToken(BaseModel):
    """What one who has this token may do by HTTP."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    token: Annotated[SecretStr, Field(min_length=16)]
    #: Patterns such as `orders-*` of the destinations that it may see and send to; None is any.
    topics: tuple[str, ...] | None = None
    #: Patterns of the other clusters where it may do so, too. A token that has neither topics nor
    #: clusters is for all of them; with topics and without clusters it is for this cluster.
    clusters: tuple[str, ...] = ()
    #: How many messages a second it may send; None is any number.
    rate: Annotated[float, Field(gt=0)] | None = None

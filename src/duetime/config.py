"""Every setting, once: its name, its default, and what it does.

Settings come, later over earlier, from the defaults, a TOML file (`duetime.toml`, or the file that
`DUETIME_CONFIG` names), the environment (`DUETIME_BOOTSTRAP=...`) and the command line.
"""

import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    IPvAnyNetwork,
    SecretStr,
    ValidationError,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from duetime.errors import ConfigError
from duetime.ladder import Ladder
from duetime.wheel import GRACE_MS, Wheel

#: What is called here becomes part of topics' names. In Rust's syntax, where `$` is the very end.
NAME_PATTERN = r"^[a-zA-Z0-9_-]{1,40}$"

#: How long the cascade of a far slot may take until its first window is planned, in ms.
CASCADE_MS = 1_000


class RetryPolicy(BaseModel):
    """How messages for one destination are retried; None is what holds for all."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    attempts: Annotated[int, Field(ge=1)] | None = None
    backoff_ms: Annotated[int, Field(ge=100)] | None = None


class Connection(BaseModel):
    """How a cluster is reached, by every client."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    bootstrap: str = Field(
        "127.0.0.1:9092", description="Kafka's bootstrap servers, host:port[,...]"
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

    bootstrap: str = Field(description="Its bootstrap servers, host:port[,...]")


class Settings(Connection, BaseSettings):
    """The configuration of one duetime. Frozen once read."""

    model_config = SettingsConfigDict(env_prefix="DUETIME_", extra="forbid", frozen=True)

    clusters: dict[Annotated[str, Field(pattern=NAME_PATTERN)], Cluster] = Field(
        default_factory=dict,
        description="Other clusters that messages may be for, by the name that `due-cluster` calls "
        "them: a table each with `bootstrap` and what else is needed to reach it",
    )
    namespace: str = Field(
        "duetime",
        pattern=NAME_PATTERN,
        description="Prefix of duetime's own topics and groups; two on one cluster need two names",
    )
    airtel_topic: str = Field(
        "event_delayer_publisher", description="Intake topic of the Airtel JSON envelope"
    )
    countdown_topic: str = Field(
        "duetime.in.countdown", description="Intake topic of the countdown JSON envelope"
    )
    scheduler_topic: str = Field(
        "duetime.in.scheduler", description="Intake topic of etf1's scheduler-* headers"
    )
    intake_partitions: Annotated[int, Field(ge=1)] = Field(
        4, description="Partitions of the native intake topic where duetime creates it"
    )
    replication_factor: int = Field(
        -1, description="Replicas of the topics that duetime creates; -1 is the cluster's default"
    )
    max_message_bytes: Annotated[int, Field(ge=1_024, le=64 * 1024 * 1024)] = Field(
        1_000_000, description="Largest key + value + headers that is taken in, in bytes"
    )

    horizon_ms: int = Field(
        4_000,
        description="What is due sooner than this goes through the lanes; what is later waits",
    )
    lead_ms: Annotated[int, Field(ge=0)] = Field(
        2_000, description="How long before its second begins a release window is planned"
    )
    rescue_every_ms: Annotated[int, Field(ge=1_000)] = Field(
        10_000,
        description="How often is looked for messages that are past due and were not released",
    )
    wheel_tick_ms: int = Field(1_000, description="Width of a slot, and of a release window, in ms")
    wheel_slots: int = Field(64, description="Slots that make one slot of the next level")
    wheel_levels: int = Field(5, description="Levels of the wheel; 5 reach 34 years")
    batch_seconds: Annotated[int, Field(ge=5)] = Field(
        180,
        description="How long a real-time batch lasts: intake and lanes commit at its end, and "
        "pause for up to a second",
    )
    job_messages: Annotated[int, Field(ge=1_000)] = Field(
        250_000, description="The most messages that one cascade or rescue job takes at a time"
    )

    retry_attempts: Annotated[int, Field(ge=1)] = Field(
        10, description="How often a message is tried to be delivered before it is a dead letter"
    )
    retry_backoff_ms: Annotated[int, Field(ge=100)] = Field(
        1_000, description="How long before the first retry; doubled for each further one"
    )
    retry_backoff_max_ms: Annotated[int, Field(ge=100)] = Field(
        3_600_000, description="The longest time between two tries"
    )
    retry_topics: dict[str, RetryPolicy] = Field(
        default_factory=dict,
        description="`attempts` and `backoff_ms` of some destinations, by their topic",
    )

    callback_hosts: list[str] = Field(
        default_factory=list,
        description="Hosts that failure callbacks may go to, such as `hooks.example.com` and "
        "`*.example.com`, or with a port but 80 and 443 `hooks:8443`; none is no callbacks",
    )
    callback_networks: list[IPvAnyNetwork] = Field(
        default_factory=list,
        description="Networks that callbacks may reach although they are loopback, link-local or "
        "otherwise special, such as `127.0.0.0/8`",
    )
    callback_attempts: Annotated[int, Field(ge=1)] = Field(
        5, description="How often a callback is tried"
    )
    callback_timeout_seconds: Annotated[float, Field(gt=0)] = Field(
        10.0, description="How long one try of a callback may take"
    )

    warm_up_seconds: Annotated[int, Field(ge=0)] = Field(
        45,
        description="How long the pipeline may warm up until it is punctual and says that it is "
        "ready; 0 is not at all: the first windows are seconds late then",
    )
    checkpoint: str = Field(
        "",
        description="Where the streaming queries keep their offsets: a directory, or a URL of a "
        "file system that Spark knows (hdfs:, s3a:); `duetime up` keeps them in its data directory",
    )
    driver_memory: str = Field("2g", description="Heap of Spark's driver JVM")
    spark_properties: dict[str, str] = Field(
        default_factory=dict,
        description="Further Spark properties, over duetime's own; the JVM's options in "
        "`spark.driver.extraJavaOptions` are added to them",
    )

    @model_validator(mode="after")
    def _times_fit_together(self) -> "Settings":
        if self.horizon_ms < self.lead_ms + self.wheel_tick_ms:
            raise ValueError(
                f"horizon_ms ({self.horizon_ms}) must be at least lead_ms + wheel_tick_ms "
                f"({self.lead_ms + self.wheel_tick_ms}), or windows would "
                "be planned before they are full"
            )
        if self.horizon_ms > GRACE_MS:
            raise ValueError(f"horizon_ms must not be over {GRACE_MS}")
        # A far slot is cascaded GRACE_MS after it closes, and its first message's window comes
        # soon.
        closes_ms = self.wheel.overlap(0) * self.wheel_tick_ms
        if self.wheel_levels > 1 and closes_ms < GRACE_MS + self.lead_ms + CASCADE_MS:
            raise ValueError(
                f"3/8 of wheel_slots, rounded down, x wheel_tick_ms ({closes_ms}) must be at least "
                f"{GRACE_MS + self.lead_ms + CASCADE_MS}, or cascades would miss their windows"
            )
        return self

    @property
    def wheel(self) -> Wheel:
        """The wheel's shape."""
        return Wheel(tick_ms=self.wheel_tick_ms, slots=self.wheel_slots, levels=self.wheel_levels)

    def at(self, cluster: str) -> "Settings":
        """The same for clients of another cluster, whose names are told apart from those here."""
        others = dict(self.clusters[cluster])
        return self.model_copy(update=others | {"namespace": f"{self.namespace}@{cluster}"})

    @property
    def ladder(self) -> Ladder:
        """The lanes' waits; no setting, because records already in lanes depend on it."""
        return Ladder()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 (no .env file is read)
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003 (nor a secrets directory)
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Command line over environment over file over defaults."""
        file = TomlConfigSettingsSource(settings_cls, config_file())
        return init_settings, env_settings, file


def config_file() -> Path:
    """The TOML file that is read if it exists."""
    return Path(os.environ.get("DUETIME_CONFIG", "duetime.toml"))


def load_settings(**overrides: Any) -> Settings:  # noqa: ANN401 (any setting's value)
    """Read the settings; `overrides` that are None are left out.

    Raises ConfigError, one sentence naming the setting.
    """
    named = os.environ.get("DUETIME_CONFIG")
    if named and not Path(named).is_file():
        raise ConfigError(f"DUETIME_CONFIG names {named}, which is no file: correct it or unset it")
    given = {name: value for name, value in overrides.items() if value is not None}
    try:
        return Settings(**given)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"]) or "settings"
        message = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"setting {name}: {message}") from None
    except ValueError as error:
        raise ConfigError(f"{config_file()} cannot be read: {error}") from None

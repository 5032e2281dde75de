"""Every setting, once: its name, its default, and what it does.

Settings come, later over earlier, from the defaults, a TOML file (`duetime.toml`, or the file that
`DUETIME_CONFIG` names), the environment (`DUETIME_BOOTSTRAP=...`) and the command line.
"""

import os
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    IPvAnyNetwork,
    PrivateAttr,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from duetime.clock import parse_instant
from duetime.errors import ConfigError
from duetime.ladder import Ladder
from duetime.misnamed import PREFIX, check_environment, told
from duetime.tables import (
    DELAYED_PATTERN,
    NAME_PATTERN,
    QUEUE_PATTERN,
    Allowed,
    ApiToken,
    Cluster,
    Connection,
    DelayedTopic,
    QueueSettings,
    RetryPolicy,
)
from duetime.wheel import GRACE_MS, Wheel

#: Where the first start may begin, besides an instant and a group's offsets.
EARLIEST, LATEST = "earliest", "latest"

#: How long the cascade of a far slot may take until its first window is planned, in ms.
CASCADE_MS = 1_000

#: What names a store, or begins its URL, and which store that is.
STORES = {"kafka": "kafka", "redis": "redis", "rediss": "redis", "aerospike": "aerospike"}

#: The largest message that Aerospike takes: a record there has less than 1 MiB, with our headers
#: and what the server itself adds.
AEROSPIKE_BYTES = 900_000


#: How the log is written.
LogFormat = Literal["text", "json"]


#: Settings are asked for it with each message that is sent; making one checks it.
_wheel = lru_cache(Wheel)


class Settings(Connection, BaseSettings):
    """The configuration of one duetime. Frozen once read."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True)

    clusters: dict[Annotated[str, Field(pattern=NAME_PATTERN)], Cluster] = Field(
        default_factory=dict,
        description="Other clusters that messages may be for, by the name that `due-cluster` calls "
        "them: a table each with `bootstrap` and what else is needed to reach it, and perhaps "
        "with a `probe_topic` there ([metrics](operating.md#metrics))",
    )
    namespace: str = Field(
        "duetime",
        pattern=NAME_PATTERN,
        description="Prefix of duetime's own topics and groups; two on one cluster need two names, "
        "and other names for the three intake topics below",
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
    delayed_topics: dict[Annotated[str, Field(pattern=DELAYED_PATTERN)], DelayedTopic] = Field(
        default_factory=dict,
        description="Delayed topics (KIP-1277), by their name: a table each with "
        '`"delayed.delivery.enable" = true`, and perhaps `"delayed.delivery.max.ms"` for another '
        "limit than 15 minutes; what is sent to `orders.delayed` appears on `orders`",
    )
    allow: dict[str, Allowed] = Field(
        default_factory=dict,
        description="Where messages may go, by the intake topic that they come in by: a table each "
        "with `topics` (patterns) and perhaps `clusters`; what comes in by a topic without a table "
        "may go anywhere ([security](operating.md#who-may-send-where))",
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

    store: SecretStr = Field(
        SecretStr("kafka"),
        description="Where messages wait: `kafka`, or `redis://user:password@host:port/db` "
        "(`rediss://...` with TLS), or `aerospike://host:port/namespace`; never logged",
    )
    store_shards: Annotated[int, Field(ge=1, le=1_024)] = Field(
        4, description="Parts that the Redis store is divided into, once and for all"
    )
    aerospike_notices: bool = Field(
        False,
        description="Take messages up when Aerospike tells that their id has expired (Enterprise "
        "Edition's connector), and not by windows",
    )
    aerospike_topic: str = Field(
        "as_outbound_msgid_set", description="Topic of Aerospike's notices, in flat JSON"
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
    metrics_port: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        None, description="Where Prometheus asks `duetime run` and `up` for metrics; none: nowhere"
    )
    metrics_host: str = Field(
        "127.0.0.1", description="The address that metrics are served on; 0.0.0.0 is all of them"
    )
    log_format: LogFormat = Field(
        "text",
        description="How `duetime run`, `up` and `api` log, on stderr: `text` for people, or "
        "`json`, an object a line",
    )
    probes: bool = Field(
        True,
        description="Whether the pipeline that leads sends two messages of its own a second, to "
        "measure how late they come; only where metrics_port is set",
    )
    batch_records: Annotated[int, Field(ge=1)] = Field(
        200_000,
        description="How many records a batch has at most when what was in flight is finished, "
        "after a stop or a crash: each batch is committed",
    )
    job_messages: Annotated[int, Field(ge=1_000)] = Field(
        250_000,
        description="The most messages that one rescue job takes at a time; a slot is always one "
        "job",
    )

    transactional_delivery: bool = Field(
        False,
        description="Deliver what is due here in Kafka's transactions, so that no request that was "
        "held up counts later: some ms later, and for consumers that read committed records "
        "([why](guarantees.md#delivery-in-transactions))",
    )
    retry_attempts: Annotated[int, Field(ge=1)] = Field(
        10, description="How often a message is tried to be delivered before it is a dead letter"
    )
    retry_backoff_ms: Annotated[int, Field(ge=100)] = Field(
        1_000, description="How long before the first retry; doubled for each further one"
    )
    retry_backoff_max_ms: Annotated[int, Field(ge=100)] = Field(
        3_600_000,
        description="The longest time between two tries; each leaves a copy in `duetime.failed` "
        "for so long, however many there are",
    )
    retry_topics: dict[str, RetryPolicy] = Field(
        default_factory=dict,
        description="`attempts` and `backoff_ms` of some destinations, by their topic",
    )

    queues: dict[Annotated[str, Field(pattern=QUEUE_PATTERN)], QueueSettings] = Field(
        default_factory=dict,
        description="Topics that are work queues, a table each with `partitions`, `group`, "
        "`markers`, `redeliveries`, `backoff_ms`, `backoff_max_ms` and `timeout_max_ms`: see "
        "docs/queue.md",
    )

    callback_hosts: list[str] = Field(
        default_factory=list,
        description="Hosts that failure callbacks may go to, such as `hooks.example.com` and "
        "`*.example.com`, or with a port but 80 and 443 `hooks:8443`; none is no callbacks",
    )
    callback_networks: list[IPvAnyNetwork] = Field(
        default_factory=list,
        description="Networks that callbacks may reach although they are private, loopback, "
        "link-local or otherwise not of the Internet, such as `10.0.0.0/8`",
    )
    callback_attempts: Annotated[int, Field(ge=1)] = Field(
        5, description="How often a callback is tried"
    )
    callback_timeout_seconds: Annotated[float, Field(gt=0)] = Field(
        10.0, description="How long one try of a callback may take"
    )

    api_host: str = Field(
        "127.0.0.1",
        description="The address that `duetime api` listens on; any but loopback needs api_tokens",
    )
    api_port: Annotated[int, Field(ge=1, le=65535)] = Field(8080, description="Its port")
    api_tokens: dict[Annotated[str, Field(pattern=NAME_PATTERN)], ApiToken] = Field(
        default_factory=dict,
        description="Who may use it, by name: a table each with `token`, and if need be `topics` "
        "(patterns), `clusters` (patterns of other clusters where these topics are meant, too) and "
        "`rate` (messages a second); none is everybody on this machine",
    )
    api_tls_certificate: Path | None = Field(
        None, description="PEM file of its certificate; with api_tls_key it speaks HTTPS only"
    )
    api_tls_key: Path | None = Field(None, description="PEM file of that certificate's key")
    api_body_bytes: Annotated[int, Field(ge=1_024)] = Field(
        16 * 1024 * 1024, description="The largest body of a request"
    )
    api_bodies_bytes: Annotated[int, Field(ge=1_024)] | None = Field(
        None,
        description="How much of all bodies is held at once, but for the first 64 KiB of each: a "
        "request that finds no room is answered with 503 `busy`; none is four times api_body_bytes",
    )
    api_connections: Annotated[int, Field(ge=1)] = Field(
        900, description="The most connections at a time; each may take a file descriptor"
    )
    api_batch_messages: Annotated[int, Field(ge=1)] = Field(
        1_000, description="The most messages in one request"
    )
    api_request_seconds: Annotated[float, Field(gt=0)] = Field(
        30.0, description="How long a request may take"
    )

    api_spool: Path | None = Field(
        None,
        description="The file for what is accepted while Kafka does not answer, one for each "
        "`duetime api`; none is ~/.local/share/duetime/spool.db, or in the --data of `duetime up`",
    )
    api_spool_bytes: Annotated[int, Field(ge=1024 * 1024)] = Field(
        1024 * 1024 * 1024, description="How large it may become"
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
    start_from: str = Field(
        "",
        description="Where the first start begins to read intake topics that another service may "
        "have read: `earliest`, `latest`, an instant such as `2026-12-24T18:00:00Z`, or a consumer "
        "group whose committed offsets are taken over; later starts ignore it "
        "([why](operating.md#the-first-start))",
    )
    driver_memory: str = Field("2g", description="Heap of Spark's driver JVM")
    spark_properties: dict[str, str] = Field(
        default_factory=dict,
        description="Further Spark properties, over duetime's own; the JVM's options in "
        "`spark.driver.extraJavaOptions` are added to them",
    )

    #: No setting: which term of the lead plans are made for; 0 outside of any. See `in_term`.
    _term: int = PrivateAttr(0)

    @field_validator("store")
    @classmethod
    def _store_is_known(cls, store: SecretStr) -> SecretStr:
        named, url, _ = store.get_secret_value().partition("://")
        if named not in STORES or bool(url) != (named != "kafka"):
            raise ValueError(
                "must be kafka, redis://host:port/db, rediss://host:port/db or "
                "aerospike://host:port/namespace"
            )
        return store

    @field_validator("start_from")
    @classmethod
    def _start_is_an_instant_or_a_name(cls, start_from: str) -> str:
        try:
            datetime.fromisoformat(start_from)
        except ValueError:
            return start_from
        parse_instant(start_from)
        return start_from

    @model_validator(mode="after")
    def _the_largest_body_has_room(self) -> "Settings":
        if self.bodies_bytes < self.api_body_bytes:
            raise ValueError(
                f"api_bodies_bytes ({self.bodies_bytes}) must be at least api_body_bytes "
                f"({self.api_body_bytes}), or the largest body would never find room"
            )
        return self

    @model_validator(mode="after")
    def _allow_names_intake_topics(self) -> "Settings":
        # A misspelt name would allow everything.
        own = f"{self.namespace}.in"
        known = (own, f"{own}.tx", self.airtel_topic, self.countdown_topic, self.scheduler_topic)
        for name in self.allow:
            if name not in known:
                raise ValueError(
                    f"allow names {name}, which is no intake topic: name one of {', '.join(known)}"
                )
        return self

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
    def store_kind(self) -> str:
        """`kafka`, `redis` or `aerospike`."""
        return STORES[self.store.get_secret_value().partition("://")[0]]

    @property
    def largest_bytes(self) -> int:
        """Largest message that is taken in, in bytes: `max_message_bytes`, or less for a store."""
        if self.store_kind == "aerospike":
            return min(self.max_message_bytes, AEROSPIKE_BYTES)
        return self.max_message_bytes

    @property
    def bodies_bytes(self) -> int:
        """How much of all bodies the API holds at once, in bytes."""
        return self.api_bodies_bytes or 4 * self.api_body_bytes

    @property
    def wheel(self) -> Wheel:
        """The wheel's shape."""
        return _wheel(tick_ms=self.wheel_tick_ms, slots=self.wheel_slots, levels=self.wheel_levels)

    def at(self, cluster: str) -> "Settings":
        """The same for clients of another cluster, whose names are told apart from those here."""
        there = self.clusters[cluster]
        others = {name: getattr(there, name) for name in Connection.model_fields}
        return self.model_copy(update=others | {"namespace": f"{self.namespace}@{cluster}"})

    @property
    def term(self) -> int:
        """The term of the lead for which plans are made with these settings; 0 outside of any."""
        return self._term

    def in_term(self, term: int) -> "Settings":
        """Return the same settings for plans whose rows are sent only in this term of the lead."""
        settings = self.model_copy()
        settings._term = term  # noqa: SLF001 (its own class)
        return settings

    def queue(self, topic: str) -> QueueSettings:
        """What is configured of a queue. Raises ConfigError."""
        if topic not in self.queues:
            raise ConfigError(f"{topic} is no queue of the configuration: add it to queues")
        return self.queues[topic]

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


def is_submitted() -> bool:
    """Whether `spark-submit` has started this program: its JVM is there, and set up, already."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def config_file() -> Path:
    """The TOML file that is read if it exists."""
    return Path(os.environ.get("DUETIME_CONFIG", "duetime.toml"))


def is_file(path: Path) -> bool:
    """Whether it is there. Raises ConfigError where this user cannot know."""
    try:
        return path.is_file()
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{path} cannot be read ({error.strerror}): let this user read it, or name another file "
        "with --config or DUETIME_CONFIG"
    )


def load_settings(**overrides: Any) -> Settings:  # noqa: ANN401 (any setting's value)
    """Read the settings; `overrides` that are None are left out.

    Raises ConfigError, one sentence naming the setting.
    """
    named = os.environ.get("DUETIME_CONFIG")
    if named and not is_file(Path(named)):
        raise ConfigError(f"DUETIME_CONFIG names {named}, which is no file: correct it or unset it")
    given = {name: value for name, value in overrides.items() if value is not None}
    check_environment(os.environ, Settings.model_fields)
    try:
        return Settings(**given)
    except ValidationError as error:
        raise ConfigError(told(error.errors()[0], Settings.model_fields)) from None
    except SettingsError as error:
        # Of the environment. Its words begin with the field's name, in quotes.
        name = str(error).partition('"')[2].partition('"')[0]
        raise ConfigError(f"setting {name}: in the environment it must be JSON") from None
    except OSError as error:
        raise _unreadable(config_file(), error) from None
    except ValueError as error:
        raise ConfigError(f"{config_file()} cannot be read: {error}") from None

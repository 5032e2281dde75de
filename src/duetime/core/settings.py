"""Every setting, once: its name, its default, and its meaning.

Settings come, later over earlier, from the defaults, a TOML file (`duetime.toml`, or the file that
`DUETIME_CONFIG` names), the environment (`DUETIME_BOOTSTRAP=...`) and the command line.
"""

import os
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AwareDatetime,
    Field,
    IPvAnyNetwork,
    PositiveFloat,
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

from duetime.core.clock import parse_instant
from duetime.core.errors import ConfigError
from duetime.core.setting_types import (
    PREFIX,
    Allowed,
    ApiToken,
    Cluster,
    Connection,
    Count,
    DelayedName,
    DelayedTopic,
    Name,
    QueueName,
    QueueSettings,
    RetryPolicy,
    check_environment,
    setting_error,
)
from duetime.core.timer_wheel import GRACE_MS, DelayLanes, Wheel

#: Values of start_from, besides an instant and a consumer group.
EARLIEST, LATEST = "earliest", "latest"

#: How long the cascade of a far slot may take until its first window is planned, in ms.
CASCADE_MS = 1_000

#: The stores, by the setting, or the beginning of its URL.
STORES = {"kafka": "kafka", "redis": "redis", "rediss": "redis", "aerospike": "aerospike"}

#: The largest message that Aerospike takes: a record there has less than 1 MiB, with our headers
#: and what the server itself adds.
AEROSPIKE_BYTES = 900_000

LogFormat = Literal["text", "json"]
Port = Annotated[int, Field(ge=1, le=65535)]

#: A slot's partitions; a window is a task each, and a level has 128 slots.
SlotPartitionCount = Annotated[int, Field(ge=1, le=64)]

# Cached, because each message that is sent asks for it, and making one checks it.
_wheel = lru_cache(Wheel)


class Settings(Connection, BaseSettings):
    """The configuration of one duetime. Frozen once read."""

    model_config = SettingsConfigDict(env_prefix=PREFIX)

    clusters: dict[Name, Cluster] = {}
    """Other clusters that messages may be for, by the name in `due-cluster`: a table each with the
    settings of its connection, and `probe_topic` for probes ([metrics](monitoring.md#probes))."""
    namespace: Name = "duetime"
    """Prefix of duetime's topics and groups; two on one cluster need two names, and other names for
    the three intake topics below."""
    airtel_topic: str = "event_delayer_publisher"
    """Intake topic of the Airtel JSON envelope."""
    countdown_topic: str = "duetime.in.countdown"
    """Intake topic of the countdown JSON envelope."""
    scheduler_topic: str = "duetime.in.scheduler"
    """Intake topic of etf1's scheduler-* headers."""
    delayed_topics: dict[DelayedName, DelayedTopic] = {}
    """Delayed topics (KIP-1277), by name: a table each with `"delayed.delivery.enable" = true`, and
    `"delayed.delivery.max.ms"` for another limit than 15 minutes; records of `orders.delayed`
    appear on `orders`."""
    allow: dict[str, Allowed] = {}
    """Allowed destinations, by intake topic: a table each with `topics` (patterns) and `clusters`;
    an intake topic without a table has no restriction
    ([security](security.md))."""
    intake_partitions: Count = 4
    """Partitions of the native intake topic where duetime creates it."""
    replication_factor: int = -1
    """Replicas of the topics that duetime creates; -1 is the cluster's default."""
    max_message_bytes: Annotated[int, Field(ge=1_024, le=64 * 1024 * 1024)] = 1_000_000
    """Largest key + value + headers that is taken in, in bytes."""

    store: SecretStr = SecretStr("kafka")
    """Store of pending messages: `kafka`, `redis://user:password@host:port/db` (`rediss://...` with
    TLS), or `aerospike://host:port/namespace`; never logged."""
    redis_shards: Annotated[int, Field(ge=1, le=1_024)] = 4
    """Shards of the Redis store; cannot be changed later."""
    aerospike_expiry_notifications: bool = False
    """Release messages when Aerospike reports that their id has expired (Enterprise Edition's
    connector), in place of windows."""
    aerospike_expiry_topic: str = "as_outbound_msgid_set"
    """Topic of Aerospike's notifications, in flat JSON."""

    short_delay_threshold_ms: int = 4_000
    """Messages that are due sooner go through the lanes, others to the store."""
    release_lead_ms: Annotated[int, Field(ge=0)] = 2_000
    """Lead of a release window: the time from its planning to its first instant."""
    overdue_scan_interval_ms: Annotated[int, Field(ge=1_000)] = 10_000
    """Interval of the scan for messages past their time."""
    wheel_tick_ms: int = 1_000
    """Width of a slot, and of a release window, in ms."""
    wheel_slots: int = 64
    """Slots that make one slot of the next level."""
    wheel_levels: int = 5
    """Levels of the wheel; 5 reach 34 years."""
    slot_partitions: SlotPartitionCount = 1
    """Partitions of a slot of the wheel, each a task of its window: more messages a second."""
    slot_partitions_since: dict[AwareDatetime, SlotPartitionCount] = Field(default_factory=dict)
    """Later changes of that number: by instant, the number for slots that are new since then."""
    checkpoint_interval_seconds: Annotated[int, Field(ge=5)] = 1_800
    """Duration of a real-time batch: intake and lanes commit at its end, and pause for up to two
    seconds. At most 180 s where their progress is not kept."""
    metrics_port: Port | None = None
    """Port of the Prometheus metrics of `duetime run` and `up`; none is off."""
    metrics_host: str = "127.0.0.1"
    """Address that metrics are served on; 0.0.0.0 is all of them."""
    log_format: LogFormat = "text"
    """Log format of `duetime run`, `up` and `api`, on stderr: `text` for people, or `json`, an
    object a line."""
    probes: bool = True
    """Send two probe messages a second from the leader, to measure lateness; only where
    metrics_port is set."""
    probe_timeout_seconds: Annotated[float, Field(ge=20)] = 120
    """How long the leader's probes may be missing until it starts again, so that a standby that is
    warm leads."""
    recovery_batch_records: Count = 100_000
    """Most records of a batch while work in flight is finished after a stop or a crash; each batch
    is committed."""
    max_messages_per_job: Annotated[int, Field(ge=1_000)] = 250_000
    """Most messages of one overdue release job; a slot is always one job."""

    transactional_delivery: bool = False
    """Deliver to this cluster in Kafka transactions, so that a request that was held up has no
    effect later: some ms slower, and for consumers that read committed records
    ([why](recovery.md#delivery-in-transactions))."""
    max_delivery_attempts: Count = 10
    """Delivery attempts before a message becomes a dead letter."""
    retry_backoff_ms: Annotated[int, Field(ge=100)] = 1_000
    """Wait before the first retry; doubled for each further one."""
    retry_backoff_max_ms: Annotated[int, Field(ge=100)] = 3_600_000
    """Longest wait between two attempts; for that long, each attempt leaves a copy in
    `duetime.retry`."""
    retry_topics: dict[str, RetryPolicy] = {}
    """`attempts` and `backoff_ms` of some destinations, by their topic."""

    queues: dict[QueueName, QueueSettings] = {}
    """Topics that are work queues, a table each with `partitions`, `group`, `markers`,
    `redeliveries`, `backoff_ms`, `backoff_max_ms` and `max_visibility_timeout_ms`: see
    [queues](queue.md)."""

    webhook_hosts: list[str] = []
    """Hosts of failure webhooks, such as `hooks.example.com` and `*.example.com`, or with another
    port than 80 and 443 `hooks:8443`; empty disables webhooks."""
    webhook_networks: list[IPvAnyNetwork] = []
    """Networks that webhooks may reach although they are private, loopback, link-local or otherwise
    not of the Internet, such as `10.0.0.0/8`."""
    webhook_attempts: Count = 5
    """Attempts of a webhook."""
    webhook_timeout_seconds: PositiveFloat = 10.0
    """Timeout of one attempt of a webhook."""

    api_host: str = "127.0.0.1"
    """Address that `duetime api` listens on; any but loopback needs api_tokens."""
    api_port: Port = 8080
    """Port of the API."""
    api_tokens: dict[Name, ApiToken] = {}
    """Tokens of the API, by user name: a table each with `token`, and optionally `topics`
    (patterns), `clusters` (patterns of other clusters with these topics) and `rate` (messages a
    second); none is everybody on this machine."""
    api_tls_certificate: Path | None = None
    """PEM file of the API's certificate; with api_tls_key it speaks HTTPS only."""
    api_tls_key: Path | None = None
    """PEM file of that certificate's key."""
    api_max_body_bytes: Annotated[int, Field(ge=1_024)] = 16 * 1024 * 1024
    """Largest body of a request."""
    api_max_buffered_bytes: Annotated[int, Field(ge=1_024)] | None = None
    """Most bytes of all bodies at once, without the first 64 KiB of each: a request beyond that is
    answered with 503 `busy`; none is four times api_max_body_bytes."""
    api_max_connections: Count = 900
    """Most connections at a time; each may take a file descriptor."""
    api_max_batch_size: Count = 1_000
    """Most messages in one request."""
    api_request_timeout_seconds: PositiveFloat = 30.0
    """Timeout of a request."""

    api_spool: Path | None = None
    """File of messages that are accepted while Kafka is down, one for each `duetime api`; none is
    ~/.local/share/duetime/spool.db, or in the --data of `duetime up`."""
    api_max_spool_bytes: Annotated[int, Field(ge=1024 * 1024)] = 1024 * 1024 * 1024
    """Largest size of that file."""

    takeover_seconds: Annotated[float, Field(ge=1, le=4)] = 1.5
    """How long the leader may be silent until a standby leads; a leader with a standby sends
    nothing, and may lose its JVM, when it could not show itself for that long."""
    warm_up_seconds: Annotated[int, Field(ge=0)] = 45
    """Longest warm-up until the pipeline is punctual and reports that it is ready; with 0 there is
    none, and the first windows are seconds late."""
    checkpoint: str = ""
    """Directory of the streaming queries' offsets, or a URL of a file system that Spark knows
    (hdfs:, s3a:); `duetime up` keeps them in its data directory."""
    start_from: str = ""
    """Starting point of the first start in intake topics that another service may have read:
    `earliest`, `latest`, an instant such as `2026-12-24T18:00:00Z`, or a consumer group whose
    committed offsets are taken over; later starts ignore it ([why](starting.md#the-first-start)).
    """
    spark_master: str = ""
    """Master of a Spark cluster, as `spark://host:7077`; by default, Spark runs in this process."""
    max_clock_skew_ms: Annotated[int, Field(ge=10)] = 500
    """Executors whose clock is further from the driver's send nothing, in ms."""
    driver_memory: str = "2g"
    """Heap of Spark's driver JVM."""
    spark_properties: dict[str, str] = {}
    """Further Spark properties, over duetime's, except those that delivery depends on; the JVM's
    options in `spark.driver.extraJavaOptions` are added to them."""

    # No setting: see `in_term`.
    _term: int = PrivateAttr(0)

    @field_validator("store")
    @classmethod
    def _check_store(cls, store: SecretStr) -> SecretStr:
        named, url, _ = store.get_secret_value().partition("://")
        if named not in STORES or bool(url) != (named != "kafka"):
            raise ValueError(
                "must be kafka, redis://host:port/db, rediss://host:port/db or "
                "aerospike://host:port/namespace"
            )
        return store

    @field_validator("start_from")
    @classmethod
    def _check_start(cls, start_from: str) -> str:
        try:
            datetime.fromisoformat(start_from)
        except ValueError:
            return start_from
        parse_instant(start_from)
        return start_from

    @model_validator(mode="after")
    def _check_body_limits(self) -> "Settings":
        if self.bodies_bytes < self.api_max_body_bytes:
            raise ValueError(
                f"api_max_buffered_bytes ({self.bodies_bytes}) must be at least api_max_body_bytes "
                f"({self.api_max_body_bytes}), or the largest body would never find room"
            )
        return self

    @model_validator(mode="after")
    def _check_allow(self) -> "Settings":
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
    def _check_times(self) -> "Settings":
        threshold_ms = self.short_delay_threshold_ms
        if threshold_ms < (least_ms := self.release_lead_ms + self.wheel_tick_ms):
            raise ValueError(
                f"short_delay_threshold_ms ({threshold_ms}) must be at least release_lead_ms + "
                f"wheel_tick_ms ({least_ms}), or windows would be planned before they are full"
            )
        if threshold_ms > GRACE_MS:
            raise ValueError(f"short_delay_threshold_ms must not be over {GRACE_MS}")
        # A far slot is cascaded GRACE_MS after it closes, and its first message's window comes
        # soon.
        closes_ms = self.wheel.overlap(0) * self.wheel_tick_ms
        least_ms = GRACE_MS + self.release_lead_ms + CASCADE_MS
        if self.wheel_levels > 1 and closes_ms < least_ms:
            raise ValueError(
                f"3/8 of wheel_slots, rounded down, x wheel_tick_ms ({closes_ms}) must be at least "
                f"{least_ms}, or cascades would miss their windows"
            )
        return self

    @property
    def store_kind(self) -> str:
        """`kafka`, `redis` or `aerospike`."""
        return STORES[self.store.get_secret_value().partition("://")[0]]

    @property
    def largest_bytes(self) -> int:
        """The largest message that is taken in, in bytes: the store may take less."""
        if self.store_kind == "aerospike":
            return min(self.max_message_bytes, AEROSPIKE_BYTES)
        return self.max_message_bytes

    @property
    def bodies_bytes(self) -> int:
        """The most bytes of all request bodies that the API holds at once."""
        return self.api_max_buffered_bytes or 4 * self.api_max_body_bytes

    @property
    def api_url(self) -> str:
        """The address of the HTTP API, without a slash at the end."""
        host = f"[{self.api_host}]" if ":" in self.api_host else self.api_host
        return f"http{'s' if self.api_tls_key else ''}://{host}:{self.api_port}"

    @property
    def wheel(self) -> Wheel:
        """The wheel's shape."""
        return _wheel(
            tick_ms=self.wheel_tick_ms,
            slots=self.wheel_slots,
            levels=self.wheel_levels,
            shards=((0, self.slot_partitions), *self._later_slot_partitions()),
        )

    def _later_slot_partitions(self) -> list[tuple[int, int]]:
        later = sorted(self.slot_partitions_since.items())
        return [(int(since.timestamp() * 1_000), count) for since, count in later]

    @property
    def delay_lanes(self) -> DelayLanes:
        """The lanes' waits; no setting, because records already in lanes depend on it."""
        return DelayLanes()

    def at(self, cluster: str | None) -> "Settings":
        """Return the settings for clients of a cluster; None is this one.

        Another cluster's namespace is `namespace@cluster`.
        """
        if cluster is None:
            return self
        there = self.clusters[cluster]
        others = {name: getattr(there, name) for name in Connection.model_fields}
        return self.model_copy(update=others | {"namespace": f"{self.namespace}@{cluster}"})

    @property
    def term(self) -> int:
        """The leader's term for which plans are made with these settings; 0 outside of any."""
        return self._term

    def in_term(self, term: int) -> "Settings":
        """Return the settings for plans whose rows are sent only in this leader's term."""
        settings = self.model_copy()
        settings._term = term  # noqa: SLF001 (of the same class)
        return settings

    def queue(self, topic: str) -> QueueSettings:
        """Return the settings of a queue. Raises ConfigError."""
        if topic not in self.queues:
            raise ConfigError(f"{topic} is no queue of the configuration: add it to queues")
        return self.queues[topic]

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 (no .env file is read)
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003 (nor a secrets directory)
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Rank the command line over the environment over the file over the defaults."""
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, config_file())


def load_settings(**overrides: Any) -> Settings:  # noqa: ANN401 (any setting's value)
    """Read the settings; `overrides` that are None are left out.

    Raises ConfigError, one sentence that names the setting.
    """
    named = os.environ.get("DUETIME_CONFIG")
    if named and not is_file(Path(named)):
        raise ConfigError(f"DUETIME_CONFIG names {named}, which is no file: correct it or unset it")
    check_environment(os.environ, Settings.model_fields)
    try:
        return Settings(**{name: each for name, each in overrides.items() if each is not None})
    except ValidationError as error:
        raise ConfigError(setting_error(error.errors()[0], Settings.model_fields)) from None
    except SettingsError as error:
        # Of the environment. The message begins with the field's name, in quotes.
        name = str(error).partition('"')[2].partition('"')[0]
        raise ConfigError(f"setting {name}: in the environment it must be JSON") from None
    except OSError as error:
        raise _unreadable(config_file(), error) from None
    except ValueError as error:
        raise ConfigError(f"{config_file()} cannot be read: {error}") from None


def with_bootstrap(settings: Settings | None, bootstrap: str | None) -> Settings:
    """Return the settings, by default those of the environment, with another bootstrap if given."""
    if settings is None:
        return load_settings(bootstrap=bootstrap)
    return settings.model_copy(update={"bootstrap": bootstrap}) if bootstrap else settings


def config_file() -> Path:
    """Return the path of the TOML file, which need not exist."""
    return Path(os.environ.get("DUETIME_CONFIG", "duetime.toml"))


def is_file(path: Path) -> bool:
    """Return whether the file exists. Raises ConfigError where this user cannot know."""
    try:
        return path.is_file()
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{path} cannot be read ({error.strerror}): let this user read it, or name another file "
        "with --config or DUETIME_CONFIG"
    )


def is_submitted() -> bool:
    """Return whether `spark-submit` has started this program: its JVM runs already."""
    return "PYSPARK_GATEWAY_PORT" in os.environ

"""The connection to Redis, and what must be so before messages are trusted to it."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from redis import Redis
from redis.backoff import ExponentialBackoff
from redis.exceptions import ConnectionError as NoConnection
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as NoAnswer
from redis.retry import Retry

from duetime.config import Settings
from duetime.errors import ConfigError, StoreError

#: How long one command may take, in seconds (a large claim is one), and how long connecting.
TIMEOUT_S, CONNECT_S = 10.0, 2.0

#: How often a command is tried again where the connection broke, and the longest pause, in seconds:
#: a server that is started again is no reason to fail.
RETRIES, PAUSE_S = 4, 0.5

#: The oldest release that has all commands used here (ZRANGESTORE).
OLDEST = (6, 2)


def client(settings: Settings, *, saving: bool = False) -> Redis:
    """The connections of this process, of which one is opened for each thread that asks.

    Every script and command here may be repeated, so what breaks is tried again. Not so long after
    a save that had no answer: what it has saved may have been delivered meanwhile.
    """
    errors = (NoConnection,) if saving else (NoConnection, NoAnswer)
    return _client(settings.store.get_secret_value(), errors)


@cache
def _client(url: str, errors: tuple[type[RedisError], ...]) -> Redis:
    return Redis.from_url(
        url,
        socket_timeout=TIMEOUT_S,
        socket_connect_timeout=CONNECT_S,
        retry=Retry(ExponentialBackoff(cap=PAUSE_S, base=0.01), RETRIES, errors),
        retry_on_error=list(errors),
    )


@contextmanager
def answering(settings: Settings) -> Iterator[None]:
    """What Redis says becomes a sentence. Raises StoreError."""
    try:
        yield
    except RedisError as error:
        raise StoreError(
            f"Redis at {place(settings)} does not answer as it should ({_words(error)}): see that "
            "it is up, that this is its address, and that user and password are its own"
        ) from None


def place(settings: Settings) -> str:
    """Where the server is, without user and password: host:port/database."""
    known = client(settings).connection_pool.connection_kwargs
    host, port = known.get("host", "localhost"), known.get("port", 6379)
    return f"{host}:{port}/{known.get('db', 0)}"


def look_at(settings: Settings) -> str:
    """What kind of server it is, in words.

    Raises StoreError, and ConfigError where it would lose messages.
    """
    with answering(settings):
        told = client(settings).info()
    version = str(told["redis_version"])
    _require_kept(told, place(settings), version)
    return f"Redis {version} at {place(settings)} keeps an append-only file, and evicts nothing"


def _require_kept(told: dict[str, Any], where: str, version: str) -> None:
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        raise ConfigError(f"Redis at {where} is {version}: use 6.2 or newer")
    if told.get("redis_mode") == "cluster" or told.get("cluster_enabled"):
        raise ConfigError(
            f"Redis at {where} is a cluster, over which no script of ours can work: use one "
            "server, with replicas if you like"
        )
    policy = str(told.get("maxmemory_policy", "noeviction"))
    if policy != "noeviction":
        raise ConfigError(
            f"Redis at {where} has maxmemory-policy {policy}, which removes messages that wait "
            "when memory is short: set noeviction"
        )
    if not told.get("aof_enabled"):
        raise ConfigError(
            f"Redis at {where} keeps no append-only file, so what waits would be lost when it "
            "stops: set appendonly yes"
        )


def _words(error: RedisError) -> str:
    # Of a pipeline's command it tells what the command was, which may have some of a message.
    _, _, said = str(error).rpartition("caused error: ")
    return " ".join(said.split()) or type(error).__name__

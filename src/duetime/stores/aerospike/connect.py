"""The connection to Aerospike: `aerospike://user:password@host:port/namespace`."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from urllib.parse import unquote, urlsplit

import aerospike
from aerospike.exception import AerospikeError

from duetime.config import Settings
from duetime.errors import ConfigError, StoreError

#: The server's port where the URL has none.
PORT = 3_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where the server is, and who we are there."""

    host: str
    port: int
    namespace: str
    user: str | None = None
    password: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return f"{self.host}:{self.port}/{self.namespace}"


def address(settings: Settings) -> Address:
    """What the setting `store` says. Raises ConfigError."""
    try:
        url = urlsplit(settings.store.get_secret_value())
        host, port, namespace = url.hostname, url.port or PORT, url.path.strip("/")
    except ValueError:
        host, port, namespace = None, PORT, ""
    if not (host and namespace) or "/" in namespace:
        raise ConfigError("setting store: write aerospike://host:port/namespace")
    return Address(
        host=host,
        port=port,
        namespace=namespace,
        user=unquote(url.username) if url.username else None,
        password=unquote(url.password) if url.password else None,
    )


@cache
def client(at: Address) -> aerospike.Client:
    """The connections of this process. Raises AerospikeError."""
    config: dict[str, object] = {"hosts": [(at.host, at.port)]}
    if at.user:
        config |= {"user": at.user, "password": at.password or ""}
    return aerospike.client(config)


@contextmanager
def answering(at: Address) -> Iterator[None]:
    """What the server says becomes a sentence. Raises StoreError."""
    try:
        yield
    except AerospikeError as error:
        words = " ".join(str(getattr(error, "msg", None) or type(error).__name__).split())
        raise StoreError(
            f"Aerospike at {at} does not answer as it should ({words}): see that it is up, that "
            "this is its address and namespace, and that user and password are its own"
        ) from None


def look_at(settings: Settings) -> str:
    """That it answers, in words. Raises StoreError, and ConfigError for an address that is none."""
    at = address(settings)
    with answering(at):
        nodes = len(client(at).get_nodes())
    return f"Aerospike at {at} answers, of a cluster of {nodes}"

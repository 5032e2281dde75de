"""The API as a server: where it listens, and what it refuses to begin with."""

import gc
import ipaddress
import logging
import socket
import ssl
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from duetime.api.address import url
from duetime.api.app import create_app
from duetime.api.connections import connection
from duetime.api.services import open_spool
from duetime.config import Settings
from duetime.errors import ConfigError
from duetime.local.ports import require_free

log = logging.getLogger(__name__)

#: How many objects are made, and not freed yet, before Python looks for cycles among them. A batch
#: makes thousands that are all alive at once: by default Python looks several times in each. To
#: look through 50,000 stops everybody for 30 to 60 ms, each second; through these, for 3.
YOUNG = 5_000

#: How long requests that are under way may take at the end, in seconds.
GRACE_S = 5


def serve(settings: Settings) -> None:
    """Answer until a signal, under settings that were checked."""
    serving = server(settings)
    _collect_seldom()
    log.info("listening url=%s dashboard=%s/", url(settings), url(settings))
    serving.run()


def _collect_seldom() -> None:
    """Look for garbage seldom, and never among what is there from the start."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG)


class Server(uvicorn.Server):
    """Ends events before it waits for what is under way: they would go on for ever."""

    def __init__(self, app: FastAPI, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._app = app

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer what is under way, and end."""
        self._app.state.services.watch.end()
        await super().shutdown(sockets)


def server(settings: Settings) -> uvicorn.Server:
    """The server, not yet listening."""
    app = create_app(settings)
    return Server(
        app,
        uvicorn.Config(
            app,
            host=settings.api_host,
            port=settings.api_port,
            http=connection(settings.api_connections),
            ssl_certfile=_text(settings.api_tls_certificate),
            ssl_keyfile=_text(settings.api_tls_key),
            # A line a request would have everybody's ids, and cost more than the request.
            access_log=False,
            log_config=None,
            server_header=False,
            # Nobody asks where a request came from: what a proxy says of that need not be read.
            proxy_headers=False,
            timeout_graceful_shutdown=GRACE_S,
        ),
    )


def check(settings: Settings) -> None:
    """Raise ConfigError for what would be unsafe, SetupError where nobody can listen."""
    if not settings.api_tokens and not _is_loopback(settings.api_host):
        raise ConfigError(
            f"api_host {settings.api_host} is not this machine alone: add a token to api_tokens, "
            "or listen on 127.0.0.1"
        )
    certificate, key = settings.api_tls_certificate, settings.api_tls_key
    if bool(certificate) != bool(key):
        raise ConfigError("api_tls_certificate and api_tls_key go together: set both, or neither")
    if certificate and key:
        _check_pair(certificate, key)
    require_free(settings.api_port)
    open_spool(settings).close()


def check_spool(settings: Settings, cluster_id: str) -> None:
    """Raise SetupError where the spool's messages are for another cluster than answers."""
    open_spool(settings, cluster_id).close()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_pair(certificate: Path, key: Path) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"api_tls_certificate and api_tls_key are no pair of PEM files ({error}): correct them"
        ) from None


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)

"""Failure callbacks: who wants to know that a message died or was rejected is told by HTTP POST.

The topics of dead letters and of rejected records are read by a consumer group of its own, so that
a slow or dead URL holds up nothing but callbacks. Many are under way at once, few of them to one
host. An offset is committed when everything before it is told or given up: a crash tells some
twice, and the body has the id to know them by.

The URL is a sender's, and must not reach what only this machine can: hosts are those on the
allow-list, the address that is connected to is the one that was checked, and no redirect is
followed.
"""

import asyncio
import base64
import fnmatch
import ipaddress
import json
import logging
import random
import socket
import threading
from collections import defaultdict, deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx
from confluent_kafka import Consumer, KafkaException, Message, TopicPartition

from duetime.config import Settings
from duetime.connection import librdkafka_properties
from duetime.message import (
    DUE_AT_MS,
    DUE_ATTEMPTS,
    DUE_CALLBACK,
    DUE_ERROR,
    DUE_ERROR_DETAIL,
    DUE_ERROR_SOURCE,
    DUE_FAILED_FIRST_MS,
    DUE_FAILED_LAST_MS,
    DUE_ID,
    DUE_PARTITION,
    DUE_TOPIC,
)
from duetime.stores.records import headers_of
from duetime.topics import TopicNames

log = logging.getLogger(__name__)

#: Callbacks under way at most, and of them to one host.
AT_ONCE, AT_ONCE_TO_ONE = 2_000, 8

#: Records taken from Kafka at a time, and how long to wait for some, in seconds.
BATCH, WAIT_S = 200, 0.5

#: The first pause between two tries, in seconds; doubled each time.
BACKOFF_S = 1.0

#: Addresses where clouds tell a machine its secrets, besides the link-local ones.
METADATA = tuple(map(ipaddress.ip_address, ("100.100.100.200", "fd00:ec2::254")))

#: What a callback says about a message, by the header that has it.
WORDS = {
    DUE_ID: "id",
    DUE_TOPIC: "topic",
    DUE_PARTITION: "partition",
    DUE_AT_MS: "due_at_ms",
    DUE_ERROR: "reason",
    DUE_ERROR_DETAIL: "detail",
    DUE_ERROR_SOURCE: "source",
    DUE_ATTEMPTS: "attempts",
    DUE_FAILED_FIRST_MS: "failed_first_ms",
    DUE_FAILED_LAST_MS: "failed_last_ms",
}

#: Those of them that are numbers.
NUMBERS = ("partition", "due_at_ms", "attempts", "failed_first_ms", "failed_last_ms")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Refused(httpx.TransportError):
    """This URL may not be called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Callback:
    """What is told to whom."""

    url: str
    body: dict[str, Any]


def callback_of(record: Message, settings: Settings) -> Callback | None:
    """The callback that a dead letter or a rejected record asks for."""
    headers = headers_of(record)
    by_name = {name: value for name, value in headers if value is not None}
    url = by_name.get(DUE_CALLBACK) or _airtel_url(record, by_name, settings)
    if not url:
        return None
    told = {
        word: by_name[name].decode(errors="replace")
        for name, word in WORDS.items()
        if name in by_name
    }
    own = [(name, value) for name, value in headers if name not in (*WORDS, DUE_CALLBACK)]
    body: dict[str, Any] = {
        name: _number(text) if name in NUMBERS else text for name, text in told.items()
    }
    body |= _payload("key", record.key()) | _payload("value", record.value())
    body["headers"] = [{"name": name, **_payload("value", value)} for name, value in own]
    return Callback(url=url.decode(errors="replace"), body=body)


class Callbacks:
    """Tells those who asked, in a thread of its own, until it is closed."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._topics = [TopicNames(settings).dead, TopicNames(settings).rejected]
        self._consumer = Consumer(
            librdkafka_properties(settings)
            | {
                "group.id": f"{settings.namespace}.callbacks",
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
            }
        )
        self._closing = threading.Event()
        self._hosts: dict[str, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(AT_ONCE_TO_ONE)
        )
        self._progress: dict[tuple[str, int], deque[tuple[int, asyncio.Task[None] | None]]] = (
            defaultdict(deque)
        )
        self._thread = threading.Thread(target=self._run, name="callbacks", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """Begin no more; what is under way is begun again the next time."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        self._consumer.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            self._progress.clear()
            # Whoever gets our partitions goes on from our commits.
            self._consumer.subscribe(self._topics, on_revoke=lambda *_: self._progress.clear())
            try:
                asyncio.run(self._tell_all())
            except Exception:
                log.exception("callbacks stopped; beginning again from the last commit")
                self._consumer.unsubscribe()
                self._closing.wait(WAIT_S)

    async def _tell_all(self) -> None:
        timeout = httpx.Timeout(self._settings.callback_timeout_seconds)
        transport = Guarded(self._settings)
        async with httpx.AsyncClient(
            transport=transport, timeout=timeout, follow_redirects=False, trust_env=False
        ) as client:
            while not self._closing.is_set():
                records = await asyncio.to_thread(self._consumer.consume, BATCH, WAIT_S)
                for record in records:
                    if not record.error():
                        self._take(record, client)
                self._commit()
                while self._under_way() >= AT_ONCE and not self._closing.is_set():
                    await asyncio.sleep(WAIT_S)
                    self._commit()
            for task in self._tasks():
                task.cancel()

    def _take(self, record: Message, client: httpx.AsyncClient) -> None:
        callback = callback_of(record, self._settings)
        task = asyncio.create_task(self._tell(callback, client)) if callback else None
        place = record.topic() or "", record.partition() or 0
        self._progress[place].append((record.offset() or 0, task))

    async def _tell(self, callback: Callback, client: httpx.AsyncClient) -> None:
        host = _host(callback.url)
        async with self._hosts[host]:
            for attempt in range(1, self._settings.callback_attempts + 1):
                try:
                    answer = await client.post(callback.url, json=callback.body)
                    if answer.is_success:
                        return
                    why = f"status {answer.status_code}"
                except Refused as error:
                    log.warning("callback refused host=%s: %s", host, error)
                    return
                except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
                    why = type(error).__name__
                if attempt < self._settings.callback_attempts:
                    await asyncio.sleep(BACKOFF_S * 2 ** (attempt - 1) * random.uniform(0.5, 1.0))  # noqa: S311 (no secret)
        log.warning(
            "callback given up host=%s attempts=%d last=%s id=%s",
            host,
            self._settings.callback_attempts,
            why,
            callback.body.get("id"),
        )

    def _commit(self) -> None:
        """Up to the first that is not told."""
        done = []
        for (topic, partition), records in self._progress.items():
            offset = None
            while records and (records[0][1] is None or records[0][1].done()):
                offset, _ = records.popleft()
            if offset is not None:
                done.append(TopicPartition(topic, partition, offset + 1))
        if done:
            with suppress(KafkaException):
                # What is not committed is told again.
                self._consumer.commit(offsets=done, asynchronous=True)

    def _tasks(self) -> Iterable[asyncio.Task[None]]:
        return [task for records in self._progress.values() for _, task in records if task]

    def _under_way(self) -> int:
        return sum(not task.done() for task in self._tasks())


class Guarded(httpx.AsyncBaseTransport):
    """HTTP to hosts on the allow-list, and to addresses that a stranger may name."""

    def __init__(self, settings: Settings) -> None:
        self._patterns = [pattern.lower() for pattern in settings.callback_hosts]
        self._networks = settings.callback_networks
        self._http = httpx.AsyncHTTPTransport(
            limits=httpx.Limits(max_connections=AT_ONCE, max_keepalive_connections=100)
        )

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Look the host up, check what was found, and connect to just that."""
        url = request.url
        if url.scheme not in ("http", "https"):
            raise Refused("only http and https are called")
        host = url.host.lower()
        port = url.port or (443 if url.scheme == "https" else 80)
        if not any(
            fnmatch.fnmatchcase(name, each)
            for name in (host, f"{host}:{port}")
            for each in self._patterns
        ):
            raise Refused("its host is not in callback_hosts")
        request.url = url.copy_with(host=str(await self._address(host, port)))
        request.extensions |= {"sni_hostname": host}
        return await self._http.handle_async_request(request)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _address(self, host: str, port: int) -> Address:
        try:
            found = await asyncio.get_running_loop().getaddrinfo(
                host, port, type=socket.SOCK_STREAM
            )
        except OSError as error:
            raise httpx.ConnectError("its host is not known") from error
        # As a name: a link-local one has the interface behind a `%`.
        addresses = [ipaddress.ip_address(str(each[4][0]).partition("%")[0]) for each in found]
        for address in addresses:
            if not self._is_allowed(address):
                raise Refused(f"its host is at {address}, which callback_networks does not allow")
        return addresses[0]

    def _is_allowed(self, address: Address) -> bool:
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
            address = address.ipv4_mapped
        if any(address in network for network in self._networks):
            return True
        return not (
            address.is_loopback
            or address.is_link_local
            or address.is_multicast
            or address.is_unspecified
            or address.is_reserved
            or address in METADATA
        )


def _airtel_url(record: Message, by_name: dict[str, bytes], settings: Settings) -> bytes | None:
    """The URL that a rejected JSON envelope names, if it can be read that far."""
    source = by_name.get(DUE_ERROR_SOURCE, b"").decode(errors="replace")
    if not source.startswith(f"{settings.airtel_topic}/"):
        return None
    try:
        envelope = json.loads(record.value() or b"")
        url = envelope["failurePostCallbackUrl"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return url.encode(errors="replace") if isinstance(url, str) else None


def _payload(name: str, data: bytes | None) -> dict[str, str | None]:
    """As text where it is UTF-8, else in base64 under a name that says so."""
    try:
        return {name: None if data is None else data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(data or b"").decode()}


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def _host(url: str) -> str:
    """For the log: the rest of a URL may have a secret in it."""
    try:
        return httpx.URL(url).host
    except (httpx.InvalidURL, UnicodeError):
        return "?"

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
from concurrent.futures import ThreadPoolExecutor
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
from duetime.stores.places import Place
from duetime.stores.records import headers_of
from duetime.topics import TopicNames

log = logging.getLogger(__name__)

#: Callbacks that wait or are under way at most, and how many bytes they have.
AT_ONCE, MOST_BYTES = 10_000, 256 * 1024 * 1024

#: Of them under way to one host, and waiting for it: more are given up, or it would hold up others.
AT_ONCE_TO_ONE, WAITING_FOR_ONE = 8, 1_000

#: Records taken from Kafka at a time, and how long to wait for some, in seconds.
BATCH, WAIT_S = 200, 0.5

#: The first pause between two tries, in seconds; doubled each time.
BACKOFF_S = 1.0

#: Addresses where clouds tell a machine its secrets, besides the link-local ones.
METADATA = tuple(
    map(
        ipaddress.ip_address,
        ("100.100.100.200", "168.63.129.16", "fd00:ec2::254", "fd20:ce::254"),
    )
)

#: Addresses of the IPv4 Internet on a network without it (RFC 6052).
NAT64 = ipaddress.ip_network("64:ff9b::/96")

#: The longest number that a header may have, in digits.
DIGITS = 18

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
        self._hosts: dict[str, _Host] = defaultdict(_Host)
        #: By partition, what is not committed: offsets, and who is told of them.
        self._progress: dict[Place, deque[tuple[int, asyncio.Task[None] | None]]]
        self._progress = defaultdict(deque)
        self._bytes = 0
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
            # What belongs to an event loop ends with it.
            self._progress.clear()
            self._hosts.clear()
            self._bytes = 0
            # Whoever gets our partitions goes on from our commits.
            self._consumer.subscribe(self._topics, on_revoke=lambda *_: self._progress.clear())
            try:
                asyncio.run(self._tell_all())
            except Exception:
                log.exception("callbacks stopped; beginning again from the last commit")
                self._consumer.unsubscribe()
                self._closing.wait(WAIT_S)

    async def _tell_all(self) -> None:
        loop = asyncio.get_running_loop()
        # No host that is looked up may keep it waiting.
        with ThreadPoolExecutor(1) as own:
            async with httpx.AsyncClient(
                transport=Guarded(self._settings), follow_redirects=False, trust_env=False
            ) as client:
                while not self._closing.is_set():
                    records = await loop.run_in_executor(own, self._consumer.consume, BATCH, WAIT_S)
                    for record in records:
                        self._take(record, client)
                    self._commit()
                    while self._is_full() and not self._closing.is_set():
                        await asyncio.sleep(WAIT_S)
                        self._commit()
                for task in self._tasks():
                    task.cancel()

    def _take(self, record: Message, client: httpx.AsyncClient) -> None:
        if error := record.error():
            log.warning("callbacks cannot be read: %s", error.str())
            return
        place, offset = (record.topic() or "", record.partition() or 0), record.offset() or 0
        try:
            callback = callback_of(record, self._settings)
        except Exception:
            log.exception("callback cannot be read place=%s/%d/%d", *place, offset)
            callback = None
        task = asyncio.create_task(self._told(callback, client)) if callback else None
        self._progress[place].append((offset, task))

    async def _told(self, callback: Callback, client: httpx.AsyncClient) -> None:
        if not is_listed(callback.url, self._settings):
            log.warning("callback refused host=%s: not in callback_hosts", _host(callback.url))
            return
        host = self._hosts[_host(callback.url)]
        if host.waiting >= WAITING_FOR_ONE:
            self._given_up(callback, 0, "too many wait for this host")
            return
        content = json.dumps(callback.body).encode()
        host.waiting += 1
        self._bytes += len(content)
        try:
            await self._tell(callback, content, host, client)
        finally:
            host.waiting -= 1
            self._bytes -= len(content)

    async def _tell(
        self, callback: Callback, content: bytes, host: "_Host", client: httpx.AsyncClient
    ) -> None:
        # A host that has just answered nobody is asked once, until it answers again.
        attempts = 1 if host.is_silent else self._settings.callback_attempts
        for attempt in range(1, attempts + 1):
            async with host.at_once:
                try:
                    why = await self._post(callback.url, content, client)
                except Refused as error:
                    log.warning("callback refused host=%s: %s", _host(callback.url), error)
                    return
                except Exception as error:  # noqa: BLE001 (a stranger's server may do anything)
                    why = type(error).__name__
            if why is None:
                host.is_silent = False
                return
            if attempt < attempts:
                await asyncio.sleep(BACKOFF_S * 2 ** (attempt - 1) * random.uniform(0.5, 1.0))  # noqa: S311 (no secret)
        host.is_silent = True
        self._given_up(callback, attempts, why)

    async def _post(self, url: str, content: bytes, client: httpx.AsyncClient) -> str | None:
        """What is wrong with the answer; its body is not read."""
        headers = {"Content-Type": "application/json"}
        async with (
            asyncio.timeout(self._settings.callback_timeout_seconds),
            client.stream("POST", url, content=content, headers=headers) as answer,
        ):
            return None if answer.is_success else f"status {answer.status_code}"

    def _given_up(self, callback: Callback, attempts: int, why: str | None) -> None:
        log.warning(
            "callback given up host=%s attempts=%d last=%s id=%s",
            _host(callback.url),
            attempts,
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

    def _tasks(self) -> list[asyncio.Task[None]]:
        return [task for records in self._progress.values() for _, task in records if task]

    def _is_full(self) -> bool:
        return self._bytes >= MOST_BYTES or len(self._tasks()) >= AT_ONCE


class _Host:
    """One host that is told something. Of one event loop."""

    def __init__(self) -> None:
        self.at_once = asyncio.Semaphore(AT_ONCE_TO_ONE)
        self.waiting = 0
        #: The last callback was given up.
        self.is_silent = False


class Guarded(httpx.AsyncBaseTransport):
    """HTTP to hosts on the allow-list, and to addresses that a stranger may name."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._networks = settings.callback_networks
        self._http = httpx.AsyncHTTPTransport(
            # Kept ones are told apart by address, and not by the name in their certificate.
            limits=httpx.Limits(max_connections=AT_ONCE, max_keepalive_connections=0)
        )

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Look the host up, check what was found, and connect to just that."""
        url = request.url
        if not is_listed(str(url), self._settings):
            raise Refused("its host is not in callback_hosts")
        request.url = url.copy_with(host=str(await self._address(url.host, _port(url))))
        request.extensions |= {"sni_hostname": url.host}
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
        # A link-local one has the interface behind a `%`.
        addresses = [ipaddress.ip_address(str(each[4][0]).partition("%")[0]) for each in found]
        for address in addresses:
            if not self.is_allowed(address):
                raise Refused(f"its host is at {address}, which callback_networks does not allow")
        return addresses[0]

    def is_allowed(self, address: Address) -> bool:
        """Whether a stranger may name it; an address within an address counts as well."""
        return all(
            any(each in network for network in self._networks) or _is_ordinary(each)
            for each in _meant(address)
        )


def is_listed(url: str, settings: Settings) -> bool:
    """Whether the URL is http(s) to a host of `callback_hosts`; without a port there, 80 or 443."""
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, UnicodeError):
        return False
    if parsed.scheme not in ("http", "https"):
        return False
    host, port = parsed.host.lower(), _port(parsed)
    names = [f"{host}:{port}"] + ([host] if port in (80, 443) else [])
    return any(
        fnmatch.fnmatchcase(name, pattern.lower())
        for name in names
        for pattern in settings.callback_hosts
    )


def _port(url: httpx.URL) -> int:
    return url.port or (443 if url.scheme == "https" else 80)


def _meant(address: Address) -> list[Address]:
    """Where packets to an address end: itself, and the IPv4 address that is written in it."""
    if isinstance(address, ipaddress.IPv4Address):
        return [address]
    if address.ipv4_mapped:
        return [address.ipv4_mapped]
    if address in NAT64:
        return [ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)]
    within = [address.sixtofour, *(address.teredo or ())]
    return [address, *(each for each in within if each)]


def _is_ordinary(address: Address) -> bool:
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
    return int(text) if text.isdecimal() and len(text) <= DIGITS else None


def _host(url: str) -> str:
    """For the log: the rest of a URL may have a secret in it."""
    try:
        return httpx.URL(url).host
    except (httpx.InvalidURL, UnicodeError):
        return "?"

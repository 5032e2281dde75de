"""Delivers failure webhooks: a dead letter or rejected record is POSTed to the URL its sender gave.

One thread reads the two topics with a consumer group of its own, so a slow or dead server holds up
webhooks only. It decides what is sent; a pool of threads sends it, few at a time to one host. An
offset is committed when each record before it is delivered or given up. A crash delivers some
twice: the body has the id of the message to detect that.
"""

import json
import logging
import math
import random
import socket
import time
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx
from confluent_kafka import Consumer, KafkaException, Message, TopicPartition

from duetime.core import headers as H
from duetime.core.errors import escaped
from duetime.core.messages import payload_json
from duetime.core.settings import Settings
from duetime.core.threads import PeriodicThread
from duetime.core.topics import TopicNames
from duetime.kafka.connection import librdkafka_properties
from duetime.kafka.consumer_group import leave
from duetime.kafka.offsets import Partition
from duetime.kafka.range_reader import headers_of
from duetime.pipeline.ssrf import AddressRefused, SsrfSafeTransport, is_listed

log = logging.getLogger(__name__)

#: Limits of the webhooks that are not delivered: how many, and the bytes of their bodies.
MAX_PENDING, MAX_PENDING_BYTES = 10_000, 256 * 1024 * 1024

#: The limit of those to one host: further ones are given up, or they would hold up other hosts.
MAX_PENDING_PER_HOST = 1_000

#: Requests at a time; and to one host, so that a silent one leaves threads to the others.
MAX_REQUESTS, MAX_REQUESTS_PER_HOST = 64, 8

#: How often records are read and requests are started, in seconds, and how many records.
POLL_INTERVAL_S, BATCH_SIZE = 0.2, 200

#: The first pause between two attempts, in seconds; it doubles each time.
BACKOFF_S = 1.0

#: The trace events of httpcore that return a request's connection: plain, then with TLS.
CONNECTED = ("connection.connect_tcp.complete", "connection.start_tls.complete")

#: The longest number in a header, in digits: an int64 may have one more.
MAX_DIGITS = 18

#: The fields of the body, by the header that they come from.
FIELDS = {
    H.DUE_ID: "id",
    H.DUE_TOPIC: "topic",
    H.DUE_PARTITION: "partition",
    H.DUE_CLUSTER: "cluster",
    H.DUE_AT_MS: "due_at_ms",
    H.DUE_ERROR: "reason",
    H.DUE_ERROR_DETAIL: "detail",
    H.DUE_ERROR_SOURCE: "source",
    H.DUE_ATTEMPTS: "attempts",
    H.DUE_FAILED_FIRST_MS: "failed_first_ms",
    H.DUE_FAILED_LAST_MS: "failed_last_ms",
}

#: The fields that are numbers.
NUMBERS = ("partition", "due_at_ms", "attempts", "failed_first_ms", "failed_last_ms")


@dataclass(slots=True)
class Webhook:
    """A request that waits, is under way, or waits for another attempt."""

    url: str
    #: Host, and port where the URL has one.
    host: bytes
    body: bytes
    #: Of the message, for the log.
    message_id: str
    attempts: int = 0
    #: When the next attempt may begin, and when the present one must end, by the monotonic clock.
    ready_s: float = 0.0
    deadline_s: float = math.inf
    request: Future[str | None] | None = None
    connection: socket.socket | None = None
    #: It was delivered, refused or given up.
    is_done: bool = False


class WebhookWorker:
    """Sends the webhooks of one namespace, from `start` to `close`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._topics = [TopicNames(settings).dead_letter, TopicNames(settings).rejected]
        group = {
            "group.id": f"{settings.namespace}.callbacks",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
        }
        self._consumer = Consumer(librdkafka_properties(settings) | group)
        self._http = httpx.Client(
            transport=SsrfSafeTransport(settings, MAX_REQUESTS),
            timeout=settings.webhook_timeout_seconds,
            follow_redirects=False,
            trust_env=False,
        )
        self._pool = ThreadPoolExecutor(MAX_REQUESTS, thread_name_prefix="webhook")
        #: What is not committed, by partition: offsets, and their webhooks where they have any.
        self._progress: dict[Partition, deque[tuple[int, Webhook | None]]] = defaultdict(deque)
        #: The webhooks among them that are not done.
        self._pending: list[Webhook] = []
        #: Hosts that did not answer the last webhook that was given up.
        self._silent_hosts: set[bytes] = set()
        self._thread = PeriodicThread("webhooks", POLL_INTERVAL_S, self._poll)

    def start(self) -> None:
        """Start reading."""
        self._subscribe()
        self._thread.start()

    def close(self) -> None:
        """Stop reading and sending; what is not delivered is sent again after the next start."""
        self._thread.stop()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._abandon()
        leave(self._consumer)

    def _subscribe(self) -> None:
        # Whichever member gets the partitions goes on from our commits.
        self._consumer.subscribe(self._topics, on_revoke=lambda *_: self._abandon())

    def _abandon(self) -> None:
        """Drop all webhooks; they are read again from the last commit."""
        for each in self._pending:
            each.is_done = True
            _disconnect(each)
        self._pending.clear()
        self._progress.clear()

    def _poll(self) -> None:
        """Read some records, send what is ready, commit what is done."""
        try:
            self._read()
            self._send(time.monotonic())
            self._commit()
        except Exception:
            self._consumer.unsubscribe()
            self._abandon()
            self._subscribe()
            raise

    def _read(self) -> None:
        size = sum(len(each.body) for each in self._pending)
        if len(self._pending) >= MAX_PENDING or size >= MAX_PENDING_BYTES:
            return
        by_host = Counter(each.host for each in self._pending)
        for record in self._consumer.consume(BATCH_SIZE, timeout=0):
            if error := record.error():
                log.warning("cannot read webhooks error=%s", error.str())
                continue
            place, offset = (record.topic() or "", record.partition() or 0), record.offset() or 0
            webhook = None
            try:
                webhook = self._webhook(record, by_host)
            except Exception:
                log.exception("cannot read the webhook of a record place=%s/%d/%d", *place, offset)
            self._progress[place].append((offset, webhook))
            if webhook:
                self._pending.append(webhook)

    def _webhook(self, record: Message, by_host: Counter[bytes]) -> Webhook | None:
        """Return the webhook of a record, counted by its host; None where none is sent."""
        url, body = webhook_request(record, self._settings)
        if not url:
            return None
        if not is_listed(url, self._settings):
            log.warning("webhook refused host=%s: not in webhook_hosts", _host_name(url))
            return None
        webhook = Webhook(
            url, httpx.URL(url).netloc, json.dumps(body).encode(), str(body.get("id"))
        )
        if by_host[webhook.host] >= MAX_PENDING_PER_HOST:
            _give_up(webhook, "too many are pending for this host")
        else:
            by_host[webhook.host] += 1
        return webhook

    def _send(self, now_s: float) -> None:
        """End the attempts that are over, and start those of webhooks that are ready."""
        for each in self._pending:
            if each.request and each.request.done():
                self._end_attempt(each, each.request, now_s)
            elif now_s >= each.deadline_s:
                # The time-outs of httpx are those of one read: a byte now and then escapes them.
                _disconnect(each)
        self._pending = [each for each in self._pending if not each.is_done]
        requests = Counter(each.host for each in self._pending if each.request)
        for each in self._pending:
            is_ready = each.request is None and each.ready_s <= now_s
            if is_ready and requests[each.host] < MAX_REQUESTS_PER_HOST:
                requests[each.host] += 1
                each.request = self._pool.submit(self._post, each)

    def _end_attempt(self, webhook: Webhook, request: Future[str | None], now_s: float) -> None:
        max_attempts = self._settings.webhook_attempts
        if webhook.host in self._silent_hosts and not webhook.attempts:
            # One attempt is enough to find out whether it answers again.
            max_attempts = 1
        webhook.attempts += 1
        webhook.request, webhook.connection, webhook.deadline_s = None, None, math.inf
        error = request.exception()
        failure = type(error).__name__ if error else request.result()
        if isinstance(error, AddressRefused):
            log.warning("webhook refused host=%s: %s", _host_name(webhook.url), error)
            webhook.is_done = True
        elif failure is None:
            webhook.is_done = True
            self._silent_hosts.discard(webhook.host)
        elif webhook.attempts < max_attempts:
            jitter = random.uniform(0.5, 1.0)  # noqa: S311 (no secret)
            webhook.ready_s = now_s + BACKOFF_S * 2 ** (webhook.attempts - 1) * jitter
        else:
            _give_up(webhook, failure)
            self._silent_hosts.discard(webhook.host)
            if error:
                self._silent_hosts.add(webhook.host)

    def _post(self, webhook: Webhook) -> str | None:
        """Return what is wrong with the answer, None of a 2xx; its body is not read.

        Runs in the pool. Raises whatever a foreign server leads to.
        """

        def trace(event: str, info: Mapping[str, Any]) -> None:
            if event in CONNECTED:
                webhook.connection = info["return_value"].get_extra_info("socket")
                if webhook.is_done:
                    _disconnect(webhook)

        # Not before: it may have waited for a thread.
        webhook.deadline_s = time.monotonic() + self._settings.webhook_timeout_seconds
        with self._http.stream(
            "POST",
            webhook.url,
            content=webhook.body,
            headers={"Content-Type": "application/json"},
            extensions={"trace": trace},
        ) as answer:
            return None if answer.is_success else f"status {answer.status_code}"

    def _commit(self) -> None:
        """Commit each partition up to its first webhook that is not done."""
        done = []
        for (topic, partition), records in self._progress.items():
            offset = None
            while records and (records[0][1] is None or records[0][1].is_done):
                offset, _ = records.popleft()
            if offset is not None:
                done.append(TopicPartition(topic, partition, offset + 1))
        if done:
            # Without the commit, they are sent again after the next start.
            with suppress(KafkaException):
                self._consumer.commit(offsets=done, asynchronous=True)


def _disconnect(webhook: Webhook) -> None:
    """Make the request fail. Closing its socket would not wake the thread that reads from it."""
    if webhook.connection:
        with suppress(OSError):
            webhook.connection.shutdown(socket.SHUT_RDWR)


def _give_up(webhook: Webhook, why: str) -> None:
    webhook.is_done = True
    log.warning(
        "webhook given up host=%s attempts=%d last=%s id=%s",
        _host_name(webhook.url),
        webhook.attempts,
        why,
        # The sender of a rejected record may have put anything there.
        escaped(webhook.message_id),
    )


def webhook_request(record: Message, settings: Settings) -> tuple[str, dict[str, Any]]:
    """Return the URL and the body of the webhook of a dead letter or a rejected record.

    The URL is empty where the record asks for no webhook.
    """
    headers = headers_of(record)
    by_name = {name: value for name, value in headers if value is not None}
    url = by_name.get(H.DUE_CALLBACK) or _airtel_url(record, by_name, settings)
    if not url:
        return "", {}
    body: dict[str, Any] = {}
    for header, name in FIELDS.items():
        if (value := by_name.get(header)) is not None:
            text = value.decode(errors="replace")
            body[name] = _number(text) if name in NUMBERS else text
    body |= payload_json("key", record.key()) | payload_json("value", record.value())
    others = H.without(headers, (*FIELDS, H.DUE_CALLBACK))
    body["headers"] = [{"name": name, **payload_json("value", value)} for name, value in others]
    return url.decode(errors="replace"), body


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() and len(text) <= MAX_DIGITS else None


def _airtel_url(record: Message, by_name: dict[str, bytes], settings: Settings) -> bytes | None:
    """Return the URL that a rejected JSON envelope names, where it can be parsed that far."""
    source = by_name.get(H.DUE_ERROR_SOURCE, b"").decode(errors="replace")
    if not source.startswith(f"{settings.airtel_topic}/"):
        return None
    try:
        url = json.loads(record.value() or b"")["failurePostCallbackUrl"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return url.encode(errors="replace") if isinstance(url, str) else None


def _host_name(url: str) -> str:
    """Return the part of a URL for the log: the rest may have a secret in it."""
    try:
        return httpx.URL(url).host
    except (httpx.InvalidURL, UnicodeError):
        return "?"

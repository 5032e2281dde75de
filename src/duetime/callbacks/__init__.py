"""Failure callbacks: who wants to know that a message died or was rejected is told by HTTP POST.

The topics of dead letters and of rejected records are read by a consumer group of its own, so that
a slow or dead URL holds up nothing but callbacks. Many are under way at once, few of them to one
host. An offset is committed when everything before it is told or given up: a crash tells some
twice, and the body has the id to know them by.
"""

import asyncio
import json
import logging
import random
import threading
from collections import defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
from confluent_kafka import Consumer, KafkaException, Message, TopicPartition

from duetime.callbacks.callback import Callback, callback_of
from duetime.callbacks.guard import Guarded, Refused, is_listed
from duetime.config import Settings
from duetime.connection import librdkafka_properties
from duetime.leaving import leave
from duetime.stores.places import Place
from duetime.topics import TopicNames
from duetime.wording import escaped

log = logging.getLogger(__name__)

#: Callbacks that wait or are under way at most, and how many bytes they have.
AT_ONCE, MOST_BYTES = 10_000, 256 * 1024 * 1024

#: Of them under way to one host, and waiting for it: more are given up, or it would hold up others.
AT_ONCE_TO_ONE, WAITING_FOR_ONE = 8, 1_000

#: Records taken from Kafka at a time, and how long to wait for some, in seconds.
BATCH, WAIT_S = 200, 0.5

#: The first pause between two tries, in seconds; doubled each time.
BACKOFF_S = 1.0


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
        self._hosts: dict[bytes, _Host] = defaultdict(_Host)
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
        leave(self._consumer)

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
                transport=Guarded(self._settings, AT_ONCE), follow_redirects=False, trust_env=False
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
        # By who answers: the host, and its port where the URL has one.
        host = self._hosts[httpx.URL(callback.url).netloc]
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
            silent = False
            async with host.at_once:
                try:
                    why = await self._post(callback.url, content, client)
                except Refused as error:
                    log.warning("callback refused host=%s: %s", _host(callback.url), error)
                    return
                except Exception as error:  # noqa: BLE001 (a stranger's server may do anything)
                    why, silent = type(error).__name__, True
            if why is None:
                host.is_silent = False
                return
            if attempt < attempts:
                await asyncio.sleep(BACKOFF_S * 2 ** (attempt - 1) * random.uniform(0.5, 1.0))  # noqa: S311 (no secret)
        host.is_silent = silent
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
            # Of a rejected record it is whatever its sender wrote.
            escaped(str(callback.body.get("id"))),
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
        # Those that are done only wait for one before them, to be committed.
        open_tasks = sum(not task.done() for task in self._tasks())
        return self._bytes >= MOST_BYTES or open_tasks >= AT_ONCE


class _Host:
    """One host that is told something. Of one event loop."""

    def __init__(self) -> None:
        self.at_once = asyncio.Semaphore(AT_ONCE_TO_ONE)
        self.waiting = 0
        #: It did not answer the last time.
        self.is_silent = False


def _host(url: str) -> str:
    """For the log: the rest of a URL may have a secret in it."""
    try:
        return httpx.URL(url).host
    except (httpx.InvalidURL, UnicodeError):
        return "?"

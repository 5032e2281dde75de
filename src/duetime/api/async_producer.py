"""Kafka's client, in the event loop: records are handed to it, and it reports what has arrived.

It tries for ever, and sends each record once. One that fails for good is replaced: what it held may
have arrived, and nobody will say so.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from confluent_kafka import KafkaException

from duetime.api.producer_batch import ProducerBatch, Refusals
from duetime.client import Producer
from duetime.config import Settings
from duetime.errors import ClientFailed, KafkaError, RecordRefused
from duetime.outgoing import Outgoing

log = logging.getLogger(__name__)

#: How often is looked for reports while some are due, in seconds.
POLL_S = 0.001

#: After so many looks that saw none, a second's worth, it is looked less often: so many seconds.
QUIET_LOOKS = 1_000
SELDOM_S = 0.05

#: How long to wait after an error that nobody thought of, in seconds.
AFTER_ERROR_S = 1.0

#: Never given up: what was handed over may have arrived, and only trying on tells.
FOR_EVER: dict[str, Any] = {"delivery.timeout.ms": 0, "reconnect.backoff.max.ms": 1_000}


class AsyncProducer:
    """Takes records to Kafka."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._producer = Producer(settings, **FOR_EVER)
        #: What was handed over and is not reported yet.
        self._under_way: set[ProducerBatch] = set()
        self._handed_over = asyncio.Event()
        #: How often in a row no report was seen.
        self._quiet_looks = 0

    async def sent(self, records: Sequence[Outgoing]) -> Refusals:
        """Which of them Kafka refuses, once all are reported; waits for room. Raises KafkaError."""
        refused = dict[str, RecordRefused]()
        while records:
            batch = self.hand_over(records)
            refused |= await batch.arrived
            if len(batch.rest) == len(records):
                await asyncio.sleep(SELDOM_S)
            records = batch.rest
        return refused

    def hand_over(self, records: Sequence[Outgoing]) -> ProducerBatch:
        """What ends when all are reported that the client has room for; the rest it has not.

        It never waits: everybody would wait with it, for as long as Kafka is away.
        """
        batch = ProducerBatch(records)
        self._under_way.add(batch)
        batch.arrived.add_done_callback(lambda _: self._under_way.discard(batch))
        self._quiet_looks = 0
        for index, record in enumerate(records):
            try:
                if not self._producer.offer(record, batch.reported):
                    batch.leave(len(records) - index)
                    break
            except ClientFailed as error:
                self._replace(error)
                break
            except KafkaError as error:
                # The others are on their way: whoever waits must hear of them, too.
                batch.reported(error, str(record.id))
        self._handed_over.set()
        return batch

    async def take_reports(self) -> None:
        """For ever; here and not in a thread: it would wait for Python's lock at each."""
        while True:
            await self._handed_over.wait()
            try:
                await self._take_reports()
            except ClientFailed as error:
                self._replace(error)
            except Exception as error:  # noqa: BLE001 (ended, it would leave all who wait waiting)
                # Nobody knows whose words are in it.
                log.warning("reports wait: %s", type(error).__name__)
                await asyncio.sleep(AFTER_ERROR_S)

    async def flush(self, seconds: float) -> None:
        """Wait for so long until all is reported."""
        with suppress(TimeoutError, KafkaException):
            async with asyncio.timeout(seconds):
                while self._producer.flush(0.0):  # noqa: ASYNC110 (only it tells)
                    await asyncio.sleep(POLL_S)

    async def _take_reports(self) -> None:
        """Until nothing is under way."""
        while self._under_way:
            self._quiet_looks = 0 if self._producer.poll() else self._quiet_looks + 1
            await asyncio.sleep(pause_s(self._quiet_looks))
        self._handed_over.clear()

    def _replace(self, error: ClientFailed) -> None:
        log.error("another client takes its place: %s", error)
        self._producer = Producer(self._settings, **FOR_EVER)
        for batch in list(self._under_way):
            batch.lose(error)


def pause_s(quiet_looks: int) -> float:
    """How long until the next look, after so many that saw no report."""
    return POLL_S if quiet_looks < QUIET_LOOKS else SELDOM_S

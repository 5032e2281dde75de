"""Notices transactions that senders leave open in the intake topics."""

import logging
import threading
import time
from collections.abc import Sequence

from duetime import metrics
from duetime.clock import Clock
from duetime.config import Settings
from duetime.errors import words
from duetime.pipeline.health import CONTRACTS
from duetime.stores.offsets import Offsets
from duetime.stores.open_transactions import OpenTransaction, open_transactions, remedy
from duetime.topics import TopicNames

log = logging.getLogger(__name__)

#: How often is looked, in seconds.
EVERY_S = 10.0

#: In the topic for transactions, one that is open for longer is warned of, in seconds.
LONG_S = 60.0

#: How long until a topic is warned of again, in seconds.
SILENCE_S = 3_600.0

#: How long a look may take that is under way when it is to end, in seconds.
LEAVE_S = 2.0


class TransactionWatch:
    """Looks every so often, in a thread of its own. Start it once."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        names = TopicNames(settings)
        self._transactional = names.transactional
        self._contracts = dict(zip(names.intake, CONTRACTS, strict=True))
        self._offsets = Offsets(settings, f"{settings.namespace}.transactions")
        #: By topic, until when it is not warned of, by the monotonic clock.
        self._silent_s: dict[str, float] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="transactions", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """End."""
        self._stopping.set()
        self._thread.join(LEAVE_S)
        if not self._thread.is_alive():
            self._offsets.close()
            metrics.OPEN_TRANSACTION_SECONDS.clear()

    def look(self) -> None:
        """Look once. Raises DuetimeError, Unreadable."""
        found = open_transactions(self._settings, self._offsets, self._contracts)
        now_ms = self._clock.now_ms()
        for topic, contract in self._contracts.items():
            mine = [each for each in found if each.topic == topic]
            longest_s = self._warn(mine, now_ms) if mine else 0.0
            metrics.OPEN_TRANSACTION_SECONDS.labels(contract).set(longest_s)

    def _watch(self) -> None:
        while not self._stopping.is_set():
            try:
                self.look()
            except Exception as error:  # noqa: BLE001 (whatever it was, it is looked again)
                log.warning("could not look for open transactions error=%s", words(error))
            self._stopping.wait(EVERY_S)

    def _warn(self, mine: Sequence[OpenTransaction], now_ms: int) -> float:
        """Warn of the oldest one, unless that was done a while ago; return its age in seconds."""
        oldest = min(mine, key=lambda each: each.since_ms)
        age_s = max(0.0, (now_ms - oldest.since_ms) / 1_000)
        is_expected = oldest.topic == self._transactional and age_s <= LONG_S
        now_s = time.monotonic()
        if not is_expected and now_s >= self._silent_s.get(oldest.topic, 0.0):
            self._silent_s[oldest.topic] = now_s + SILENCE_S
            told = oldest.topic, oldest.partition, age_s, remedy(oldest.topic, self._transactional)
            log.warning("transaction is open topic=%s partition=%d seconds=%.0f: %s", *told)
        return age_s

"""Whether what is in the spool may go to this Kafka, and more be spooled for it."""

import asyncio
from collections.abc import Callable
from typing import Any

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from duetime.api.spool.errors import SpoolForeign
from duetime.api.spool.file import Spool
from duetime.api.spool.owner import owner_of
from duetime.api.spool.thread import SpoolThread
from duetime.config import Settings
from duetime.connection import librdkafka_properties
from duetime.errors import DuetimeError, KafkaError

#: How long Kafka may take to say which cluster it is, in seconds.
ANSWER_S = 4.0

#: How often it is asked, in seconds: one that was made anew at the same address is another.
EVERY_S = 60.0

#: The same while it does not answer.
AGAIN_S = 1.0


class Cluster:
    """Asks Kafka which cluster it is."""

    def __init__(self, settings: Settings) -> None:
        own: dict[str, Any] = {"reconnect.backoff.max.ms": 1_000}
        self._bootstrap = settings.bootstrap
        self._admin = AdminClient(librdkafka_properties(settings) | own)

    async def id(self) -> str:
        """Its id, as it says now. Raises KafkaError."""
        try:
            asked = self._admin.describe_cluster(request_timeout=ANSWER_S)
            return str((await asyncio.wrap_future(asked)).cluster_id)
        except KafkaException as error:
            raise KafkaError(
                f"Kafka at {self._bootstrap} does not say which cluster it is "
                f"({error.args[0].str()}): see that it is up"
            ) from error


class SpoolClaim:
    """The claim of this Kafka on the spool. In the event loop."""

    def __init__(self, settings: Settings, spool: Spool, thread: SpoolThread) -> None:
        self._settings = settings
        self._spool = spool
        self._thread = thread
        self._cluster = Cluster(settings)
        #: Why the spool is not, or may not be, this Kafka's.
        self._refused: str | None = None
        try:
            spool.claim(owner_of(settings))
        except SpoolForeign as error:
            self._refused = error.detail

    @property
    def is_refused(self) -> bool:
        """Whether the spool is, or may be, that of another Kafka."""
        return self._refused is not None

    def require(self) -> None:
        """Raise SpoolForeign where it is, or may be, another's."""
        if self._refused:
            raise SpoolForeign(self._refused)

    async def confirm(self) -> None:
        """Ask Kafka whether it is the one, now. Raises KafkaError, SpoolForeign, SpoolFailed."""
        owner = owner_of(self._settings, await self._cluster.id())
        try:
            await self._thread.ask(self._spool.claim, owner)
        except SpoolForeign as error:
            self._refused = error.detail
            raise
        self._refused = None

    async def keep_up(self, is_spooling: Callable[[], bool]) -> None:
        """For ever: know which cluster answers before it goes away, and something is spooled."""
        while True:
            pause_s = EVERY_S
            try:
                if not is_spooling():
                    await self.confirm()
            except DuetimeError:
                pause_s = AGAIN_S
            await asyncio.sleep(pause_s)

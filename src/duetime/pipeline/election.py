"""Who delivers: of several pipelines on one cluster one leads, and the others stand by.

They are a consumer group on a topic of one partition: whoever is assigned it leads. Every second
the leader commits to the group, which only a member can. So from then on no other can lead for as
long as its session lasts; and for a little less than that it holds a lease, and may send.

A process may be paused at any instant (SIGSTOP, a long collection) and know nothing of it. So the
lease is looked at by each row, last before the sink.

Each term has a lease of its own, and a plan names the lease of the term that it was made in. A row
that waits for the lease of an older term is never sent, even if the same process leads again:
others may have led in between, and have sent it.
"""

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from confluent_kafka import Consumer, KafkaException, TopicPartition
from confluent_kafka import KafkaError as BrokerError
from pyspark.sql import Column

from duetime.clock import Clock
from duetime.config import Settings
from duetime.connection import librdkafka_properties
from duetime.leaving import leave
from duetime.pipeline.jvm import JVM_ERRORS
from duetime.pipeline.leases import held, hold
from duetime.topics import TopicNames

log = logging.getLogger(__name__)

#: After so long without a word from the leader another is chosen, in seconds. The least that
#: brokers allow as they come (group.min.session.timeout.ms).
SESSION_S = 6.0

#: How long the leader may send after it has shown that it is in the group, in seconds. The rest of
#: the session is for what is on its way to the broker.
LEASE_S = SESSION_S - 1.0

#: How often the lease is renewed, in seconds.
RENEW_S = 1.0

#: The longest note that is committed, in bytes (brokers: offset.metadata.max.bytes, 4096).
NOTE_BYTES = 4_000

#: How often is looked whether the group has news, in seconds.
LOOK_S = 0.1

#: How long the group may take to answer whether we lead, in seconds: a leader that was killed is
#: waited for until its session ends.
ANSWER_S = SESSION_S + 4.0


def lease_name(settings: Settings) -> str:
    """Return the name of the JVM's property with the lease of the settings' term.

    Term 0 has no lease: what is planned outside of any term is not held up.
    """
    return f"{settings.namespace}.lease.{settings.term}"


def lease_is_held(settings: Settings) -> Column:
    """A filter for rows: true while we lead in the settings' term.

    Otherwise it waits a while for the lease, then raises.
    """
    otherwise = "the lead is lost: whoever leads next sends what is not sent yet"
    return held(lease_name(settings), otherwise)


class Election:
    """One pipeline's part in the election, in a thread of its own.

    `is_leading` is set while it leads. It is cleared once another may lead.
    """

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._place = TopicNames(settings).leader, 0
        self._name = f"{socket.gethostname()}:{os.getpid()}"
        self._jvm: Any = None
        self.is_leading = threading.Event()
        #: How often it has come to lead: whoever was away for a moment knows it by that.
        self.term = 0
        #: What is told with the lease, to whoever asks for the state of the pipelines.
        self.tell: Callable[[], Mapping[str, Any]] = dict
        #: Why it cannot take part any more, and has left the group.
        self.broken: Exception | None = None
        self._answered = threading.Event()
        self._closing = threading.Event()
        self._since_ms = 0
        #: Until when the lease of this term is held, by the monotonic clock, in seconds.
        self._until_s = 0.0
        self._extending = threading.Lock()
        self._consumer = Consumer(
            librdkafka_properties(settings)
            | {
                "group.id": TopicNames(settings).leader_group,
                "client.id": self._name,
                "session.timeout.ms": int(SESSION_S * 1_000),
                "heartbeat.interval.ms": int(RENEW_S * 1_000),
                # A process in which nothing moves any more leads no more than one that has died.
                "max.poll.interval.ms": int(SESSION_S * 2_000),
                "enable.auto.commit": False,
                "auto.offset.reset": "latest",
                # A pipeline that joins must not take the partition from the one that leads.
                "partition.assignment.strategy": "cooperative-sticky",
            }
        )
        self._thread = threading.Thread(target=self._take_part, name="election", daemon=True)

    def start(self) -> None:
        """Join the group."""
        topic, _ = self._place
        self._consumer.subscribe(
            [topic], on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._revoked
        )
        self._thread.start()

    def guard(self, jvm: Any) -> None:  # noqa: ANN401 (py4j's view of the JVM has no type)
        """From the first time that we lead, rows of this JVM are sent only while we do."""
        with self._extending:
            self._jvm = jvm
            # We may lead already. Without the property, rows would pass until the next renewal.
            if self.term:
                self._tell_rows()

    def holds_lease(self) -> bool:
        """Return whether we may send at this instant, for what sends from Python."""
        return time.monotonic() < self._until_s

    def wait(self) -> bool:
        """Wait until it is known whether we lead, or for as long as a dead leader is waited for."""
        self._answered.wait(ANSWER_S)
        return self.is_leading.is_set()

    def close(self, settle: Callable[[], None] = lambda: None) -> None:
        """Leave the group, so that another can lead at once.

        `settle` is called before that, when no row is sent any more: it waits for what was sent.
        """
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        if self.broken is None:
            try:
                self._step_down()
                settle()
            finally:
                leave(self._consumer)

    def _take_part(self) -> None:
        renew_s = 0.0
        while not self._closing.is_set():
            try:
                # The topic is empty: this is where the group's news arrive.
                self._consumer.poll(LOOK_S)
                if self._since_ms and (not self.is_leading.is_set() or time.monotonic() > renew_s):
                    renew_s = time.monotonic() + RENEW_S
                    self._renew()
            except JVM_ERRORS as error:
                # A leader without a JVM would keep others from delivering.
                self.broken = error
                self.is_leading.clear()
                leave(self._consumer)
                return
            except Exception:
                log.exception("could not take part in the election; trying again")
                self._closing.wait(RENEW_S)

    def _assigned(self, consumer: Consumer, places: list[TopicPartition]) -> None:
        consumer.incremental_assign(places)
        if places:
            self.term += 1
            self._since_ms = self._clock.now_ms()
        else:
            self._answered.set()

    def _revoked(self, consumer: Consumer, places: list[TopicPartition]) -> None:
        self._step_down()
        with suppress(KafkaException):
            consumer.incremental_unassign(places)

    def _renew(self) -> None:
        """Show that we are in the group, and hold the lease from before that on.

        That the group is waiting for its new assignment is an answer, too: the broker gives it to
        members of the present generation only. With cooperative assignment nobody else can be given
        the partition before we have given it back. So a standby that stands still while it joins
        (the others wait 6 s for it) does not end the lease.
        """
        begun_s = time.monotonic()
        error = self._committed(self._note())
        if error and error.code() != BrokerError.REBALANCE_IN_PROGRESS:
            # It ends by itself, if the group does not tell us sooner that we have lost it.
            log.warning("the lease is not renewed error=%s", error.str())
            return
        self._lease_until(begun_s + LEASE_S)
        self.is_leading.set()
        self._answered.set()

    def _note(self) -> str:
        """What is told last is left out first, where all of it would be too long."""
        told = {"leader": self._name, "since_ms": self._since_ms, **self.tell()}
        while len(note := json.dumps(told, separators=(",", ":"))) > NOTE_BYTES:
            told.popitem()
        return note

    def _committed(self, note: str) -> BrokerError | None:
        """Commit as a member of the group; what the broker has against it."""
        position = TopicPartition(*self._place, 0, metadata=note)
        try:
            answers = self._consumer.commit(offsets=[position], asynchronous=False)
        except KafkaException as error:
            refused: BrokerError = error.args[0]
            return refused
        return answers[0].error if answers else None

    def _step_down(self) -> None:
        if self.is_leading.is_set():
            self._lease_until(0)
        self._since_ms = 0
        self.is_leading.clear()

    def _lease_until(self, instant_s: float) -> None:
        with self._extending:
            self._until_s = instant_s
            if self._jvm is not None:
                self._tell_rows()

    def _tell_rows(self) -> None:
        hold(self._jvm, lease_name(self._settings.in_term(self.term)), self._until_s)

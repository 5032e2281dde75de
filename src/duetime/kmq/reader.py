"""The thread that reads a queue's topic: steps 1 to 3 of kmq's five, batch by batch."""

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence

import confluent_kafka
from confluent_kafka import TopicPartition

from duetime.errors import ClientFailed, KafkaError
from duetime.kmq.batch import firsts, lasts, readable
from duetime.kmq.breaker import Breaker
from duetime.kmq.marking import Marking
from duetime.kmq.message import MakeMessage, Message, place_of

log = logging.getLogger(__name__)

#: How long one look for messages may take, in seconds.
POLL_S = 0.1

#: How long workers may keep a full buffer until the group is told that we are alive, in seconds.
FULL_S = 1.0

#: How long to wait after something went wrong, in seconds.
AGAIN_S = 1.0

#: So often within a time-out is looked whether what waits needs more time.
LOOKS = 8


class Reader:
    """Keeps a small buffer of messages that are ours: marked as begun, and committed.

    While workers are at work, what waits for its turn is given more time. Where they hang, it is
    given back, and nothing is read until one asks: what nobody has seen is no attempt.
    """

    def __init__(  # noqa: PLR0913 (what it works with, and two figures)
        self,
        consumer: confluent_kafka.Consumer,
        marking: Marking,
        breaker: Breaker,
        make: MakeMessage,
        *,
        batch: int,
        timeout_ms: int,
    ) -> None:
        self._consumer, self._marking, self._breaker = consumer, marking, breaker
        self._make, self._batch, self._timeout_s = make, batch, timeout_ms / 1_000
        self._timeout_ms = timeout_ms
        self._buffer: deque[Message] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._failed: Exception | None = None
        self._paused = False
        #: Whether the last batch of markers ended the client that wrote it.
        self._client_failed = False
        #: What was handed to a worker last, and when one asked for more.
        self._taken: Message | None = None
        self._asked_s = self._looked_s = time.monotonic()
        #: How many workers wait for a message now.
        self._waiting = 0
        #: Whether one has asked since what waited was given back.
        self._is_wanted = True
        self._thread = threading.Thread(target=self._run, name="kmq-reader", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def take(self) -> Message | None:
        """The next message, if one is there."""
        with self._changed:
            while self._buffer:
                message, self._asked_s = self._buffer.popleft(), time.monotonic()
                self._changed.notify_all()
                if message.keep(self._asked_s):
                    self._taken = message
                    return message
        return None

    def has_some(self) -> bool:
        """Whether a message may be there at once."""
        return bool(self._buffer)

    def wait(self) -> bool:
        """Wait until a message may be there; false if none will come any more.

        Raises KafkaError where reading has failed for good.
        """
        with self._changed:
            self._is_wanted = True
            self._waiting += 1
            try:
                self._changed.wait_for(lambda: self._buffer or self._is_over())
            finally:
                self._waiting -= 1
                self._asked_s = time.monotonic()
            if self._failed and not self._buffer:
                raise KafkaError(f"the queue cannot be read: {self._failed}") from self._failed
            return bool(self._buffer) or not self._is_over()

    def close(self) -> None:
        """Read no more; give back what nobody has taken."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        with self._changed:
            waiting = list(self._buffer)
            self._buffer.clear()
        _give_back(waiting)

    def _run(self) -> None:
        try:
            while not self._closing:
                self._next_batch(self._room())
                self._look_after(time.monotonic())
        except Exception as error:  # noqa: BLE001 (whatever it was, whoever waits is told)
            self._failed = error
        with self._changed:
            self._changed.notify_all()

    def _room(self) -> int:
        """How many messages to read now; 0 while workers have enough, or the breaker is open."""
        with self._changed:
            wait_s = min(FULL_S, self._timeout_s / LOOKS)
            self._changed.wait_for(lambda: self._has_room() or self._closing, wait_s)
            is_room = self._has_room() and self._is_wanted
            room = self._batch - len(self._buffer) if is_room else 0
        if self._closing or not room:
            return 0
        return min(self._breaker.room(self._batch), room)

    def _has_room(self) -> bool:
        return len(self._buffer) <= self._batch // 2

    def _next_batch(self, room: int) -> None:
        """Steps 1 to 3. Step 4 is the worker's, and step 5 is `Message.ack`.

        A crash between 1 and 3 leaves the messages to be read again; after 3, to be redelivered.
        """
        records = self._read(room)
        try:
            self._start(records)
            self._commit(records)
        except (KafkaError, confluent_kafka.KafkaException) as error:
            self._tolerate(error)
            log.warning("a batch is read again messages=%d error=%s", len(records), error)
            self._read_again(records)
            records = []
        self._hand_over(records)
        if room and not records:
            self._breaker.cancel_test()

    def _tolerate(self, error: Exception) -> None:
        """Go on after this; but what ends two clients in a row ends each. Raises ClientFailed."""
        is_again, self._client_failed = self._client_failed, isinstance(error, ClientFailed)
        if is_again and self._client_failed:
            raise error

    def _read(self, room: int) -> list[confluent_kafka.Message]:
        """1. Read; where there is no room, only take part in the group."""
        self._pause(room == 0)
        # A partition that we just got is not paused: one of its messages may come anyway.
        return readable(self._consumer.consume(max(room, 1), timeout=POLL_S))

    def _start(self, records: Sequence[confluent_kafka.Message]) -> None:
        """2. Write their start markers, and wait for them."""
        if records:
            self._marking.start_all([place_of(each) for each in records], self._timeout_ms)
            self._client_failed = False

    def _commit(self, records: Sequence[confluent_kafka.Message]) -> None:
        """3. Commit: from here on they are ours, whoever gets the partition."""
        ends = [TopicPartition(*place, offset + 1) for place, offset in lasts(records).items()]
        for one in self._consumer.commit(offsets=ends, asynchronous=False) if ends else ():
            if one.error is not None:
                raise confluent_kafka.KafkaException(one.error)

    def _hand_over(self, records: Sequence[confluent_kafka.Message]) -> None:
        """To step 4: the workers."""
        with self._changed:
            self._buffer.extend(map(self._make, records))
            self._changed.notify_all()

    def _look_after(self, now_s: float) -> None:
        """Now and then: give what waits here more time or, where workers hang, give it back."""
        if now_s < self._looked_s + self._timeout_s / LOOKS:
            return
        self._looked_s = now_s
        with self._changed:
            waiting, is_left = list(self._buffer), self._is_left(now_s)
            if is_left:
                # Under the lock: who asks from now on is heard.
                self._buffer.clear()
                self._is_wanted = False
        if is_left:
            _give_back(waiting)
        else:
            for message in waiting:
                message.keep(now_s)

    def _is_left(self, now_s: float) -> bool:
        """Whether no worker asks for what waits, and what was taken last is over its time."""
        if self._waiting or now_s < self._asked_s + self._timeout_s:
            return False
        return self._taken is None or self._taken.is_overdue(now_s)

    def _read_again(self, records: Sequence[confluent_kafka.Message]) -> None:
        """Go back to before these. Raises KafkaError where that cannot be done."""
        for place, offset in firsts(records).items():
            self._seek(TopicPartition(*place, offset))
        time.sleep(AGAIN_S)

    def _seek(self, to: TopicPartition) -> None:
        try:
            self._consumer.seek(to)
        except confluent_kafka.KafkaException as error:
            ours = {(each.topic, each.partition) for each in self._consumer.assignment()}
            # Read on from behind them, they would come to nobody. Those of a partition that we have
            # lost are read by others.
            if (to.topic, to.partition) in ours:
                raise KafkaError(f"they cannot be read again ({error.args[0].str()})") from error

    def _pause(self, wanted: bool) -> None:  # noqa: FBT001 (what pausing is)
        if wanted:
            self._consumer.pause(self._consumer.assignment())
        elif self._paused:
            self._consumer.resume(self._consumer.assignment())
        self._paused = wanted

    def _is_over(self) -> bool:
        return self._closing or self._failed is not None


def _give_back(waiting: Iterable[Message]) -> None:
    for message in waiting:
        try:
            message.give_back()
        except KafkaError as error:
            # It comes again after its time-out.
            log.warning("a message is not given back error=%s", error)

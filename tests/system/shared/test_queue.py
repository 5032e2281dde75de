"""A queue's messages that are not acknowledged are delivered again, by the running pipeline."""

import signal
import subprocess
import sys
import time
import uuid
from datetime import timedelta

import pytest
from tests.support.live import EXAMPLE, JOBS, PATIENCE_S, PATIENT, now_ms

from duetime.core import headers as H
from duetime.queue import BreakerPolicy, Queue
from duetime.queue.message import REDELIVERY_COUNT, MarkerKey, start_value
from duetime.queue.stats import TrackerOffsets

pytestmark = pytest.mark.timeout(600)

#: How late a message may be delivered again on a busy machine, in ms: less than the time-out that
#: the tests shorten.
LATE_MS = 45_000


class Worker:
    """One of a queue's workers, for one test: messages of others it leaves to them."""

    def __init__(self, live, topic=JOBS, **options):
        given = {"timeout": timedelta(seconds=2), "group": "workers"} | options
        self.queue = Queue(topic, settings=live.settings, **given)
        self._live, self._topic = live, topic
        self._messages = iter(self.queue)
        self.mark = uuid.uuid4().hex.encode()

    def send(self, partition=0, **record):
        headers = [("mark", self.mark), *record.pop("headers", ())]
        self._live.send(self._topic, partition=partition, headers=headers, **record)
        self._live.flush()

    def next(self):
        until_s = time.monotonic() + PATIENCE_S
        while ("mark", self.mark) not in (message := next(self._messages)).headers:
            assert time.monotonic() < until_s
            message.ack()
        return message


@pytest.fixture
def worker(live):
    made = Worker(live)
    yield made
    made.queue.close()


@pytest.mark.slow
def test_an_unacknowledged_message_is_redelivered_whole_and_counted(worker, live):
    headers = [("a", b"\x00"), ("a", None), (REDELIVERY_COUNT, b"\x01")]
    worker.send(partition=17, value=b"\xff", key=b"k", headers=headers)
    first = worker.next()
    assert first.attempt == 2
    started_ms = now_ms()

    again = worker.next()
    again.extend_visibility(60)
    assert (again.key, again.value, again.position.partition) == (b"k", b"\xff", 17)
    assert [each for each in again.headers if each[0] in ("mark", "a")] == [
        ("mark", worker.mark),
        ("a", b"\x00"),
        ("a", None),
    ]
    assert again.attempt == 3
    # The clock was read a moment after the marker was written.
    assert 2_000 - 500 < again.timestamp_ms - started_ms < 2_000 + LATE_MS

    notes, until_s = TrackerOffsets(live.settings), time.monotonic() + PATIENCE_S
    while not ((noted := notes.of(JOBS)).redelivered_total and noted.in_flight):
        assert time.monotonic() < until_s
    assert noted.redelivered_total == 1
    assert noted.oldest_ms <= now_ms()
    again.ack()
    while notes.of(JOBS).in_flight:
        assert time.monotonic() < until_s
    notes.close()


def test_a_poison_message_becomes_a_dead_letter_and_harms_no_other(worker, live):
    dead = live.inbox(f"{JOBS}__undelivered")
    worker.send(value=b"poison", key=b"k", headers=[("a", b"\x00")])
    worker.send(value=b"good", partition=1)
    attempts, good = [], 0
    while len(attempts) < 3 or not good:
        with worker.next() as message:
            if message.value == b"poison":
                attempts.append(message.attempt)
                raise ValueError
            good += 1
    assert (attempts, good) == ([1, 2, 3], 1)
    dead.until(lambda: any(each.by_name["mark"] == worker.mark for each in dead.arrived), "dead")
    (letter,) = [each for each in dead.arrived if each.by_name["mark"] == worker.mark]
    assert (letter.key, letter.value, letter.by_name["a"]) == (b"k", b"poison", b"\x00")
    assert letter.by_name["due-error"] == b"nacked"
    assert letter.by_name["due-attempts"] == b"3"


@pytest.mark.slow
def test_what_is_given_back_extended_or_backed_off_comes_again_in_its_time(live):
    worker, patient = (Worker(live, name, timeout=timedelta(minutes=1)) for name in (JOBS, PATIENT))
    patient.send(value=b"backed off")
    patient.next().nack()
    for value in (b"retried", b"extended"):
        worker.send(value=value)
        message = worker.next()
        if message.value == b"retried":
            message.nack(retry_in=timedelta(seconds=6))
        else:
            message.extend_visibility(5)
    started_ms = now_ms()
    after_ms = {}
    for each in (patient, worker, worker):
        with each.next() as message:
            assert message.attempt == 2
            after_ms[message.value] = message.timestamp_ms - started_ms
            # However soon that is, it is not delivered before.
            assert message.timestamp_ms >= int(dict(message.headers)[H.DUE_AT_MS])
    # The clock was read a moment after the markers were written.
    assert 5_000 - 500 < after_ms[b"extended"] < 5_000 + LATE_MS
    assert 6_000 - 1_000 < after_ms[b"retried"] < 6_000 + LATE_MS
    # Between half of it and all of it, spread by the message's place.
    assert 3_000 - 1_000 < after_ms[b"backed off"] < 6_000 + LATE_MS
    worker.queue.close()
    patient.queue.close()


@pytest.mark.slow
def test_a_record_that_retention_has_removed_is_a_dead_letter_that_says_so(live):
    from confluent_kafka import TopicPartition  # noqa: PLC0415 (of no use elsewhere)

    dead = live.inbox(f"{JOBS}__undelivered")
    live.send(JOBS, "removed", partition=31)
    live.flush()
    end = live.inbox(JOBS)
    end.until(lambda: any(each.partition == 31 for each in end.arrived), "what is removed")
    (deleted,) = live.admin.delete_records([TopicPartition(JOBS, 31, -1)]).values()
    offset = deleted.result().low_watermark - 1
    key = MarkerKey(31, offset).encoded()
    live.send(f"{JOBS}__markers", start_value(100), key, partition=31)
    live.flush()
    place = f"{JOBS}.31.{offset}".encode()
    dead.until(lambda: any(place in each.by_name["due-id"] for each in dead.arrived), "gone")
    (letter,) = [each for each in dead.arrived if place in each.by_name["due-id"]]
    assert letter.by_name["due-error"] == b"record-deleted"


@pytest.mark.slow
@pytest.mark.parametrize("wait_ms", [0, 400, 1_500, 3_000])
def test_what_is_to_come_again_soon_comes_then_and_never_before(worker, wait_ms):
    worker.send()
    worker.next().nack(retry_in=timedelta(milliseconds=wait_ms))
    with worker.next() as again:
        due_ms = int(dict(again.headers)[H.DUE_AT_MS])
        assert 0 <= again.timestamp_ms - due_ms < LATE_MS


@pytest.mark.slow
def test_what_is_extended_comes_again_when_that_is_over_and_not_before(worker):
    worker.send()
    message = worker.next()
    message.extend_visibility(10)
    extended_ms = now_ms()
    again = worker.next()
    # By the clock of the marker: it was written a moment before ours was read.
    assert again.timestamp_ms - extended_ms >= 10_000 - 500
    assert again.attempt == 2
    again.ack()


@pytest.mark.slow
@pytest.mark.parametrize("heals_after_s", [5, pytest.param(30, marks=pytest.mark.hostile)])
def test_a_flood_of_failures_is_read_slowly_and_then_all_is_done(live, heals_after_s):
    breaker = BreakerPolicy(failures=5, pause=timedelta(seconds=1))
    worker = Worker(live, EXAMPLE, breaker=breaker, prefetch=10)
    for number in range(50):
        worker.send(value=str(number))
    heals_s, deliveries, done = time.monotonic() + heals_after_s, 0, set()
    while len(done) < 50:
        with worker.next() as message:
            deliveries += 1
            if time.monotonic() < heals_s:
                raise ValueError
            done.add(message.value)
    # What was read before it opened, and a test a second: without it, some thousands.
    assert deliveries <= 50 + 35 + heals_after_s
    assert worker.queue.breaker_state == "closed"
    worker.queue.close()


#: Works on a queue, says so, and is killed in the middle of some message.
DOOMED = """
import os, random, signal, sys
from datetime import timedelta
from duetime.core.settings import load_settings
from duetime.queue import Queue

queue = Queue(
    sys.argv[2],
    group="workers",
    settings=load_settings(bootstrap=sys.argv[1]),
    timeout=timedelta(seconds=2),
    prefetch=20,
    **{"session.timeout.ms": 6_000},
)
last = random.randrange(5, 40)
for number, message in enumerate(queue):
    print(message.value.decode(), flush=True)
    if number == last:
        os.kill(os.getpid(), signal.SIGKILL)
    message.ack()
"""


@pytest.mark.slow
def test_each_message_is_worked_on_although_workers_are_killed(live):
    wanted = {f"{uuid.uuid4().hex}-{number}" for number in range(200)}
    for number, value in enumerate(wanted):
        live.send(EXAMPLE, value, partition=number % 2)
    live.flush()
    program = [sys.executable, "-c", DOOMED, live.settings.bootstrap, EXAMPLE]
    doomed = [subprocess.Popen(program, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    done = {line for each in doomed for line in each.communicate()[0].split()}
    assert {each.returncode for each in doomed} == {-signal.SIGKILL}
    assert not wanted <= done
    with Queue(EXAMPLE, group="workers", settings=live.settings) as queue:
        for message in queue:
            done.add(message.value.decode())
            message.ack()
            if wanted <= done:
                break

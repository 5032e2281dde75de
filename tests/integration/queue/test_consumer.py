"""The worker's end of a queue: its messages, and the markers that it writes."""

import asyncio
import itertools
import threading
from datetime import timedelta

import pytest
from confluent_kafka import Consumer, TopicPartition
from tests.support.clocks import eventually

from duetime.core.errors import ConfigError, InvalidMessage, Reason
from duetime.kafka.connection import librdkafka_properties
from duetime.queue import Queue
from duetime.queue.message import END_VALUE, GIVEN_BACK, REDELIVERY_COUNT, MarkerKey, start_value

START = start_value(30_000)


def first(queue):
    return next(iter(queue))


def committed(jobs, partition=0):
    consumer = Consumer(librdkafka_properties(jobs.settings) | {"group.id": "workers"})
    (found,) = consumer.committed([TopicPartition(jobs.topic, partition)], timeout=30)
    consumer.close()
    return found.offset


def test_a_message_is_marked_and_committed_before_processing(jobs):
    jobs.send("a", partition=1)
    for message in jobs.queue():
        with message:
            assert (message.value, message.attempt) == (b"a", 1)
            assert jobs.markers(1) == [(1, MarkerKey(1, 0).encoded(), START, None)]
            assert committed(jobs, partition=1) == 1
        break
    assert jobs.markers(2)[1] == (1, MarkerKey(1, 0).encoded(), END_VALUE, None)


def test_an_exception_gives_the_message_back(jobs):
    jobs.send("bad", "good")
    queue, seen = jobs.queue(), []
    for message in queue:
        with message:
            seen.append(message.value)
            if message.value == b"bad":
                raise ValueError(message.value)
            break
    queue.close()
    assert seen == [b"bad", b"good"]
    last = {key: (value, headers) for _, key, value, headers in jobs.markers(4)}
    given_back = start_value(0), [(GIVEN_BACK, b"failed")]
    assert last[MarkerKey(0, 0).encoded()] == given_back


def test_nack_and_extend_write_start_markers(jobs):
    jobs.send("a")
    message = first(jobs.queue())
    message.extend_visibility(90)
    message.nack(retry_in=timedelta(minutes=5))
    message.ack()

    values = [(value, headers) for _, _, value, headers in jobs.markers(3)]
    retry = start_value(300_000), [(GIVEN_BACK, b"retry")]
    assert values == [(START, None), (start_value(90_000), None), retry]


def test_the_attempt_is_counted_from_kmqs_header(jobs):
    jobs.send("a", headers=[(REDELIVERY_COUNT, b"\x02")])
    assert first(jobs.queue()).attempt == 3


@pytest.mark.parametrize("wait", [timedelta(seconds=-1), timedelta(days=2)])
def test_a_timeout_out_of_range_is_rejected(jobs, wait):
    with pytest.raises(InvalidMessage) as refused:
        jobs.queue(timeout=wait)
    assert refused.value.reason == Reason.BAD_TIMEOUT


def test_a_topic_without_markers_is_rejected(jobs):
    with pytest.raises(ConfigError, match="is missing: create it"):
        Queue(f"{jobs.topic}-other", group="workers", settings=jobs.settings)


def test_close_gives_unseen_messages_back_uncounted(jobs):
    jobs.send("a", "b")
    queue = jobs.queue()
    with first(queue):
        jobs.markers(2)
        queue.close()
    last = {key: (value, headers) for _, key, value, headers in jobs.markers(4)}
    assert last[MarkerKey(0, 0).encoded()] == (END_VALUE, None)
    assert last[MarkerKey(0, 1).encoded()] == (start_value(0), [(GIVEN_BACK, b"unseen")])


@pytest.mark.slow
def test_waiting_messages_outlive_long_processing(jobs):
    jobs.send("long", "b", "c")
    messages = iter(jobs.queue(timeout=timedelta(seconds=1)))
    long = next(messages)
    long.extend_visibility(60)
    # Started, and extended until the first timeout has passed: none was lost.
    jobs.markers(4 + 2 * 3)
    assert [next(messages).value for _ in range(2)] == [b"b", b"c"]


def test_a_hanging_worker_gets_no_messages_until_it_asks(jobs):
    jobs.send("hangs", "waits")
    messages = iter(jobs.queue(timeout=timedelta(seconds=1)))
    next(messages)
    waits = MarkerKey(0, 1).encoded()
    given_back = 0, waits, start_value(0), [(GIVEN_BACK, b"unseen")]
    # Two are started; the waiting one may have been extended before.
    counts = itertools.count(3)
    eventually(lambda: given_back in jobs.markers(next(counts)))
    jobs.send("next")
    assert next(messages).value == b"next"


def test_threads_share_a_queue(jobs):
    jobs.send(*map(str, range(500)))
    queue, seen = jobs.queue(), []

    def work():
        for message in queue:
            with message:
                seen.append(message.value)
                if len(seen) == 500:
                    threading.Thread(target=queue.close).start()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert sorted(map(int, seen)) == list(range(500))


def test_tasks_share_a_queue(jobs):
    jobs.send(*map(str, range(50)))
    queue, seen = jobs.queue(), []

    async def work():
        async for message in queue:
            async with message:
                await asyncio.sleep(0)
                seen.append(message.value)
                if len(seen) == 50:
                    await asyncio.to_thread(queue.close)

    async def both():
        await asyncio.gather(work(), work())

    asyncio.run(both())
    assert sorted(map(int, seen)) == list(range(50))


@pytest.mark.slow
def test_a_second_worker_takes_over_without_loss_or_repeat(jobs):
    seen, both, done = [], threading.Barrier(2), threading.Event()

    def work(queue):
        for number, message in enumerate(queue):
            with message:
                seen.append(message.value)
            if number == 0:
                # Continue once each worker has a partition.
                both.wait(60)
            if len(seen) == 602:
                done.set()

    for partition in (0, 1):
        jobs.send(*(f"{partition}-{each}" for each in range(200)), partition=partition)
    queues = [jobs.queue(prefetch=1)]
    threads = [threading.Thread(target=work, args=(queues[0],))]
    threads[0].start()
    queues.append(jobs.queue(prefetch=1))
    threads.append(threading.Thread(target=work, args=(queues[1],)))
    threads[1].start()
    for partition in (0, 1):
        jobs.send(*(f"{partition}-{each}" for each in range(200, 301)), partition=partition)
    assert done.wait(60)
    for each in queues:
        each.close()
    for each in threads:
        each.join()
    assert len(seen) == len(set(seen)) == 602

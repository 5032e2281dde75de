"""The consumer on a real broker."""

import json
import secrets
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import NewTopic
from tests.support.clocks import SetClock, eventually
from tests.support.delayed_topics import ONE_AT_A_TIME, PATIENCE_S, DelayedTopic, read, values

from duetime.core import headers as H
from duetime.core.errors import ConfigError, KafkaError
from duetime.core.metrics import DELAYED_REMOVED
from duetime.delayed import DelayedConsumer, group
from duetime.delayed.consumer import SERVE_S
from duetime.kafka import producer
from duetime.kafka.producer import OF_ANY_SIZE


@pytest.mark.slow
def test_records_come_at_their_time_and_ties_by_offset(topic, now_ms):
    for delay_ms, value in ((900, "d"), (300, "a"), (600, "b"), (600, "c"), (300, "a2")):
        topic.send(now_ms + delay_ms, value)
    topic.flush()
    with topic.reader() as consumer:
        found = read(consumer, 5)
    assert values(found) == ["a", "a2", "b", "c", "d"]
    assert found[-1].deliver_after_ms == now_ms + 900


@pytest.mark.slow
def test_a_missing_or_invalid_header_means_at_once(topic, now_ms):
    topic.send(now_ms + 500, "later")
    topic.send(None, "plain", key=b"k", headers=[("a", b"b")])
    topic.send("soon", "nonsense")
    topic.flush()
    with topic.reader() as consumer:
        found = read(consumer, 3)
    assert values(found) == ["plain", "nonsense", "later"]
    assert (found[0].key(), found[0].headers()) == (b"k", [("a", b"b")])


def test_records_that_arrive_during_a_pause_keep_their_order(topic, now_ms, monkeypatch):
    clock = SetClock(now_ms - 1_000)
    topic.send(now_ms - 200, "known")
    topic.flush()
    with topic.reader(clock=clock) as consumer:
        eventually(lambda: consumer.poll(0) is None and consumer.metrics().index_entries)
        read_logs = consumer._member.read

        def read_and_stand_still(wait_s, append):
            read_logs(wait_s, append)
            topic.send(now_ms - 400, "new")
            topic.flush()
            clock.ms = now_ms
            # It arrives with the next read, however long the broker takes.
            monkeypatch.setattr(
                consumer._member, "read", lambda _, append: read_logs(PATIENCE_S, append)
            )

        monkeypatch.setattr(consumer._member, "read", read_and_stand_still)
        assert values(read(consumer, 2)) == ["new", "known"]


def test_a_late_record_is_returned_at_once(topic, now_ms):
    topic.send(now_ms, "first")
    topic.send(now_ms + 60_000, "in a minute")
    topic.flush()
    with topic.reader() as consumer:
        read(consumer, 1)
        topic.send(now_ms - 5_000, "late")
        topic.flush()
        assert values(read(consumer, 1)) == ["late"]


def test_a_restart_resumes_exactly_even_among_equal_times(topic, now_ms):
    for number in range(10):
        topic.send(now_ms - 100, str(number))
    topic.send(now_ms - 200, "earlier")
    topic.flush()
    with topic.reader(enable_auto_commit=False) as consumer:
        found = read(consumer, 7)
        consumer.commit(found[3], asynchronous=False)
    with topic.reader(enable_auto_commit=False) as consumer:
        again = read(consumer, 2)
        consumer.commit(asynchronous=False)
    with topic.reader() as consumer:
        rest = read(consumer, 5)
    assert values([*found[:4], *again, *rest]) == ["earlier", *map(str, range(10))]
    plain = Consumer(topic.properties())
    (committed,) = plain.committed([TopicPartition(topic.name, 0)], timeout=PATIENCE_S)
    plain.close()
    assert committed.offset == 11


@pytest.mark.slow
def test_index_files_spare_the_log_and_may_be_missing_or_damaged(topic, now_ms, tmp_path):
    files = {"delayed_index_location": tmp_path.as_uri(), "delayed_segment_records": 100}
    topic.send_old(now_ms, 1_000)
    with topic.reader(**files, enable_auto_commit=False) as consumer:
        expected = values(read(consumer, 1_000))
    found = sorted(tmp_path.rglob("*.parquet"))
    assert len(found) == 10
    found[2].unlink()
    found[5].write_bytes(found[5].read_bytes()[:-7])
    with topic.reader(**files) as consumer:
        assert values(read(consumer, 1_000)) == expected
        # Entries in files are not read from the log; records are, when they are due.
        assert consumer.metrics().read_again >= 800
        consumer.commit(asynchronous=False)
        assert len(list(tmp_path.rglob("*.parquet"))) == 0


@pytest.mark.slow
@pytest.mark.parametrize("harm", [Path.unlink, lambda path: path.write_bytes(b"PAR1")])
def test_index_files_may_be_lost_while_they_are_used(topic, now_ms, tmp_path, harm):
    files = {"delayed_index_location": str(tmp_path), "delayed_segment_records": 100}
    for number in range(2_000):
        topic.send(now_ms - 500 + number * 7919 % 500, str(number))
    topic.send(None, "first")
    topic.flush()
    clock = SetClock(now_ms - 4_000)
    with topic.reader(**files, enable_auto_commit=False, clock=clock) as consumer:
        assert values(read(consumer, 1)) == ["first"]
        # None of these is due soon, so that their entries are in the files alone.
        assert consumer.metrics().index_bytes < 2_000 * 16
        for path in tmp_path.rglob("*.parquet"):
            harm(path)
        clock.ms = now_ms
        found = read(consumer, 500)
        consumer.commit(found[0], asynchronous=False)
    order = sorted(range(2_000), key=lambda number: (number * 7919 % 500, number))
    assert values(found) == [str(number) for number in order[:500]]
    with topic.reader() as consumer:
        assert values(read(consumer, 1_999)) == [str(number) for number in order[1:]]


def test_records_not_cached_are_read_again(topic, now_ms):
    for number in range(2_000):
        topic.send(now_ms - number * 7919 % 1_000, str(number), headers=[("n", str(number))])
    topic.flush()
    with topic.reader(delayed_kept_bytes=100_000) as consumer:
        found = read(consumer, 2_000)
        assert consumer.metrics().read_again > 0
        assert consumer.metrics().kept_bytes == 0
    order = [(message.deliver_after_ms, message.offset()) for message in found]
    assert order == sorted(order)
    assert all(message.headers()[0] == ("n", message.value()) for message in found)


def test_only_committed_records_of_transactions_come(topic, now_ms):
    producer = Producer({"bootstrap.servers": topic.bootstrap, "transactional.id": topic.name})
    producer.init_transactions(PATIENCE_S)
    for value, end in (("no", producer.abort_transaction), ("yes", producer.commit_transaction)):
        producer.begin_transaction()
        producer.produce(topic.name, value, headers=[(H.DELIVER_AFTER_MS, str(now_ms + 300))])
        topic.send(now_ms + 200, f"beside {value}")
        topic.flush()
        end(PATIENCE_S)
    with topic.reader(delayed_kept_bytes=1) as consumer:
        assert values(read(consumer, 3)) == ["beside no", "beside yes", "yes"]
        assert consumer.metrics().removed == 0


def test_an_asynchronous_commit_counts_once_it_is_answered(topic, now_ms, monkeypatch):
    for number in range(2):
        topic.send(now_ms, str(number))
    topic.flush()
    manual = {"enable_auto_commit": False}
    with topic.reader(**manual) as consumer:
        read(consumer, 1)
        whole = consumer._member.commit
        # The commit did not reach the broker, and was not reported.
        monkeypatch.setattr(consumer._member, "commit", lambda *_, **__: None)
        consumer.commit()
        monkeypatch.setattr(consumer._member, "commit", whole)
        consumer.commit(asynchronous=False)
        assert next(iter(consumer._partitions.values())).to_commit() is None
    with topic.reader(**manual) as consumer:
        assert values(read(consumer, 1)) == ["1"]
        consumer.commit()
        eventually(lambda: consumer.poll(0) is None and is_known_to_be_committed(consumer))


def is_known_to_be_committed(consumer):
    (partition,) = consumer._partitions.values()
    return partition.to_commit() is None


@pytest.mark.slow
def test_unhandled_records_are_redelivered(topic, now_ms):
    for number in range(2):
        topic.send(now_ms, str(number))
    topic.flush()
    with pytest.raises(ZeroDivisionError):
        fail_at_the_first(topic)
    with topic.reader() as consumer:
        assert values(read(consumer, 1)) == ["0"]
    with topic.reader() as consumer:
        assert values(read(consumer, 1)) == ["1"]


def fail_at_the_first(topic):
    with topic.reader() as consumer:
        read(consumer, 1)
        raise ZeroDivisionError


def test_the_client_is_polled_while_many_records_are_ready(topic, now_ms, monkeypatch):
    for number in range(100):
        topic.send(now_ms, str(number))
    topic.flush()
    with topic.reader() as consumer:
        read(consumer, 1)
        served = []
        monkeypatch.setattr(consumer._member, "read", lambda *asked: served.append(asked))
        read(consumer, 1)
        # Handling the last record took long.
        consumer._served_s -= SERVE_S
        assert served == []
        read(consumer, 2)
        assert len(served) == 1
        monkeypatch.undo()


@pytest.mark.slow
def test_two_consumers_share_the_partitions_and_hand_them_over(two_partitions, now_ms):
    topic = two_partitions
    told = []
    for number in range(400):
        topic.send(now_ms + number * 5, str(number), partition=number % 2)
    topic.flush()
    often = {"heartbeat.interval.ms": 200}
    first, second = (DelayedConsumer(topic.properties() | often) for _ in range(2))
    first.subscribe([topic.name], on_revoke=lambda _, gone: told.append(len(gone)))
    found = values(read(first, 50))
    second.subscribe([topic.name])
    while not (len(first.assignment()) == len(second.assignment()) == 1):
        found += values(each for each in (first.poll(0.05), second.poll(0.05)) if each)
    second.close()
    found += values(read(first, 400 - len(found)))
    first.close()
    assert sorted(map(int, found)) == list(range(400))
    assert told[0] == 1


def test_closing_does_not_wait_for_an_unknown_rebalance(topic):
    consumer = topic.reader()
    # The client has the partition, and has not been polled.
    eventually(topic.is_assigned)
    started_s = time.monotonic()
    consumer.close()
    assert time.monotonic() - started_s < 10
    assert not topic.is_assigned()
    # Closing may be repeated.
    consumer.close()


def test_closing_leaves_a_static_member_its_partitions(topic):
    topic.send(None, "one")
    topic.flush()
    consumer = topic.reader(group_instance_id="one")
    read(consumer, 1)
    consumer.close()
    assert topic.is_assigned()


def test_a_nacked_record_is_retried_for_its_group_until_it_dies(topic, now_ms):
    dead = DelayedTopic(topic.bootstrap)
    retry = {"delayed_backoff_ms": 50, "delayed_attempts": 3}
    topic.send(now_ms, "order", key=b"k", headers=[("a", b"b")])
    topic.flush()
    with topic.reader(**retry, delayed_dead_letter_topic=dead.name) as consumer:
        (message,) = read(consumer, 1)
        message.nack(retry_in=timedelta(milliseconds=200))
        (again,) = read(consumer, 1)
        assert (again.value(), again.key(), again.attempts) == (b"order", b"k", 1)
        assert again.deliver_after_ms >= now_ms + 200
        again.nack()
        (last,) = read(consumer, 1)
        last.nack()
        consumer.commit(asynchronous=False)
    with dead.reader() as letters:
        (letter,) = read(letters, 1)
    words = dict(letter.headers())
    assert letter.headers()[0] == ("a", b"b")
    assert (words["due-error"], words["due-attempts"]) == (b"retries-exhausted", b"3")
    with topic.reader(group="other") as consumer:
        topic.send(now_ms, "end")
        topic.flush()
        assert values(read(consumer, 2)) == ["order", "end"]


@pytest.mark.slow
def test_a_second_dead_letter_has_only_the_senders_headers(topic, now_ms):
    dead = DelayedTopic(topic.bootstrap)
    delivered = [("due-at-ms", b"1"), ("due-id", b"000000000001-redriven.0"), ("a", b"b")]
    topic.send(now_ms, "order", headers=delivered)
    topic.flush()
    retry = {"delayed_backoff_ms": 50, "delayed_attempts": 2}
    with topic.reader(**retry, delayed_dead_letter_topic=dead.name) as consumer:
        for _ in range(2):
            (message,) = read(consumer, 1)
            # It is the same message at each attempt.
            assert message.headers()[: len(delivered)] == delivered
            message.nack()
            consumer.commit(asynchronous=False)
    with dead.reader() as letters:
        (letter,) = read(letters, 1)
    assert letter.headers()[: -len(H.DEAD_LETTER)] == [("a", b"b")]


def test_records_removed_before_they_are_due_are_counted(topic, now_ms, caplog):
    counted = DELAYED_REMOVED._value.get()
    for number in range(100):
        topic.send(now_ms - 1_000, str(number))
    topic.send(now_ms - 500, "end")
    topic.flush()
    clock = SetClock(now_ms - 2_000)
    with topic.reader(delayed_kept_bytes=1, clock=clock) as consumer:
        eventually(lambda: consumer.poll(0) is None and consumer.metrics().index_entries == 101)
        topic.remove_before(60)
        clock.ms = now_ms
        found = read(consumer, 41)
        assert values(found)[-1] == "end"
        assert consumer.metrics().removed == 60
    assert DELAYED_REMOVED._value.get() == counted + 60
    removed = f"before they were due topic={topic.name} partition=0 records=60"
    assert f"retention removed records {removed}" in caplog.text


@pytest.mark.slow
def test_records_removed_without_a_reader_are_counted_too(topic, now_ms):
    for number in range(10):
        topic.send(now_ms + number, str(number))
    topic.flush()
    with topic.reader() as consumer:
        read(consumer, 2)
    topic.remove_before(6)
    with topic.reader() as consumer:
        assert values(read(consumer, 4)) == ["6", "7", "8", "9"]
        assert consumer.metrics().removed == 4


READER = """
import json, sys
from duetime.delayed import DelayedConsumer
consumer = DelayedConsumer(json.loads(sys.argv[2]) | {"enable.auto.commit": False})
consumer.subscribe([sys.argv[1]])
while True:
    message = consumer.poll(1)
    if message:
        print(message.value().decode(), flush=True)
        consumer.commit(asynchronous=False)
"""


def killed_after(count, topic, properties):
    """Return the records of a reader process, killed a moment after this many."""
    program = [sys.executable, "-c", READER, topic.name, json.dumps(properties)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        found = [process.stdout.readline().strip() for _ in range(count)]
        process.kill()
        return found + process.stdout.read().split()


@pytest.mark.slow
def test_a_killed_reader_loses_nothing_and_repeats_one_at_most(topic, now_ms, tmp_path):
    for number in range(300):
        topic.send(now_ms - number * 7919 % 300, str(number))
    topic.flush()
    files = {"delayed_index_location": str(tmp_path), "delayed_segment_records": 50}
    member = topic.properties(group_instance_id="one", **files)
    counts = [1 + secrets.randbelow(90) for _ in range(3)]
    found = [value for count in counts for value in killed_after(count, topic, member)]
    with DelayedConsumer(member) as consumer:
        consumer.subscribe([topic.name])
        while len(set(found)) < 300:
            found += values(read(consumer, 1))
    assert len(found) <= 303, counts
    order = list(dict.fromkeys(map(int, found)))
    assert order == sorted(range(300), key=lambda number: (-(number * 7919 % 300), number)), counts


@pytest.mark.slow
def test_partitions_of_a_killed_consumer_go_to_the_other(two_partitions, now_ms):
    topic = two_partitions
    for number in range(600):
        topic.send(now_ms + number * 7919 % 600, str(number), partition=number % 2)
    topic.flush()
    soon = topic.properties(session_timeout_ms=6_000, heartbeat_interval_ms=200)
    count = 1 + secrets.randbelow(250)
    found = killed_after(count, topic, soon)
    with DelayedConsumer(soon) as consumer:
        consumer.subscribe([topic.name])
        while len(set(found)) < 600:
            found += values(read(consumer, 1))
    assert len(found) <= 601, count
    for partition in (0, 1):
        order = [each for each in dict.fromkeys(map(int, found)) if each % 2 == partition]
        assert order == sorted(order, key=lambda number: (number * 7919 % 600, number)), count


@pytest.mark.parametrize(
    "wrong",
    [{"group.id": ""}, {"delayed.attempts": 0}, {"delayed.cake": 1}, {"auto.offset.reset": "none"}],
)
def test_an_invalid_property_is_refused_by_name(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        DelayedConsumer({"bootstrap.servers": "127.0.0.1:1", "group.id": "g"} | wrong)


@pytest.mark.slow
def test_the_log_replaces_a_segment_file_that_retention_cut(topic, now_ms, tmp_path):
    files = {"delayed_index_location": tmp_path.as_uri(), "delayed_segment_records": 100}
    for number in range(300):
        topic.send(now_ms + 1_000 + number, str(number))
    topic.send(now_ms - 1_000, "due")
    topic.flush()
    with topic.reader(**files) as consumer:
        assert values(read(consumer, 1)) == ["due"]
    topic.remove_before(150)
    with topic.reader(**files) as consumer:
        assert values(read(consumer, 150)) == [str(each) for each in range(150, 300)]


def test_a_group_from_the_end_passes_on_what_is_pending(topic, now_ms):
    topic.send(now_ms, "before")
    topic.flush()
    with topic.reader(auto_offset_reset="latest", enable_auto_commit=False) as consumer:
        while not consumer.assignment():
            assert consumer.poll(1) is None
        topic.send(now_ms + 1_000, "since")
        topic.flush()
    with topic.reader(auto_offset_reset="latest") as consumer:
        assert values(read(consumer, 1)) == ["since"]


def is_committed(consumer):
    try:
        consumer.commit(asynchronous=False)
    except KafkaError:
        return False
    return True


@pytest.fixture
def narrow(broker, now_ms):
    """A topic that accepts a record, but not with the headers of a retry."""
    topic = DelayedTopic(broker.bootstrap, **{"max.message.bytes": "1000"})
    topic.send(now_ms, "x" * 880)
    topic.flush()
    return topic


def test_a_retry_that_the_topic_refuses_is_a_dead_letter(narrow):
    dead = f"{narrow.name}.dead"
    narrow.admin.create_topics([NewTopic(dead, num_partitions=1)])[dead].result()
    retry = {"delayed_dead_letter_topic": dead, "enable_auto_commit": False}
    with narrow.reader(**retry) as consumer:
        read(consumer, 1)[0].nack()
        with pytest.raises(KafkaError, match="nothing is committed"):
            consumer.commit(asynchronous=False)
        consumer.commit(asynchronous=False)
    place = TopicPartition(dead, 0)
    with_letters = Consumer(narrow.properties("dead"))
    eventually(lambda: with_letters.get_watermark_offsets(place, timeout=PATIENCE_S) == (0, 1))
    with_letters.close()


@pytest.mark.parametrize("queue", [{}, ONE_AT_A_TIME])
def test_a_record_too_large_for_a_dead_letter_leaves_its_place(topic, now_ms, monkeypatch, queue):
    monkeypatch.setattr(producer, "OF_ANY_SIZE", OF_ANY_SIZE | queue)
    dead, large = DelayedTopic(topic.bootstrap, **{"max.message.bytes": "70000"}), "x" * 100_000
    topic.send(now_ms, large, key=b"k", headers=[("a", b"b")])
    topic.send(now_ms, "small", key=b"k", headers=[("a", large.encode())])
    topic.flush()
    retry = {"delayed_attempts": 1, "delayed_dead_letter_topic": dead.name}
    with topic.reader(**retry, enable_auto_commit=False) as consumer:
        for message in read(consumer, 2):
            message.nack()
        consumer.commit(asynchronous=False)
    with dead.reader() as letters:
        without_value, bare = sorted(read(letters, 2), key=lambda each: each.key() is None)
    assert (without_value.key(), without_value.headers()[0]) == (b"k", ("a", b"b"))
    assert bare.key() is None
    for offset, letter in enumerate((without_value, bare)):
        words = dict(letter.headers())
        assert (letter.value(), words["due-error"]) == (None, b"record-deleted")
        assert words["due-error-detail"].endswith(f"its record is {topic.name}/0/{offset}".encode())


def test_the_next_commit_repeats_a_failed_retry(narrow, monkeypatch):
    topic, retry = narrow, {"delayed_backoff_ms": 50, "enable_auto_commit": False}
    # As if another attempt could change it; here it does.
    monkeypatch.setattr(group, "PERMANENT", ())
    with topic.reader(**retry) as consumer:
        (found,) = read(consumer, 1)
        found.nack()
        with pytest.raises(KafkaError, match="nothing is committed"):
            consumer.commit(asynchronous=False)
        topic.configure("max.message.bytes", "2000")
        # The broker applies it later.
        eventually(lambda: is_committed(consumer))
        (again,) = read(consumer, 1)
    assert again.value() == found.value()


def test_a_failed_read_is_repeated_and_loses_nothing(topic, now_ms, monkeypatch):
    for number in range(300):
        topic.send(now_ms, str(number))
    topic.flush()
    # Nothing is cached, so that everything is read when it is due.
    with topic.reader(delayed_kept_bytes=1, enable_auto_commit=False) as consumer:
        first = read(consumer, 1)
        (partition,) = consumer._partitions.values()
        whole = partition.reader.batches
        failures = iter([True, True])

        def sometimes(*asked):
            if next(failures, False):
                raise KafkaError("away")
            return whole(*asked)

        monkeypatch.setattr(partition.reader, "batches", sometimes)
        rest, failed = [], 0
        while len(rest) < 299:
            try:
                rest += consumer.consume(500, 1)
            except KafkaError:
                failed += 1
        assert values([*first, *rest]) == [str(each) for each in range(300)]
        assert failed > 0

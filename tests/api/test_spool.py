"""What is accepted while Kafka does not answer: kept, drained in order, and sent once."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from itertools import count

import httpx
import pytest
from confluent_kafka.admin import AdminClient
from tests.api.conftest import NOWHERE, Running, alike, problem_of
from tests.conftest import configure, eventually

from duetime.admin import create_topics
from duetime.api.address import url
from duetime.api.spool.errors import SpoolFull
from duetime.api.spool.file import Spool
from duetime.api.spool.rows import apart
from duetime.connection import librdkafka_properties
from duetime.errors import SetupError
from duetime.local.broker import LocalBroker
from duetime.outgoing import Wanted, cancelled, scheduled
from duetime.stores import OffsetRange
from duetime.stores.offsets import Offsets
from duetime.stores.records import RangeReader

MIB = 1024 * 1024


def record(number, **parts):
    wanted = Wanted(topic="orders", value=f"{number}", **parts)
    unique = f"m{number}"
    return scheduled(wanted, NOWHERE, due_ms=1_000, now_ms=2_000, unique=unique)


@pytest.fixture
def spool(tmp_path):
    made = Spool(tmp_path / "spool.db", MIB)
    yield made
    made.close()


def test_records_come_out_as_they_went_in_and_in_order(spool):
    records = [record(each, key=b"\xff", headers={"a": b"\x00", "b": None}) for each in range(5)]
    spool.put(records[:2])
    spool.put(records[2:])

    taken = spool.take(3, now_ms=7) + spool.take(3, now_ms=8)

    assert [each.record for each in taken] == records
    assert spool.take(1, now_ms=9) == []


def test_what_arrived_is_gone_and_what_did_not_is_taken_again(spool):
    spool.put([record(each) for each in range(4)])
    first, second, third = spool.take(3, now_ms=7)
    spool.remove([first.number])

    assert spool.taken() == {str(each.record.id): 7 for each in (second, third)}
    spool.settle(spool.taken(), [str(second.record.id)])

    assert [each.record for each in spool.take(9, now_ms=8)] == [record(2), record(3)]


def test_what_is_taken_meanwhile_stays_taken(spool):
    spool.put([record(0)], taken_ms=7)
    looked_for = spool.taken()
    spool.put([record(1)], taken_ms=8)
    spool.settle(looked_for, [])

    assert spool.taken() == {str(record(1).id): 8}
    assert [each.record for each in spool.take(9, now_ms=9)] == [record(0)]


def test_the_same_message_is_kept_once(spool):
    assert len(spool.put([record(1)])) == 1
    assert spool.put([record(1)]) == []
    assert spool.depth() == 1


def test_what_is_set_aside_is_never_taken_again_and_does_not_count(spool):
    spool.put([record(each) for each in range(2)])
    first, _ = spool.take(2, now_ms=7)
    spool.set_aside(first.number)
    spool.settle(spool.taken(), [])

    assert [each.record for each in spool.take(9, now_ms=8)] == [record(1)]
    assert spool.depth() == 1
    assert spool.find(record(0).id) is None


def test_what_is_set_aside_is_anew_for_who_gives_it_again(spool):
    spool.put([record(each) for each in range(2)])
    first, _ = spool.take(2, now_ms=7)
    spool.set_aside(first.number)
    again = record(0, key="another")

    assert len(spool.put([again])) == 1
    assert spool.depth() == 2
    assert spool.find(again.id) == again
    assert [each.record for each in spool.take(9, now_ms=8)] == [again]
    assert spool.put([again]) == []


def test_no_more_bytes_are_taken_at_a_time_than_are_to_be_in_memory(spool):
    small, large = [record(each) for each in range(3)], scheduled_large(9)
    spool.put([small[0], large, *small[1:]])

    taken = [[each.record for each in spool.take(9, 7, 500_000)] for _ in range(3)]

    assert taken == [[small[0], large], small[1:], []]


def test_what_is_kept_in_place_of_what_is_withdrawn_comes_last(spool):
    instead = cancelled(record(0).id, NOWHERE)
    spool.put([record(each) for each in range(2)])

    assert spool.withdraw(record(0).id, replace(instead, id=apart(record(0).id)))
    assert not spool.withdraw(record(0).id, instead)
    assert spool.find(record(0).id) is None
    stays, kept = spool.take(9, now_ms=7)
    assert stays.record == record(1)
    assert (kept.record.topic, kept.record.key) == (instead.topic, instead.key)


def test_only_what_was_not_taken_can_be_withdrawn(spool):
    spool.put([record(each) for each in range(2)])
    spool.take(1, now_ms=7)

    assert not spool.withdraw(record(0).id)
    assert spool.withdraw(record(1).id)
    assert not spool.withdraw(record(1).id)
    assert spool.find(record(0).id) == record(0)
    assert spool.find(record(1).id) is None


def test_a_full_spool_takes_nothing_and_loses_nothing(spool):
    large = [scheduled_large(each) for each in range(3)]
    spool.put(large[:1])
    with pytest.raises(SpoolFull):
        spool.put(large[1:])
    assert spool.depth() == 1
    (taken,) = spool.take(9, now_ms=7)
    spool.remove([taken.number])
    spool.put(large[1:2])


def scheduled_large(number):
    wanted = Wanted(topic="orders", value=b"x" * 600_000)
    return scheduled(wanted, NOWHERE, due_ms=1_000, now_ms=2_000, unique=f"l{number}")


def test_every_write_is_on_the_disk_before_it_is_answered(spool):
    """So nothing accepted is lost by a power cut: FULL is an fsync of the log at each commit."""
    full = 2
    assert spool._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert spool._db.execute("PRAGMA synchronous").fetchone() == (full,)


def test_nobody_else_reads_what_is_in_it(spool, tmp_path):
    spool.put([record(1)])
    assert {each.name for each in tmp_path.iterdir()} == {"spool.db", "spool.db-wal"}
    assert {each.stat().st_mode & 0o777 for each in tmp_path.iterdir()} == {0o600}


def test_two_do_not_share_a_spool(spool, tmp_path):
    spool.put([record(1)])
    with pytest.raises(SetupError, match=r"another duetime api has it.* DUETIME_API_SPOOL="):
        Spool(tmp_path / "spool.db", MIB)


def message(number):
    return {"topic": "orders", "at": "2020-01-01T00:00:00Z", "id": f"m{number}", "value": "v"}


def test_without_kafka_messages_are_accepted_and_kept(serving):
    client = serving(NOWHERE)
    before, begun_s = spooled(client), time.monotonic()
    answers = [client.post("/v1/messages", json=message(each)) for each in range(20)]
    # The first waits for Kafka, and the others know.
    assert time.monotonic() - begun_s < 5
    assert {each.status_code for each in answers} == {202}
    assert answers[3].json()["id"].endswith("-m3")
    # Other servers of this process count into the same gauge.
    assert spooled(client) - before == 20
    assert client.get("/readyz").status_code == 200


def test_what_is_in_the_spool_at_the_start_counts_while_kafka_is_away(serving, tmp_path):
    kept = Spool(alike(NOWHERE, tmp_path).api_spool, MIB)
    kept.put([record(each) for each in range(3)])
    kept.close()
    assert spooled(serving(NOWHERE)) == 3


def test_a_full_spool_says_when_to_try_again(serving):
    client = serving(NOWHERE.model_copy(update={"api_spool_bytes": MIB}))
    large = {"topic": "orders", "in": "1m", "value": "x" * 600_000}
    assert client.post("/v1/messages", json=large).status_code == 202
    answer = client.post("/v1/messages", json=large)
    assert problem_of(answer) == (503, "spool-full")
    assert int(answer.headers["retry-after"]) > 0
    assert client.get("/readyz").status_code == 503


def spooled(client):
    """What the metric says."""
    lines = client.get("/metrics").text.splitlines()
    (line,) = (each for each in lines if each.startswith("duetime_api_spooled_messages "))
    return float(line.split()[1])


@pytest.mark.system
def test_a_record_that_the_topic_does_not_take_holds_up_no_other(settings, topics, tmp_path):  # noqa: ARG001
    intake = f"{settings.namespace}.in"
    configure(AdminClient(librdkafka_properties(settings)), intake, "max.message.bytes", "20000")
    named = alike(settings, tmp_path)
    kept = Spool(named.api_spool, MIB)
    kept.put([of(settings, each, "x" * (30_000 if each == 3 else 3_000)) for each in range(9)])
    kept.close()

    running = Running(named)
    with httpx.Client(base_url=url(named), timeout=30) as client:
        eventually(lambda: len(everything_taken_in(settings)) == 8)
        large = {"topic": "orders", "in": "1h", "value": "x" * 30_000}
        assert problem_of(client.post("/v1/messages", json=large)) == (422, "refused")
        assert client.post("/v1/messages", json=message(9)).status_code == 201
    running.stop()

    assert sorted(everything_taken_in(settings)) == [f"m{each}" for each in range(10) if each != 3]


def of(settings, number, value):
    wanted = Wanted(topic="orders", value=value)
    return scheduled(wanted, settings, due_ms=1_000, now_ms=2_000, unique=f"m{number}")


@pytest.mark.system
def test_nothing_accepted_is_lost_or_sent_twice_when_broker_and_api_are_killed(tmp_path):
    """Under load: the broker is stopped, the API killed twice, and both started again."""
    with LocalBroker(tmp_path / "kafka") as broker:
        settings = alike(NOWHERE.model_copy(update={"bootstrap": broker.bootstrap}), tmp_path)
        create_topics(settings)
        load = Load(settings)
        with api_process(settings) as api, load:
            load.await_more(200)
            broker.stop()
            load.await_more(200)
            api.send_signal(signal.SIGKILL)
        with api_process(settings) as api, load:
            load.await_more(200)
            broker.start()
            load.await_more(200)
            api.send_signal(signal.SIGKILL)
        with api_process(settings), load:
            load.await_more(200)
            await_drained(settings)
        arrived = everything_taken_in(settings)
    accepted = load.accepted
    assert not set(accepted) - set(arrived)
    # What was not answered may have come, and was never sent a second time.
    assert len(arrived) == len(set(arrived))


class Load:
    """Sends messages one after another, each with an id of its own, while the block lasts."""

    def __init__(self, settings):
        self._url = f"{url(settings)}/v1/messages"
        self._numbers = count(1)
        self.accepted = []

    def __enter__(self):
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._send)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        self._thread.join()

    def await_more(self, count):
        wanted = len(self.accepted) + count
        eventually(lambda: len(self.accepted) >= wanted)

    def message(self):
        return message(next(self._numbers))

    def note(self, sent, status):
        if status in (201, 202):
            self.accepted.append(sent["id"])

    def _send(self):
        with httpx.Client(timeout=10) as client:
            while not self._ended.is_set():
                sent = self.message()
                try:
                    answer = client.post(self._url, json=sent)
                except httpx.TransportError:
                    self._ended.wait(0.01)
                    continue
                self.note(sent, answer.status_code)


def api_process(settings):
    """`duetime api` as its user runs it."""
    names = ("bootstrap", "api_port", "api_spool", "wheel_levels")
    own = {f"DUETIME_{name.upper()}": str(getattr(settings, name)) for name in names}
    process = subprocess.Popen([sys.executable, "-m", "duetime", "api"], env=os.environ | own)
    return Ended(process)


class Ended:
    def __init__(self, process):
        self._process = process

    def __enter__(self):
        return self._process

    def __exit__(self, *_):
        self._process.terminate()
        self._process.wait(20)


def await_drained(settings):
    with httpx.Client(base_url=url(settings)) as client:
        eventually(lambda: not spooled(client))


def everything_taken_in(settings):
    """The ids of all records of the intake topic."""
    places = [(f"{settings.namespace}.in", each) for each in range(settings.intake_partitions)]
    offsets = Offsets(settings, settings.namespace)
    ends = offsets.ends(places)
    offsets.close()
    with RangeReader(settings) as reader:
        ranges = [OffsetRange(*place, 0, end) for place, end in ends.items()]
        return [dict(each.headers())["due-id"].decode() for each in reader.records(ranges)]

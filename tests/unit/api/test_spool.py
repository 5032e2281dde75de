"""What is accepted while Kafka does not answer: kept, drained in order, and sent once."""

import time

import pytest
from tests.support.api import NOWHERE, alike, problem_of
from tests.support.spooling import MIB, message, put, record, spooled

from duetime.api.errors import SpoolFull
from duetime.api.spool import Spool
from duetime.core.errors import SetupError
from duetime.core.records import MessageSpec, cancel_record, message_record


def test_records_come_out_as_they_went_in_and_in_order(spool):
    records = [record(each, key=b"\xff", headers={"a": b"\x00", "b": None}) for each in range(5)]
    put(spool, records[:2])
    put(spool, records[2:])

    taken = spool.take(3, now_ms=7) + spool.take(3, now_ms=8)

    assert [each.record for each in taken] == records
    assert spool.take(1, now_ms=9) == []


def test_arrived_records_are_removed_and_the_others_taken_again(spool):
    put(spool, [record(each) for each in range(4)])
    first, second, third = spool.take(3, now_ms=7)
    spool.remove([first.number])

    assert spool.unconfirmed() == {str(each.record.id): 7 for each in (second, third)}
    spool.settle(spool.unconfirmed(), [str(second.record.id)])

    assert [each.record for each in spool.take(9, now_ms=8)] == [record(2), record(3)]


def test_records_taken_meanwhile_stay_taken(spool):
    put(spool, [record(0)], taken_ms=7)
    looked_for = spool.unconfirmed()
    put(spool, [record(1)], taken_ms=8)
    spool.settle(looked_for, [])

    assert spool.unconfirmed() == {str(record(1).id): 8}
    assert [each.record for each in spool.take(9, now_ms=9)] == [record(0)]


def test_the_same_message_is_kept_once(spool):
    assert len(put(spool, [record(1)])) == 1
    assert put(spool, [record(1)]) == []
    assert spool.depth() == 1


def test_a_record_set_aside_is_never_taken_and_does_not_count(spool):
    put(spool, [record(each) for each in range(2)])
    first, _ = spool.take(2, now_ms=7)
    spool.set_aside(first.number)
    spool.settle(spool.unconfirmed(), [])

    assert [each.record for each in spool.take(9, now_ms=8)] == [record(1)]
    assert spool.depth() == 1
    assert spool.find(record(0).id) is None


def test_a_record_set_aside_is_new_when_it_is_put_again(spool):
    put(spool, [record(each) for each in range(2)])
    first, _ = spool.take(2, now_ms=7)
    spool.set_aside(first.number)
    again = record(0, key="another")

    assert len(put(spool, [again])) == 1
    assert spool.depth() == 2
    assert spool.find(again.id) == again
    assert [each.record for each in spool.take(9, now_ms=8)] == [again]
    assert put(spool, [again]) == []


def test_the_bytes_taken_at_a_time_are_bounded(spool):
    small, large = [record(each) for each in range(3)], scheduled_large(9)
    put(spool, [small[0], large, *small[1:]])

    taken = [[each.record for each in spool.take(9, 7, 500_000)] for _ in range(3)]

    assert taken == [[small[0], large], small[1:], []]


def test_the_replacement_of_a_withdrawn_record_comes_last(spool):
    instead = cancel_record(record(0).id, NOWHERE)
    put(spool, [record(each) for each in range(2)])

    assert spool.withdraw(record(0).id, instead)
    assert not spool.withdraw(record(0).id, instead)
    assert spool.find(record(0).id) is None
    stays, kept = spool.take(9, now_ms=7)
    assert stays.record == record(1)
    assert (kept.record.topic, kept.record.key) == (instead.topic, instead.key)


def test_only_records_that_were_not_taken_can_be_withdrawn(spool):
    put(spool, [record(each) for each in range(2)])
    spool.take(1, now_ms=7)

    assert not spool.withdraw(record(0).id)
    assert spool.withdraw(record(1).id)
    assert not spool.withdraw(record(1).id)
    assert spool.find(record(0).id) == record(0)
    assert spool.find(record(1).id) is None


def test_a_full_spool_takes_nothing_and_loses_nothing(spool):
    large = [scheduled_large(each) for each in range(3)]
    put(spool, large[:1])
    with pytest.raises(SpoolFull):
        put(spool, large[1:])
    assert spool.depth() == 1
    (taken,) = spool.take(9, now_ms=7)
    spool.remove([taken.number])
    put(spool, large[1:2])


def scheduled_large(number):
    wanted = MessageSpec(topic="orders", value=b"x" * 600_000)
    return message_record(wanted, NOWHERE, due_ms=1_000, now_ms=2_000, unique=f"l{number}")


def test_every_write_is_on_the_disk_before_it_is_answered(spool):
    """So nothing accepted is lost by a power cut: FULL is an fsync of the log at each commit."""
    full = 2
    assert spool._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert spool._db.execute("PRAGMA synchronous").fetchone() == (full,)


def test_other_users_cannot_read_the_file(spool, tmp_path):
    put(spool, [record(1)])
    assert {each.name for each in tmp_path.iterdir()} == {"spool.db", "spool.db-wal"}
    assert {each.stat().st_mode & 0o777 for each in tmp_path.iterdir()} == {0o600}


def test_two_processes_cannot_share_a_spool(spool, tmp_path):
    put(spool, [record(1)])
    with pytest.raises(SetupError, match=r"another duetime api has it.* DUETIME_API_SPOOL="):
        Spool(tmp_path / "spool.db", MIB)


def test_without_kafka_messages_are_accepted_and_kept(serving):
    client = serving(NOWHERE)
    before, started_s = spooled(client), time.monotonic()
    answers = [client.post("/v1/messages", json=message(each)) for each in range(20)]
    # The first waits for Kafka, and the others know.
    assert time.monotonic() - started_s < 5
    assert {each.status_code for each in answers} == {202}
    assert answers[3].json()["id"].endswith("-m3")
    # Other servers of this process count into the same gauge.
    assert spooled(client) - before == 20
    assert client.get("/readyz").status_code == 200


def test_records_in_the_spool_count_from_the_start(serving, tmp_path):
    kept = Spool(alike(NOWHERE, tmp_path).api_spool, MIB)
    put(kept, [record(each) for each in range(3)])
    kept.close()
    assert spooled(serving(NOWHERE)) == 3


def test_a_full_spool_says_when_to_try_again(serving):
    client = serving(NOWHERE.model_copy(update={"api_max_spool_bytes": MIB}))
    large = {"topic": "orders", "in": "1m", "value": "x" * 600_000}
    assert client.post("/v1/messages", json=large).status_code == 202
    answer = client.post("/v1/messages", json=large)
    assert problem_of(answer) == (503, "spool-full")
    assert int(answer.headers["retry-after"]) > 0
    assert client.get("/readyz").status_code == 503

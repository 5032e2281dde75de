import json

from duetime.bench.loadgen import ANY_PARTITION, LoadPlan, maker
from duetime.core import headers as H
from duetime.core.settings import Settings

SETTINGS = Settings(namespace="bench-test", airtel_topic="airtel")

NOW_MS = 1_800_000_000_000


def made(shape, number, due_ms):
    plan = LoadPlan(messages=1, destinations=("one", "two"), label="run", shape=shape)
    return maker(SETTINGS, plan)(number, due_ms, NOW_MS)


def test_native_records_carry_the_contracts_headers():
    topic, value, key, headers, partition = made("native", 3, NOW_MS + 5_000)
    assert (topic, partition, len(value), key) == ("bench-test.in", ANY_PARTITION, 200, b"3")
    assert headers == [
        ("due-topic", b"two"),
        ("due-at-ms", b"1800000005000"),
        ("due-id", b"run-3"),
    ]


def test_airtel_records_are_json_of_the_given_size():
    topic, text, *_ = made("airtel", 2, NOW_MS + 5_000)
    envelope = json.loads(text)
    assert (topic, envelope["topic"], envelope["postTime"]) == ("airtel", "one", NOW_MS + 5_000)
    assert len(json.dumps(envelope["value"], separators=(",", ":"))) == 200


def test_pending_records_are_in_their_slot_with_intakes_headers():
    due_ms = NOW_MS + 20 * 60_000
    topic, _, _, headers, partition = made("pending", 0, due_ms)
    assert topic == "bench-test.wheel.1"
    assert partition == due_ms // 64_000 % 128
    assert tuple(name for name, _ in headers) == H.SCHEDULED
    assert dict(headers)["due-id"] == f"{due_ms:012x}-run-0".encode()


def test_records_of_a_queue_are_numbered_and_go_to_its_partitions_in_turn():
    records = [made("queue", number, NOW_MS) for number in range(16)]
    assert [int(value) for _, value, *_ in records] == list(range(16))
    assert {len(value) for _, value, *_ in records} == {200}
    assert [partition for *_, partition in records] == [*range(8), *range(8)]

import json

from duetime.bench.records import ANY_PARTITION, Shape, maker
from duetime.config import Settings
from duetime.message import WAITING_HEADERS

SETTINGS = Settings(namespace="bench-test", airtel_topic="airtel")

NOW_MS = 1_800_000_000_000


def made(shape, number, due_ms):
    return maker(shape, SETTINGS, ["one", "two"], "run", 200)(number, due_ms, NOW_MS)


def test_native_records_carry_the_contracts_headers():
    topic, value, key, headers, partition = made(Shape.NATIVE, 3, NOW_MS + 5_000)
    assert (topic, partition, len(value), key) == ("bench-test.in", ANY_PARTITION, 200, b"3")
    assert headers == [
        ("due-topic", b"two"),
        ("due-at-ms", b"1800000005000"),
        ("due-id", b"run-3"),
    ]


def test_airtel_records_are_json_with_a_value_of_the_size_asked_for():
    topic, text, *_ = made(Shape.AIRTEL, 2, NOW_MS + 5_000)
    envelope = json.loads(text)
    assert (topic, envelope["topic"], envelope["postTime"]) == ("airtel", "one", NOW_MS + 5_000)
    assert len(json.dumps(envelope["value"], separators=(",", ":"))) == 200


def test_waiting_records_are_in_their_slot_with_the_headers_that_intake_gives():
    due_ms = NOW_MS + 20 * 60_000
    topic, _, _, headers, partition = made(Shape.WAITING, 0, due_ms)
    assert topic == "bench-test.wheel.1"
    assert partition == due_ms // 64_000 % 128
    assert tuple(name for name, _ in headers) == WAITING_HEADERS
    assert dict(headers)["due-id"] == f"{due_ms:012x}-run-0".encode()

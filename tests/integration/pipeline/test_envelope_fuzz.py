"""Whatever is sent to an intake topic: it is routed, or rejected untouched; and nothing raises."""

import json
import random
import tomllib
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
from tests.support import GOLDEN
from tests.support.golden_records import headers_of, payload
from tests.support.servers import RECORD

from duetime.core.errors import Reason
from duetime.core.messages import MessageId, check_destination
from duetime.core.settings import Settings
from duetime.core.topics import OVERHEAD_BYTES, TopicNames
from duetime.pipeline.intake.query import Intake

SETTINGS = Settings()
NAMES = TopicNames(SETTINGS)
STAMPED = datetime(2027, 1, 15, tzinfo=UTC)

#: A larger record is not copied to the rejected topic: its source header names its position.
ROOM_BYTES = SETTINGS.max_message_bytes + OVERHEAD_BYTES

#: Seeded, so that a failure comes again.
CHANCE = random.Random(20_261_224)  # noqa: S311 (no secret)
LONG = 900_000

#: A sender's record: key, value, headers.
Sent = tuple[bytes | None, bytes | None, list[tuple[str, bytes | None]] | None]


def some_bytes(most: int = 200) -> bytes | None:
    return CHANCE.choice([None, b"", CHANCE.randbytes(CHANCE.randrange(most))])


def random_records(count: int) -> Iterator[Sent]:
    """Noise, and noise under names that mean something."""
    names = [
        "due-topic",
        "due-at-ms",
        "due-in-ms",
        "due-id",
        "due-partition",
        "due-cluster",
        "due-op",
        "due-replaces",
        "scheduler-epoch",
        "scheduler-target-topic",
        "scheduler-target-key",
        "",
        "x",
        "\x00",
        "é",
    ]
    values = [
        b"orders",
        b"1",
        b"0",
        b"-1",
        b"cancel",
        b"9" * 18,
        b"9" * 1_000,
        b"1e5",
        b" 1",
        b"1\n",
    ]
    for _ in range(count):
        headers = [
            (CHANCE.choice(names), CHANCE.choice([*values, some_bytes()]))
            for _ in range(CHANCE.randrange(12))
        ]
        yield some_bytes(), some_bytes(), CHANCE.choice([None, headers])


def golden_records() -> list[Sent]:
    """Draw records of senders, valid and invalid, like the golden records."""
    found = []
    for path in sorted((GOLDEN / "envelopes").glob("*.toml")):
        for case in tomllib.loads(path.read_text())["case"]:
            headers = [
                (name, (rest or [""])[0].encode()) for name, *rest in case.get("headers", ())
            ]
            key, value = case.get("key", "").encode(), case.get("value", "").encode()
            found.append((key, value, headers))
    return found


def mutated(count: int) -> Iterator[Sent]:
    """Golden records with some bytes changed, cut out, repeated or put elsewhere."""
    originals = golden_records()
    for _ in range(count):
        key, value, headers = CHANCE.choice(originals)
        yield torn(key), torn(value), [(name, torn(each)) for name, each in headers]


def torn(data: bytes) -> bytes:
    if CHANCE.random() < 0.5 or not data:
        return data
    start, end = sorted(CHANCE.randrange(len(data) + 1) for _ in range(2))
    middle = data[start:end]
    changed = [b"", middle * 2, middle[::-1], CHANCE.randbytes(len(middle)), CHANCE.choice(TOKENS)]
    return data[:start] + CHANCE.choice(changed) + data[end:]


TOKENS = [
    b'"',
    b"\\",
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"null",
    b"NaN",
    b"1e999999999",
    b"\\ud800",
    b"\xff",
    b"\xed\xa0\x80",
    b"\xf0\x9f\x98\x80",
    b"\x00",
    b"-",
    b"1" * 1_000,
    b'"value":1,',
    b"\n",
]


#: The JSON envelopes with a harmless value in each field.
AIRTEL = {"topic": '"t"', "key": '"k"', "value": '"v"', "headers": '{"a":"b"}', "postTime": "1"}
COUNTDOWN = {"topic": '"t"', "message": '"m"', "countdown": "0"}


def enveloped(payload: str, fields: dict[str, str], name: str) -> bytes:
    text = ",".join(f'"{each}":{value}' for each, value in (fields | {name: payload}).items())
    return f"{{{text}}}".encode(errors="surrogatepass")


def nasty_payloads() -> Iterator[str]:
    yield from (
        "NaN",
        "-Infinity",
        "[]",
        "{}",
        "null",
        "true",
        '"\\ud800"',
        '"\ud800"',
        '"\\u0000"',
    )
    yield from ("9" * 1_000, "0." + "9" * 1_000, "1e" + "9" * 1_000, '"1e-999999999"', "-" * 1_000)
    yield from ('{"a":1,"a":2}', '{"value":1,"topic":2}', '"\\ud83d\\ude00"', "01", "1.", "+1")
    for depth in (31, 32, 33, 1_000):
        yield "[" * depth + "]" * depth
        yield '{"a":' * depth + "1" + "}" * depth


def long_payloads() -> Iterator[str]:
    yield from ("[" * 100_000 + "]" * 100_000, '{"a":' * 100_000 + "1" + "}" * 100_000)
    yield from ("[" * LONG, '{"a":' * (LONG // 5), '"' * LONG, "1" * LONG, " " * LONG)
    yield from (f'"{"x" * LONG}"', '"' + "\\" * LONG + '"', '"' + "\\u00e9" * (LONG // 6) + '"')
    yield "{" + ",".join(f'"{each}":{each}' for each in range(LONG // 16)) + "}"
    yield '{"' + "n" * LONG + '":1}'
    yield "[" + "[]," * (LONG // 3) + "0]"


def nasty_json() -> Iterator[tuple[str, Sent]]:
    """Each payload in each field of each envelope; the long ones in fewer."""
    for nasty in nasty_payloads():
        yield from ((NAMES.airtel, (None, enveloped(nasty, AIRTEL, name), None)) for name in AIRTEL)
        for name in COUNTDOWN:
            yield NAMES.countdown, (None, enveloped(nasty, COUNTDOWN, name), None)
    for long in long_payloads():
        for name in ("value", "headers", "postTime"):
            yield NAMES.airtel, (None, enveloped(long, AIRTEL, name), None)
        yield NAMES.countdown, (None, enveloped(long, COUNTDOWN, "countdown"), None)


def nasty_records() -> Iterator[Sent]:
    due = [("due-topic", b"t"), ("due-at-ms", b"1")]
    for raw in (b"{", b"[" * 100_000, b"\xef\xbb\xbf{}", b"\x00" * 1_000, b" " * LONG):
        yield b"k", raw, due
    yield None, None, None
    yield b"k", None, []
    yield b"k", b"v", [*due, *((str(each), b"x") for each in range(10_000))]
    yield b"k", b"v", [*due, *[("same", b"x")] * 10_000]
    yield b"k", b"v", [*due, *[("", None)] * 200_000]
    yield b"k", b"v", [*due, ("long", b"x" * LONG)]
    yield b"k", b"v", [*due, ("n" * LONG, b"x")]
    yield b"k", b"v", [("due-topic", b"t" * LONG), ("due-at-ms", b"1" * LONG)]
    yield b"k" * LONG, b"v" * LONG, due


@pytest.fixture(scope="module")
def sent():
    """(topic, record), every kind of record to every topic."""
    small = [*random_records(1_500), *mutated(3_000), *golden_records()]
    anywhere = [(CHANCE.choice(NAMES.intake), each) for each in small]
    everywhere = [(topic, each) for each in nasty_records() for topic in NAMES.intake]
    return [*anywhere, *everywhere, *nasty_json()]


@pytest.fixture(scope="module")
def rows(spark, sent):
    """Return the sink row of each, in order."""
    records = [(topic, 0, offset, STAMPED, *record) for offset, (topic, record) in enumerate(sent)]
    frame = spark.createDataFrame(spark.sparkContext.parallelize(records, 16), RECORD)
    return Intake(SETTINGS).rows(frame).collect()


@pytest.mark.slow
def test_every_record_comes_out_exactly_once(sent, rows):
    assert len(rows) == len(sent)


def test_rejected_record_is_untouched_and_has_a_reason(sent, rows):
    reasons = set()
    for offset, ((topic, (key, value, headers)), row) in enumerate(zip(sent, rows, strict=True)):
        if row.topic != NAMES.rejected:
            continue
        *own, (_, reason), _, (_, source) = headers_of(row)
        reasons.add(reason.decode())
        assert source == f"{topic}/0/{offset}".encode()
        if record_bytes(key, value, headers) > ROOM_BYTES:
            assert (payload(row), own) == ((None, None), [])
        else:
            assert (payload(row), own) == ((key, value), headers or [])
    assert reasons <= set(Reason)
    assert len(reasons) > 10


def test_routed_row_has_a_legal_position_and_an_id_of_its_due_time(rows):
    found = set()
    for row in rows:
        if row.topic == NAMES.rejected:
            continue
        headers = dict(headers_of(row)[:5])
        identity = MessageId.parse(headers["due-id"].decode())
        # A cancel may be of a retry, which has a time of its own.
        is_cancel = headers.get("due-topic", b"") is None
        assert is_cancel or identity.due_ms == int(headers["due-at-ms"])
        found.add(kind_of(row))
    assert found >= {"destination", "wheel"}


def record_bytes(key, value, headers):
    framed = sum(len(name.encode()) + len(each or b"") + 8 for name, each in headers or ())
    return len(key or b"") + len(value or b"") + framed


def kind_of(row):
    if row.topic == NAMES.lanes:
        assert 0 <= row.partition < SETTINGS.delay_lanes.lanes
        return "lane"
    if row.topic.startswith(NAMES.wheel(0)[:-1]):
        assert 0 <= row.partition < SETTINGS.wheel.ring
        return "wheel"
    if row.topic == NAMES.retry:
        return "failed"
    assert check_destination(row.topic, SETTINGS.namespace)
    assert row.partition is None or row.partition >= 0
    return "destination"


def test_payload_cut_out_of_json_equals_another_parsers(sent, rows):
    fields = {NAMES.airtel: "value", NAMES.countdown: "message"}
    compared = 0
    for (topic, (_, value, _)), row in zip(sent, rows, strict=True):
        if topic not in fields or row.topic == NAMES.rejected:
            continue
        expected = json.loads(value, parse_constant=pytest.fail, parse_float=str, parse_int=str)[
            fields[topic]
        ]
        assert delivered(row.value, isinstance(expected, str), value) == expected
        compared += 1
    assert compared > 100


def delivered(payload, is_text, value):
    """The delivered bytes, read again; a piece of what was sent, unless they were a string."""
    if payload is None:
        return None
    text = bytes(payload)
    if is_text:
        return text.decode()
    assert text in value
    return json.loads(text, parse_float=str, parse_int=str)

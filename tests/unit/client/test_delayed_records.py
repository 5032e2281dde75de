from datetime import UTC, datetime

import pytest

from duetime.client.producer import Producer
from duetime.core.errors import InvalidMessage, Reason
from duetime.core.records import MessageSpec, delayed_record, round_up_to_batch
from duetime.core.settings import Settings, load_settings

NOW_MS = 1_800_000_000_000

SETTINGS = Settings(
    delayed_topics={"orders.delayed": {"delayed.delivery.enable": True}, "off": {"enable": False}}
)


def sent(deliver_after_ms=NOW_MS + 5_000, topic="orders.delayed", **parts):
    wanted = MessageSpec(topic=topic, **({"value": "v", "key": "k"} | parts))
    return delayed_record(
        wanted, SETTINGS, deliver_after_ms=deliver_after_ms, now_ms=NOW_MS, unique="u"
    )


def test_one_line_of_configuration_makes_a_delayed_topic(monkeypatch, tmp_path):
    file = tmp_path / "duetime.toml"
    file.write_text('delayed_topics."orders.delayed"."delayed.delivery.enable" = true\n')
    monkeypatch.setenv("DUETIME_CONFIG", str(file))
    assert load_settings().delayed_topics["orders.delayed"].max_ms == 900_000


def test_a_delayed_record_has_the_senders_parts():
    record = sent(headers={"a": "b"}, partition=3)
    assert (record.topic, record.partition) == ("orders.delayed", 3)
    assert (record.key, record.value) == (b"k", b"v")
    assert record.headers == (
        ("deliver-after-ms", b"1800000005000"),
        ("deliver-id", str(record.id).encode()),
        ("a", b"b"),
    )


def test_the_visible_topic_may_be_named():
    assert sent(topic="orders").topic == "orders.delayed"


@pytest.mark.parametrize(
    ("reason", "parts"),
    [
        (Reason.BEYOND_LIMIT, {"deliver_after_ms": NOW_MS + 900_001}),
        (Reason.NOT_DELAYED, {"topic": "off"}),
        (Reason.NOT_DELAYED, {"topic": "others"}),
        (Reason.UNKNOWN_CLUSTER, {"cluster": "eu"}),
        (Reason.BAD_HEADERS, {"headers": {"deliver-after-ms": "1"}}),
        (Reason.BAD_PARTITION, {"partition": -2}),
        (Reason.TOO_LARGE, {"value": b"x" * 1_000_001}),
    ],
)
def test_an_invalid_delayed_record_is_refused(reason, parts):
    with pytest.raises(InvalidMessage) as refused:
        sent(**parts)
    assert refused.value.reason == reason


def test_records_of_a_batch_window_are_due_at_its_end():
    assert [round_up_to_batch(each, 100) for each in (1, 99, 100, 101)] == [100, 100, 100, 200]
    assert round_up_to_batch(17, 0) == 17


def test_a_producer_in_transactions_is_refused():
    settings = SETTINGS.model_copy(update={"bootstrap": "127.0.0.1:1"})
    producer = Producer(settings, **{"transactional.id": "t"})
    with pytest.raises(InvalidMessage) as refused:
        producer.produce("orders", "v", deliver_after=datetime.now(UTC))
    assert refused.value.reason == Reason.IN_TRANSACTION

import time
from datetime import UTC, datetime, timedelta

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from duetime.client import Producer
from duetime.config import Settings, load_settings
from duetime.delayed.log import LogReader, deliver_after_ms
from duetime.delaying import delayed, in_batches
from duetime.errors import InvalidMessage, Reason
from duetime.outgoing import Wanted

NOW_MS = 1_800_000_000_000

SETTINGS = Settings(
    delayed_topics={"orders.delayed": {"delayed.delivery.enable": True}, "off": {"enable": False}}
)


def sent(deliver_after_ms=NOW_MS + 5_000, topic="orders.delayed", **parts):
    wanted = Wanted(topic=topic, **({"value": "v", "key": "k"} | parts))
    return delayed(wanted, SETTINGS, deliver_after_ms=deliver_after_ms, now_ms=NOW_MS, unique="u")


def test_one_line_of_configuration_makes_a_delayed_topic(monkeypatch, tmp_path):
    file = tmp_path / "duetime.toml"
    file.write_text('delayed_topics."orders.delayed"."delayed.delivery.enable" = true\n')
    monkeypatch.setenv("DUETIME_CONFIG", str(file))
    assert load_settings().delayed_topics["orders.delayed"].max_ms == 900_000


def test_a_delayed_record_says_when_and_is_otherwise_the_senders():
    record = sent(headers={"a": "b"}, partition=3)
    assert (record.topic, record.partition) == ("orders.delayed", 3)
    assert (record.key, record.value) == (b"k", b"v")
    assert record.headers == (
        ("deliver-after-ms", b"1800000005000"),
        ("deliver-id", str(record.id).encode()),
        ("a", b"b"),
    )


def test_the_name_of_the_visible_topic_will_do():
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
def test_what_a_delayed_topic_cannot_take_is_refused(reason, parts):
    with pytest.raises(InvalidMessage) as refused:
        sent(**parts)
    assert refused.value.reason == reason


def test_by_the_batch_rule_what_is_due_in_one_stretch_is_delivered_at_its_end():
    assert [in_batches(each, 100) for each in (1, 99, 100, 101)] == [100, 100, 100, 200]
    assert in_batches(17, 0) == 17


def test_a_producer_in_transactions_is_refused():
    settings = SETTINGS.model_copy(update={"bootstrap": "127.0.0.1:1"})
    producer = Producer(settings, **{"transactional.id": "t"})
    with pytest.raises(InvalidMessage) as refused:
        producer.produce("orders", "v", deliver_after=datetime.now(UTC))
    assert refused.value.reason == Reason.IN_TRANSACTION


def refusal(producer, topic, after):
    """Why the producer refuses. A broker hears of a topic a moment after it is created.

    What is sent until then is not kept by a compacted topic: it has no key.
    """
    until_s = time.monotonic() + 30
    while True:
        try:
            producer.produce(topic, "v", deliver_after=after, on_delivery=lambda *_: None)
        except InvalidMessage as error:
            return error.reason
        assert time.monotonic() < until_s


@pytest.mark.system
def test_the_client_writes_to_the_delayed_topic_and_not_to_a_compacted_one(broker):
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    compacted = NewTopic("compact.delayed", num_partitions=1, config={"cleanup.policy": "compact"})
    for created in admin.create_topics([NewTopic("plain.delayed", 2), compacted]).values():
        created.result()
    topics = {name: {} for name in ("plain.delayed", "compact.delayed")}
    settings = Settings(bootstrap=broker.bootstrap, delayed_topics=topics)
    after = datetime.now(UTC) + timedelta(minutes=1)
    with Producer(settings, deliver_together=timedelta(seconds=1)) as producer:
        id_ = producer.produce("plain", "v", partition=1, deliver_after=after)
        assert refusal(producer, "compact", after) == Reason.COMPACTED
    with LogReader({"bootstrap.servers": broker.bootstrap}) as reader:
        ((record,),) = reader.batches(("plain.delayed", 1), 0, 1)
    assert dict(record.headers())["deliver-id"].decode() == id_
    time_ms = deliver_after_ms(record, None)
    assert (time_ms, time_ms % 1_000) == (int(id_[:12], 16), 0)

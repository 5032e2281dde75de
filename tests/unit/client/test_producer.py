import subprocess
import sys
from datetime import timedelta

import pytest
from tests.support.clocks import SetClock, eventually

from duetime.client.producer import Producer
from duetime.core.errors import InvalidMessage, KafkaError, TooLate
from duetime.core.messages import MessageId

#: A port without a broker, and a short timeout.
NOWHERE = {"bootstrap": "127.0.0.1:1", "delivery.timeout.ms": 50, "linger.ms": 0}


@pytest.mark.parametrize(
    "module",
    [
        "client",
        "client.rescheduling",
        "kafka.admin",
        "stores.wheel_reader",
        "stores.wheel_store",
        "cli",
        "delayed",
        # The package imports its parts on demand.
        "queue.consumer",
        "queue.stats",
    ],
)
def test_clients_and_readers_start_without_spark(module):
    program = f"import sys, duetime.{module}; sys.exit('pyspark' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_cancel_that_cannot_come_in_time_is_refused():
    now_ms = 1_800_000_000_000
    producer = Producer(clock=SetClock(now_ms), **NOWHERE)
    # A message due in less than 4 s may be in a lane, or its window planned.
    for due_ms in (now_ms - 1, now_ms, now_ms + 3_999):
        with pytest.raises(TooLate):
            producer.cancel(str(MessageId(due_ms=due_ms, unique="1")))
    producer.cancel(str(MessageId(due_ms=now_ms + 4_000, unique="1")))
    with pytest.raises(InvalidMessage, match="no message id"):
        producer.cancel("order-17")


def test_a_failed_delivery_is_reported_with_what_to_do():
    reports = []
    with Producer(**NOWHERE) as producer:
        full_id = producer.produce(
            "orders", in_=timedelta(0), on_delivery=lambda *report: reports.append(report)
        )
    ((error, reported),) = reports
    assert reported == full_id
    assert isinstance(error, KafkaError)
    assert "send it again with the same id" in str(error)


def test_produce_calls_the_callbacks_of_earlier_messages():
    reports = []

    def is_told():
        # Its report comes later.
        producer.produce("orders", in_=timedelta(0), on_delivery=lambda *_: None)
        return reports

    producer = Producer(**NOWHERE)
    producer.produce("orders", in_=timedelta(0), on_delivery=lambda *each: reports.append(each))
    ((error, _),) = eventually(is_told)
    assert isinstance(error, KafkaError)
    producer.flush()


def test_a_callback_may_send_any_number_of_messages():
    reports = []

    def again(error, _):
        reports.append(error)
        if len(reports) <= 3_000:
            producer.produce("orders", in_=timedelta(0), on_delivery=again)

    # All fail at once.
    producer = Producer(**NOWHERE)
    for _ in range(3_000):
        producer.produce("orders", in_=timedelta(0), on_delivery=again)
    producer.flush()
    assert len(reports) == 6_000


def test_a_callback_raises_if_the_queue_is_full():
    raised, one = [], {"queue.buffering.max.messages": 1}

    def send():
        producer.produce("orders", in_=timedelta(0), on_delivery=lambda *_: None)

    def again(*_):
        # A reported record occupies the queue until its callback has returned.
        with pytest.raises(KafkaError, match="cannot wait for others") as refused:
            send()
        raised.append(refused.value)

    producer = Producer(**NOWHERE | one)
    producer.produce("orders", in_=timedelta(0), on_delivery=again)
    producer.flush()
    assert len(raised) == 1


def test_a_callback_that_polls_raises():
    raised = []

    def wait(*_):
        with pytest.raises(KafkaError, match="cannot wait for others") as refused:
            producer.poll()
        raised.append(refused.value)

    producer = Producer(**NOWHERE)
    producer.produce("orders", in_=timedelta(0), on_delivery=wait)
    producer.flush()
    assert len(raised) == 1


def test_a_failed_delivery_without_callback_raises_at_the_end():
    producer = Producer(**NOWHERE)
    for _ in range(2):
        producer.produce("orders", in_=timedelta(0))
    with pytest.raises(KafkaError, match="2 messages did not arrive"), producer:
        pass


def test_an_error_in_the_block_is_not_hidden():
    producer = Producer(**NOWHERE)
    producer.produce("orders", in_=timedelta(0))
    with pytest.raises(ZeroDivisionError), producer:
        raise ZeroDivisionError


def test_an_invalid_message_is_not_sent():
    with Producer(**NOWHERE) as producer:
        with pytest.raises(InvalidMessage):
            producer.produce("orders", {"no": "bytes"}, in_=timedelta(0))
        assert producer.flush(0) == 0

"""A pipeline that was cut off from its brokers starts again once they answer."""

import threading

from tests.support.clocks import eventually
from tests.support.topics import small_settings

from duetime.kafka.connection import await_kafka
from duetime.local.broker import LocalBroker


def test_it_waits_for_kafka_and_says_so_once(tmp_path, caplog):
    broker = LocalBroker(tmp_path)
    waiting = threading.Thread(target=await_kafka, args=[small_settings(broker.bootstrap)])
    waiting.start()
    eventually(lambda: "waiting for Kafka" in caplog.text)
    assert waiting.is_alive()
    with broker:
        waiting.join()
    assert caplog.text.count("waiting for Kafka") == 1

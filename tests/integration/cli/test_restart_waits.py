"""A pipeline that was cut off from its brokers starts again once they answer."""

import threading

from confluent_kafka.admin import AdminClient, NewTopic
from tests.support.clocks import eventually
from tests.support.topics import small_settings

from duetime.core.topics import TopicNames
from duetime.kafka.admin import await_kafka, create_topics
from duetime.local.broker import LocalBroker, Node, new_cluster

SECOND = 2


def waiting_for(settings):
    thread = threading.Thread(target=await_kafka, args=[settings])
    thread.start()
    return thread


def rejected(settings):
    return TopicNames(settings).rejected


def test_it_waits_for_kafka_and_says_so_once(tmp_path, caplog):
    broker = LocalBroker(tmp_path)
    waiting = waiting_for(small_settings(broker.bootstrap))
    eventually(lambda: "waiting for Kafka" in caplog.text)
    assert waiting.is_alive()
    with broker:
        waiting.join()
    assert caplog.text.count("waiting for Kafka") == 1


def test_it_waits_for_the_leader_of_each_of_its_topics(tmp_path, caplog):
    """Otherwise it would end with an error, in the seconds before others lead."""
    first, second = new_cluster(tmp_path, [Node(), Node(is_controller=False)])
    with first:
        second.start()
        settings = small_settings(first.bootstrap)
        admin, topic = AdminClient({"bootstrap.servers": first.bootstrap}), rejected(settings)
        on_second = NewTopic(topic, 1, replica_assignment=[[SECOND]])
        admin.create_topics([on_second])[topic].result()
        create_topics(settings)
        second.kill()
        waiting = waiting_for(settings)
        try:
            eventually(lambda: "waiting for Kafka: Kafka did not answer about" in caplog.text)
            assert waiting.is_alive()
        finally:
            second.start()
        waiting.join()
        second.kill()

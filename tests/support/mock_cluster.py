"""librdkafka's mock cluster, whose brokers answer requests as a test says.

A real broker refuses a record in this way for some milliseconds after a change of leaders.
"""

import ctypes
from contextlib import contextmanager
from pathlib import Path

from confluent_kafka import Consumer, TopicPartition

#: The number of a produce request in Kafka's protocol.
PRODUCE = 0

#: The timeout of a request, in seconds.
TIMEOUT_S = 30.0

#: How long each answer takes, in ms: all requests are sent before the first is answered.
ANSWER_MS = 50


def librdkafka():
    """The library that confluent-kafka has loaded."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return ctypes.CDLL(next(each.split()[-1] for each in lines if "librdkafka" in each))


def _mocking():
    """The library, with the results of the functions that return pointers."""
    library = librdkafka()
    library.rd_kafka_new.restype = ctypes.c_void_p
    library.rd_kafka_conf_new.restype = ctypes.c_void_p
    library.rd_kafka_mock_cluster_new.restype = ctypes.c_void_p
    library.rd_kafka_mock_cluster_bootstraps.restype = ctypes.c_char_p
    return library


class MockCluster:
    """One broker, with topics of one partition."""

    def __init__(self, library, cluster):
        self._library, self._cluster = library, cluster
        self.bootstrap = library.rd_kafka_mock_cluster_bootstraps(cluster).decode()
        library.rd_kafka_mock_broker_set_rtt(cluster, ctypes.c_int32(-1), ANSWER_MS)

    def create_topic(self, name):
        assert self._library.rd_kafka_mock_topic_create(self._cluster, name.encode(), 1, 1) == 0

    def count(self, topic):
        """The number of records in the topic."""
        client = Consumer({"bootstrap.servers": self.bootstrap, "group.id": "t", "log_level": 0})
        _, end = client.get_watermark_offsets(TopicPartition(topic, 0), TIMEOUT_S)
        client.close()
        return end

    def refuse(self, *codes):
        """Answer the next produce requests with these errors; 0 is none."""
        array = (ctypes.c_int * len(codes))(*codes)
        self._library.rd_kafka_mock_push_request_errors_array(
            self._cluster, ctypes.c_int16(PRODUCE), ctypes.c_size_t(len(codes)), array
        )


@contextmanager
def mock_cluster():
    library = _mocking()
    error = ctypes.create_string_buffer(512)
    conf = ctypes.c_void_p(library.rd_kafka_conf_new())
    owner = ctypes.c_void_p(library.rd_kafka_new(0, conf, error, ctypes.c_size_t(512)))
    assert owner, error.value
    cluster = ctypes.c_void_p(library.rd_kafka_mock_cluster_new(owner, 1))
    try:
        yield MockCluster(library, cluster)
    finally:
        library.rd_kafka_mock_cluster_destroy(cluster)
        library.rd_kafka_destroy(owner)

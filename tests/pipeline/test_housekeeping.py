"""What went wrong is counted by the broker's offsets."""

import pytest
from confluent_kafka import Producer

from duetime.connection import librdkafka_properties
from duetime.pipeline.housekeeping import Tally
from duetime.topics import TopicNames

pytestmark = pytest.mark.system


@pytest.mark.usefixtures("topics")
def test_what_is_rejected_and_what_is_dead_is_counted_since_the_last_time(settings, caplog):
    names, producer = TopicNames(settings), Producer(librdkafka_properties(settings))

    def append(topic, count):
        for _ in range(count):
            producer.produce(topic, b"x", partition=0)
        assert producer.flush(30) == 0

    append(names.rejected, 2)
    tally = Tally(settings)
    append(names.rejected, 3)
    append(names.dead, 1)
    tally.tell()
    tally.tell()
    tally.close()
    assert [each.getMessage() for each in caplog.records] == [
        f"rejected messages=3 total=5 topic={names.rejected}",
        f"dead letters messages=1 total=1 topic={names.dead}",
    ]

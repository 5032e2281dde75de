"""The ranges that are read for single records."""

import pytest
from confluent_kafka import Producer
from hypothesis import given
from hypothesis import strategies as st

from duetime.core.errors import KafkaError
from duetime.core.topics import TopicNames
from duetime.kafka.connection import librdkafka_properties
from duetime.kafka.offsets import Offsets
from duetime.pipeline.redelivery import GAP, MAX_READS, before_end, fetch, reads

OFFSETS = st.sets(st.integers(min_value=0, max_value=10**7), min_size=1, max_size=60)


def test_near_records_are_one_read_and_far_ones_are_two():
    wanted = {("jobs", 0): [5, 2, 9 * GAP], ("jobs", 1): [7]}
    first, second = (
        [(each.partition, each.start, each.end) for each in one] for one in reads(wanted)
    )
    assert first == [(0, 2, 6), (1, 7, 8)]
    assert second == [(0, 9 * GAP, 9 * GAP + 1)]


def test_no_offsets_need_no_reads():
    assert reads({}) == []


@given(st.dictionaries(st.tuples(st.just("jobs"), st.integers(0, 3)), OFFSETS, max_size=3))
def test_every_record_is_read_once_in_few_reads(wanted):
    found = reads(wanted)
    assert len(found) <= MAX_READS
    for one in found:
        assert len({each.partition for each in one}) == len(one)
    for place, offsets in wanted.items():
        ranges = [each for one in found for each in one if (each.topic, each.partition) == place]
        for offset in offsets:
            assert sum(each.start <= offset < each.end for each in ranges) == 1


@pytest.fixture
def offsets(settings):
    found = Offsets(settings, "fetching")
    yield found
    found.close()


def test_offsets_behind_the_end_are_not_fetched(settings, topics, offsets):  # noqa: ARG001 (they must be there)
    topic = TopicNames(settings).wheel(0)
    producer = Producer(librdkafka_properties(settings))
    producer.produce(topic, b"x", partition=0)
    assert producer.flush(30) == 0
    wanted = {(topic, 0): [0, 1, 10**15], (topic, 1): [0], (topic, 10**6): [0]}
    assert before_end(offsets, wanted) == {(topic, 0): [0], (topic, 1): []}


def test_a_missing_topic_is_an_error_and_no_deleted_record(settings, offsets):
    with pytest.raises(KafkaError, match="take it out of queues"):
        before_end(offsets, {(settings.namespace, 0): [0]})


def test_no_offsets_fetch_no_records(spark, settings):
    assert fetch(spark, settings, {("jobs", 0): []}).collect() == []

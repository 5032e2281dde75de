"""Where intake begins that has no checkpoint, on a real broker; the checkpoint is a stand-in."""

import logging
from contextlib import closing

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from duetime.core.clock import format_instant
from duetime.core.errors import ConfigError
from duetime.core.topics import TopicNames
from duetime.kafka.connection import librdkafka_properties
from duetime.kafka.offsets import Offsets
from duetime.pipeline.intake.starting_point import IntakeStart
from duetime.pipeline.recovery.checkpoint import CheckpointState

NOTHING = CheckpointState(offsets={}, invalid_topics=frozenset(), problems=())

#: When records are sent that have a time of their own, epoch ms: a minute apart.
SENT_MS = 1_780_000_000_000
MINUTE = 60_000


class Checkpoint:
    """Holds what a test says that it holds."""

    def __init__(self, found=NOTHING):
        self.found = found
        self.is_removed = False

    def inspect(self, *_):
        return self.found

    def remove(self, *_):
        self.is_removed = True

    def note(self, *_):
        pass


@pytest.fixture
def settings(settings):
    """With topics of other systems' contracts, which are not of our namespace."""
    name = settings.namespace
    others = {"airtel_topic": f"publisher_{name}", "countdown_topic": f"timers_{name}"}
    return settings.model_copy(update=others)


@pytest.fixture
def names(settings, topics):  # noqa: ARG001 (the topics must be there)
    return TopicNames(settings)


@pytest.fixture
def send(settings):
    producer = Producer(librdkafka_properties(settings))

    def sent(topic, count=1):
        for number in range(count):
            at_ms = SENT_MS + number * MINUTE
            producer.produce(topic, b"x", partition=0, timestamp=at_ms)
        assert producer.flush(30) == 0

    return sent


@pytest.fixture
def start(settings):
    """Makes the decision of a start; None is that Spark goes on from its checkpoint."""

    def started(start_from="", checkpoint=None, reached=None, **others):
        chosen = settings.model_copy(update={"start_from": start_from, **others})
        with closing(Offsets(settings, TopicNames(settings).intake_group)) as offsets:
            decided = IntakeStart(chosen, checkpoint or Checkpoint(), offsets)
            decided.require()
            return decided.begin(reached or {})

    return started


@pytest.fixture
def group(settings):
    """A group of another service, which has committed an offset."""
    name = f"service-{settings.namespace}"

    def committed(topic, offset):
        consumer = Consumer(librdkafka_properties(settings) | {"group.id": name})
        consumer.commit(offsets=[TopicPartition(topic, 0, offset)], asynchronous=False)
        consumer.close()
        return name

    return committed


def test_first_start_reads_internal_topics_from_the_earliest_record(names, start, send, caplog):
    """Only duetime can have delivered them: a sender may start before the pipeline."""
    caplog.set_level(logging.INFO)
    send(names.native, 3)
    send(names.scheduler, 2)
    begun = start()
    assert begun[names.native, 0] == begun[names.scheduler, 0] == 0
    (told,) = [each.getMessage() for each in caplog.records]
    assert told.startswith("first start: reading intake topics from=earliest records=5 ")


def test_first_start_on_another_services_topic_needs_a_starting_point(names, start, send):
    send(names.airtel, 3)
    with pytest.raises(ConfigError) as refused:
        start()
    assert f"3 records in {names.airtel}" in str(refused.value)
    # The broker has set the time.
    for word in ("earliest", "latest", "2026-", "group", "--from", "start_from"):
        assert word in str(refused.value)


def test_error_names_the_first_and_last_timestamp_of_the_history(names, start, send, configured):
    configured(names.airtel, "message.timestamp.type", "CreateTime")
    send(names.airtel, 3)
    with pytest.raises(ConfigError) as refused:
        start()
    told = f"from {format_instant(SENT_MS)} to {format_instant(SENT_MS + 2 * MINUTE)}"
    assert told in str(refused.value)


@pytest.fixture
def configured(settings):
    from confluent_kafka.admin import AdminClient  # noqa: PLC0415 (here alone)
    from tests.support.topics import configure  # noqa: PLC0415 (here alone)

    admin = AdminClient(librdkafka_properties(settings))
    return lambda *change: configure(admin, *change)


@pytest.mark.parametrize(
    ("start_from", "offset"),
    [
        ("earliest", 0),
        ("latest", 3),
        (format_instant(SENT_MS + MINUTE), 1),
        (format_instant(SENT_MS + 9 * MINUTE), 3),
    ],
)
def test_first_start_begins_at_start_from(  # noqa: PLR0913, PLR0917 (fixtures)
    names, start, send, configured, caplog, start_from, offset
):
    configured(names.airtel, "message.timestamp.type", "CreateTime")
    send(names.airtel, 3)
    assert start(start_from)[names.airtel, 0] == offset
    told = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    passed = f"first start: not delivering records={offset} topic={names.airtel}"
    assert told == ([passed] if offset else [])


def test_first_start_begins_at_another_groups_offsets(names, start, send, group):
    send(names.airtel, 3)
    send(names.native, 2)
    begun = start(group(names.airtel, 2))
    assert begun[names.airtel, 0] == 2
    # Only duetime reads it.
    assert begun[names.native, 0] == 0


def test_group_without_offsets_is_an_error(names, start, send):
    send(names.airtel)
    with pytest.raises(ConfigError, match="the group nobody has committed nothing"):
        start("nobody")


def test_group_is_no_starting_point_for_a_topic_that_it_does_not_read(names, start, send, group):
    send(names.airtel, 3)
    send(names.countdown, 4)
    with pytest.raises(ConfigError, match=f"4 records in {names.countdown}"):
        start(group(names.airtel, 2))


def test_lost_checkpoint_begins_at_the_committed_starting_point(names, start, send):
    """Also with the option still there, which is of the first start alone."""
    send(names.airtel, 3)
    start("latest")
    send(names.airtel, 4)
    send(names.native, 2)
    for start_from in ("", "latest"):
        begun = start(start_from)
        assert begun[names.airtel, 0] == 3
        assert begun[names.native, 0] == 0


def test_lost_checkpoint_of_an_old_version_needs_no_starting_point(names, start, send):
    """Of a version that did not: what is there is read back."""
    send(names.airtel, 3)
    send(names.lanes)
    assert start()[names.airtel, 0] == 0


def test_usable_checkpoint_is_continued(names, start, send):
    send(names.airtel, 3)
    read = {(names.airtel, 0): 2}
    found = CheckpointState(offsets=read, invalid_topics=frozenset(), problems=())
    checkpoint = Checkpoint(found)
    assert start(checkpoint=checkpoint) is None
    assert not checkpoint.is_removed


def test_recreated_topic_is_read_from_its_start_and_others_continue(names, start, send):
    send(names.airtel, 3)
    send(names.native, 3)
    found = CheckpointState(
        offsets={(names.native, 0): 2},
        invalid_topics=frozenset({names.airtel}),
        problems=("created again",),
    )
    checkpoint = Checkpoint(found)
    begun = start(checkpoint=checkpoint)
    assert (begun[names.native, 0], begun[names.airtel, 0]) == (2, 0)
    assert checkpoint.is_removed


def test_topic_configured_later_needs_a_starting_point(names, start, send):
    """Its history may be another service's, whatever duetime has read so far."""
    start(airtel_topic=names.dead_letter)
    send(names.airtel, 3)
    with pytest.raises(ConfigError, match=f"3 records in {names.airtel}"):
        start()
    assert start("latest")[names.airtel, 0] == 3


def test_records_removed_by_retention_before_intake_are_logged(
    names, start, send, settings, caplog
):
    send(names.native, 5)
    with closing(Offsets(settings, "any")) as offsets:
        place = names.native, 0
        offsets.delete_before({place: 4})
        while offsets.starts([place])[place] < 4:
            pass
    found = CheckpointState(offsets={place: 2}, invalid_topics=frozenset(), problems=())
    assert start(checkpoint=Checkpoint(found))[place] == 4
    (told,) = [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR]
    assert f"topic={names.native} records=2" in told
    caplog.clear()
    # They had moved on, as the query's progress says.
    assert start(checkpoint=Checkpoint(found), reached={place: 5}) is None
    assert not caplog.records


def test_starting_point_is_committed_again_before_it_expires(names, settings, send, monkeypatch):
    send(names.native, 2)
    with closing(Offsets(settings, names.intake_group)) as offsets:
        start = IntakeStart(settings, Checkpoint(), offsets)
        start.keep()
        start.begin({})
        place = names.native, 0
        offsets.commit({place: 2})
        start.keep()
        assert offsets.committed([place]) == {place: 2}
        monkeypatch.setattr("duetime.pipeline.intake.starting_point.COMMIT_INTERVAL_S", 0.0)
        start._commit()
        offsets.commit({place: 2})
        start.keep()
        assert offsets.committed([place]) == {place: 0}

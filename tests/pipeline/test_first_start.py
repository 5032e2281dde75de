"""Where intake begins that has no checkpoint, on a real broker; the checkpoint is a stand-in."""

import logging
from contextlib import closing

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from duetime.clock import format_instant
from duetime.connection import librdkafka_properties
from duetime.errors import ConfigError
from duetime.pipeline.checkpoint import Found
from duetime.pipeline.first_start import IntakeStart
from duetime.stores.offsets import Offsets
from duetime.topics import TopicNames

pytestmark = pytest.mark.system

NOTHING = Found(offsets={}, lost=frozenset(), troubles=())

#: When records are sent that have a time of their own, epoch ms: a minute apart.
SENT_MS = 1_780_000_000_000
MINUTE = 60_000


class Checkpoint:
    """Holds what a test says that it holds."""

    def __init__(self, found=NOTHING):
        self.found = found
        self.is_removed = False

    def look(self, *_):
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

    def started(start_from="", checkpoint=None, **others):
        chosen = settings.model_copy(update={"start_from": start_from, **others})
        with closing(Offsets(settings, TopicNames(settings).intake_group)) as offsets:
            decided = IntakeStart(chosen, checkpoint or Checkpoint(), offsets)
            decided.require()
            return decided.begin()

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


def test_the_first_start_reads_all_that_is_there_in_topics_of_ours(names, start, send, caplog):
    """Nobody else has delivered it: a sender may come before the pipeline."""
    caplog.set_level(logging.INFO)
    send(names.native, 3)
    send(names.scheduler, 2)
    begun = start()
    assert begun[names.native, 0] == begun[names.scheduler, 0] == 0
    (told,) = [each.getMessage() for each in caplog.records]
    assert told.startswith("first start: reading intake topics from=earliest records=5 ")


def test_what_another_service_may_have_delivered_is_not_guessed(names, start, send):
    send(names.airtel, 3)
    with pytest.raises(ConfigError) as refused:
        start()
    assert f"3 records in {names.airtel}" in str(refused.value)
    # The broker has set the time.
    for word in ("earliest", "latest", "2026-", "group", "--from", "start_from"):
        assert word in str(refused.value)


def test_the_history_is_told_from_its_first_to_its_last_time(names, start, send, configured):
    configured(names.airtel, "message.timestamp.type", "CreateTime")
    send(names.airtel, 3)
    with pytest.raises(ConfigError) as refused:
        start()
    told = f"from {format_instant(SENT_MS)} to {format_instant(SENT_MS + 2 * MINUTE)}"
    assert told in str(refused.value)


@pytest.fixture
def configured(settings):
    from confluent_kafka.admin import AdminClient  # noqa: PLC0415 (here alone)
    from tests.conftest import configure  # noqa: PLC0415 (here alone)

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
def test_the_first_start_begins_where_it_is_told(  # noqa: PLR0913, PLR0917 (fixtures)
    names, start, send, configured, caplog, start_from, offset
):
    configured(names.airtel, "message.timestamp.type", "CreateTime")
    send(names.airtel, 3)
    assert start(start_from)[names.airtel, 0] == offset
    told = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    passed = f"first start: not delivering records={offset} topic={names.airtel}"
    assert told == ([passed] if offset else [])


def test_the_offsets_of_another_services_group_are_taken_over(names, start, send, group):
    send(names.airtel, 3)
    send(names.native, 2)
    begun = start(group(names.airtel, 2))
    assert begun[names.airtel, 0] == 2
    # What nobody but us reads.
    assert begun[names.native, 0] == 0


def test_a_group_that_has_committed_nothing_is_refused(names, start, send):
    send(names.airtel)
    with pytest.raises(ConfigError, match="the group nobody has committed nothing"):
        start("nobody")


def test_a_group_says_nothing_of_a_topic_that_it_does_not_read(names, start, send, group):
    send(names.airtel, 3)
    send(names.countdown, 4)
    with pytest.raises(ConfigError, match=f"4 records in {names.countdown}"):
        start(group(names.airtel, 2))


def test_a_checkpoint_that_is_lost_begins_where_the_first_start_began(names, start, send):
    """Also with the option still there, which is of the first start alone."""
    send(names.airtel, 3)
    start("latest")
    send(names.airtel, 4)
    send(names.native, 2)
    for start_from in ("", "latest"):
        begun = start(start_from)
        assert begun[names.airtel, 0] == 3
        assert begun[names.native, 0] == 0


def test_a_checkpoint_that_is_lost_asks_nothing_where_the_start_was_not_noted(names, start, send):
    """Of a version that did not: what is there is read back."""
    send(names.airtel, 3)
    send(names.lanes)
    assert start()[names.airtel, 0] == 0


def test_a_checkpoint_that_is_there_is_gone_on_from(names, start, send):
    send(names.airtel, 3)
    read = {(names.airtel, 0): 2}
    found = Found(offsets=read, lost=frozenset(), troubles=())
    checkpoint = Checkpoint(found)
    assert start(checkpoint=checkpoint) is None
    assert not checkpoint.is_removed


def test_a_topic_that_was_created_again_is_read_from_its_start_and_others_go_on(names, start, send):
    send(names.airtel, 3)
    send(names.native, 3)
    found = Found(
        offsets={(names.native, 0): 2}, lost=frozenset({names.airtel}), troubles=("created again",)
    )
    checkpoint = Checkpoint(found)
    begun = start(checkpoint=checkpoint)
    assert (begun[names.native, 0], begun[names.airtel, 0]) == (2, 0)
    assert checkpoint.is_removed


def test_a_topic_that_is_configured_later_is_a_first_start_too(names, start, send):
    """Its history may be another service's, whatever duetime has read so far."""
    start(airtel_topic=names.dead)
    send(names.airtel, 3)
    with pytest.raises(ConfigError, match=f"3 records in {names.airtel}"):
        start()
    assert start("latest")[names.airtel, 0] == 3


def test_what_retention_removed_before_it_was_taken_in_is_told(
    names, start, send, settings, caplog
):
    send(names.native, 5)
    with closing(Offsets(settings, "any")) as offsets:
        place = names.native, 0
        offsets.delete_before({place: 4})
        while offsets.starts([place])[place] < 4:
            pass
    found = Found(offsets={place: 2}, lost=frozenset(), troubles=())
    assert start(checkpoint=Checkpoint(found))[place] == 4
    (told,) = [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR]
    assert f"topic={names.native} records=2" in told


def test_where_it_began_is_committed_again_before_brokers_forget_it(
    names, settings, send, monkeypatch
):
    send(names.native, 2)
    with closing(Offsets(settings, names.intake_group)) as offsets:
        start = IntakeStart(settings, Checkpoint(), offsets)
        start.keep()
        start.begin()
        place = names.native, 0
        offsets.commit({place: 2})
        start.keep()
        assert offsets.committed([place]) == {place: 2}
        monkeypatch.setattr("duetime.pipeline.first_start.KEEP_S", 0.0)
        start._commit()
        offsets.commit({place: 2})
        start.keep()
        assert offsets.committed([place]) == {place: 0}

"""Which destination failed a sink, and records that are sent with reports and with the lease."""

from itertools import count
from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError
from pyspark.sql import Row
from tests.support.mock_cluster import mock_cluster
from tests.support.topics import small_settings

from duetime.core.errors import LeaderPaused
from duetime.core.setting_types import Cluster
from duetime.core.settings import Settings
from duetime.pipeline.delivery import isolation
from duetime.pipeline.delivery.isolation import (
    NO_ANSWER,
    FailedDestinations,
    RecordSender,
    Undelivered,
    _is_unknown,
    chunks,
    named_topics,
    send_groups,
)

SETTINGS = Settings(clusters={"eu": Cluster(bootstrap="127.0.0.1:1")})


class Topics:
    """The topics of a cluster, and which of them are isolated."""

    def __init__(self, *known):
        self.known, self.isolated, self.is_reached = known, [], True

    def knows(self, topic):
        return topic in self.known

    def isolate(self, topic):
        self.isolated.append(topic)


class Rig:
    """Failed destinations, with the errors of producers that a test sets."""

    def __init__(self):
        self.errors = {}
        self.here, self.eu = Topics("orders", "bills", "duetime.lanes"), Topics("orders")
        self.failed = FailedDestinations(
            SETTINGS,
            {None: self.here, "eu": self.eu},
            SimpleNamespace(errors=lambda: dict(self.errors)),
        )

    def blame(self, text="", **errors):
        """By topic, how many records of the producer of windows were not delivered by now."""
        self.errors |= {("duetime.release-0", topic): count for topic, count in errors.items()}
        return self.failed.blame(Exception(text), "duetime.release-0")


@pytest.fixture
def rig():
    return Rig()


def test_destination_with_new_errors_is_isolated_and_others_are_not(rig):
    assert rig.blame(orders=1) == {"orders"}
    assert rig.here.isolated == ["orders"]
    assert rig.blame(orders=1, bills=2) == {"bills"}
    assert rig.here.isolated == ["orders", "bills"]
    assert not rig.blame()


def test_an_outage_of_brokers_isolates_no_destination(rig):
    assert rig.blame(orders=40, bills=2, **{"duetime.lanes": 7}) == set()
    assert not rig.here.isolated
    # What is refused after it is blamed all the same.
    assert rig.blame(orders=41) == {"orders"}
    assert rig.here.isolated == ["orders"]


def test_destination_that_an_error_names_is_isolated_if_it_is_known(rig):
    text = "Topic {} not present in metadata after 60000 ms."
    assert rig.blame(text.format("orders")) == {"orders"}
    assert not rig.blame(text.format("gone"))
    assert rig.here.isolated == ["orders"]


def test_destination_on_another_cluster_is_isolated_there(rig):
    client = next(iter(rig.failed._clusters)) + "outbox"
    rig.errors[client, "orders"] = 1
    assert rig.failed.blame(Exception(), client) == {"orders"}
    assert (rig.here.isolated, rig.eu.isolated) == ([], ["orders"])


def test_outage_of_another_cluster_isolates_no_destination_there(rig):
    client = next(iter(rig.failed._clusters)) + "outbox"
    rig.errors[client, "orders"], rig.eu.is_reached = 1, False
    assert not rig.failed.blame(Exception(), client)
    assert not rig.eu.isolated


def test_each_sink_that_a_topic_has_failed_is_answered(rig):
    # Both failed before the first asked.
    rig.errors["duetime.lanes", "orders"] = 1
    assert rig.blame(orders=1) == {"orders"}
    assert rig.failed.blame(Exception(), "duetime.lanes") == {"orders"}
    assert rig.failed.blame(Exception(), "duetime.lanes") == rig.blame() == set()


def test_a_sink_is_not_answered_for_what_failed_another(rig):
    rig.errors["duetime.lanes", "orders"] = 1
    assert not rig.blame()
    assert rig.here.isolated == ["orders"]


@pytest.mark.parametrize(
    ("error", "topics"),
    [
        ("Expiring 12 record(s) for a.b_c-d-3:10000 ms has passed since batch creation", "a.b_c-d"),
        ("Topic orders not present in metadata after 60000 ms.", "orders"),
        ("Not authorized to access topics: [orders]", "orders"),
        ("The request timed out.", None),
    ],
)
def test_topics_are_found_in_the_texts_of_errors(error, topics):
    assert named_topics(error) == ({topics} if topics else set())


@pytest.mark.parametrize(
    ("code", "is_unknown"),
    [
        (KafkaError.INVALID_RECORD, False),
        (KafkaError.INVALID_TIMESTAMP, False),
        (KafkaError._INVALID_DIFFERENT_RECORD, False),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, False),
        (KafkaError._UNKNOWN_TOPIC, False),
        (KafkaError.REQUEST_TIMED_OUT, True),
        (KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND, True),
        (KafkaError._MSG_TIMED_OUT, True),
        (KafkaError._TRANSPORT, True),
    ],
)
def test_record_without_an_answer_may_have_been_written(code, is_unknown):
    assert _is_unknown(KafkaError(code)) is is_unknown


@pytest.fixture
def cluster():
    with mock_cluster() as found:
        found.create_topic("orders")
        yield found


def records(number):
    return [
        Row(offset=n, topic="orders", partition=None, key=None, value=b"v", headers=[("h", b"")])
        for n in range(number)
    ]


def test_refused_record_is_reported_and_the_others_are_sent(cluster):
    # All in one request, and then each in one of its own.
    cluster.refuse(KafkaError.INVALID_RECORD, 0, KafkaError.INVALID_RECORD, 0)
    sender = RecordSender(small_settings(cluster.bootstrap), lambda _: True)
    (refused,) = sender.send(records(3), None, 1)
    assert (refused.offset, refused.is_unknown) == (1, False)
    assert cluster.count("orders") == 2


def test_record_that_is_not_sent_when_the_lease_ends_is_dropped(cluster, monkeypatch):
    """The cluster takes 20 records a second, and the lease ends when it has some."""
    monkeypatch.setattr(isolation, "REQUEST", 1)
    looks = count()

    def holds_lease(_term):
        return next(looks) < 200 or cluster.count("orders") < 3

    sender = RecordSender(small_settings(cluster.bootstrap), holds_lease)
    with pytest.raises(LeaderPaused):
        sender.send(records(200), None, 1)
    sent = cluster.count("orders")
    assert 3 <= sent < 200
    # Nothing is left that could be sent later.
    assert sender._clients
    assert not any(map(len, sender._clients.values()))
    sender.settle()
    assert cluster.count("orders") == sent


def test_batch_of_an_earlier_term_is_not_sent(cluster):
    """The process was paused, lost the lead and has it again: another has sent the batch."""
    sender = RecordSender(small_settings(cluster.bootstrap), lambda term: term == 2)
    with pytest.raises(LeaderPaused):
        sender.send(records(3), None, 1)
    assert cluster.count("orders") == 0
    assert not sender.send(records(3), None, 2)
    assert cluster.count("orders") == 3


def test_topic_that_does_not_answer_is_left_out_of_later_groups():
    sent = []

    def send(rows):
        sent.append([row.topic for row in rows])
        answers = {
            "silent": Undelivered(0, NO_ANSWER, True),
            "refused": Undelivered(1, "no", False),
        }
        return [answers[row.topic] for row in rows if row.topic in answers]

    group = [Row(offset=n, topic=each) for n, each in enumerate(("silent", "refused", "orders"))]
    undelivered = list(send_groups([group, group], send))
    assert sent == [["silent", "refused", "orders"], ["refused", "orders"]]
    assert [(each.offset, each.is_unknown) for each in undelivered] == [
        (0, True),
        (1, False),
        (0, True),
        (1, False),
    ]


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        ([], []),
        ([9], [(0, 0)]),
        ([1, 1, 1], [(0, 2)]),
        ([3, 1, 1, 4], [(0, 1), (2, 2), (3, 3)]),
    ],
)
def test_records_are_held_in_groups_of_a_limited_size(sizes, groups):
    assert list(chunks(enumerate(sizes), 4)) == groups

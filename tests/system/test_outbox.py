"""Messages for another cluster: delivered there, once and in order, whatever becomes of it."""

from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import pytest
from confluent_kafka.admin import AdminClient, NewTopic
from prometheus_client import REGISTRY
from tests.support.clocks import eventually
from tests.support.live import (
    LATE_MS,
    PATIENCE_S,
    Inbox,
    Live,
    await_first_messages,
    now_ms,
    scraped,
    with_topics,
)
from tests.support.schedules import every_minute
from tests.support.topics import TRACE, configure, small_settings

from duetime.bench.chaos import duetime_process
from duetime.client.dead_letters import DeadLetterFilter, DeadLetters
from duetime.client.producer import Producer
from duetime.core.clock import SystemClock
from duetime.core.setting_types import Cluster
from duetime.core.timer_wheel import Wheel
from duetime.core.topics import TopicNames
from duetime.kafka.connection import librdkafka_properties
from duetime.local.broker import LocalBroker
from duetime.local.process import free_port
from duetime.pipeline.monitoring.prober import Prober

pytestmark = pytest.mark.timeout(1_200)

#: What is counted.
TAKEN_IN = "duetime_intake_records_total", "native"
DELIVERED_THERE, DELIVERED_HERE = (
    ("duetime_delivered_records_total", cluster) for cluster in ("far", "")
)
FAILED, DEAD, REJECTED = (
    f"duetime_{each}_records_total" for each in ("failed", "dead", "rejected")
)


#: Records keep the timestamps of their senders, which a topic may limit: then they are isolated.
OWN_TIME = {"message.timestamp.type": "CreateTime"}


@pytest.fixture(scope="module")
def far(tmp_path_factory):
    """Another cluster, where topics are not created by whoever asks for them."""
    with LocalBroker(
        tmp_path_factory.mktemp("far"), properties={"auto.create.topics.enable": "false"}
    ) as broker:
        yield broker


@pytest.fixture(scope="module")
def live(broker, far, tmp_path_factory):
    """Two clusters, and no pipeline yet."""
    found = Live(
        small_settings(
            broker.bootstrap,
            clusters={"far": Cluster(bootstrap=far.bootstrap, probe_topic="probes")},
            overdue_scan_interval_ms=2_000,
            max_delivery_attempts=2,
            # A broker that was restarted takes seconds until it leads its partitions.
            retry_backoff_ms=2_000,
            checkpoint=tmp_path_factory.mktemp("checkpoint").as_uri(),
        )
    )
    with with_topics(found):
        yield found


@pytest.fixture(scope="module")
def running(live):
    """One pipeline for the tests that leave it alone; the port where it tells Prometheus."""
    told = {"metrics_port": free_port(), "probes": False}
    with duetime_process(live.settings.model_copy(update=told)):
        await_first_messages(live)
        yield told["metrics_port"]


@pytest.fixture
def abroad(live):
    """Creates topics on the other cluster, and reads them."""
    elsewhere = Live(live.settings.at("far"))
    yield elsewhere
    for each in elsewhere._inboxes:
        each.close()


def schedule(live, topic, count, over_s, after_s=0, **where):
    """Messages with one key, due one after another; returns their ids in that order."""
    with Producer(live.settings) as client:
        first, step = timedelta(seconds=after_s), timedelta(seconds=over_s) / count
        return [
            client.produce(topic, "x", key="k", in_=first + number * step, **where)
            for number in range(count)
        ]


@pytest.mark.slow
@pytest.mark.hostile
def test_killed_pipeline_sends_nothing_twice(live, abroad):
    topic = abroad.topic()
    inbox = Inbox(abroad.settings, [topic])
    ids = set()
    for some in (100, 600):
        # Killed at the end of the block, with messages in every place that there is.
        with duetime_process(live.settings):
            ids |= set(schedule(live, topic, 500, 8, cluster="far"))
            inbox.until(lambda some=some: len(inbox.arrived) >= some, "some")
    with duetime_process(live.settings):
        inbox.until(lambda: len({each.id for each in inbox.arrived}) == len(ids), "all")
        # What comes twice may come now.
        last = schedule(live, topic, 1, 0, cluster="far")
        arrived = inbox.until_id(last[0])
    inbox.close()
    assert sorted(each.id for each in arrived) == sorted({*ids, *last})
    assert min(each.late_ms for each in arrived) >= 0


@pytest.mark.slow
@pytest.mark.usefixtures("running")
@pytest.mark.parametrize("delay_s", [0, 1, 6])
def test_message_arrives_on_the_other_cluster_as_it_was_sent(live, abroad, delay_s):
    topic = abroad.topic(partitions=3)
    due_ms = now_ms() + delay_s * 1_000
    address = [("due-topic", topic), ("due-cluster", "far"), ("due-partition", "2")]
    own = [("h", b"\xff"), ("h", None), *TRACE]
    live.send(live.names.native, b"\x00v", b"\xfek", [*address, ("due-at-ms", str(due_ms)), *own])
    live.flush()
    (arrived,) = abroad.inbox(topic).take(1)
    assert (arrived.key, arrived.value, arrived.partition) == (b"\xfek", b"\x00v", 2)
    assert arrived.headers[-len(own) :] == own
    assert set(arrived.by_name) == {"due-at-ms", "due-id", *dict(own)}
    assert arrived.appended_ms >= due_ms
    assert topic not in live.admin.list_topics(timeout=10).topics


@pytest.mark.slow
def test_outage_delays_only_messages_for_that_cluster(live, running, far, abroad):
    topic, here, before = abroad.topic(), live.topic(), counted_anew(live, running)
    first = schedule(live, topic, 1, 0, cluster="far")
    abroad.inbox(topic).take(1)
    with down(far):
        # Through the wheel, where windows are in order: also where taking them in lasts seconds.
        ids = schedule(live, topic, 300, 3, after_s=15, cluster="far")
        local = schedule(live, here, 300, 3, after_s=15)
        punctual = live.inbox(here).take(300)
        assert by_window(punctual) == local
        assert max(each.late_ms for each in punctual) < LATE_MS
    arrived = abroad.inbox(topic).take(301)
    assert by_window(arrived) == first + ids
    told = partial(more_than, before, running, (DELIVERED_THERE, DELIVERED_HERE))

    def all_are_counted():
        there, here = told().values()
        # What Kafka's client sends a second time is counted a second time.
        return there >= 301 and here == 300

    eventually(all_are_counted, told, PATIENCE_S)


@pytest.mark.slow
@pytest.mark.usefixtures("running")
def test_outage_of_a_cluster_delays_no_isolated_record_here(live, far, abroad):
    """A message for a destination that is isolated there waits; one for here comes to its end."""
    bad, topic = (
        where.topic(config=OWN_TIME | {"message.timestamp.before.max.ms": limit})
        for where, limit in ((live, "0"), (abroad, "4000"))
    )
    first = schedule(live, topic, 1, 0, cluster="far")
    abroad.inbox(topic).take(1)
    with down(far):
        waits = schedule(live, topic, 1, 0, cluster="far")
        (lost,) = schedule(live, bad, 1, 0)
        # One that comes within its millisecond is taken.
        ends = live.inbox(bad, TopicNames(live.settings).dead_letter)
        ends.until(lambda: lost in {each.id for each in ends.arrived}, "its end")
    assert [each.id for each in abroad.inbox(topic).take(2)] == first + waits


def by_window(arrived):
    """Ids window by window: each is in order by itself, and a late one may be overtaken."""
    wheel = Wheel()
    return [each.id for each in sorted(arrived, key=lambda each: wheel.number(0, each.due_ms))]


@pytest.mark.slow
@pytest.mark.usefixtures("running")
def test_schedule_runs_on_the_other_cluster(live, abroad):
    topic = abroad.topic()
    ids = every_minute(live, topic, "abroad", ago=3, cluster="far")
    arrived = abroad.inbox(topic).take(len(ids))
    assert {each.id for each in arrived} == ids
    assert {each.value for each in arrived} == {b"\x00v"}
    assert topic not in live.admin.list_topics(timeout=10).topics


@contextmanager
def down(broker):
    broker.stop()
    try:
        yield
    finally:
        broker.start()


@pytest.mark.slow
@pytest.mark.usefixtures("running")
def test_undeliverable_message_becomes_a_dead_letter_and_is_redriven(live, abroad):
    (topic, known) = "not-there-yet", abroad.topic()
    with Producer(live.settings) as client:
        lost = client.produce(topic, "1", headers=dict(TRACE), in_=timedelta(0), cluster="far")
        nowhere = client.produce(known, "2", in_=timedelta(0), cluster="nowhere")
        fine = client.produce(known, "3", in_=timedelta(seconds=1), cluster="far")
    assert [each.id for each in abroad.inbox(known).take(1)] == [fine]
    dead = live.inbox(TopicNames(live.settings).dead_letter)
    dead.until(lambda: {each.id for each in dead.arrived} >= {lost, nowhere}, "both dead")
    letters = {each.id: each.by_name for each in dead.arrived}
    assert (letters[lost]["due-error"], letters[lost]["due-cluster"]) == (b"unknown-topic", b"far")
    assert letters[nowhere]["due-error"] == b"unknown-cluster"
    assert letters[nowhere]["due-cluster"] == b"nowhere"
    create(abroad, topic)
    assert (
        DeadLetters(live.settings).redrive(DeadLetterFilter(reason="unknown-topic"), SystemClock())
        == 1
    )
    (back,) = abroad.inbox(topic).take(1)
    assert (back.value, back.headers[2:]) == (b"1", list(TRACE))


@pytest.mark.hostile
@pytest.mark.slow
@pytest.mark.usefixtures("running")
def test_topic_that_refuses_a_record_there_delays_no_other(live, abroad):
    bad, good = abroad.topic(), abroad.topic()
    with Producer(live.settings) as client:
        client.produce(bad, "x", key="k", in_=timedelta(0), cluster="far")
        abroad.inbox(bad).take(1)
        # It is known as it was: no table says that it takes no message without a key now.
        configure(abroad.admin, bad, "cleanup.policy", "compact")
        lost = {client.produce(bad, "x", in_=timedelta(seconds=s), cluster="far") for s in (0, 2)}
    others = schedule(live, good, 40, over_s=8, cluster="far")
    arrived = abroad.inbox(good).take(len(others))
    assert sorted(each.id for each in arrived) == sorted(others)

    dead = live.inbox(TopicNames(live.settings).dead_letter)
    dead.until(lambda: {each.id for each in dead.arrived} >= lost, f"{lost} dead")
    for letter in (each for each in dead.arrived if each.id in lost):
        # The table may have been refreshed meanwhile.
        assert letter.by_name["due-error"] in {b"refused-by-broker", b"no-key"}
        assert letter.by_name["due-cluster"] == b"far"


@pytest.mark.slow
def test_metrics_count_each_outcome(live, running):
    before = counted_anew(live, running)
    with Producer(live.settings) as client:
        lost = client.produce(live.topic(), "x", partition=7, in_=timedelta(0))
    live.inbox(live.names.dead_letter).until_id(lost)

    # It was tried twice.
    other = partial(told_since, before, running, {TAKEN_IN: 1, FAILED: 2, DEAD: 1, REJECTED: 0})
    eventually(lambda: other() == {}, other)
    found = scraped(running)
    assert found["duetime_is_leader"] == 1
    assert 0 < found["duetime_query_batch_seconds", "retries"] < PATIENCE_S


def told_since(before, port, done):
    """What is told that is not what was done since then: empty where all of it is."""
    more = more_than(before, port, done)
    return {each: count for each, count in more.items() if count != done[each]}


def more_than(before, port, names):
    """By how much each is more than then, in the order of the names."""
    now = scraped(port)
    return {each: now[each] - before[each] for each in names}


def counted_anew(live, port):
    """What is told, once all that was done before is counted: it is looked every ten seconds."""
    before = scraped(port)[REJECTED]
    live.send(live.names.native, "garbage")
    live.flush()
    eventually(lambda: scraped(port)[REJECTED] > before)
    return scraped(port)


@pytest.mark.slow
@pytest.mark.usefixtures("running")
def test_probes_measure_lateness_on_the_other_cluster(live, abroad):
    create(abroad, "probes")
    prober = Prober(live.settings, SystemClock(), "far")
    prober.start()
    try:
        for path in ("lanes", "store"):
            there = {"cluster": "far", "path": path}
            arrived = partial(REGISTRY.get_sample_value, "duetime_lateness_seconds_count", there)
            eventually(arrived, path, PATIENCE_S)
    finally:
        prober.close()


def create(abroad, topic):
    stamped = {"message.timestamp.type": "LogAppendTime"}
    admin = AdminClient(librdkafka_properties(abroad.settings))
    for created in admin.create_topics([NewTopic(topic, 1, config=stamped)]).values():
        created.result()

"""Brokers in trouble: a disk that is full for a while, and one of three that goes away."""

import os
import signal
import subprocess
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from types import MappingProxyType

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, NewTopic
from tests.support.clocks import eventually
from tests.support.live import Live, await_first_messages, scraped
from tests.support.processes import complete, logs, running
from tests.support.topics import small_settings

from duetime.bench.chaos import duetime_process, send_signal
from duetime.client.producer import Producer
from duetime.client.status import status
from duetime.core.clock import SystemClock
from duetime.core.messages import MessageId
from duetime.core.settings import Settings
from duetime.kafka.admin import create_topics
from duetime.kafka.connection import librdkafka_properties
from duetime.kafka.descriptions import describe_topic_ids
from duetime.kafka.heartbeats import MemberReader
from duetime.kafka.leadership import IS_WARM
from duetime.local.broker import REPLICATED, ROOM_MIB, LocalBroker, Node, new_cluster, started
from duetime.local.network import Proxy
from duetime.local.process import free_port

pytestmark = pytest.mark.timeout(1_200)

PATIENCE_S = 120.0

#: Longer than the trouble lasts: what is sent twice meanwhile is found while it waits.
FAR = timedelta(seconds=40)

BROKERS = 3

#: A pipeline that soon misses its probes.
PROBED = {"DUETIME_PROBES": "true", "DUETIME_PROBE_TIMEOUT_SECONDS": "20"}

#: How many probes through the lanes a leader has seen arrive.
PROBES_SEEN = "duetime_lateness_seconds_count", "", "lanes"

#: How late others may be when a broker dies that leads a destination alone, in ms: its session
#: takes 9 s, and what was sent into it 15 s; then a query starts again.
DEATH_MS = 30_000

#: How long a broker stands still, in seconds.
SLOW_S = 4

#: Clients, of which some have chosen the broker that dies.
ADMINS = 12


@contextmanager
def cluster(bootstrap, directory, **others):
    """Topics on these brokers, and no pipeline yet."""
    checkpoint = directory / "checkpoint"
    found = Live(
        small_settings(
            bootstrap, overdue_scan_interval_ms=2_000, checkpoint=checkpoint.as_uri(), **others
        )
    )
    create_topics(found.settings)
    yield found
    found.close()


@contextmanager
def small_disk(directory):
    """A file system of its own with little more room than a broker asks for."""
    if os.geteuid():
        pytest.skip("only root may mount a file system")
    directory.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={ROOM_MIB + 50}m", "tmpfs", str(directory)]
    subprocess.run(["/bin/mount", *options], check=True)
    try:
        yield directory
    finally:
        subprocess.run(["/bin/umount", "--lazy", str(directory)], check=True)


def fill(path):
    """Write until there is no room at all."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                continue


def schedule(client, topic, count, over_s):
    step = timedelta(seconds=over_s) / count
    return {client.produce(topic, "x", in_=number * step) for number in range(count)}


def noted(refused):
    """Adds to these ids that of a message that was not acknowledged."""
    return lambda error, id_: error and refused.append(id_)


def test_a_disk_that_is_full_for_a_while_loses_and_doubles_nothing(tmp_path):
    with (
        small_disk(tmp_path / "disk") as disk,
        LocalBroker(disk / "broker") as broker,
        cluster(broker.bootstrap, disk) as live,
        duetime_process(live.settings),
        Producer(live.settings) as client,
    ):
        topic = live.topic()
        inbox = live.inbox(topic)
        ids = schedule(client, topic, 600, over_s=30)
        inbox.until(lambda: len(inbox.arrived) > 50, "the first")
        ballast = disk / "ballast"
        fill(ballast)
        waiting, refused = {}, []
        # Kafka gives up a disk that it cannot write to, and ends.
        until_s = time.monotonic() + PATIENCE_S
        while broker.running:
            assert time.monotonic() < until_s
            at = datetime.now(UTC) + FAR
            waiting[client.produce(topic, "x", at=at, on_delivery=noted(refused))] = at
            time.sleep(0.1)
        ballast.unlink()
        broker.start()
        client.flush()
        # As the sender is told to: it may have arrived all the same.
        for each in refused:
            unique = MessageId.parse(each).unique
            assert client.produce(topic, "x", at=waiting[each], id=unique) == each
        ids |= waiting.keys()
        complete(live, topic, inbox, ids)


@contextmanager
def three_brokers(directory, properties=MappingProxyType({}), first=MappingProxyType({}), doors=()):
    """Three nodes of one cluster, each broker and controller; `first` is for the first alone.

    Through `doors`, a proxy for each, clients reach them, too.
    """
    own = dict(first), {}, {}
    nodes = [
        Node(properties=REPLICATED | dict(properties) | own[each], doors=doors[each : each + 1])
        for each in range(BROKERS)
    ]
    brokers = new_cluster(directory, nodes)
    with started(brokers):
        yield brokers


def leader_of(settings, topic):
    """The broker that leads the only partition of this topic."""
    found = AdminClient(librdkafka_properties(settings)).list_topics(topic, timeout=30)
    return found.topics[topic].partitions[0].leader


def test_a_leader_out_of_reach_of_one_broker_gives_way(tmp_path):
    """Its heartbeats reach the others, so it keeps its lease; a third of the lanes stands still."""
    with ExitStack() as closed:
        proxies = [closed.enter_context(Proxy(free_port())) for _ in range(BROKERS)]
        brokers = closed.enter_context(three_brokers(tmp_path, doors=proxies))
        bootstrap = ",".join(each.bootstrap for each in brokers)
        live = closed.enter_context(cluster(bootstrap, tmp_path, replication_factor=BROKERS))
        by_doors = ",".join(f"127.0.0.1:{each.port}" for each in proxies)
        ports, pids = (free_port(), free_port()), []
        for each, port in zip((by_doors, bootstrap), ports, strict=True):
            own = PROBED | {"DUETIME_BOOTSTRAP": each, "DUETIME_METRICS_PORT": str(port)}
            pids.append(closed.enter_context(running(live, tmp_path, **own)).pid)
            eventually(lambda: status(live.settings, SystemClock()).leader)
        wait_for_warm_standby(live, pids[0])
        # A leader that has never delivered gives way to none.
        eventually(lambda: scraped(ports[0]).get(PROBES_SEEN, 0) > 0, "the first probe")
        client = closed.enter_context(Producer(live.settings))
        topic = live.topic(partitions=3)
        inbox = live.inbox_when_there(topic, partitions=3)
        ids = schedule(client, topic, 600, over_s=20)
        inbox.until(lambda: len(inbox.arrived) > 50, "the first")
        heartbeats = {
            leader_of(live.settings, each) for each in (live.names.leader, "__transaction_state")
        }
        cut = min({1, 2, 3} - heartbeats)
        proxies[cut - 1].cut()
        ids |= schedule(client, topic, 300, over_s=10)
        eventually(lambda: leads(live, pids[1]), "the lead of the standby")
        complete(live, topic, inbox, ids)


def leads(live, pid):
    return str(status(live.settings, SystemClock()).leader).endswith(f":{pid}")


def wait_for_warm_standby(live, leader):
    """Wait until another process would lead at once if this one did not."""
    assert leads(live, leader)
    with closing(MemberReader(live.settings)) as reader:

        def is_warm():
            _, standbys = reader.read(SystemClock().now_ms())
            return any(each.status.get(IS_WARM) for each in standbys)

        eventually(is_warm, "a warm standby")


def test_when_one_of_three_brokers_goes_away_each_message_comes_once(tmp_path):
    with three_brokers(tmp_path) as brokers, ExitStack() as closed:
        bootstrap = ",".join(each.bootstrap for each in brokers)
        live = closed.enter_context(cluster(bootstrap, tmp_path, replication_factor=BROKERS))
        closed.enter_context(duetime_process(live.settings))
        client = closed.enter_context(Producer(live.settings))
        topic = live.topic(partitions=3)
        # Not every broker hears of it at once.
        inbox = live.inbox_when_there(topic, partitions=3)
        ids = schedule(client, topic, 900, over_s=30)
        inbox.until(lambda: len(inbox.arrived) > 50, "the first")
        brokers[0].kill()
        ids |= schedule(client, topic, 300, over_s=10)
        before = len(inbox.arrived)
        inbox.until(lambda: len(inbox.arrived) > before + 100, "some while it is away")
        brokers[0].start()
        complete(live, topic, inbox, ids)


def test_destinations_that_a_broker_takes_along_wait_and_others_do_not(tmp_path):
    """It dies under load. One needs it as its leader, one as its second replica in sync.

    Nothing else has a replica there.
    """
    retried = {"retry_backoff_ms": 500, "retry_backoff_max_ms": 5_000, "max_delivery_attempts": 99}
    with three_brokers(tmp_path, TWO_OF_THREE) as brokers, ExitStack() as closed:
        bootstrap = ",".join(each.bootstrap for each in brokers)
        brokers[2].stop()
        live = closed.enter_context(cluster(bootstrap, tmp_path, replication_factor=2, **retried))
        closed.enter_context(running(live, tmp_path))
        await_first_messages(live)
        brokers[2].start()
        healthy, leaderless = placed(live, [[1]]), placed(live, [[3]])
        thin = placed(live, [[2, 3]], {"min.insync.replicas": "2"})
        topics = healthy, leaderless, thin
        inboxes = {each: live.inbox_when_there(each) for each in topics}
        client = closed.enter_context(Producer(live.settings))
        ids = {each: schedule(client, each, 600, over_s=30) for each in topics}
        inbox = inboxes[healthy]
        inbox.until(lambda: len(inbox.arrived) > 100, "the first")
        brokers[2].kill()
        inbox.until(lambda: {each.id for each in inbox.arrived} >= ids[healthy], "the others")
        assert max(each.late_ms for each in inbox.arrived) < DEATH_MS
        brokers[2].start()
        complete(live, healthy, inbox, ids[healthy])
        # What was on its way when the broker died may come twice: nothing shows what it has.
        for each in (leaderless, thin):
            found = inboxes[each]
            found.until(lambda: {one.id for one in found.arrived} >= ids[each], "all of them")  # noqa: B023 (called at once)
            assert min(one.late_ms for one in found.arrived) >= 0


def placed(live, replicas, config=MappingProxyType({})):
    """Create a destination; `replicas` are the brokers of each partition, its leader first."""
    topic = f"to_{uuid.uuid4().hex[:8]}"
    stamped = {"message.timestamp.type": "LogAppendTime"} | dict(config)
    wanted = NewTopic(topic, len(replicas), replica_assignment=replicas, config=stamped)
    live.admin.create_topics([wanted])[topic].result()
    return topic


def test_a_leader_that_ends_while_its_broker_stands_still_hands_over_once(tmp_path):
    """As in a rolling upgrade: what is on its way then is acknowledged after the standby leads."""
    with LocalBroker(tmp_path / "broker") as broker, ExitStack() as closed:
        live = closed.enter_context(cluster(broker.bootstrap, tmp_path))
        ended = closed.enter_context(running(live, tmp_path))
        eventually(lambda: status(live.settings, SystemClock()).leader)
        standby = closed.enter_context(running(live, tmp_path))
        wait_for_warm_standby(live, ended.pid)
        client = closed.enter_context(Producer(live.settings))
        topic = live.topic(partitions=3)
        inbox = live.inbox_when_there(topic, partitions=3)
        ids = schedule(client, topic, 2_000, over_s=20)
        client.flush()
        inbox.until(lambda: len(inbox.arrived) > 100, "the first")
        send_signal(broker._process.pid, signal.SIGSTOP)
        os.kill(ended.pid, signal.SIGTERM)
        time.sleep(SLOW_S)
        send_signal(broker._process.pid, signal.SIGCONT)
        eventually(lambda: leads(live, standby.pid), "the lead of the standby")
        complete(live, topic, inbox, ids)


def test_admin_requests_are_answered_soon_after_a_broker_has_died(tmp_path):
    """A client that asks a broker which is gone would do so for five minutes."""
    with three_brokers(tmp_path) as brokers, ThreadPoolExecutor(ADMINS) as pool:
        settings = Settings(bootstrap=",".join(each.bootstrap for each in brokers))
        admins = [AdminClient(librdkafka_properties(settings)) for _ in range(ADMINS)]
        admins[0].create_topics([NewTopic("orders", 1, BROKERS)])["orders"].result()

        def are_answered():
            asked = pool.map(lambda each: describe_topic_ids(each, ["orders"], 5), admins)
            with suppress(KafkaException):
                return all(asked)

        eventually(are_answered)
        # A third of them have chosen it.
        brokers[0].kill()
        eventually(are_answered, "an answer to each of the clients", within_s=60)


#: A topic created while one of three brokers is away has no replica there. A follower that lags
#: stays in sync.
TWO_OF_THREE = {
    "default.replication.factor": "2",
    "offsets.topic.replication.factor": "2",
    "transaction.state.log.replication.factor": "2",
    "transaction.state.log.min.isr": "1",
    "replica.lag.time.max.ms": "120000",
}

#: How long a fetch of a follower that lags takes, in seconds: longer than a record is tried (10)
#: and a failed turn rests (11), and shorter than reading back waits (60).
LAG_S = 50

#: It asks for more than there ever is, so that the leader answers when this time is over.
LAGS = {
    "replica.fetch.min.bytes": str(2**30),
    "replica.fetch.wait.max.ms": str(LAG_S * 1_000),
    "replica.socket.timeout.ms": str(2 * LAG_S * 1_000),
}

#: The replicas of each partition of the destination, its leader first.
FOLLOWED = [[2, 3, 1], [3, 2, 1], [2, 3, 1]]


def test_when_a_follower_lags_each_message_comes_once(tmp_path):
    """Reading back waits for records that lie above the high watermark.

    The first broker is a follower in sync that fetches once in `LAG_S` seconds. It leads nothing,
    and it has replicas of the destination alone, so that the pipeline commits and keeps its lease.
    Between two fetches:

    1. The leaders append what the pipeline sends, and do not acknowledge it.
    2. After 15 s the producers give it up, and the turns and queries fail.
    3. After another 16 s these are repeated, and read the destination back.
    4. They send again what they have not found.

    Readers see what was appended in step 1 once the follower has fetched, or has stopped. If step 3
    does not wait until then, step 4 sends these messages a second time.
    """
    with three_brokers(tmp_path, TWO_OF_THREE, LAGS) as brokers, ExitStack() as closed:
        bootstrap = ",".join(each.bootstrap for each in brokers)
        follower = brokers[0]
        follower.stop()
        live = closed.enter_context(cluster(bootstrap, tmp_path, replication_factor=2))
        closed.enter_context(running(live, tmp_path))
        await_first_messages(live)
        follower.start()
        topic = placed(live, FOLLOWED)
        client = closed.enter_context(Producer(live.settings))
        inbox = live.inbox_when_there(topic, partitions=len(FOLLOWED))
        ids = schedule(client, topic, 1_000, over_s=1.5 * LAG_S)
        client.flush()
        time.sleep(1.5 * LAG_S)
        # It has not left the in-sync replicas, and has nothing else.
        assert partitions_of(live, 1) == {(topic, each) for each in range(len(FOLLOWED))}
        follower.stop()
        complete(live, topic, inbox, ids)
        assert "waiting for replicas" in logs(tmp_path)
        # A client may have chosen it to delete topics.
        follower.start()


def partitions_of(live, node):
    """Return the partitions where the broker, which leads none, is in sync."""
    topics = live.admin.list_topics(timeout=PATIENCE_S).topics.values()
    partitions = [(one.topic, each) for one in topics for each in one.partitions.values()]
    assert all(each.leader != node for _, each in partitions)
    return {(topic, each.id) for topic, each in partitions if node in each.isrs}

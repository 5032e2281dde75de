"""`duetime bench lateness --stuck`: lateness beside a destination that takes nothing.

One destination has no leader, refuses what is sent to it, or does not exist. A few messages a
second are for it: due at once, in the lanes and in the wheel, in turn. All others go to a topic of
their own at a steady rate.
"""

import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from itertools import cycle
from pathlib import Path

from confluent_kafka.admin import AdminClient, NewTopic

from duetime.bench.lateness import KNOWN_S, ONE, deliver, run_once, running_pipeline
from duetime.bench.load import LoadPlan
from duetime.bench.options import Mode
from duetime.bench.report import Report
from duetime.bench.say import say
from duetime.bench.testbed import BROKER, TIMEOUT_S, destination, testbed
from duetime.client import Producer
from duetime.config import Settings
from duetime.connection import librdkafka_properties
from duetime.dead import DeadLetters, Selection
from duetime.local.broker import LocalBroker
from duetime.local.ports import free_port
from duetime.local.properties import HOST
from duetime.local.storage import new_cluster_id
from duetime.stores.offsets import Offsets

#: The delays of the messages for the destination that takes nothing, in seconds: due at once, in
#: the lanes, in the wheel.
WAYS_S = (0.0, 2.0, 8.0)

#: How often one of them is sent, in seconds.
EVERY_S = 0.5

#: How often a message is tried, and how long before the first retry, in ms: an end within seconds.
RETRIES = {"retry_attempts": 3, "retry_backoff_ms": 500}

#: Settings under which a broker refuses each timestamp that is not of its own millisecond.
REFUSING = {"message.timestamp.type": "CreateTime", "message.timestamp.before.max.ms": "0"}

#: How long the last of them may take to end, in seconds.
PATIENCE_S = 60.0

#: How often is looked, in seconds.
LOOK_S = 0.1

#: The node that leads nothing but the destination of that mode.
SECOND = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Stuck:
    """What came of the others, and of the messages for the destination that takes nothing."""

    others: Report
    sent: int
    #: Dead letters by their reason.
    reasons: Counter[str]
    #: What the destination has taken all the same: a record that came within its millisecond.
    delivered: int

    def figures(self) -> dict[str, int | None]:
        """The result as it is shown: of the others, without a prefix."""
        return {
            **asdict(self.others),
            "stuck_sent": self.sent,
            "stuck_dead": self.reasons.total(),
            "stuck_delivered": self.delivered,
            **{f"stuck_{reason.replace('-', '_')}": n for reason, n in self.reasons.items()},
        }


@dataclass(frozen=True, slots=True)
class Bed:
    """Where it runs: the settings, and a second broker of the cluster, which is not started."""

    settings: Settings
    second: LocalBroker


@contextmanager
def stuck_testbed() -> Iterator[Bed]:
    """Two temporary brokers; the first has all topics of ours. Raises SetupError."""
    to_controller, port, cluster_id = free_port(), free_port(), new_cluster_id()
    voters = {"controller.quorum.voters": f"1@{HOST}:{to_controller}"}
    listeners = f"PLAINTEXT://{HOST}:{port},CONTROLLER://{HOST}:{to_controller}"
    other = free_port()
    second = {
        "process.roles": "broker",
        "node.id": str(SECOND),
        "listeners": f"PLAINTEXT://{HOST}:{other}",
    }
    with ExitStack() as closed:
        scratch = Path(closed.enter_context(tempfile.TemporaryDirectory(prefix="duetime-bench-")))
        own = BROKER | voters | {"listeners": listeners}
        first = LocalBroker(scratch / "first", port, own, cluster_id)
        closed.enter_context(first)
        beside = LocalBroker(scratch / "second", other, BROKER | voters | second, cluster_id)
        closed.callback(beside.kill)
        yield Bed(closed.enter_context(testbed(first.bootstrap, **RETRIES)), beside)


def stuck(bed: Bed, mode: Mode, plan: LoadPlan, warm_up_s: float) -> Stuck:
    """Send the plan to a topic, beside messages for a destination that takes nothing."""
    settings = bed.settings
    with running_pipeline(settings):
        if warm_up_s:
            before = replace(plan, messages=round(plan.rate * warm_up_s), label="before")
            deliver(settings, before, "before")
        topic = _destination(bed, mode)
        time.sleep(KNOWN_S)
        with _sending_beside(settings, topic) as sent:
            others = run_once(settings, plan, "others", ONE).report
        reasons, delivered = _ended(settings, topic, mode, len(sent))
    return Stuck(others=others, sent=len(sent), reasons=reasons, delivered=delivered)


def _destination(bed: Bed, mode: Mode) -> str:
    """The name of the destination, which takes nothing from now on."""
    topic, admin = (
        destination(bed.settings, "stuck"),
        AdminClient(librdkafka_properties(bed.settings)),
    )
    if mode is Mode.REFUSING:
        _create(admin, NewTopic(topic, 1, config=REFUSING))
    elif mode is Mode.LEADERLESS:
        bed.second.start()
        _create(admin, NewTopic(topic, 1, replica_assignment=[[SECOND]]))
        bed.second.kill()
        say("waiting until the destination has no leader ...")
        while _leader(admin, topic) >= 0:
            time.sleep(LOOK_S)
    return topic


def _create(admin: AdminClient, topic: NewTopic) -> None:
    admin.create_topics([topic])[topic.topic].result()


def _leader(admin: AdminClient, topic: str) -> int:
    """The node that leads the topic's partition; -1 is none."""
    partition = admin.list_topics(topic, timeout=TIMEOUT_S).topics[topic].partitions.get(0)
    return partition.leader if partition else 0


@contextmanager
def _sending_beside(settings: Settings, topic: str) -> Iterator[list[str]]:
    """Send some messages for the topic while the block runs; gives their ids."""
    sent, ending = list[str](), threading.Event()

    def send() -> None:
        with Producer(settings) as producer:
            for way_s in cycle(WAYS_S):
                sent.append(producer.produce(topic, b"stuck", in_=timedelta(seconds=way_s)))
                if ending.wait(EVERY_S):
                    return

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield sent
    finally:
        ending.set()
        thread.join()


def _ended(settings: Settings, topic: str, mode: Mode, sent: int) -> tuple[Counter[str], int]:
    """Dead letters by reason, and how many were delivered, once all have ended."""
    say("waiting until all that is stuck has ended ...")
    until_s = time.monotonic() + PATIENCE_S
    while True:
        letters = DeadLetters(settings).chosen(Selection(topic=topic))
        reasons = Counter(each.reason for each in letters)
        # A topic that is missing or has no leader took none.
        delivered = _appended(settings, topic) if mode is Mode.REFUSING else 0
        if reasons.total() + delivered >= sent or time.monotonic() > until_s:
            return reasons, delivered
        time.sleep(LOOK_S)


def _appended(settings: Settings, topic: str) -> int:
    with closing(Offsets(settings, f"{settings.namespace}.bench")) as offsets:
        return offsets.appended([topic])[topic] or 0

"""The local broker's settings, each with its reason, and Java's format for them."""

import json
from collections.abc import Mapping

#: Host of every listener. By number: `localhost` may mean ::1, where nothing listens.
HOST = "127.0.0.1"

#: Where the broker keeps its log directory, relative to its working directory, the data directory:
#: Kafka would split a path at its commas.
LOG_DIR = "kafka"

#: Internal topics ask for three brokers and up to 50 partitions unless told otherwise. Here is one
#: broker, and each partition costs start time.
INTERNAL_TOPICS = {
    "offsets.topic.num.partitions": "1",
    "offsets.topic.replication.factor": "1",
    "transaction.state.log.num.partitions": "1",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "share.coordinator.state.topic.num.partitions": "1",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
}

SETTINGS = INTERNAL_TOPICS | {
    # Whoever tries duetime should be able to send to a topic without creating it first ...
    "auto.create.topics.enable": "true",
    # ... and to see its messages come out in one order.
    "num.partitions": "1",
    # A group's first member need not wait for others: there are none.
    "group.initial.rebalance.delay.ms": "0",
    # Progress is kept as committed offsets. The default drops them after a week without a commit,
    # but a far slot waits for years, and a laptop may be off for a month.
    "offsets.retention.minutes": "2147483647",
    # Only whole segments are ever freed, so a segment bounds what each partition holds in vain.
    "log.segment.bytes": str(64 * 1024 * 1024),
    # The default reserves 10 MiB twice for each of hundreds of partitions; a segment of this size
    # fills less than 0.3 MiB.
    "log.index.size.max.bytes": str(1024 * 1024),
    # Give room back a minute after it is settled instead of five.
    "log.retention.check.interval.ms": "60000",
    # The default takes 128 MiB of heap at start, to clean logs of millions of keys.
    "log.cleaner.dedupe.buffer.size": str(16 * 1024 * 1024),
    # After a kill, the restarted broker is turned away until its old session has run out: 9 s by
    # default. Shorter would fence a healthy broker on a machine that is busy for a moment.
    "broker.session.timeout.ms": "3000",
    "broker.heartbeat.interval.ms": "500",
}


def server_properties(port: int, controller_port: int) -> dict[str, str]:
    """Settings of a node that is broker and controller, for clients on this machine only.

    The quorum is named here rather than recorded in the data, so both ports may change from start
    to start.
    """
    return SETTINGS | {
        "process.roles": "broker,controller",
        "node.id": "1",
        "controller.quorum.voters": f"1@{HOST}:{controller_port}",
        "listeners": f"PLAINTEXT://{HOST}:{port},CONTROLLER://{HOST}:{controller_port}",
        "controller.listener.names": "CONTROLLER",
        "inter.broker.listener.name": "PLAINTEXT",
        "log.dirs": LOG_DIR,
    }


def render(properties: Mapping[str, str]) -> str:
    r"""Java's properties format. It is Latin-1, so the rest goes as \uXXXX, as in JSON."""
    lines = (f"{name}={json.dumps(value)[1:-1]}" for name, value in sorted(properties.items()))
    return "\n".join(lines) + "\n"

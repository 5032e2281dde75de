"""A cluster of several local brokers, as child processes."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from duetime.local.broker import LocalBroker, new_cluster_id
from duetime.local.network import Namespace, Proxy, host
from duetime.local.process import HOST, free_port

#: Broker settings of a cluster that keeps everything three times, and can do without one of three.
REPLICATED = {
    "default.replication.factor": "3",
    "min.insync.replicas": "2",
    "offsets.topic.replication.factor": "3",
    "transaction.state.log.replication.factor": "3",
    "transaction.state.log.min.isr": "2",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node of a cluster."""

    #: Broker settings in place of ours.
    properties: Mapping[str, str] = field(default_factory=dict)
    #: Whether it is one of the controllers, besides a broker.
    is_controller: bool = True
    #: Further listeners: clients reach each by a proxy before it.
    doors: Sequence[Proxy] = ()
    #: Where it runs; None is this machine's own network.
    namespace: Namespace | None = None


def new_cluster(directory: Path, nodes: Sequence[Node]) -> list[LocalBroker]:
    """Return the brokers of a new cluster, not started; node ids count from 1."""
    cluster_id, numbered = new_cluster_id(), dict(enumerate(nodes, 1))
    controllers = {
        number: f"{host(node.namespace)}:{free_port()}"
        for number, node in numbered.items()
        if node.is_controller
    }
    voters = ",".join(f"{number}@{address}" for number, address in controllers.items())

    def broker(number: int, node: Node) -> LocalBroker:
        port, names = free_port(), [f"DOOR{door}" for door in range(len(node.doors))]
        own, roles = f"PLAINTEXT://{host(node.namespace)}:{port}", "broker"
        listeners, advertised = [own], [own]
        for name, door in zip(names, node.doors, strict=True):
            listeners.append(f"{name}://{HOST}:{door.target}")
            advertised.append(f"{name}://{HOST}:{door.port}")
        if node.is_controller:
            listeners.append(f"CONTROLLER://{controllers[number]}")
            roles = "broker,controller"
        every = ("PLAINTEXT", "CONTROLLER", *names)
        properties = {
            "node.id": str(number),
            "process.roles": roles,
            "controller.quorum.voters": voters,
            "listeners": ",".join(listeners),
            "advertised.listeners": ",".join(advertised),
            "listener.security.protocol.map": ",".join(f"{each}:PLAINTEXT" for each in every),
        } | dict(node.properties)
        path = directory / f"broker-{number}"
        return LocalBroker(path, port, properties, cluster_id, node.namespace)

    return [broker(number, node) for number, node in numbered.items()]


@contextmanager
def started(brokers: Sequence[LocalBroker]) -> Iterator[None]:
    """Run the brokers while the block lasts, then kill them. Raises SetupError."""
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        for each in brokers:
            stack.callback(each.kill)
        # Together: none answers before a majority of the controllers does.
        list(pool.map(LocalBroker.start, brokers))
        yield

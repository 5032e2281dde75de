"""What duetime's own topics are called (`required`: what they must be like)."""

from collections.abc import Collection

from duetime.config import Settings
from duetime.message import LEADER, WHEEL

#: What duetime's own headers (and a rejected record's error headers) may add to a record, in bytes.
OVERHEAD_BYTES = 64 * 1024

#: What the name of a delayed topic ends with that has a visible one.
DELAYED = ".delayed"


def native_topic(namespace: str) -> str:
    """Where messages of duetime's own envelope come in."""
    return f"{namespace}.in"


class TopicNames:
    """The names of duetime's topics and groups under one namespace."""

    def __init__(self, settings: Settings) -> None:
        self._prefix = settings.namespace
        self.native = native_topic(self._prefix)
        self.transactional = f"{self.native}.tx"
        self.airtel = settings.airtel_topic
        self.countdown = settings.countdown_topic
        self.scheduler = settings.scheduler_topic
        self.control = f"{self._prefix}.control"
        self.rejected = f"{self._prefix}.rejected"
        self.failed = f"{self._prefix}.failed"
        self.dead = f"{self._prefix}.dead"
        self.isolated = f"{self._prefix}.isolated"
        self.sending = f"{self._prefix}.sending"
        self.redriven = f"{self._prefix}.redriven"
        self.lanes = f"{self._prefix}.lanes"
        self.store = f"{self._prefix}.store"
        self.recurring = f"{self._prefix}.recurring"
        self.series = f"{self._prefix}.series"
        self.warmup = f"{self._prefix}.warmup"
        self.wake = f"{self._prefix}.wake"
        self.redelivery_group = f"{self._prefix}.redelivery"
        self.leader = f"{self._prefix}{LEADER}"
        self.leader_group = f"{self._prefix}.leader"
        self.release_group = f"{self._prefix}.release"
        self.intake_group = f"{self._prefix}.intake"
        #: Nobody is a member: what it has committed is where each slot's index is.
        self.index_group = f"{self._prefix}.index"

    def outbox(self, cluster: str) -> str:
        """The topic of what is on its way to another cluster."""
        return f"{self._prefix}.outbox.{cluster}"

    def visible_group(self, topic: str) -> str:
        """The group that makes a delayed topic visible."""
        return f"{self._prefix}.visible.{topic}"

    def wheel(self, level: int) -> str:
        """The topic of one level of the wheel."""
        return f"{self._prefix}{WHEEL}{level}"

    @property
    def own(self) -> list[str]:
        """Where messages go that duetime sends to itself, and nobody else reads or cancels."""
        return [self.recurring, self.warmup]

    @property
    def plain_intake(self) -> list[str]:
        """The intake topics that are read up to their end, whatever transactions are open there."""
        return [self.native, self.control, self.airtel, self.countdown, self.scheduler]

    @property
    def intake(self) -> list[str]:
        """Every topic that an intake query reads."""
        return [*self.plain_intake, self.transactional]


def namespaces(topics: Collection[str]) -> set[str]:
    """Return the namespaces of duetime on a cluster that has these topics.

    A namespace has a topic that elects a leader, and a wheel.
    """
    found = (name.removesuffix(LEADER) for name in topics if name.endswith(LEADER))
    return {name for name in found if f"{name}{WHEEL}0" in topics}


def own_destinations(settings: Settings) -> set[tuple[str | None, str]]:
    """The same with the cluster, None for this one: there, a topic that is named for probes."""
    here = {(None, topic) for topic in TopicNames(settings).own}
    clusters = settings.clusters.items()
    return here | {(name, each.probe_topic) for name, each in clusters if each.probe_topic}


def markers(settings: Settings) -> tuple[str, ...]:
    """The topics of the markers of all queues."""
    return tuple(own.markers_topic(name) for name, own in settings.queues.items())


def enabled(settings: Settings) -> list[str]:
    """The delayed topics that are switched on."""
    return [name for name, topic in settings.delayed_topics.items() if topic.enable]


def visible(settings: Settings) -> dict[str, str]:
    """The visible topics of delayed ones, by the latter's name."""
    return {
        name: name.removesuffix(DELAYED)
        for name in enabled(settings)
        if name.endswith(DELAYED) and name != DELAYED
    }

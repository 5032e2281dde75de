"""What duetime's own topics are called (`required`: what they must be like)."""

from duetime.config import Settings

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
        self.airtel = settings.airtel_topic
        self.countdown = settings.countdown_topic
        self.scheduler = settings.scheduler_topic
        self.control = f"{self._prefix}.control"
        self.rejected = f"{self._prefix}.rejected"
        self.failed = f"{self._prefix}.failed"
        self.dead = f"{self._prefix}.dead"
        self.redriven = f"{self._prefix}.redriven"
        self.lanes = f"{self._prefix}.lanes"
        self.store = f"{self._prefix}.store"
        self.recurring = f"{self._prefix}.recurring"
        self.series = f"{self._prefix}.series"
        self.warmup = f"{self._prefix}.warmup"
        self.wake = f"{self._prefix}.wake"
        self.redelivery_group = f"{self._prefix}.redelivery"
        self.leader = f"{self._prefix}.leader"
        self.leader_group = f"{self._prefix}.leader"
        self.release_group = f"{self._prefix}.release"
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
        return f"{self._prefix}.wheel.{level}"

    @property
    def own(self) -> list[str]:
        """Where messages go that duetime sends to itself, and nobody else reads or cancels."""
        return [self.recurring, self.warmup]

    @property
    def intake(self) -> list[str]:
        """Every topic that the intake query reads."""
        return [self.native, self.control, self.airtel, self.countdown, self.scheduler]


def own_destinations(settings: Settings) -> set[tuple[str | None, str]]:
    """The same with the cluster, None for this one: there, a topic that is named for probes."""
    here = {(None, topic) for topic in TopicNames(settings).own}
    clusters = settings.clusters.items()
    return here | {(name, each.probe_topic) for name, each in clusters if each.probe_topic}


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

"""How the pipelines stand: what `status` asks of Kafka, and what the HTTP client is told."""

from collections.abc import Mapping
from dataclasses import dataclass, field

#: What is said of a query that is well.
RUNS = "runs"


#: Of so many rescues is told, the latest: all are in one note of the leader's, which is small.
RESCUES_TOLD = 8


@dataclass(frozen=True, slots=True, order=True)
class Rescue:
    """What was past due before a window took it up, as it was found at one look."""

    #: When, epoch ms.
    at_ms: int
    #: How many records.
    messages: int
    #: When they were due, from `from_ms` up to, not including, `to_ms`: as far as it is known.
    from_ms: int
    to_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The state of the pipelines on a cluster."""

    #: `host:process` of the pipeline that delivers; None where none does.
    leader: str | None
    #: Since when it leads, epoch ms.
    since_ms: int | None
    #: The pipelines that would take over.
    standbys: tuple[str, ...]
    #: Messages that wait in the wheel.
    waiting: int
    #: Those of them whose slot is over, and which are not delivered.
    late: int
    #: How long the oldest slot of those is over, in ms.
    lag_ms: int
    #: Messages that were past due before a window took them up, since it leads; None: not known.
    rescued: int | None = None
    #: The latest looks that found some of those, oldest first.
    rescues: tuple[Rescue, ...] = ()
    #: How each query of the leader fares: `runs`, or what keeps it from that.
    queries: Mapping[str, str] = field(default_factory=dict)

"""The words of the contract: header names, message ids, and what a destination may be called.

An id is `<due as 12 hex digits>-<unique part>`. The unique part is the sender's own `due-id`, or
says where the record was taken in. An id is deterministic, so reading a record twice gives the same
one; it sorts by time; and it names the slot to look in, so that cancelling needs no index.
"""

import re
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

from duetime.errors import InvalidMessage, Reason

# Headers that a sender writes.
DUE_TOPIC = "due-topic"
DUE_PARTITION = "due-partition"
DUE_CLUSTER = "due-cluster"
DUE_AT_MS = "due-at-ms"
DUE_IN_MS = "due-in-ms"
DUE_ID = "due-id"
DUE_OP = "due-op"
DUE_EXPIRES_MS = "due-expires-ms"
DUE_CALLBACK = "due-callback"
#: The full id of the message that this one takes the place of.
DUE_REPLACES = "due-replaces"

# Headers of a message that comes again and again, a series.
DUE_CRON = "due-cron"
DUE_ZONE = "due-zone"
DUE_UNTIL = "due-until"
DUE_MISFIRE = "due-misfire"

#: What a sender says of when it comes again.
RECURRENCE = (DUE_CRON, DUE_ZONE, DUE_UNTIL, DUE_MISFIRE)

#: The longest that each of these may be, in characters: all that cron counts, one by one, is 356.
LONGEST_SAID = 500

# Headers of what is sent to the recurring topic.
#: What a series is called: the unique part of its runs' ids.
DUE_SERIES = "due-series"
#: The id under which the series was taken in: of two with one name, the later one is meant.
SERIES_SINCE = "due-series-since"
#: The instant from which its next run is sought, epoch ms: after its last run, or its beginning.
SERIES_NEXT = "due-series-next"
SERIES_TOPIC = "due-series-topic"
SERIES_PARTITION = "due-series-partition"
SERIES_CLUSTER = "due-series-cluster"

#: What a message of a series carries with it, behind its time and id, always in this order.
SERIES_HEADERS = (
    DUE_OP,
    DUE_SERIES,
    SERIES_SINCE,
    SERIES_NEXT,
    SERIES_TOPIC,
    SERIES_PARTITION,
    SERIES_CLUSTER,
    *RECURRENCE,
)

# Headers of a delayed topic's records.
#: When a record is to be delivered, epoch ms.
DELIVER_AFTER_MS = "deliver-after-ms"
#: What `produce` returned for it.
DELIVER_ID = "deliver-id"
#: A retry is for the group that wanted it, and for no other.
DELIVER_GROUP = "deliver-group"
#: How often it was tried, when it failed first (epoch ms) and the offset it had then, with colons.
DELIVER_RETRY = "deliver-retry"

#: Only while a message waits: numbers and a name between colons, see STATE; those at the end may be
#: missing.
DUE_STATE = "due-state"

#: What they are: the timestamp of the intake record (what came early and cascaded is written into
#: its last slot behind what came late, and must still be sent before it); when it expires; and of
#: a message that could not be delivered, when to try again, how often it was tried, and when that
#: failed first. All but the attempts are instants in epoch ms. Last, the name of the cluster that
#: it is for, if that is another one.
STATE = ("taken", "expires", "retry", "attempts", "failed", "cluster")

#: What the control topic takes: of a message, and of a series.
CANCEL = "cancel"
PAUSE, RESUME, STOP = "pause", "resume", "stop"
OF_SERIES = (PAUSE, RESUME, STOP)

#: A series is asked for; and inside of duetime, its next run is to be sent on its way.
DEFINE, NEXT = "define", "next"

# Headers of a rejected record.
DUE_ERROR = "due-error"
DUE_ERROR_DETAIL = "due-error-detail"
DUE_ERROR_SOURCE = "due-error-source"

# Headers of a dead letter, besides its address and its error.
DUE_ATTEMPTS = "due-attempts"
DUE_FAILED_FIRST_MS = "due-failed-first-ms"
DUE_FAILED_LAST_MS = "due-failed-last-ms"

#: The headers that speak to duetime and are not passed on as they came, in any envelope: a record
#: that was delivered once and is sent again carries old ones, and a reader takes the last of a
#: name.
ADDRESS = (
    DUE_TOPIC,
    DUE_PARTITION,
    DUE_CLUSTER,
    DUE_AT_MS,
    DUE_IN_MS,
    DUE_ID,
    DUE_EXPIRES_MS,
    DUE_REPLACES,
)

#: What intake takes for itself of a record of the native contract.
TAKEN = (*ADDRESS, *RECURRENCE)

#: The longest callback that is kept of a record that is too large, in bytes.
CALLBACK_BYTES = 4_096

#: What a dead letter ends its headers with, always in this order, after the sender's own.
LAST_WORDS = (
    DUE_TOPIC,
    DUE_PARTITION,
    DUE_CLUSTER,
    DUE_AT_MS,
    DUE_ID,
    DUE_ERROR,
    DUE_ERROR_DETAIL,
    DUE_ATTEMPTS,
    DUE_FAILED_FIRST_MS,
    DUE_FAILED_LAST_MS,
)

#: What a record that waits begins its headers with, always in this order, so that they are read by
#: position. A destination's record starts at DUE_AT_MS: one slice takes the rest off. A cancel has
#: no destination.
WAITING_HEADERS = (DUE_TOPIC, DUE_PARTITION, DUE_STATE, DUE_AT_MS, DUE_ID)

#: How many of them are not delivered.
UNDELIVERED_HEADERS = WAITING_HEADERS.index(DUE_AT_MS)

#: What a header adds to a record besides its name and value: two lengths, of 4 bytes at most each.
#: Without it, a million empty headers would count as nothing, and be too large for the sink.
HEADER_FRAME_BYTES = 8

#: The end of the text for Python and Java alike: `$` would let a line feed pass behind it.
END = r"(?![\s\S])"

#: What Kafka allows as a topic's name (besides `.` and `..`).
TOPIC_PATTERN = rf"^[a-zA-Z0-9._-]{{1,249}}{END}"

#: What the names of two topics end with that each namespace has; behind the second is a level.
LEADER, WHEEL = ".leader", ".wheel."

#: What the name of a queue's markers ends with, unless it is configured.
MARKERS = "__markers"

#: A topic of a namespace, but for its intake: others than duetime may have topics called so.
NAMESPACE_TOPIC = (
    r"^[a-zA-Z0-9_-]{1,40}\.(control|rejected|failed|isolated|sending|dead|redriven|lanes|store|recurring|series|"
    rf"warmup|wake|leader|wheel\.[0-9]+|outbox\.[a-zA-Z0-9_-]+){END}"
)

#: How a cluster may be called: it becomes part of a topic's name.
CLUSTER_PATTERN = rf"^[a-zA-Z0-9_-]{{1,40}}{END}"

#: A sender's own id: safe in a URL, in a shell and in a log. `@` marks the ids that intake makes.
UNIQUE_PATTERN = rf"^[A-Za-z0-9._:=~+-][A-Za-z0-9._:=~+@-]{{0,199}}{END}"

#: What a series is called: shorter, because its runs' ids and more are made of it.
SERIES_PATTERN = rf"^[A-Za-z0-9._:=~+@-]{{1,160}}{END}"

#: How the unique part of an id begins under which a series waits for its next run.
SERIES_MARK = "@series:"

#: How much longer than the horizon before a message is due it can be replaced, in ms. The cancel of
#: the old message may take so long to its slot: later, the message would be delivered twice.
REPLACING_MS = 3_000

#: Any full id.
ID_PATTERN = rf"^[0-9a-f]{{12}}-[A-Za-z0-9._:=~+@-]{{1,200}}{END}"

#: The latest instant an id can carry: 12 hex digits of ms, in the year 10889.
LATEST_MS = 2**48 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageId:
    """A message's id, taken apart."""

    due_ms: int
    unique: str

    def __post_init__(self) -> None:
        if not 0 <= self.due_ms <= LATEST_MS:
            raise InvalidMessage(
                Reason.BAD_DUE_TIME,
                f"{self.due_ms} is not an instant in epoch ms from 0 to {LATEST_MS}",
            )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read an id as `duetime send` printed it. Raises InvalidMessage (bad-id)."""
        if not re.match(ID_PATTERN, text):
            raise InvalidMessage(
                Reason.BAD_ID, f"{text!r} is no message id: it is 12 hex digits, a dash and a name"
            )
        return cls(due_ms=int(text[:12], 16), unique=text[13:])

    def __str__(self) -> str:
        return f"{self.due_ms:012x}-{self.unique}"


def headers_without(
    headers: Iterable[tuple[str, bytes | None]], names: Container[str]
) -> list[tuple[str, bytes | None]]:
    """The headers that are called otherwise, in order."""
    return [(name, value) for name, value in headers if name not in names]


def last_words(words: Mapping[str, object]) -> list[tuple[str, bytes]]:
    """The headers that a dead letter ends with; empty where nothing is said."""
    said = {name: word for name, word in words.items() if word is not None}
    return [(name, str(said.get(name, "")).encode()) for name in LAST_WORDS]


def check_unique(unique: str) -> str:
    """The sender's own id, if it may be one. Raises InvalidMessage (bad-id)."""
    if not re.match(UNIQUE_PATTERN, unique):
        raise InvalidMessage(
            Reason.BAD_ID,
            f"{unique!r} cannot be an id: use 1 to 200 letters, digits and . _ : = ~ + - "
            "(and @, but not first)",
        )
    return unique


def check_cluster(name: object) -> str:
    """The name, if a cluster may be called so. Raises InvalidMessage (unknown-cluster)."""
    if not (isinstance(name, str) and re.match(CLUSTER_PATTERN, name)):
        raise InvalidMessage(
            Reason.UNKNOWN_CLUSTER,
            f"{name!r} is no cluster's name: use 1 to 40 of a-z A-Z 0-9 _ -",
        )
    return name


def is_internal(
    topic: str,
    namespace: str,
    markers: Container[str] = (),
    exists: Callable[[str], bool] = lambda _: False,
) -> bool:
    """Return whether the topic is Kafka's or duetime's own, and so no destination.

    `markers` are the topics of queues' markers, and `exists` says whether the cluster has a topic.
    Another namespace is known by two topics that each has: `payments.failed` is internal only where
    `payments.leader` and `payments.wheel.0` exist. `pipeline.refusals` has the same as a column.
    """
    other = topic.partition(".")[0]
    return (
        topic.startswith(("__", f"{namespace}."))
        or topic.endswith(MARKERS)
        or topic in markers
        or (
            re.match(NAMESPACE_TOPIC, topic) is not None
            and exists(f"{other}{LEADER}")
            and exists(f"{other}{WHEEL}0")
        )
    )


@lru_cache
def check_destination(topic: str, namespace: str, markers: tuple[str, ...] = ()) -> str:
    """The topic, if messages may be sent to it. The topics of other namespaces are not known here.

    Raises InvalidMessage (bad-topic, internal-topic).
    """
    if not re.match(TOPIC_PATTERN, topic) or topic in (".", ".."):
        raise InvalidMessage(
            Reason.BAD_TOPIC, f"{topic!r} is no topic name: use 1 to 249 of a-z A-Z 0-9 . _ -"
        )
    if is_internal(topic, namespace, markers):
        raise InvalidMessage(
            Reason.INTERNAL_TOPIC,
            f"{topic} belongs to Kafka or duetime: choose another destination",
        )
    return topic

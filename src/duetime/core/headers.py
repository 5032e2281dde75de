"""The headers of records: those that senders write, and those that duetime adds.

Modules import it as `H`, as PySpark's functions are `F`: `H.DUE_TOPIC`, `H.split(headers, names)`.
"""

from collections.abc import Container, Iterable, Mapping, Sequence

#: A header as Kafka has it: its name and its value.
Header = tuple[str, bytes | None]

# Senders write these, to address a message. DUE_REPLACES has the full id of the message that this
# one takes the place of.
DUE_TOPIC = "due-topic"
DUE_PARTITION = "due-partition"
DUE_CLUSTER = "due-cluster"
DUE_AT_MS = "due-at-ms"
DUE_IN_MS = "due-in-ms"
DUE_ID = "due-id"
DUE_EXPIRES_MS = "due-expires-ms"
DUE_REPLACES = "due-replaces"

#: The headers that name the destination.
DESTINATION = (DUE_TOPIC, DUE_PARTITION, DUE_CLUSTER)

#: The headers that address duetime and are not passed on, in any envelope: a record that was
#: delivered once and is sent again carries old ones, and a reader takes the last of a name.
ADDRESS = (*DESTINATION, DUE_AT_MS, DUE_IN_MS, DUE_ID, DUE_EXPIRES_MS, DUE_REPLACES)

# Senders write these, too: a webhook for failures, and what the control topic is to do.
DUE_CALLBACK = "due-callback"
DUE_OP = "due-op"

#: The longest callback that is kept of a record that is too large, in bytes.
CALLBACK_BYTES = 4_096

# Senders write these, to define a schedule.
DUE_CRON = "due-cron"
DUE_ZONE = "due-zone"
DUE_UNTIL = "due-until"
DUE_MISFIRE = "due-misfire"
RECURRENCE = (DUE_CRON, DUE_ZONE, DUE_UNTIL, DUE_MISFIRE)

#: The longest value of each of these, in characters: the longest expression that names each minute,
#: hour and day has 356.
MAX_RECURRENCE_CHARACTERS = 500

#: The headers that intake consumes from a record of the native contract.
CONSUMED = (*ADDRESS, *RECURRENCE)

# The values of DUE_OP: for a message, for a schedule, and inside of duetime (a schedule is defined,
# and its next run is to be sent).
CANCEL = "cancel"
PAUSE, RESUME, STOP = "pause", "resume", "stop"
SCHEDULE_OPERATIONS = (PAUSE, RESUME, STOP)
DEFINE, NEXT = "define", "next"

# The topic of schedule commands has these: the schedule's name (the unique part of its runs' ids),
# the id under which it was defined (of two with one name, the later one counts), the instant from
# which its next run is computed (epoch ms: after its last run, or its start), and the destination.
DUE_SCHEDULE = "due-schedule"
SCHEDULE_SINCE = "due-schedule-since"
SCHEDULE_NEXT = "due-schedule-next"
SCHEDULE_TOPIC = "due-schedule-topic"
SCHEDULE_PARTITION = "due-schedule-partition"
SCHEDULE_CLUSTER = "due-schedule-cluster"
_SCHEDULE_DESTINATION = (SCHEDULE_TOPIC, SCHEDULE_PARTITION, SCHEDULE_CLUSTER)

#: The headers of a schedule's record, after its time and id, always in this order.
SCHEDULE = (
    DUE_OP,
    DUE_SCHEDULE,
    SCHEDULE_SINCE,
    SCHEDULE_NEXT,
    *_SCHEDULE_DESTINATION,
    *RECURRENCE,
)

# Records of delayed topics have these: when to deliver (epoch ms), the id that `produce` returned,
# and of a retry the group it is for, and `attempts:first failure in epoch ms:first offset`.
DELIVER_AFTER_MS = "deliver-after-ms"
DELIVER_ID = "deliver-id"
DELIVER_GROUP = "deliver-group"
DELIVER_RETRY = "deliver-retry"

# Rejected records have these, and dead letters the first two.
DUE_ERROR = "due-error"
DUE_ERROR_DETAIL = "due-error-detail"
DUE_ERROR_SOURCE = "due-error-source"

# Dead letters have these: the number of attempts, and the first and the last failure.
DUE_ATTEMPTS = "due-attempts"
DUE_FAILED_FIRST_MS = "due-failed-first-ms"
DUE_FAILED_LAST_MS = "due-failed-last-ms"
_ATTEMPTS = (DUE_ATTEMPTS, DUE_FAILED_FIRST_MS, DUE_FAILED_LAST_MS)

#: The headers at the end of a dead letter, after the sender's, always in this order.
DEAD_LETTER = (*DESTINATION, DUE_AT_MS, DUE_ID, DUE_ERROR, DUE_ERROR_DETAIL, *_ATTEMPTS)

#: A pending record has this: the values of STATE between colons; those at the end may be missing.
DUE_STATE = "due-state"

#: The parts of DUE_STATE. Instants are in epoch ms.
#:   taken     timestamp of the intake record: of one slot, the earlier message is sent first
#:   expires   when the message expires
#:   retry     when a failed delivery is retried
#:   attempts  number of failed deliveries
#:   failed    when the first one failed
#:   cluster   name of the destination's cluster, if it is another one
STATE = ("taken", "expires", "retry", "attempts", "failed", "cluster")

#: The headers at the beginning of a pending record, always in this order, so that they are read by
#: position. The delivered record starts at DUE_AT_MS: one slice removes the rest. A cancel has no
#: destination.
SCHEDULED = (DUE_TOPIC, DUE_PARTITION, DUE_STATE, DUE_AT_MS, DUE_ID)

#: How many of SCHEDULED are not delivered.
UNDELIVERED_COUNT = SCHEDULED.index(DUE_AT_MS)

#: The size of a header besides its name and value: two lengths of at most 4 bytes. Without it, a
#: million empty headers would count as nothing, and be too large for the sink.
FRAME_BYTES = 8


def without(headers: Iterable[Header], names: Container[str]) -> list[Header]:
    """Return the headers that have none of the names, in order."""
    return [(name, value) for name, value in headers if name not in names]


def from_texts(texts: Mapping[str, object]) -> list[tuple[str, bytes]]:
    """Build headers from their values by name; one that is None is empty."""
    return [(name, b"" if value is None else str(value).encode()) for name, value in texts.items()]


def dead_letter(texts: Mapping[str, object]) -> list[tuple[str, bytes]]:
    """Build DEAD_LETTER from their values by name; one that is None or missing is empty."""
    return from_texts({name: texts.get(name) for name in DEAD_LETTER})


def split(
    headers: Sequence[Header], names: Sequence[str], errors: str = "strict"
) -> tuple[Sequence[Header], dict[str, str]] | None:
    """Split a record's headers into the sender's, and the texts of the last ones by name.

    Returns None where they do not end with `names`, or a text is not UTF-8 and `errors` is strict.
    """
    sender, ours = headers[: -len(names)], headers[-len(names) :]
    if tuple(name for name, _ in ours) != tuple(names):
        return None
    try:
        return sender, {name: (value or b"").decode(errors=errors) for name, value in ours}
    except UnicodeDecodeError:
        return None

"""What can go wrong, as one tree.

    DuetimeError
    ├── SetupError          this machine lacks something (Java, jars, a port, room on the disk)
    ├── ConfigError         a setting, or a topic's setting, would lose messages or cannot work
    ├── KafkaError          the cluster does not answer, or refuses
    │   ├── RecordRefused   it refuses this record, however often it is sent
    │   └── ClientFailed    its client in this process has failed for good
    ├── StoreError          the store (Redis) does not answer, or refuses
    ├── Paused              the leader stood still for so long that another leads
    ├── OutcomeKnown        a write has failed, and each record's outcome is known
    ├── UnknownMessage      nothing that waits has this id, and no series this name
    ├── TooLate             the message is delivered, or about to be
    ├── Refused             the HTTP API refuses, for a reason that only HTTP has
    └── InvalidMessage      this message or time cannot be taken; `reason` says why

Every error has a fixed `reason`, the same word in the rejected record's header, on the command
line and in metrics, and a `detail`: one sentence that says what is wrong and what to do next.
"""

from enum import StrEnum

#: How much of a failure in Java is told, in characters.
WORDS = 400


class Reason(StrEnum):
    """Why a record was refused or could not be delivered: the value of its `due-error` header."""

    NOT_JSON = "not-json"
    NO_VALUE = "no-value"
    BAD_HEADERS = "bad-headers"
    NO_TOPIC = "no-topic"
    BAD_TOPIC = "bad-topic"
    INTERNAL_TOPIC = "internal-topic"
    NOT_ALLOWED = "not-allowed"
    BAD_PARTITION = "bad-partition"
    UNKNOWN_CLUSTER = "unknown-cluster"
    NO_DUE_TIME = "no-due-time"
    TWO_DUE_TIMES = "two-due-times"
    BAD_DUE_TIME = "bad-due-time"
    BEYOND_WHEEL = "beyond-wheel"
    BAD_ID = "bad-id"
    BAD_OPERATION = "bad-operation"
    TOO_LARGE = "too-large"
    TOO_LATE = "too-late"
    UNREADABLE = "unreadable"
    BAD_EXPIRY = "bad-expiry"
    BAD_CRON = "bad-cron"
    BAD_ZONE = "bad-zone"

    # Why a delayed topic does not take a record.
    NOT_DELAYED = "not-delayed"
    BEYOND_LIMIT = "beyond-limit"
    COMPACTED = "compacted"
    IN_TRANSACTION = "in-transaction"
    # Why a worker of a queue cannot have what it asks for.
    BAD_TIMEOUT = "bad-timeout"

    # Why a message could not be delivered: the same header, in duetime.failed and duetime.dead.
    UNKNOWN_TOPIC = "unknown-topic"
    NOT_AUTHORISED = "not-authorised"
    NO_SUCH_PARTITION = "no-such-partition"
    TOO_LARGE_FOR_TOPIC = "too-large-for-topic"
    NO_KEY = "no-key"
    NO_LEADER = "no-leader"
    NOT_ENOUGH_REPLICAS = "not-enough-replicas"
    NOT_ACKNOWLEDGED = "not-acknowledged"
    REFUSED_BY_BROKER = "refused-by-broker"
    EXPIRED = "expired"
    RETRIES_OVER = "retries-over"

    # Why a queue's message is not delivered again: the same header, in its dead letter.
    TIMED_OUT = "timed-out"
    GIVEN_BACK = "given-back"
    GONE = "gone"


class DuetimeError(Exception):
    """The root: `str(error)` is a sentence for a person, `error.reason` a word for a program."""

    reason = "error"

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail


class SetupError(DuetimeError):
    """This machine lacks something that duetime needs."""

    reason = "setup"


class ConfigError(DuetimeError):
    """A setting, or a topic's setting, would lose messages or cannot work."""

    reason = "config"


class KafkaError(DuetimeError):
    """The cluster does not answer, or refuses what was asked."""

    reason = "kafka"


class RecordRefused(KafkaError):
    """The cluster refuses this record, and will however often it is sent."""

    reason = "refused"


class ClientFailed(KafkaError):
    """Kafka's client in this process has failed for good: only another one sends anything."""


class StoreError(DuetimeError):
    """The store of what waits does not answer, or refuses what was asked."""

    reason = "store"


class Paused(DuetimeError):
    """The leader stood still for so long that another leads."""

    reason = "paused"


class OutcomeKnown(DuetimeError):
    """A write has failed, and of each of its records is known whether it was written."""

    reason = "refused"


class UnknownMessage(DuetimeError):
    """Nothing that waits has this id."""

    reason = "unknown-message"


class TooLate(DuetimeError):
    """The message is delivered already, or about to be."""

    reason = Reason.TOO_LATE


class Refused(DuetimeError):
    """The HTTP API refuses, for a reason that only HTTP has."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class InvalidMessage(DuetimeError, ValueError):
    """This message, id or time cannot be taken."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def words(error: BaseException) -> str:
    """A failure in its own words, in one line and without Java's trace."""
    told = " ".join(str(error).partition("\n\tat ")[0].split())
    return told[:WORDS] or type(error).__name__

"""The envelopes of senders: each is a function that makes a request of a row of Kafka's source.

Headers: duetime's own, its control records, and etf1's scheduler. A native record with `due-cron`
defines a schedule. It becomes a message to the topic `duetime.schedule-commands`, due at once,
whose headers hold the definition: H.SCHEDULE, always all and in this order, then the sender's. A
control record that pauses, resumes or stops a schedule becomes such a message, too.

JSON: Airtel's delay service and the countdown of the Redis black box. The payload is cut out
exactly as it was sent. Spark's from_json finds the small fields, but rewrites an object that it
returns as text (numbers, spaces and escapes change). So one regular expression cuts the payload out
of the raw text, and ensures that the text is one object with the field exactly once. Its groups are
possessive, and what follows a run of characters is never one of them: it backtracks over the last
run at most, and uses no stack. The runs themselves are not possessive: Java has a loop for those
that are not, and a call for each character of those that are.
"""

from collections.abc import Mapping

from pyspark.sql import Column
from pyspark.sql import functions as F

from duetime.core import headers as H
from duetime.core.errors import Reason
from duetime.core.messages import CLUSTER_PATTERN, END, ID_PATTERN, SCHEDULE_MARK, SCHEDULE_PATTERN
from duetime.pipeline.delivery.rows import ErrorCase
from duetime.pipeline.intake.canonical_request import (
    CanonicalRequest,
    named,
    record_headers,
    record_timestamp_ms,
    repeated,
    whole_number,
    without,
)
from duetime.spark.columns import HEADERS_TYPE, due_ms_of, header, unique_of

#: Headers of etf1's scheduler.
EPOCH = "scheduler-epoch"
TARGET_TOPIC = "scheduler-target-topic"
TARGET_KEY = "scheduler-target-key"

#: Options of from_json: what Spark takes beyond JSON by default.
STRICT = {"allowSingleQuotes": "false", "allowNonNumericNumbers": "false"}

#: How deep objects and arrays may nest in an envelope; a pattern has an end.
DEPTH = 32

_HEX = "[0-9a-fA-F]"
# A surrogate must come as a pair: a lone one is no character and has no bytes.
_ESCAPE = (
    rf'\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F]){_HEX}{{4}}'
    rf"|u[dD][89abAB]{_HEX}{{2}}\\u[dD][c-fC-F]{_HEX}{{2}})"
)
# from_json rejects bare control characters; a class with a range costs twice as much.
_RUN = r'[^"\\]*'
_STRING = rf'"{_RUN}(?:{_ESCAPE}{_RUN})*+"'
# A payload that is delivered as its text has bytes whatever its escapes are.
_LENIENT = rf'"{_RUN}(?:\\.{_RUN})*+"'
_SCALAR = r"(?:-?[0-9][0-9.eE+-]*|true|false|null)"
_SPACE = r"[ \t\r\n]*"
_BETWEEN = r'[^"\[\]{}]*'


def native() -> CanonicalRequest:
    """Headers `due-topic` and `due-at-ms`, `due-in-ms` or `due-cron`; and optional ones.

    Source: docs/contracts.md.
    """
    # A row has it as a column: many expressions read it, and each look-up of the header costs a
    # hundredth of intake.
    is_schedule = F.col("is_schedule")
    due_ms = F.coalesce(
        whole_number(named(H.DUE_AT_MS)), record_timestamp_ms() + whole_number(named(H.DUE_IN_MS))
    )
    is_untimed = named(H.DUE_AT_MS).isNull() & named(H.DUE_IN_MS).isNull()
    headers = without(record_headers(), H.ADDRESS)
    return CanonicalRequest(
        topic=named(H.DUE_TOPIC),
        partition=named(H.DUE_PARTITION),
        cluster=named(H.DUE_CLUSTER),
        expires_ms=whole_number(named(H.DUE_EXPIRES_MS)),
        # A schedule without a time starts at once.
        due_ms=F.coalesce(due_ms, F.when(is_schedule & is_untimed, record_timestamp_ms())),
        # The due-id of a schedule is its name: each of its definitions is a message of its own.
        unique=F.when(~is_schedule, named(H.DUE_ID)),
        key=F.col("key"),
        value=F.col("value"),
        headers=F.when(is_schedule, _definition(due_ms)).otherwise(headers),
        operation=F.when(is_schedule, H.DEFINE),
        replaces=named(H.DUE_REPLACES),
        errors=(
            ErrorCase(
                ~named(H.DUE_CLUSTER).rlike(CLUSTER_PATTERN),
                Reason.UNKNOWN_CLUSTER,
                "due-cluster is no cluster's name: use 1 to 40 of a-z A-Z 0-9 _ -",
            ),
            ErrorCase(
                is_untimed & ~is_schedule,
                Reason.NO_DUE_TIME,
                "neither due-at-ms nor due-in-ms: add one of the two headers",
            ),
            ErrorCase(
                (named(H.DUE_AT_MS).isNotNull() & named(H.DUE_IN_MS).isNotNull())
                | repeated(H.DUE_AT_MS, H.DUE_IN_MS),
                Reason.TWO_DUE_TIMES,
                "more than one due-at-ms or due-in-ms: leave one",
            ),
            bad_expiry(named(H.DUE_EXPIRES_MS)),
            ErrorCase(
                ~_can_be_replaced(named(H.DUE_REPLACES)),
                Reason.BAD_ID,
                "due-replaces is no message's id: 12 hex digits, a dash and a name",
            ),
            ErrorCase(
                is_schedule & named(H.DUE_REPLACES).isNotNull(),
                Reason.BAD_ID,
                "a schedule replaces no message: leave out due-replaces, and cancel by the id",
            ),
            *_schedule_errors(is_schedule),
        ),
    )


def _definition(start_ms: Column) -> Column:
    """array: the headers of the schedule that the record defines; null for a start at once."""
    values = {
        H.DUE_OP: F.lit(H.DEFINE),
        H.DUE_SCHEDULE: named(H.DUE_ID),
        H.SCHEDULE_NEXT: start_ms,
        H.SCHEDULE_TOPIC: named(H.DUE_TOPIC),
        H.SCHEDULE_PARTITION: named(H.DUE_PARTITION),
        H.SCHEDULE_CLUSTER: named(H.DUE_CLUSTER),
    }
    sender = F.filter(record_headers(), lambda one: ~one["key"].isin(*H.CONSUMED))
    recurrence = {name: named(name) for name in H.RECURRENCE}
    return F.concat(_schedule_headers(values | recurrence), sender)


def _schedule_headers(values: Mapping[str, Column]) -> Column:
    """array: H.SCHEDULE with these values, and null for the others."""
    none = F.lit(None).cast("string")
    return F.array(*(header(name, values.get(name, none)) for name in H.SCHEDULE))


def _can_be_replaced(identity: Column) -> Column:
    """boolean: the text is the id of a message; null for none.

    A schedule waits under an id, too, and would have no next run without it.
    """
    return identity.rlike(ID_PATTERN) & ~unique_of(identity).startswith(SCHEDULE_MARK)


def bad_expiry(text: Column) -> ErrorCase:
    """Return the error of a header `due-expires-ms` that is not an instant."""
    return ErrorCase(
        text.isNotNull() & whole_number(text).isNull(),
        Reason.BAD_EXPIRY,
        "due-expires-ms is no whole number: write it in epoch ms",
    )


def _schedule_errors(is_schedule: Column) -> list[ErrorCase]:
    """Return errors of schedules only; the schedules query validates the recurrence itself."""
    longest = F.greatest(*(F.coalesce(F.length(named(each)), F.lit(0)) for each in H.RECURRENCE))
    name = named(H.DUE_ID)
    return [
        ErrorCase(
            is_schedule & (longest > H.MAX_RECURRENCE_CHARACTERS),
            Reason.BAD_CRON,
            f"one of {', '.join(H.RECURRENCE)} is too long: write {H.MAX_RECURRENCE_CHARACTERS} "
            "characters at most",
        ),
        ErrorCase(
            is_schedule & named(H.DUE_EXPIRES_MS).isNotNull(),
            Reason.BAD_EXPIRY,
            "a schedule has no due-expires-ms: due-until ends it, and due-misfire says what "
            "becomes of runs that are late",
        ),
        ErrorCase(
            is_schedule & (~name.rlike(SCHEDULE_PATTERN) | name.startswith("@")),
            Reason.BAD_ID,
            "the due-id of a schedule has at most 160 characters: letters, digits and "
            ". _ : = ~ + - (and @, but not first)",
        ),
    ]


def has_cron() -> Column:
    """boolean: the record defines a schedule. The column `is_schedule`."""
    return named(H.DUE_CRON).isNotNull()


def control() -> CanonicalRequest:
    """Key = message id, header `due-op` = `cancel`; or key = schedule, `pause`, `resume` or `stop`.

    A cancel is due when its message is, so that it is routed to the same slot. Of a message that
    waits for a retry, `due-at-ms` is the instant of the retry. Other operations are due at once.
    """
    operation = F.coalesce(named(H.DUE_OP), F.lit(""))
    is_cancel, is_schedule = operation == H.CANCEL, operation.isin(*H.SCHEDULE_OPERATIONS)
    raw = F.col("key").cast("string")
    text = F.when(F.is_valid_utf8(raw), raw)
    is_id = text.rlike(ID_PATTERN)
    retry_ms = named(H.DUE_AT_MS)
    cancel_ms = F.when(retry_ms.isNull(), due_ms_of(text)).otherwise(whole_number(retry_ms))
    headers = _schedule_headers({H.DUE_OP: operation, H.DUE_SCHEDULE: text}).cast(HEADERS_TYPE)
    return CanonicalRequest(
        due_ms=F.when(is_schedule, record_timestamp_ms()).when(is_id, cancel_ms),
        unique=F.when(is_id & is_cancel, unique_of(text)),
        key=F.col("key"),
        headers=F.when(is_schedule, headers).otherwise(F.array().cast(HEADERS_TYPE)),
        operation=F.when(is_schedule, operation).otherwise(H.CANCEL),
        errors=(
            ErrorCase(
                ~(is_cancel | is_schedule),
                Reason.BAD_OPERATION,
                "the header due-op must be cancel, or for a schedule pause, resume or stop",
            ),
            ErrorCase(
                is_cancel & ~F.coalesce(is_id, F.lit(False)),
                Reason.BAD_ID,
                "the key must be a message id: 12 hex digits, a dash and a name",
            ),
            ErrorCase(
                is_schedule & ~F.coalesce(text.rlike(SCHEDULE_PATTERN), F.lit(False)),
                Reason.BAD_ID,
                "the key must be the name of a schedule, its due-id",
            ),
        ),
    )


def scheduler() -> CanonicalRequest:
    """`scheduler-epoch` in seconds, `scheduler-target-topic`, `scheduler-target-key`.

    The headers of etf1's kafka-message-scheduler, so that its senders need not change. Source:
    github.com/etf1/kafka-message-scheduler, README, "Schedule message".
    """
    seconds = whole_number(named(EPOCH))
    return CanonicalRequest(
        topic=named(TARGET_TOPIC),
        # Fewer than 10**15 seconds, so that the milliseconds cannot overflow.
        due_ms=F.when(seconds < 10**15, seconds * 1_000),
        key=named(TARGET_KEY).cast("binary"),
        value=F.col("value"),
        headers=without(record_headers(), (EPOCH, TARGET_TOPIC, TARGET_KEY, *H.ADDRESS)),
        errors=(
            ErrorCase(
                named(EPOCH).isNull(),
                Reason.NO_DUE_TIME,
                "the header scheduler-epoch is missing: add it, in seconds",
            ),
            ErrorCase(
                repeated(EPOCH),
                Reason.TWO_DUE_TIMES,
                "more than one header scheduler-epoch: leave one",
            ),
        ),
    )


def _nested(string: str, depth: int = DEPTH) -> str:
    inner = "" if depth == 1 else f"|{_nested(string, depth - 1)}"
    return rf"[\[{{]{_BETWEEN}(?:(?:{string}{inner}){_BETWEEN})*+[\]}}]"


_STRICT = f"(?:{_STRING}|{_SCALAR}|{_nested(_STRING)})"
_PAYLOAD = f"(?:{_STRING}|{_SCALAR}|{_nested(_LENIENT)})"

AIRTEL_FIELDS = (
    "topic string, key string, value string, headers map<string,string>, "
    "postTime string, failurePostCallbackUrl string"
)

#: Seconds as JSON writes them. An exponent of two digits: Java would write out all the digits of
#: 1e-999999999, until its memory ends.
SECONDS_PATTERN = rf"^-?[0-9]{{1,40}}(?:\.[0-9]{{1,40}})?(?:[eE][+-]?[0-9]{{1,2}})?{END}"


def airtel() -> CanonicalRequest:
    """`{"topic", "key"?, "value", "headers"?, "postTime" (epoch ms), "failurePostCallbackUrl"?}`.

    `value` is delivered as its JSON text exactly as sent; a string as its own bytes; null as null.
    """
    envelope = JsonEnvelope("airtel", AIRTEL_FIELDS, payload="value")
    url = envelope.field("failurePostCallbackUrl")
    none = F.array().cast(HEADERS_TYPE)
    callback = F.when(url.isNotNull(), F.array(header(H.DUE_CALLBACK, url))).otherwise(none)
    return CanonicalRequest(
        topic=envelope.field("topic"),
        due_ms=whole_number(envelope.field("postTime")),
        key=envelope.field("key").cast("binary"),
        value=envelope.payload(),
        headers=F.concat(without(record_headers(), H.ADDRESS), _headers_field(envelope), callback),
        parsed=envelope.parsed,
        errors=envelope.errors(due="postTime", unit="epoch ms"),
    )


def _headers_field(envelope: "JsonEnvelope") -> Column:
    """array: the envelope's field `headers`, as Kafka headers."""
    entries = envelope.field("headers")
    others = F.filter(F.map_entries(entries), lambda one: ~one["key"].isin(*H.ADDRESS))
    headers = F.transform(
        others,
        lambda one: F.struct(one["key"].alias("key"), one["value"].cast("binary").alias("value")),
    )
    # Most have none, and the lambdas are interpreted.
    return F.when(entries.isNotNull(), headers).otherwise(F.array()).cast(HEADERS_TYPE)


def countdown() -> CanonicalRequest:
    """`{"topic", "message", "countdown" (seconds, fractions allowed)}`; Kafka headers pass through.

    The seconds count from the record's append to the intake topic, and are rounded up to whole ms.
    """
    fields = "topic string, message string, countdown string"
    envelope = JsonEnvelope("countdown", fields, payload="message")
    text = envelope.field("countdown")
    number = F.when(text.rlike(SECONDS_PATTERN), text)
    wait_ms = F.ceil(number.try_cast("decimal(38,15)") * 1_000).try_cast("bigint")
    return CanonicalRequest(
        topic=envelope.field("topic"),
        due_ms=F.when(wait_ms.between(0, 10**15), record_timestamp_ms() + wait_ms),
        value=envelope.payload(),
        headers=without(record_headers(), H.ADDRESS),
        parsed=envelope.parsed,
        errors=(
            *envelope.errors(due="countdown", unit="seconds"),
            ErrorCase(
                number.try_cast("double") < 0,
                Reason.BAD_DUE_TIME,
                "the field countdown is negative: a delay is 0 or more",
            ),
        ),
    )


class JsonEnvelope:
    """A record whose value is one JSON object with some small fields and one payload."""

    def __init__(self, name: str, fields: str, payload: str) -> None:
        """`name` is the prefix of the parsed columns.

        `fields` is Spark's DDL of all fields, the payload's included, as strings or maps.
        """
        options = STRICT | {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": "_bad"}
        text = F.col("text")
        self.parsed = {
            f"{name}_fields": F.from_json(text, f"{fields}, _bad string", options),
            f"{name}_payload": F.regexp_extract(text, payload_pattern(payload), 1),
        }
        self._json, self._raw = map(F.col, self.parsed)
        self._payload = payload

    def field(self, name: str) -> Column:
        """Return a small field, in its type in `fields`."""
        return self._json[name]

    def repeats(self, name: str) -> Column:
        """boolean: a small field is there more than once (`field` returns the last)."""
        text, quoted = F.col("text"), f'"{name}"'
        # The second may be in the payload: the pattern decides, where the name is there twice.
        is_twice = F.substring_index(text, quoted, 2) != text
        once = F.regexp_extract(text, payload_pattern(name, others=_PAYLOAD), 1)
        return is_twice & (once == "")

    def payload(self) -> Column:
        """binary: a string's own bytes, any other value's JSON text as sent, null for null."""
        string = self._json[self._payload].cast("binary")
        is_string = F.substring(self._raw, 1, 1) == '"'
        return F.when(is_string, string).when(self._raw != "null", self._raw.cast("binary"))

    def errors(self, due: str, unit: str) -> tuple[ErrorCase, ...]:
        """Return the errors of an envelope that cannot be read, or has not one field `due`."""
        missing = self._json[self._payload].isNull()
        torn = F.coalesce(self._raw, F.lit("")) == ""
        return (
            ErrorCase(
                self._json.isNull() | self._json["_bad"].isNotNull(),
                Reason.NOT_JSON,
                "the value is not a JSON object in UTF-8 with fields of the right types",
            ),
            ErrorCase(torn & missing, Reason.NO_VALUE, f'the field "{self._payload}" is missing'),
            ErrorCase(
                torn,
                Reason.NOT_JSON,
                f'not one JSON object with "{self._payload}" once, {DEPTH} levels at most',
            ),
            ErrorCase(
                self.field(due).isNull(),
                Reason.NO_DUE_TIME,
                f"the field {due} is missing: add it, in {unit}",
            ),
            ErrorCase(
                self.repeats(due),
                Reason.TWO_DUE_TIMES,
                f"the field {due} is there more than once: leave one",
            ),
        )


def payload_pattern(name: str, others: str = _STRICT) -> str:
    """Return a pattern for one JSON object that has the field once; group 1 is its raw text.

    `others` is the pattern of other fields' values.
    """
    # Each letter may be written as itself or as an escape.
    letters = "".join(rf"(?:{letter}|\\u(?i:{ord(letter):04x}))" for letter in name)
    other = rf'(?!"{letters}"){_STRING}{_SPACE}:{_SPACE}{others}{_SPACE}'
    field = rf'"{name}"{_SPACE}:{_SPACE}({_PAYLOAD}){_SPACE}'
    before = rf"(?:{other},{_SPACE})*+"
    after = rf"(?:,{_SPACE}{other})*+"
    return rf"^{_SPACE}\{{{_SPACE}{before}{field}{after}\}}{_SPACE}{END}"

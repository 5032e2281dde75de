"""The JSON envelopes: Airtel's delay service and the countdown of the Redis black box.

The payload is cut out exactly as it was sent. Spark's from_json finds the small fields, but
rewrites an object that it returns as text (numbers, spaces and escapes change). So one regular
expression cuts the payload out of the raw text, and ensures that the text is one object with the
field exactly once. Its groups are possessive, and what follows a run of characters is never one of
them: it backtracks over the last run at most, and uses no stack. The runs themselves are not
possessive: Java has a loop for those that are not, and a call for each character of those that are.
"""

from pyspark.sql import Column
from pyspark.sql import functions as F

from duetime.core import headers as H
from duetime.core.errors import Reason
from duetime.core.messages import END
from duetime.pipeline.delivery.rows import ErrorCase
from duetime.pipeline.intake.canonical_request import (
    CanonicalRequest,
    record_headers,
    record_timestamp_ms,
    whole_number,
    without,
)
from duetime.spark.columns import HEADERS_TYPE, header

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

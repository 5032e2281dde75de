"""Reading JSON envelopes, with the payload cut out exactly as it was sent.

Spark's from_json finds the small fields. It re-writes an object that it gives as text (numbers,
spaces, escapes change), and a payload must not change; so the payload is cut out of the raw text by
one regular expression, which also makes sure that the text is a single object holding the field
exactly once. Its groups are possessive, and what follows a run of characters is never one of them:
so it goes back over no more than the last run, and uses no stack. The runs themselves are not
possessive, because Java has a loop for those that are not, and a call for each character of others.
"""

from pyspark.sql import Column
from pyspark.sql import functions as F

from duetime.envelopes import Refusal
from duetime.errors import Reason
from duetime.message import END

#: What Spark takes beyond JSON unless told otherwise.
STRICT = {"allowSingleQuotes": "false", "allowNonNumericNumbers": "false"}

#: How deep objects and arrays may nest in an envelope; a pattern has an end.
DEPTH = 32

_HEX = "[0-9a-fA-F]"
# A surrogate must come as a pair: a lone one is no character and has no bytes.
_ESCAPE = (
    rf'\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F]){_HEX}{{4}}'
    rf"|u[dD][89abAB]{_HEX}{{2}}\\u[dD][c-fC-F]{_HEX}{{2}})"
)
# Bare control characters are refused by from_json; a class with a range costs twice as much.
_RUN = r'[^"\\]*'
_STRING = rf'"{_RUN}(?:{_ESCAPE}{_RUN})*+"'
# Inside a payload that is delivered as its own text, it has bytes all the same.
_LENIENT = rf'"{_RUN}(?:\\.{_RUN})*+"'
_SCALAR = r"(?:-?[0-9][0-9.eE+-]*|true|false|null)"
_SPACE = r"[ \t\r\n]*"
_BETWEEN = r'[^"\[\]{}]*'


def _nested(string: str, depth: int = DEPTH) -> str:
    inner = "" if depth == 1 else f"|{_nested(string, depth - 1)}"
    return rf"[\[{{]{_BETWEEN}(?:(?:{string}{inner}){_BETWEEN})*+[\]}}]"


_STRICT = f"(?:{_STRING}|{_SCALAR}|{_nested(_STRING)})"
_PAYLOAD = f"(?:{_STRING}|{_SCALAR}|{_nested(_LENIENT)})"


def _spelt(name: str) -> str:
    """The name's letters, each as itself or as an escape."""
    return "".join(rf"(?:{letter}|\\u(?i:{ord(letter):04x}))" for letter in name)


def payload_pattern(name: str, others: str = _STRICT) -> str:
    """Matches one JSON object that has the field once; group 1 is the field's raw text.

    `others` matches what other fields may have.
    """
    other = rf'(?!"{_spelt(name)}"){_STRING}{_SPACE}:{_SPACE}{others}{_SPACE}'
    field = rf'"{name}"{_SPACE}:{_SPACE}({_PAYLOAD}){_SPACE}'
    before = rf"(?:{other},{_SPACE})*+"
    after = rf"(?:,{_SPACE}{other})*+"
    return rf"^{_SPACE}\{{{_SPACE}{before}{field}{after}\}}{_SPACE}{END}"


class JsonEnvelope:
    """A record whose value is one JSON object with some small fields and one payload."""

    def __init__(self, name: str, fields: str, payload: str) -> None:
        """`fields` is Spark's DDL for all fields, the payload's included, as strings or maps.

        `name` begins the names of the columns that are parsed.
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
        """A small field, in the type that `fields` gave it."""
        return self._json[name]

    def repeats(self, name: str) -> Column:
        """Whether a small field is there more than once: of two, `field` gives the last."""
        text, spelt = F.col("text"), f'"{name}"'
        # It may as well be in the payload; looked at closely only where it is there twice at all.
        is_twice = F.substring_index(text, spelt, 2) != text
        once = F.regexp_extract(text, payload_pattern(name, others=_PAYLOAD), 1)
        return is_twice & (once == "")

    def payload(self) -> Column:
        """binary: a string's own bytes, any other value's JSON text as sent, null for null."""
        string = self._json[self._payload].cast("binary")
        is_string = F.substring(self._raw, 1, 1) == '"'
        return F.when(is_string, string).when(self._raw != "null", self._raw.cast("binary"))

    def refusals(self) -> tuple[Refusal, ...]:
        """What makes the envelope unreadable."""
        unreadable = self._json.isNull() | self._json["_bad"].isNotNull()
        missing = self._json[self._payload].isNull()
        torn = F.coalesce(self._raw, F.lit("")) == ""
        return (
            Refusal(
                when=unreadable,
                reason=Reason.NOT_JSON,
                detail="the value is not a JSON object in UTF-8 with fields of the right types",
            ),
            Refusal(
                when=torn & missing,
                reason=Reason.NO_VALUE,
                detail=f'the field "{self._payload}" is missing',
            ),
            Refusal(
                when=torn,
                reason=Reason.NOT_JSON,
                detail=f'not one JSON object with "{self._payload}" once, {DEPTH} levels at most',
            ),
        )

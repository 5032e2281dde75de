"""Words for people: what pydantic finds wrong, without the input, and text of others, escaped."""

from collections.abc import Mapping
from typing import Any

#: By pydantic's name for it; what stands in braces is what was asked for.
WORDS: Mapping[str, str] = {
    "missing": "it is missing: add it",
    "extra_forbidden": "there is none of this name: correct it, or leave it out",
    "model_attributes_type": "it must be {object}",
    "model_type": "it must be {object}",
    "dict_type": "it must be {object}",
    "list_type": "it must be a list",
    "string_type": "it must be text",
    "int_type": "it must be a whole number",
    "int_parsing": "it must be a whole number",
    "int_parsing_size": "it must be a whole number",
    "int_from_float": "it must be a whole number",
    "float_type": "it must be a number",
    "float_parsing": "it must be a number",
    "bool_type": "it must be true or false",
    "bool_parsing": "it must be true or false",
    "greater_than": "it must be more than {gt:g}",
    "greater_than_equal": "it must be {ge} or more",
    "less_than_equal": "it must be {le} or less",
    "string_too_short": "it must have {min_length} characters or more",
    "string_pattern_mismatch": "it must fit {pattern}",
    "too_short": "it must have {min_length} or more",
    "too_long": "it must have {max_length} or less",
    "enum": "it must be {expected}",
    "literal_error": "it must be {expected}",
}


def escaped(text: str, kept: str = "") -> str:
    """Return text that a stranger chose, with escapes for what is not to be seen, but `kept`.

    A line feed in it would forge a line of a log, and an escape sequence steers a terminal.
    """
    return "".join(
        each if each.isprintable() or each in kept else each.encode("unicode_escape").decode()
        for each in text
    )


def words(found: Mapping[str, Any], named: str = "an object") -> str:
    """What is wrong, as one error of a ValidationError says it. Its `input` is not looked at.

    `named` is what a set of fields is called where this is told.
    """
    kind, context = found["type"], found.get("ctx") or {}
    # A secret is counted as a list is.
    if kind == "too_short" and context.get("field_type") != "List":
        kind = "string_too_short"
    if kind in WORDS:
        return WORDS[kind].format_map({"object": named, **context})
    return str(found["msg"]).removeprefix("Value error, ")

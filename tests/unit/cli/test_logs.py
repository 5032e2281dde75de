import json
import logging
import re
import sys

import pytest
from tests.support.snippets import OTHERS, ROOT

from duetime.cli.logs import OneLineFormatter, _formatter, logged


class ErrorOfAnEndedJvm(Exception):
    def __str__(self):
        raise ConnectionRefusedError


def raised(error):
    try:
        raise error
    except type(error):
        return sys.exc_info()


def line(error):
    info = raised(error)
    record = logging.LogRecord("duetime", logging.ERROR, __file__, 1, "turn failed", (), info)
    return OneLineFormatter("%(levelname)s %(message)s").format(record)


def test_an_exception_is_one_line():
    assert line(ValueError("first\nsecond")) == "ERROR turn failed ValueError: first"


@pytest.mark.parametrize("level", [logging.INFO, logging.DEBUG])
@pytest.mark.parametrize("form", ["text", "json"])
def test_a_value_from_outside_forges_no_line_and_no_escape(level, form):
    chosen = "a\r\n12:00:00 ERROR forged\u2028\x1b[2J\u202eb"
    record = logging.LogRecord("duetime", logging.INFO, "", 1, "given up id=%s", (chosen,), None)

    told = _formatter(level, form).format(record)

    assert len(told.splitlines()) == 1
    assert told.isprintable()
    if form == "text":
        assert told.endswith(r"given up id=a\r\n12:00:00 ERROR forged\u2028\x1b[2J\u202eb")
    else:
        assert json.loads(told)["id"] == chosen


def test_an_error_without_a_text_is_named():
    assert line(ErrorOfAnEndedJvm()) == "ERROR turn failed ErrorOfAnEndedJvm: "


def test_nothing_is_logged_after_the_block(monkeypatch, capsys):
    monkeypatch.setattr(logging.root, "handlers", [])
    log = logging.getLogger("duetime.test")
    with logged(logging.INFO, "text"):
        log.error("within")
    log.error("after")
    said = capsys.readouterr().err
    assert "within" in said
    assert "after" not in said


def as_json(phrase, *args, info=None, level=logging.INFO):
    record = logging.LogRecord("duetime.here", logging.WARNING, __file__, 1, phrase, args, info)
    return json.loads(_formatter(level, "json").format(record))


def test_a_json_line_has_the_fields_of_the_operating_page():
    (block,) = (each for each in OTHERS if each.page == "monitoring.md")
    shown, phrase = json.loads(block.text), "released overdue messages=%d slots=%d"
    module = ROOT / "src" / f"{shown['logger'].replace('.', '/')}.py"
    assert f'"{phrase}"' in module.read_text(encoding="utf-8")

    told = as_json(phrase, 3, 1)
    # Digits aside, the time is written in the same way.
    instants = {re.sub(r"\d", "0", each.pop("timestamp")) for each in (told, shown)}
    assert instants == {"0000-00-00T00:00:00.000000Z"}
    assert list(told.items()) == list((shown | {"logger": "duetime.here"}).items())


@pytest.mark.parametrize(
    ("phrase", "args", "event", "fields"),
    [
        ("the spool is empty", (), "the spool is empty", {}),
        ("%s topic=%s", ("rejected", "t"), "rejected", {"topic": "t"}),
        ("refused host=%s: %s", ("a", "no"), "refused: no", {"host": "a"}),
        ("unread place=%s/%d/%d", ("t", 0, 7), "unread", {"place": "t/0/7"}),
        (
            "listening url=%s dashboard=%s/",
            ("u", "u"),
            "listening",
            {"url": "u", "dashboard": "u/"},
        ),
        (
            "could not plan level=%d; a scan will",
            (3,),
            "could not plan; a scan will",
            {"level_": 3},
        ),
        ("took seconds=%.1f of 100%%", (1.25,), "took of 100%", {"seconds": 1.25}),
        ("100% of no arguments", (), "100% of no arguments", {}),
        ("by name %(a)s", ({"a": 1},), "by name 1", {}),
        ("two\nlines error=%s", ("a\nb",), "two lines", {"error": "a\nb"}),
    ],
)
def test_the_event_is_what_is_left_of_the_phrase(phrase, args, event, fields):
    told = as_json(phrase, *args)
    assert told["event"] == event
    own = {"event", "level", "logger", "timestamp"}
    assert {name: value for name, value in told.items() if name not in own} == fields


def test_an_exception_is_a_field_with_its_trace_in_verbose_mode():
    info = raised(ValueError("first\nsecond"))
    assert as_json("turn failed", info=info)["exception"] == "ValueError: first"
    assert "Traceback" in as_json("turn failed", info=info, level=logging.DEBUG)["exception"]

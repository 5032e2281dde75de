"""Every error is one sentence and an exit code, with a stack trace on request."""

import time

import pytest

from duetime.cli import admin


@pytest.mark.parametrize("command", ["topics", "pending", "run", "up"])
def test_an_unreachable_kafka_is_named_within_five_seconds(duetime, command):
    started_s = time.monotonic()

    outcome = duetime(command, "--kafka", "127.0.0.1:1")

    assert outcome.code == 1
    assert outcome.err.startswith(
        "error: Kafka does not answer at 127.0.0.1:1 (Connection refused)"
    )
    assert outcome.err.count("\n") == 1
    # The command's own limit is 4 s; the rest is this machine's.
    assert time.monotonic() - started_s < 10


def test_a_message_for_an_unreachable_kafka_prints_no_id(duetime):
    outcome = duetime("send", "t", "--in", "5s", "--value", "v", "--kafka", "127.0.0.1:1")

    assert (outcome.code, outcome.out) == (1, "")
    assert "Kafka does not answer at 127.0.0.1:1" in outcome.err


def test_settings_that_kafka_cannot_take_are_named(duetime, monkeypatch):
    monkeypatch.setenv("DUETIME_SECURITY_PROTOCOL", "TELNET")

    outcome = duetime("topics")

    assert outcome.code == 1
    assert "security.protocol" in outcome.err


def test_a_missing_file_of_settings_is_named(duetime):
    outcome = duetime("topics", "--config", "nowhere.toml")

    assert outcome.code == 1
    assert outcome.err == "error: --config names nowhere.toml, which is no file: correct it\n"


@pytest.mark.parametrize(
    # Root can read any file but this one, and no file has a name of this length.
    "unreadable",
    ["/proc/self/mem", "/" + "x" * 300],
)
@pytest.mark.parametrize("by_option", [True, False])
def test_settings_that_cannot_be_read_are_named(duetime, monkeypatch, unreadable, by_option):
    if not by_option:
        monkeypatch.setenv("DUETIME_CONFIG", unreadable)

    outcome = duetime("topics", *(["--config", unreadable] if by_option else []))

    assert outcome.code == 1
    assert outcome.err.startswith(f"error: {unreadable} cannot be read (")
    assert "let this user read it" in outcome.err


def test_an_unknown_setting_is_named(duetime, tmp_path):
    (tmp_path / "duetime.toml").write_text("colour = 'red'\n")

    outcome = duetime("topics")

    assert outcome.code == 1
    assert "colour" in outcome.err


def failing(*_, **__):
    raise ZeroDivisionError("first line\nsecond line")


def test_a_fault_is_one_sentence(duetime, monkeypatch):
    monkeypatch.setattr(admin, "checkup", failing)

    outcome = duetime("doctor")

    assert outcome.code == 1
    assert outcome.err == (
        "error: ZeroDivisionError: first line: this is a fault in duetime, "
        "and DUETIME_DEBUG=1 shows where\n"
    )


def test_a_fault_shows_its_trace_with_debug(duetime, monkeypatch):
    monkeypatch.setattr(admin, "checkup", failing)
    monkeypatch.setenv("DUETIME_DEBUG", "1")

    outcome = duetime("doctor")

    assert "Traceback" in outcome.err
    assert outcome.err.splitlines()[-1].startswith("error: ZeroDivisionError")


def test_ctrl_c_is_quiet(duetime, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(admin, "checkup", interrupted)

    outcome = duetime("doctor")

    assert (outcome.code, outcome.out, outcome.err) == (130, "", "")

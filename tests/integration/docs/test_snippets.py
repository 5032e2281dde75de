"""The first examples of README and docs run on a real broker."""

import re

import confluent_kafka
import pytest
from tests.support.handled import sent
from tests.support.snippets import BOOTSTRAP, Enough, commands, of, run
from tests.support.topics import taken_in

from duetime.cli import main

#: What the first commands are to do, on a broker.
ASKED = {"send", "pending"}


@pytest.mark.slow
@pytest.mark.usefixtures("on_broker", "topics")
@pytest.mark.parametrize("page", ["README.md", "index.md"])
def test_the_first_snippets_schedule_what_they_say_and_read_what_arrives(page, settings, capfd):
    by_import = {each.text.split()[1]: each for each in of("python", page=page)}
    reader, sender = by_import.pop("confluent_kafka"), by_import.pop("datetime")
    assert not by_import
    topic = f"{settings.namespace}-greetings"
    own = {BOOTSTRAP: settings.bootstrap, '"greetings"': f'"{topic}"'}
    run(sender, own)
    assert re.fullmatch(r"[0-9a-f]{12}-\S+\n", capfd.readouterr().out)

    # What a pipeline would do now.
    (record,) = taken_in(settings, 1)
    sent(settings, dict(record.headers())["due-topic"].decode(), headers=[], value=record.value())
    run(reader, own)
    assert capfd.readouterr().out == "b'hello'\n"


@pytest.mark.slow
@pytest.mark.usefixtures("on_broker", "topics")
def test_the_first_commands_do_what_they_say(capfd):
    first = [words for words in commands("README.md", "index.md") if words[0] in ASKED]
    assert {words[0] for words in first} == ASKED
    for words in first:
        assert main(words) == 0, words
        assert capfd.readouterr().out


@pytest.mark.usefixtures("on_broker", "topics")
def test_messages_are_sent_from_python_as_the_page_says(settings):
    (snippet,) = of("python", page="sending.md")
    # The wheel of the tests reaches an hour.
    own = {BOOTSTRAP: settings.bootstrap, "hours=1": "minutes=1", "days=1": "minutes=2"}
    run(snippet, own)

    records = taken_in(settings, 2)
    ids = [dict(record.headers()).get("due-id") for record in records]
    assert b"order-42" in ids


@pytest.mark.usefixtures("on_broker", "topics")
def test_a_message_that_comes_again_is_asked_for_as_the_page_says(settings):
    (snippet,) = of("python", page="schedules.md")
    run(snippet, {BOOTSTRAP: settings.bootstrap})

    (record,) = taken_in(settings, 1)
    headers = dict(record.headers())
    assert (headers["due-topic"], headers["due-id"]) == (b"reports", b"daily-report")
    assert (headers["due-cron"], headers["due-zone"]) == (b"0 9 * * 1-5", b"Europe/Berlin")
    assert headers["due-misfire"] == b"skip"


class OneMessage(confluent_kafka.Consumer):
    """Reads from the beginning, and that is enough when something is committed."""

    def __init__(self, properties):
        super().__init__(properties | {"auto.offset.reset": "earliest"})

    def commit(self, message):
        super().commit(message, asynchronous=False)
        self.close()
        raise Enough


@pytest.mark.slow
@pytest.mark.usefixtures("on_broker", "topics")
def test_the_loop_with_a_handler_that_fails_tries_again_later(settings, monkeypatch):
    (loop,) = of("python", page="retries.md")
    topic = f"{settings.namespace}-orders"
    # A record of no bytes is false to Python.
    sent(settings, topic, headers=[], value=b"")
    monkeypatch.setattr(confluent_kafka, "Consumer", OneMessage)
    own = {BOOTSTRAP: settings.bootstrap, '"orders"': f'"{topic}"', "    ...": "    work()"}
    with pytest.raises(Enough):
        # `work` is not defined, so the handler fails.
        run(loop, own)

    monkeypatch.undo()
    (again,) = taken_in(settings, 1)
    assert dict(again.headers())["due-retried"].startswith(b"1:")


@pytest.mark.slow
@pytest.mark.usefixtures("on_broker", "topics")
def test_the_snippets_with_dataframes_run(spark, settings, capfd):
    waiting, reminders = of("python", page="sql.md")
    run(waiting)
    # The wheel of the tests reaches an hour.
    run(reminders, {"30 days 9 hours": "1 minute"})
    assert capfd.readouterr().out.splitlines()[-1] == "1000"

    *_, source = of("python", page="delayed-topics.md")
    orders = run(source, {BOOTSTRAP: settings.bootstrap}, spark=spark)["orders"]
    assert orders.isStreaming
    assert "deliver_after" in orders.columns

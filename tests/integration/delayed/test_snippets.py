"""The examples of docs/delayed-topics.md: sending and reading."""

from datetime import UTC, datetime, timedelta

import pytest
from tests.support.snippets import BOOTSTRAP, Enough, changed, of, run

from duetime.client.producer import Producer


class Unavailable(Exception):
    """A dependency of the handler is unavailable."""


def test_a_sent_record_is_read_retried_and_read_again(topic, monkeypatch, tmp_path):
    send, read, _ = of("python", page="delayed-topics.md")
    (configured,) = of("toml", page="delayed-topics.md")
    own = {"orders.delayed": topic.name}
    (tmp_path / "duetime.toml").write_text(changed(configured, own), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    handled = []

    def handle(value):
        handled.append(value)
        raise Unavailable if len(handled) == 1 else Enough

    with Producer(bootstrap=topic.bootstrap) as producer:
        names = {"producer": producer, "datetime": datetime, "timedelta": timedelta, "UTC": UTC}
        run(send, own | {"seconds=30": "seconds=1"}, **names)
    group = {'"shop"': f'"shop-{topic.name}", "auto.offset.reset": "earliest"'}
    with pytest.raises(Enough):
        run(
            read,
            own | group | {BOOTSTRAP: topic.bootstrap},
            handle=handle,
            Unavailable=Unavailable,
        )

    assert handled == [b"remind me"] * 2

"""Asking about series where no pipeline runs: what is written down is known, and no more."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from confluent_kafka import Producer

from duetime import asking
from duetime.asking import all_series, ask, find_series, find_series_soon
from duetime.cli import main
from duetime.connection import librdkafka_properties
from duetime.errors import InvalidMessage, KafkaError, UnknownMessage
from duetime.message import STOP
from duetime.series import Page, Series, Watched
from duetime.topics import TopicNames

pytestmark = pytest.mark.system

DAILY, WEEKLY = (
    Series(name=name, since=f"1-{name}", topic="orders", cron=f"@{name}")
    for name in ("daily", "weekly")
)


@pytest.fixture
def write(settings, topics):  # noqa: ARG001 (the topics must be there)
    """Writes what a pipeline would; None where a series is gone."""
    producer = Producer(librdkafka_properties(settings))

    def written(name, series):
        value = series and Page(series).encoded()
        producer.produce(TopicNames(settings).series, value, name)
        assert producer.flush(30) == 0

    return written


def test_what_is_asked_where_nobody_hears_it_is_an_error_that_says_so(settings, write, monkeypatch):
    monkeypatch.setattr(asking, "HEARD_S", 0.5)
    write("daily", DAILY)
    with pytest.raises(KafkaError, match="no pipeline has heard to stop daily"):
        ask(find_series("daily", settings), STOP, settings)


def test_a_book_that_is_watched_has_what_is_written_meanwhile(settings, write):
    with Watched(settings) as watched:
        assert watched.now().all() == []
        write("weekly", WEEKLY)
        write("daily", DAILY)
        assert watched.now().all() == [DAILY, WEEKLY]
        write("weekly", None)
        assert watched.now().all() == [DAILY]
        assert watched.now().all() == [DAILY]


def test_a_series_that_is_gone_is_unknown(settings, write):
    write("daily", DAILY)
    write("daily", None)
    assert all_series(settings) == []
    with pytest.raises(UnknownMessage, match="or it is over, or it was stopped"):
        find_series("daily", settings)


def test_a_series_that_was_sent_just_now_is_waited_for(settings, write, monkeypatch):
    with ThreadPoolExecutor(1) as pool:
        finding = pool.submit(find_series_soon, "daily", settings)
        with pytest.raises(TimeoutError):
            finding.result(0.5)
        write("daily", DAILY)
        assert finding.result(30) == DAILY
    monkeypatch.setattr(asking, "KNOWN_S", 0.1)
    with pytest.raises(UnknownMessage):
        find_series_soon("weekly", settings)
    with pytest.raises(InvalidMessage):
        find_series_soon("no name", settings)


@pytest.mark.usefixtures("on_broker")
def test_a_series_whose_zone_is_not_known_here_is_listed_with_the_others(write, capsys):
    write("mars", replace(DAILY, name="mars", zone="Mars/Olympus"))
    write("weekly", WEEKLY)
    assert main(["recurring", "list"]) == 0
    listed = {
        line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.split()
    }
    assert "bad-zone" in listed["mars"]
    assert "bad-zone" not in listed["weekly"]
    assert main(["recurring", "show", "mars"]) == 0

"""Schedules as the topic has them, without a pipeline."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from confluent_kafka import Producer

from duetime.cli import main
from duetime.client import schedules
from duetime.client.schedules import (
    ScheduleTableReader,
    find_schedule,
    list_schedules,
    stop_schedule,
)
from duetime.core.errors import InvalidMessage, KafkaError, UnknownMessage
from duetime.core.schedules import Schedule, ScheduleEntry
from duetime.core.topics import TopicNames
from duetime.kafka.connection import librdkafka_properties

DAILY, WEEKLY = (
    Schedule(name=name, since=f"1-{name}", topic="orders", cron=f"@{name}")
    for name in ("daily", "weekly")
)


@pytest.fixture
def write(settings, topics):  # noqa: ARG001 (the topics must be there)
    """Write a schedule as the pipeline does; None deletes it."""
    producer = Producer(librdkafka_properties(settings))

    def written(name, schedule):
        value = schedule and ScheduleEntry(schedule).encoded()
        producer.produce(TopicNames(settings).schedules, value, name)
        assert producer.flush(30) == 0

    return written


def test_an_unconfirmed_schedule_command_is_an_error(settings, write, monkeypatch):
    monkeypatch.setattr(schedules, "CONFIRM_TIMEOUT_S", 0.5)
    write("daily", DAILY)
    with pytest.raises(KafkaError, match="request to stop schedule daily was sent, but no pipe"):
        stop_schedule("daily", settings)


def test_the_schedule_table_reader_follows_the_topic(settings, write):
    with ScheduleTableReader(settings) as watched:
        assert watched.now().all() == []
        write("weekly", WEEKLY)
        write("daily", DAILY)
        assert watched.now().all() == [DAILY, WEEKLY]
        write("weekly", None)
        assert watched.now().all() == [DAILY]
        assert watched.now().all() == [DAILY]


@pytest.mark.slow
def test_a_stopped_schedule_is_unknown(settings, write):
    write("daily", DAILY)
    write("daily", None)
    assert list_schedules(settings) == []
    with pytest.raises(UnknownMessage, match="or it is over, or it was stopped"):
        find_schedule("daily", settings)


def test_a_schedule_that_was_sent_just_now_is_awaited(settings, write):
    with ThreadPoolExecutor(1) as pool:
        finding = pool.submit(find_schedule, "daily", settings, timeout_s=5)
        with pytest.raises(TimeoutError):
            finding.result(0.5)
        write("daily", DAILY)
        assert finding.result(30) == DAILY
    with pytest.raises(UnknownMessage):
        find_schedule("weekly", settings, timeout_s=0.1)
    with pytest.raises(InvalidMessage):
        find_schedule("no name", settings)


@pytest.mark.usefixtures("on_broker")
def test_a_schedule_of_an_unknown_zone_is_listed(write, capsys):
    write("mars", replace(DAILY, name="mars", zone="Mars/Olympus"))
    write("weekly", WEEKLY)
    assert main(["schedules", "list"]) == 0
    listed = {
        line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.split()
    }
    assert "bad-zone" in listed["mars"]
    assert "bad-zone" not in listed["weekly"]
    assert main(["schedules", "show", "mars"]) == 0

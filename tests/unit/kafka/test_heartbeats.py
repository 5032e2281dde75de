"""Who leads and who stands by, given the heartbeats in the log."""

import json

import pytest

from duetime.kafka.heartbeats import SKEW_S, present_members
from duetime.kafka.leadership import HEARTBEAT_BYTES, LONE_LEASE_S, PRESENT_S, Heartbeat

AT_MS = 1_700_000_000_000


def heartbeat(member, lease_ms=None, **status):
    return Heartbeat(
        member=member, name=f"host:{member}", number=1, lease_ms=lease_ms, status=status
    )


def test_the_last_that_has_a_lease_leads_and_the_others_stand_by():
    heard = [
        (AT_MS - 500, heartbeat("1", 1_500)),
        (AT_MS - 400, heartbeat("2")),
        (AT_MS - 300, heartbeat("2", 1_500, since_ms=7)),
        (AT_MS - 200, heartbeat("3")),
        (AT_MS - 100, heartbeat("1")),
    ]
    leader, standbys = present_members(heard, AT_MS)
    assert (leader.name, leader.status) == ("host:2", {"since_ms": 7})
    assert [each.name for each in standbys] == ["host:1", "host:3"]


@pytest.mark.parametrize(
    ("after_ms", "leader", "standbys"),
    [
        (0, "host:1", ["host:2"]),
        # Others go on, and it is silent.
        (LONE_LEASE_S * 1_000 + 1, None, ["host:2"]),
    ],
)
def test_a_leader_that_is_silent_leads_no_longer(after_ms, leader, standbys):
    last_ms = AT_MS + int(after_ms)
    heard = [(AT_MS, heartbeat("1", 1_500)), (last_ms, heartbeat("2"))]
    found, others = present_members(heard, last_ms)
    assert (found and found.name, [each.name for each in others]) == (leader, standbys)


def test_a_leader_that_gave_the_lead_back_does_not_lead():
    heard = [(AT_MS, heartbeat("1", 1_500)), (AT_MS, heartbeat("1", 0))]
    assert present_members(heard, AT_MS) == (None, [])


def test_a_standby_that_is_silent_is_none():
    silent_ms = int(PRESENT_S * 1_000) + 1
    heard = [(AT_MS - silent_ms, heartbeat("2")), (AT_MS, heartbeat("1", 1_500))]
    assert present_members(heard, AT_MS)[1] == []


def test_a_log_in_which_all_are_silent_has_no_members():
    heard = [(AT_MS, heartbeat("1", 1_500)), (AT_MS, heartbeat("2"))]
    later_ms = AT_MS + int((LONE_LEASE_S + SKEW_S) * 1_000) + 1
    assert present_members(heard, later_ms) == (None, [])
    assert present_members([], later_ms) == (None, [])


@pytest.mark.parametrize("value", [None, b"", b"\xff", b"[]", b"7", b"{}", b'{"member": "1"}'])
def test_a_record_that_is_no_heartbeat_is_passed_over(value):
    assert Heartbeat.decode(value) is None


def test_a_heartbeat_is_read_as_it_was_written():
    written = heartbeat("1", 1_500, since_ms=7, queries={"lanes": "runs"})
    assert Heartbeat.decode(written.encode()) == written


def test_the_last_parts_of_a_long_status_are_left_out():
    long = heartbeat("1", 1_500, since_ms=7, queries="q" * HEARTBEAT_BYTES)
    assert json.loads(long.encode())["status"] == {"since_ms": 7}

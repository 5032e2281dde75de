"""The status of a running pipeline: its leader and its queries."""

import httpx
from tests.support.api import RunningServer, alike
from tests.support.clocks import eventually
from tests.support.live import PATIENCE_S
from tests.support.page import events

from duetime.api.events import DashboardSnapshot
from duetime.client.status import RUNS, status
from duetime.core.clock import SystemClock


def test_each_query_is_told_of(live):
    found = eventually(lambda: told(live), within_s=PATIENCE_S)
    assert {"intake", "lanes", "retries", "schedules", "redelivery"} <= found.queries.keys()
    assert found.overdue_released >= 0


def told(live):
    """The state, once all of them run."""
    found = status(live.settings, SystemClock())
    return found if found.queries and set(found.queries.values()) == {RUNS} else None


def test_events_of_a_running_pipeline_say_who_leads(live, tmp_path):
    running = RunningServer(alike(live.settings, tmp_path))
    client = httpx.Client(base_url=running.settings.api_url, timeout=PATIENCE_S)
    with client, events(client) as received:
        snapshot = next(
            each for _, each in received if each["status"]["queries"].get("intake") == RUNS
        )
    running.stop()
    assert DashboardSnapshot.model_validate(snapshot, strict=True).model_dump() == snapshot
    assert snapshot["status"]["leader"]

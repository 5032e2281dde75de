"""What is told of a pipeline that runs: its queries, and how late a message would be."""

import httpx
import pytest
from tests.api.conftest import Running, alike
from tests.api.test_events import events
from tests.conftest import eventually
from tests.system.conftest import PATIENCE_S

from duetime.api.address import url
from duetime.api.punctuality import Punctuality
from duetime.api.responses import Look
from duetime.clock import SystemClock
from duetime.standing import RUNS
from duetime.status import status

pytestmark = pytest.mark.system


def test_each_query_is_told_of(live):
    found = eventually(lambda: told(live), within_s=PATIENCE_S)
    assert {"intake", "lanes", "failures", "recurring", "redelivery"} <= found.queries.keys()
    assert found.rescued >= 0


def told(live):
    """The state, once all of them run."""
    found = status(live.settings, SystemClock())
    return found if found.queries and set(found.queries.values()) == {RUNS} else None


def test_events_of_a_running_pipeline_say_who_leads_and_how_late_a_message_would_be(live, tmp_path):
    running = Running(alike(live.settings, tmp_path))
    client = httpx.Client(base_url=url(running.settings), timeout=PATIENCE_S)
    with client, events(client) as heard:
        look = next(each for _, each in heard if (each["lateness"] or {}).get("samples"))
    running.stop()
    assert Look.model_validate(look, strict=True).model_dump() == look
    assert look["status"]["leader"]
    assert look["status"]["queries"]["intake"] == RUNS
    assert 0 <= look["lateness"]["p50_ms"] <= look["lateness"]["p99_ms"]


def test_own_messages_say_how_late_one_would_be(live):
    own = Punctuality(live.settings, SystemClock())
    assert own.look().samples == 0
    # Through the lanes, and through the store.
    seen = eventually(lambda: seen_of_both(own), within_s=PATIENCE_S)
    assert 0 <= seen.p50_ms <= seen.p99_ms <= seen.max_ms
    assert own.sent >= seen.samples
    own.close()


def seen_of_both(own):
    seen = own.look()
    return seen if own.released and seen.samples >= 2 else None

"""Slots of the wheel get more partitions while messages wait in it."""

import json
from datetime import UTC, datetime, timedelta

import pytest
from tests.support.processes import complete, running, schedule

from duetime.client import Producer as Client
from duetime.kafka.admin import grow_topics, topic_problems
from duetime.kafka.offsets import Offsets

pytestmark = pytest.mark.timeout(1_200)

#: How long after the start of the test the change is, in s.
AFTER_S = 10


def test_slots_get_more_partitions_and_each_message_comes_once(live, tmp_path):
    topic = live.topic()
    inbox = live.inbox(topic)
    since = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=AFTER_S)
    grown = live.settings.model_copy(update={"slot_partitions_since": {since: 4}})
    with running(live, tmp_path):
        inbox.until_id(*schedule(live, topic, 1, over_s=0))
        ids = {each.id for each in inbox.arrived}
        ids |= schedule(live, topic, 600, over_s=240)
        kept, cancelled = halves(schedule(live, topic, 100, over_s=100, after_s=60))
        # A process without the setting goes on.
        assert len(grow_topics(grown)) == live.settings.wheel_levels
        ids |= schedule(live, topic, 100, over_s=20)
    assert topic_problems(grown) == []
    assert f"it must have {live.settings.wheel.ring}" in topic_problems(live.settings)[0]
    changed = json.dumps({since.isoformat(): 4})
    with running(live, tmp_path, DUETIME_SLOT_PARTITIONS_SINCE=changed):
        ids |= kept | schedule(live, topic, 600, over_s=240)
        also_kept, also_cancelled = halves(schedule(live, topic, 100, over_s=100, after_s=100))
        with Client(grown) as client:
            for each in cancelled | also_cancelled:
                client.cancel(each)
        complete(live, topic, inbox, ids | also_kept)
        assert min(records_by_shard(grown)) > 50


def halves(ids):
    """The messages that stay, and those that are cancelled."""
    half = len(ids) // 2
    return set(sorted(ids)[:half]), set(sorted(ids)[half:])


def records_by_shard(settings):
    """How many records each shard of level 0 has had."""
    wheel, topic = settings.wheel, f"{settings.namespace}.wheel.0"
    offsets = Offsets(settings)
    try:
        ends = offsets.ends([(topic, each) for each in range(wheel.partitions)])
    finally:
        offsets.close()
    counts = [0] * (wheel.partitions // wheel.ring)
    for (_, partition), end in ends.items():
        counts[wheel.shard_of(partition)] += end
    return counts

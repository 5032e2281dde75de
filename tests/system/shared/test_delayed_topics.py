"""A delayed topic in a running pipeline; the rest of it is in tests/integration/delayed."""

from datetime import UTC, datetime, timedelta

from confluent_kafka.admin import NewTopic

from duetime.core.topics import visible_topics


def test_the_pipeline_makes_a_delayed_topic_visible(live, sender):
    ((delayed, shown),) = visible_topics(live.settings).items()
    stamped = {"message.timestamp.type": "LogAppendTime"}
    live.admin.create_topics([NewTopic(shown, 4, config=stamped)])[shown].result()
    after = datetime.now(UTC) + timedelta(seconds=1)
    for value, of in (("second", after), ("first", after - timedelta(milliseconds=500))):
        sender.produce(shown, value, key="k", partition=3, deliver_after=of)
    found = live.inbox_when_there(shown, 4).take(2)
    assert [(each.value, each.partition) for each in found] == [(b"first", 3), (b"second", 3)]
    assert all(each.late_ms >= 0 for each in found)
    assert found[0].id.endswith(f"@{delayed}.3.1")

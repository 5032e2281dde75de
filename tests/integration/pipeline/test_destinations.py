"""Topic metadata of another cluster that is stopped: its messages wait, and none fails for that."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from confluent_kafka.admin import AdminClient, NewTopic
from tests.support.topics import small_settings

from duetime.core.setting_types import Cluster
from duetime.local.broker import LocalBroker
from duetime.pipeline.delivery.delivery_errors import table_name
from duetime.pipeline.delivery.destinations import FIRST_SETTINGS_S, TopicMetadataCache
from duetime.spark.task_jvms import DriverJvm


class AnswersOf(AdminClient):
    """A client that keeps the leaders in each answer about topics."""

    def __init__(self, properties):
        super().__init__(properties)
        self.leaders = []

    def list_topics(self, *args, **named):
        found = super().list_topics(*args, **named)
        self.leaders.append(
            {part.leader for each in found.topics.values() for part in each.partitions.values()}
        )
        return found


@pytest.fixture
def far(tmp_path):
    with LocalBroker(tmp_path) as broker:
        yield broker


def test_cluster_that_shuts_down_has_no_stuck_partitions(spark, far):
    """A broker that is stopped first says that no partition has a leader."""
    admin = AnswersOf({"bootstrap.servers": far.bootstrap, "log_level": 2})
    for created in admin.create_topics([NewTopic("orders", 2), NewTopic("bills", 1)]).values():
        created.result()
    settings = small_settings("127.0.0.1:1", clusters={"far": Cluster(bootstrap=far.bootstrap)})
    jvm = DriverJvm(spark)
    cache = TopicMetadataCache(jvm, settings, "far")
    cache._admin = admin
    cache.refresh(FIRST_SETTINGS_S)
    cache.hold("bills")

    def entry(topic):
        name = f"{table_name(settings.at('far'))}.{topic}"
        return jvm.properties(name)[name]

    assert (entry("orders"), entry("bills")) == ("2", "1:::not-acknowledged:,0,:")
    with ThreadPoolExecutor() as pool:
        ended = pool.submit(far.stop)
        while not ended.done():
            cache.refresh()
            assert entry("orders") == "2"
    assert {-1} in admin.leaders
    assert entry("bills") == "1"

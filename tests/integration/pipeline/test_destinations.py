"""Topic metadata of another cluster that is stopped: its messages wait, and none fails for that."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from confluent_kafka.admin import AdminClient, NewTopic
from pyspark.sql import functions as F
from tests.support.topics import small_settings

from duetime.core.errors import KafkaError
from duetime.core.setting_types import Cluster
from duetime.core.threads import wait_until
from duetime.local.broker import LocalBroker
from duetime.pipeline.delivery.delivery_errors import UNKNOWN, table_name, topic_metadata
from duetime.pipeline.delivery.destinations import FIRST_SETTINGS_S, REACHED_S, TopicMetadataCache
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
        row = spark.range(1).select(topic_metadata(settings, F.lit(topic), F.lit("far"))).head()
        return ":".join(row[0]) if row[0] else None

    assert (entry("orders"), entry("bills")) == ("2", "1:::not-acknowledged:,0,:")
    assert entry("not-there") == UNKNOWN
    orders, begun_s = f"{table_name(settings.at('far'))}.orders", time.monotonic()
    cache.require_reached(begun_s)
    # It says so for a tenth of a second.
    while {-1} not in admin.leaders:
        far.start()
        with ThreadPoolExecutor() as pool:
            ended = pool.submit(far.stop)
            while not ended.done():
                cache.refresh()
                assert jvm.properties(orders)[orders] == "2"
    # Nor does a message fail for its topic, which may be created once the cluster is back.
    assert (entry("bills"), entry("not-there")) == ("1", None)
    far.start()
    # Its partitions have no leader yet for a moment after its first answer.
    assert wait_until(lambda: cache.refresh() or cache.is_reached, REACHED_S)
    assert entry("not-there") == UNKNOWN
    cache.require_reached(time.monotonic())
    with pytest.raises(KafkaError, match="messages for it wait"):
        cache.require_reached(begun_s)

"""pending: all pending messages as a DataFrame."""

from contextlib import closing

import pytest
from pydantic import SecretStr
from pyspark.sql import functions as F
from tests.support.saved import row

from duetime.core.setting_types import Cluster
from duetime.dataframes import pending
from duetime.stores.factory import open_reader, open_store
from duetime.stores.redis.scripts import Shards

MINUTE_MS = 60_000


@pytest.mark.usefixtures("topics")
def test_each_pending_message_is_one_row(spark, settings, wheel, now_ms):
    due_ms = now_ms + MINUTE_MS
    kept = wheel.message("orders", due_ms, key="k", value="größe", headers={"h": "1"})
    wheel.message("orders", due_ms, unique=kept.unique, value="double", level=1)
    wheel.cancel(wheel.message("orders", due_ms + 1))
    again = wheel.message("bills", due_ms, state=f"1::{due_ms + 7}:2", partition=3)
    wheel.foreign(due_ms, [("due-topic", b"x")])

    # As a user's own session may have it.
    spark.conf.set("spark.sql.ansi.enabled", "true")
    found = pending(spark, settings).withColumn("due_ms", F.unix_millis("due")).collect()
    spark.conf.unset("spark.sql.ansi.enabled")

    rows = {row.id: row for row in found}
    assert len(found) == len(rows) == 2
    row = rows[str(kept)]
    assert (row.topic, row.partition, row.cluster, row.due_ms) == ("orders", None, None, due_ms)
    assert [tuple(one) for one in row.headers] == [("h", b"1")]
    assert row.size == len(row.key) + len(row.value) + len("h1") + 8
    retried = rows[str(again)]
    assert (retried.topic, retried.partition, retried.due_ms) == ("bills", 3, due_ms + 7)


@pytest.mark.usefixtures("topics")
def test_an_empty_wheel_is_an_empty_dataframe(spark, settings):
    assert pending(spark, settings).count() == 0


@pytest.mark.usefixtures("topics")
def test_probes_are_not_listed(spark, settings, wheel, now_ms):
    far = Cluster(bootstrap="127.0.0.1:1", probe_topic="probes")
    probed = settings.model_copy(update={"clusters": {"far": far}})
    due_ms = now_ms + MINUTE_MS
    probe = wheel.message("probes", due_ms, state="1:::::far")
    shown = {
        str(wheel.message("probes", due_ms)),
        str(wheel.message("probes", due_ms, state="1:::::near")),
        str(wheel.message("orders", due_ms, state="1:::::far")),
    }

    listed = {row.id for row in pending(spark, probed).collect()}
    with closing(open_reader(probed)) as reader:
        read = {str(each.id) for each in reader.messages(now_ms)}
        assert reader.find(probe, now_ms) is None

    assert listed == read == shown


@pytest.mark.slow
@pytest.mark.usefixtures("topics")
def test_messages_in_redis_are_included(spark, settings, wheel, now_ms, redis_server):
    before = wheel.message("orders", now_ms + MINUTE_MS, unique="before", value="v")
    stored = settings.model_copy(update={"store": SecretStr(redis_server.url)})
    shards = Shards(stored)
    shards.clear()
    term, due_ms = shards.begin_term(), now_ms + MINUTE_MS
    kept = [row(due_ms + each, f"m{each}", value=b"%d" % each) for each in range(300)]
    shards.save([*kept, row(due_ms, "m0", offset=1, is_cancel=True)], term)
    store = open_store(stored)
    # Also what is claimed, and not sent yet.
    assert store.acquire_overdue(due_ms + 10)
    found = {each.id: each.value for each in pending(spark, stored).collect()}
    store.close()
    assert found == {each.id: b"%d" % number for number, each in enumerate(kept) if number} | {
        str(before): b"v"
    }

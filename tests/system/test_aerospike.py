"""`duetime run` with messages that wait in Aerospike, by windows and by what its connector says.

The connector belongs to Enterprise Edition: its records are written here.
"""

import base64
import json

import aerospike
import pytest
from pydantic import SecretStr
from tests.support.clocks import eventually
from tests.support.live import Live, fresh_settings, now_ms, with_topics
from tests.support.processes import complete, running, schedule
from tests.support.servers import aerospike_url

from duetime.stores.aerospike import AerospikeReader

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(params=[False, True], ids=["windows", "notices"])
def live(request, broker, tmp_path, monkeypatch):
    url = aerospike_url()
    monkeypatch.setenv("DUETIME_STORE", url)
    monkeypatch.delenv("DUETIME_AEROSPIKE")
    settings = fresh_settings(broker.bootstrap, tmp_path)
    changed = {
        "store": SecretStr(url),
        "aerospike_expiry_notifications": request.param,
        "aerospike_expiry_topic": f"{settings.namespace}.told",
    }
    if request.param:
        # What is not told of does not come while the test runs.
        changed["overdue_scan_interval_ms"] = 600_000
    found = Live(settings.model_copy(update=changed))
    with with_topics(found):
        yield found


def test_each_message_comes_once_whatever_is_told_of_it(live, tmp_path):
    topic = live.topic()
    inbox = live.inbox(topic)
    with running(live, tmp_path):
        ids = schedule(live, topic, 200, over_s=14)
        inbox.until(lambda: len(inbox.arrived) > 50, "those of the lanes")
        if live.settings.aerospike_expiry_notifications:
            last_ms = max(int(each[:12], 16) for each in ids)
            eventually(lambda: now_ms() > last_ms)
            # Of each twice, and of half of them as of an id that has expired.
            tell(live, [name for name in sorted(ids) for _ in range(2)])
        complete(live, topic, inbox, ids)
        reader = AerospikeReader(live.settings)
        inbox.until(lambda: not reader.pending(0), "everything to be settled")


def tell(live, names):
    within = {"namespace": "test", "set": f"kafka_message_id_{live.settings.namespace}"}
    for number, name in enumerate(names):
        digest = base64.b64encode(aerospike.calc_digest(*within.values(), name)).decode()
        named = {"userKey": name} if number % 4 < 2 else {}
        about = {"msg": "delete", "digest": digest} | within | named
        live.send(live.settings.aerospike_expiry_topic, json.dumps({"metadata": about}).encode())
    live.flush()

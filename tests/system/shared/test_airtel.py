"""The example of Airtel's delay service, on the default store: its contract needs no Aerospike."""

import subprocess
import sys

import pytest
from tests.support import ROOT

from duetime.local.process import free_port
from duetime.pipeline.webhooks import WebhookWorker

pytestmark = pytest.mark.slow

EXAMPLE = ROOT / "examples" / "airtel" / "service.py"


@pytest.fixture
def callbacks(live):
    """As a pipeline has them that is configured so."""
    port = free_port()
    allowed = {"webhook_hosts": [f"127.0.0.1:{port}"], "webhook_networks": ["127.0.0.0/8"]}
    told = WebhookWorker(
        type(live.settings)(**live.settings.model_dump(exclude_unset=True) | allowed)
    )
    told.start()
    yield port
    told.close()


def test_the_example_gets_its_messages_and_its_callback(live, callbacks):
    topic = live.topic()
    arguments = live.settings.bootstrap, topic, live.names.airtel, str(callbacks)
    told = subprocess.run(
        [sys.executable, EXAMPLE, *arguments], capture_output=True, text=True, check=False
    )
    lines = [line.partition(" came ")[0] for line in told.stdout.splitlines()[1:]]
    orders = [f'{{"order": {each}}}' for each in (1, 2, 3)]
    refused = topic.replace("_", ".")
    called = f"called back: {refused}, unknown-topic, after 2 attempts"
    assert sorted(lines) == sorted([*orders, called]), told.stdout + told.stderr

"""The API as a process of its own, for tests that measure it: over a Kafka that takes everything.

python -m tests.support.serve_alone PORT SPOOL CONNECTIONS
"""

import sys
from pathlib import Path

import pytest
from tests.support.made_kafka import MadeKafka

from duetime.api.server import serve
from duetime.core.settings import Settings


class WillingKafka(MadeKafka):
    """A producer whose records arrive at once."""

    def send(self, record, report):
        report(None, str(record.id))


if __name__ == "__main__":
    port, spool, connections = sys.argv[1:]
    WillingKafka().install(pytest.MonkeyPatch(), acknowledge_s=10.0, ask_again_s=0.1)
    serve(
        Settings(
            bootstrap="127.0.0.1:1",
            api_port=int(port),
            api_spool=Path(spool),
            api_max_connections=int(connections),
            # A busy machine takes its time.
            api_request_timeout_seconds=300.0,
        )
    )

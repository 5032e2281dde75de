"""The load on the HTTP API: on a server that refuses, and a short one on the real one."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count

import pytest

from duetime.bench.api import CONNECTIONS, Load, api

TURNS = count()


class EveryOther(BaseHTTPRequestHandler):
    """Takes one, and refuses the next."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(201 if next(TURNS) % 2 else 429)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    #: All of the load's connections come at once.
    request_queue_size = 2 * CONNECTIONS


@pytest.fixture
def server():
    made = Server(("127.0.0.1", 0), EveryOther)
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def test_what_is_refused_counts_as_failed_and_not_as_taken(server):
    load = Load(server.server_port, b"{}", rate=200).run(1)
    assert len(load.took_us) + load.failed == 200
    assert load.failed == 100


@pytest.mark.system
def test_a_short_load_gives_the_figures_by_their_names(settings, topics):  # noqa: ARG001
    # What it sends is due in a day.
    wide = settings.model_copy(update={"wheel_levels": 5})
    figures = json.loads(json.dumps(api(wide, seconds=1, value_bytes=20).figures()))
    assert set(figures) == {"single_per_s", "batch_messages_per_s", "p50_ms", "p99_ms", "failed"}
    assert figures["batch_messages_per_s"] > figures["single_per_s"] > 0
    assert 0 < figures["p50_ms"] <= figures["p99_ms"]

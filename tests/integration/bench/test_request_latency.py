"""The load on the HTTP API: against a refusing server, and briefly against the real one."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count

import pytest

from duetime.bench.clients import CONNECTIONS, api, http_load

TURNS = count()


class EveryOther(BaseHTTPRequestHandler):
    """Accepts one request, and refuses the next."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(201 if next(TURNS) % 2 else 429)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    #: All connections of the load open at once.
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


def test_refused_requests_count_as_failed_only(server):
    took_us, failed = http_load(server.server_port, b"{}", 1, rate=200)
    assert len(took_us) + failed == 200
    assert failed == 100


def test_a_short_load_has_every_figure(settings, topics):  # noqa: ARG001
    # The messages are due in a day.
    wide = settings.model_copy(update={"wheel_levels": 5})
    figures = json.loads(json.dumps(api(wide, seconds=1, value_bytes=20, runs=1)[0]))
    assert set(figures) == {"single_per_s", "batch_messages_per_s", "p50_ms", "p99_ms", "failed"}
    assert figures["batch_messages_per_s"] > figures["single_per_s"] > 0
    assert 0 < figures["p50_ms"] <= figures["p99_ms"]

"""The load on the HTTP API, on a server that refuses."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count

import pytest

from duetime.bench.api import CONNECTIONS, Load

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

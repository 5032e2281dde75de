"""The proxy between clients and a server, and what a cut does to both."""

import socket
import socketserver
import threading

import pytest

from duetime.local.network import Proxy
from duetime.local.process import HOST

#: How long nothing arrives during a cut, in seconds; and how long something may take.
SILENCE_S, PATIENCE_S = 0.1, 30.0


class Echo(socketserver.BaseRequestHandler):
    def handle(self):
        while data := self.request.recv(1_000):
            self.request.sendall(data.upper())


@pytest.fixture
def proxy():
    with socketserver.ThreadingTCPServer((HOST, 0), Echo) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with Proxy(server.server_address[1]) as found:
            yield found
        server.shutdown()


@pytest.fixture
def client(proxy):
    with socket.create_connection((HOST, proxy.port), PATIENCE_S) as found:
        found.sendall(b"a")
        assert found.recv(1) == b"A"
        yield found


def test_what_is_sent_during_a_cut_arrives_when_it_is_healed(proxy, client):
    proxy.cut()
    client.sendall(b"bc")
    client.settimeout(SILENCE_S)
    with pytest.raises(TimeoutError):
        client.recv(1)
    proxy.heal()
    client.settimeout(PATIENCE_S)
    assert [client.recv(1) for _ in range(2)] == [b"B", b"C"]


def test_an_end_passes_the_proxy(client):
    client.sendall(b"z")
    client.shutdown(socket.SHUT_WR)
    assert client.recv(1) == b"Z"
    assert client.recv(1) == b""


def test_a_server_that_is_not_there_closes_the_client():
    with socket.create_server((HOST, 0)) as gone:
        port = gone.getsockname()[1]
    with Proxy(port) as proxy, socket.create_connection((HOST, proxy.port), PATIENCE_S) as client:
        assert client.recv(1) == b""

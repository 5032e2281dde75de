"""How much memory the API takes, whoever sends whatever: measured in a process of its own."""

import asyncio
import json
import socket
import subprocess
import sys
from http.client import HTTPResponse
from pathlib import Path

import pytest
from tests.support.clocks import eventually

from duetime.api.server import MAX_HEAD_BYTES
from duetime.local.process import free_port

#: How many send at once, and how much each.
CONNECTIONS, BODY_BYTES = 500, 4 * 1024 * 1024

#: What `Settings` allow for bodies: four of the largest.
ROOM_BYTES = 64 * 1024 * 1024

#: The most by which the process may grow, in bytes: what may be held of bodies is held some times
#: over (as it came, in one piece, as JSON's objects, as records), and each connection has what was
#: read of it in one go, and what a body has for nothing.
MOST_GROWTH_BYTES = 5 * ROOM_BYTES + CONNECTIONS * 384 * 1024

#: What is sent at a time: everybody's bodies are there in parts, and few are complete.
CHUNK_BYTES = 64 * 1024


class Served:
    """The process."""

    def __init__(self, spool, connections=900):
        self.port = free_port()
        command = [sys.executable, "-m", "tests.support.serve_alone"]
        command += [str(self.port), str(spool), str(connections)]
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        eventually(self._answers)

    def _answers(self):
        assert self.process.poll() is None
        with socket.socket() as connection:
            return connection.connect_ex(("127.0.0.1", self.port)) == 0

    def peak_bytes(self):
        """The most memory that it ever had."""
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        (line,) = (each for each in status.splitlines() if each.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024

    def end(self):
        self.process.terminate()
        self.process.wait(30)


@pytest.fixture
def serve(tmp_path):
    """Starts the process, and ends it."""
    started = []

    def start(**options):
        started.append(Served(tmp_path / f"spool{len(started)}.db", **options))
        return started[-1]

    yield start
    for each in started:
        each.end()


def large_body():
    value = "x" * 4_000
    messages = [{"topic": "orders", "in": "1h", "value": value} for _ in range(1_000)]
    body = json.dumps(messages).encode()
    return body + b" " * (BODY_BYTES - len(body))


def head(path, length):
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()


async def answered(reader):
    """The status, and the headers in small letters."""
    text = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    return int(text.split()[1]), text


async def send(port, body, chunk_bytes=CHUNK_BYTES):
    """What is answered to a body that is sent bit by bit."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        answer = asyncio.create_task(answered(reader))
        writer.write(head("/v1/messages", len(body)))
        for start in range(0, len(body), chunk_bytes):
            if answer.done():
                break
            writer.write(memoryview(body)[start : start + chunk_bytes])
            drained = asyncio.ensure_future(writer.drain())
            await asyncio.wait({drained, answer}, return_when=asyncio.FIRST_COMPLETED)
            # The others are as far.
            await asyncio.sleep(0.001)
        return await answer
    finally:
        writer.close()


async def flood(port):
    """The answers to many large bodies at once, and to small ones that are sent meanwhile."""
    body = large_body()
    large = [asyncio.create_task(send(port, body)) for _ in range(CONNECTIONS)]
    small = []
    while not all(each.done() for each in large):
        small.append(await send(port, b'{"topic": "orders", "in": "1h"}'))
        await asyncio.sleep(0.05)
    return [each.result() for each in large], small


def test_large_bodies_take_bounded_memory_and_leave_room_for_small_ones(serve):
    served = serve()
    before = served.peak_bytes()

    large, small = asyncio.run(flood(served.port))

    statuses = [status for status, _ in large]
    assert len(statuses) == CONNECTIONS
    assert set(statuses) == {201, 503}
    assert all("retry-after: " in text for status, text in large if status == 503)
    assert {status for status, _ in small} == {201}
    assert served.peak_bytes() - before < MOST_GROWTH_BYTES
    # What was held is given back, also of those that were refused.
    for _ in range(ROOM_BYTES // BODY_BYTES + 1):
        assert asyncio.run(send(served.port, large_body()))[0] == 201


def test_endless_headers_are_cut_off(serve):
    served = serve()
    with socket.create_connection(("127.0.0.1", served.port), timeout=30) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nX-Long: " + b"x" * MAX_HEAD_BYTES)
        answer = connection.recv(65_536)

    assert answer.startswith(b"HTTP/1.1 431 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["reason"] == "too-large"
    # Of one request after the other, each is counted for itself.
    with socket.create_connection(("127.0.0.1", served.port), timeout=30) as connection:
        for _ in range(3):
            long = b"x" * (MAX_HEAD_BYTES // 2)
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Long: " + long)
            connection.sendall(b"\r\n\r\n")
            response = HTTPResponse(connection)
            response.begin()
            assert (response.status, response.read()) == (200, b'{"status":"ok"}')


def test_more_connections_than_may_be_are_told_so_and_closed(serve):
    served = serve(connections=3)

    def opened():
        return socket.create_connection(("127.0.0.1", served.port), timeout=30)

    def asked(connection):
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        return connection.recv(65_536)

    # The one that has waited for the start is closed, sooner or later.
    held = [opened() for _ in range(3)]
    eventually(lambda: asked(held[-1]).startswith(b"HTTP/1.1 200 "))
    with opened() as one_more:
        answer = one_more.recv(65_536)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: " in answer.lower()
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["reason"] == "busy"
        assert one_more.recv(1) == b""
    assert asked(held[0]).startswith(b"HTTP/1.1 200 ")

    held.pop().close()

    def is_taken():
        with opened() as another:
            return asked(another).startswith(b"HTTP/1.1 200 ")

    eventually(is_taken)
    for each in held:
        each.close()

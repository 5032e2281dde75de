"""Failure callbacks reach those who asked, nobody else, and hold nothing up."""

import json
import queue
import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from confluent_kafka import Producer, TopicPartition
from tests.conftest import eventually

from duetime import callbacks
from duetime.connection import librdkafka_properties
from duetime.message import LAST_WORDS
from duetime.topics import TopicNames

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("topics")]

PATIENCE_S = 60.0

WORDS = (
    "to",
    None,
    None,
    "1000",
    "0000000003e8-a",
    "unknown-topic",
    "so it is",
    "10",
    "1500",
    "2000",
)


class Listener:
    """An HTTP server that notes what is POSTed, and answers as it is told to."""

    def __init__(self, status=204, location=None):
        self.heard = queue.Queue()
        listener = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                listener.heard.put((self.path, json.loads(body)))
                self.send_response(status)
                if location:
                    self.send_header("Location", location)
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def url(self, path="/told", host="127.0.0.1"):
        return f"http://{host}:{self.port}{path}"

    def next(self):
        return self.heard.get(timeout=PATIENCE_S)

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def listen():
    """Starts listeners, and ends them."""
    listeners = []

    def start(**how):
        listeners.append(Listener(**how))
        return listeners[-1]

    yield start
    for each in listeners:
        each.close()


@pytest.fixture
def append(settings):
    """Writes a dead letter with this callback, or any record."""
    producer = Producer(librdkafka_properties(settings))
    names = TopicNames(settings)

    def write(url=None, *, topic=names.dead, value=b"x", key=None, headers=None):
        if headers is None:
            words = [(name, word) for name, word in zip(LAST_WORDS, WORDS, strict=True) if word]
            headers = [("h", b"\xff"), ("due-callback", url), *words]
        producer.produce(topic, value, key, headers=headers)
        assert producer.flush(30) == 0

    return write


@contextmanager
def told(settings, **changed):
    """Callbacks at work while the block lasts; this machine is allowed unless it says otherwise."""
    allowed = {"callback_hosts": ["127.0.0.1:*"], "callback_networks": ["127.0.0.0/8"]}
    given = settings.model_dump(exclude_unset=True) | allowed | changed
    teller = callbacks.Callbacks(type(settings)(**given))
    teller.start()
    try:
        yield teller
    finally:
        teller.close()


def test_a_dead_letter_is_told_with_all_there_is_to_say(settings, listen, append):
    listener = listen()
    append(listener.url("/path?q=1"), key=b"k", value="grüße".encode())
    with told(settings):
        path, body = listener.next()
    assert path == "/path?q=1"
    assert body == {
        "id": "0000000003e8-a",
        "topic": "to",
        "due_at_ms": 1_000,
        "reason": "unknown-topic",
        "detail": "so it is",
        "attempts": 10,
        "failed_first_ms": 1_500,
        "failed_last_ms": 2_000,
        "key": "k",
        "value": "grüße",
        "headers": [{"name": "h", "value_base64": "/w=="}],
    }


def test_a_rejected_envelope_is_told_to_the_url_in_it(settings, listen, append):
    listener = listen()
    envelope = {"topic": "", "value": "x", "failurePostCallbackUrl": listener.url()}
    why = [("due-error", "bad-topic"), ("due-error-source", f"{settings.airtel_topic}/0/17")]
    names = TopicNames(settings)
    for value in (b"not json", b"[]", json.dumps(envelope).encode()):
        append(topic=names.rejected, value=value, headers=why)
    with told(settings):
        _, body = listener.next()
    assert (body["reason"], body["source"]) == ("bad-topic", f"{settings.airtel_topic}/0/17")


def test_what_was_told_is_not_told_again(settings, listen, append):
    listener = listen()
    append(listener.url("/first"))
    with told(settings) as teller:
        assert listener.next()[0] == "/first"
        committed(teller, 1)
    append(listener.url("/second"))
    with told(settings):
        assert listener.next()[0] == "/second"
    assert listener.heard.empty()


def committed(teller, offset):
    """Wait until the group's offset of the dead letters is this."""
    place = TopicPartition(teller._topics[0], 0)
    done = threading.Event()
    for _ in range(int(PATIENCE_S / 0.1)):
        (found,) = teller._consumer.committed([place], timeout=PATIENCE_S)
        if found.offset == offset:
            return
        done.wait(0.1)
    raise AssertionError(found.offset)


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"callback_hosts": ["example.com"]}, id="not on the list"),
        pytest.param({"callback_hosts": ["127.0.0.1:1"]}, id="another port"),
        pytest.param({"callback_hosts": ["127.0.0.1"]}, id="neither 80 nor 443"),
        pytest.param({"callback_networks": []}, id="loopback, on the list"),
    ],
)
def test_a_host_that_is_not_allowed_is_never_connected_to(settings, listen, append, changed):
    listener = listen()
    append(listener.url())
    with told(settings, **changed) as teller:
        committed(teller, 1)
    assert listener.heard.empty()


def test_a_record_that_cannot_be_understood_is_passed_over(settings, listen, append):
    listener = listen()
    why = [("due-error", "bad-due-time"), ("due-callback", listener.url("/odd"))]
    append(topic=TopicNames(settings).rejected, headers=[*why, ("due-at-ms", "9" * 5_000)])
    with told(settings):
        path, body = listener.next()
    assert (path, body["due_at_ms"]) == ("/odd", None)


@pytest.mark.parametrize(
    "url", ["ftp://127.0.0.1/", "file:///etc/passwd", "http://[", "x" * 70_000, ""]
)
def test_a_url_that_is_none_is_passed_over(settings, listen, append, url):
    listener = listen()
    append(url)
    append(listener.url("/after"))
    with told(settings) as teller:
        assert listener.next()[0] == "/after"
        committed(teller, 2)


def test_a_redirect_is_not_followed_and_a_failure_is_tried_again(
    settings, listen, append, monkeypatch
):
    monkeypatch.setattr(callbacks, "BACKOFF_S", 0.01)
    target = listen()
    redirects, fails = listen(status=307, location=target.url()), listen(status=503)
    append(redirects.url())
    append(fails.url())
    with told(settings, callback_attempts=3) as teller:
        committed(teller, 2)
    assert (redirects.heard.qsize(), fails.heard.qsize()) == (3, 3)
    assert target.heard.empty()


def test_a_url_where_nobody_answers_holds_nothing_up(settings, listen, append, monkeypatch, caplog):
    """More of them than may be under way to one host, and more than may wait for it."""
    monkeypatch.setattr(callbacks, "WAITING_FOR_ONE", callbacks.AT_ONCE_TO_ONE + 4)
    monkeypatch.setattr(callbacks, "AT_ONCE", callbacks.AT_ONCE_TO_ONE + 8)
    listener = listen()
    # The kernel takes the connections, and nobody reads from them.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for _ in range(callbacks.AT_ONCE_TO_ONE * 2):
            append(f"http://localhost:{silent.getsockname()[1]}/secret-path")
        append(listener.url("/told"))
        with told(settings, callback_hosts=["127.0.0.1:*", "localhost:*"]):
            assert listener.next()[0] == "/told"
    assert "secret-path" not in caplog.text


def test_an_id_that_a_stranger_chose_forges_no_line_of_the_log(settings, listen, append, caplog):
    listener = listen(status=500)
    chosen = [("due-callback", listener.url().encode()), ("due-id", b"a\nforged line")]
    append(topic=TopicNames(settings).rejected, headers=chosen)
    with told(settings, callback_attempts=1):
        listener.next()
        eventually(lambda: any("given up" in each for each in caplog.messages), PATIENCE_S)

    (given_up,) = [each for each in caplog.messages if "given up" in each]
    assert given_up.endswith(r"id=a\nforged line")

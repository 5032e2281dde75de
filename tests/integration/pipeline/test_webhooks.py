"""Failure webhooks reach the URLs that were named, no others, and hold nothing up."""

import json
import queue
import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from confluent_kafka import Producer, TopicPartition
from tests.support.clocks import eventually

from duetime.core import headers as H
from duetime.core.topics import TopicNames
from duetime.kafka.connection import librdkafka_properties
from duetime.pipeline import webhooks

pytestmark = pytest.mark.usefixtures("topics")

PATIENCE_S = 150.0

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
    """An HTTP server that records requests, and answers with a given status."""

    def __init__(self, status=204, location=None):
        self.requests = queue.Queue()
        listener = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                listener.requests.put((self.path, json.loads(body)))
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
        return self.requests.get(timeout=PATIENCE_S)

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
    """Writes a dead letter with this webhook, or any record."""
    producer = Producer(librdkafka_properties(settings))
    names = TopicNames(settings)

    def write(url=None, *, topic=names.dead_letter, value=b"x", key=None, headers=None):
        if headers is None:
            words = [(name, word) for name, word in zip(H.DEAD_LETTER, WORDS, strict=True) if word]
            headers = [("h", b"\xff"), ("due-callback", url), *words]
        producer.produce(topic, value, key, headers=headers)
        assert producer.flush(30) == 0

    return write


@contextmanager
def sending(settings, **changed):
    """Run a worker for the block; by default this machine is allowed."""
    allowed = {"webhook_hosts": ["127.0.0.1:*"], "webhook_networks": ["127.0.0.0/8"]}
    given = settings.model_dump(exclude_unset=True) | allowed | changed
    running = webhooks.WebhookWorker(type(settings)(**given))
    running.start()
    try:
        yield running
    finally:
        running.close()


@pytest.mark.slow
def test_the_webhook_of_a_dead_letter_has_all_its_fields(settings, listen, append):
    listener = listen()
    append(listener.url("/path?q=1"), key=b"k", value="grüße".encode())
    with sending(settings):
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


def test_a_rejected_envelope_is_sent_to_the_url_in_it(settings, listen, append):
    listener = listen()
    envelope = {"topic": "", "value": "x", "failurePostCallbackUrl": listener.url()}
    why = [("due-error", "bad-topic"), ("due-error-source", f"{settings.airtel_topic}/0/17")]
    names = TopicNames(settings)
    for value in (b"not json", b"[]", json.dumps(envelope).encode()):
        append(topic=names.rejected, value=value, headers=why)
    with sending(settings):
        _, body = listener.next()
    assert (body["reason"], body["source"]) == ("bad-topic", f"{settings.airtel_topic}/0/17")


@pytest.mark.slow
def test_a_delivered_webhook_is_not_sent_again(settings, listen, append):
    listener = listen()
    append(listener.url("/first"))
    with sending(settings) as running:
        assert listener.next()[0] == "/first"
        committed(running, 1)
    append(listener.url("/second"))
    with sending(settings):
        assert listener.next()[0] == "/second"
    assert listener.requests.empty()


def committed(running, offset):
    """Wait until the group's offset of the dead letters is this."""
    place = TopicPartition(running._topics[0], 0)
    done = threading.Event()
    for _ in range(int(PATIENCE_S / 0.1)):
        (found,) = running._consumer.committed([place], timeout=PATIENCE_S)
        if found.offset == offset:
            return
        done.wait(0.1)
    raise AssertionError(found.offset)


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"webhook_hosts": ["example.com"]}, id="not on the list"),
        pytest.param({"webhook_hosts": ["127.0.0.1:1"]}, id="another port"),
        pytest.param({"webhook_hosts": ["127.0.0.1"]}, id="neither 80 nor 443"),
        pytest.param({"webhook_networks": []}, id="loopback, on the list"),
    ],
)
def test_a_host_that_is_not_allowed_is_never_connected_to(settings, listen, append, changed):
    listener = listen()
    append(listener.url())
    with sending(settings, **changed) as running:
        committed(running, 1)
    assert listener.requests.empty()


@pytest.mark.slow
def test_a_number_that_is_too_long_is_sent_as_null(settings, listen, append):
    listener = listen()
    why = [("due-error", "bad-due-time"), ("due-callback", listener.url("/odd"))]
    append(topic=TopicNames(settings).rejected, headers=[*why, ("due-at-ms", "9" * 5_000)])
    with sending(settings):
        path, body = listener.next()
    assert (path, body["due_at_ms"]) == ("/odd", None)


@pytest.mark.parametrize(
    "url", ["ftp://127.0.0.1/", "file:///etc/passwd", "http://[", "x" * 70_000, ""]
)
def test_an_invalid_url_is_skipped(settings, listen, append, url):
    listener = listen()
    append(url)
    append(listener.url("/after"))
    with sending(settings) as running:
        assert listener.next()[0] == "/after"
        committed(running, 2)


def test_a_redirect_is_not_followed_and_a_failure_is_retried(settings, listen, append, monkeypatch):
    monkeypatch.setattr(webhooks, "BACKOFF_S", 0.01)
    target = listen()
    redirects, fails = listen(status=307, location=target.url()), listen(status=503)
    append(redirects.url())
    append(fails.url())
    with sending(settings, webhook_attempts=3) as running:
        committed(running, 2)
    assert (redirects.requests.qsize(), fails.requests.qsize()) == (3, 3)
    assert target.requests.empty()


def test_a_silent_host_holds_no_other_up(settings, listen, append, monkeypatch, caplog):
    """More webhooks than one host may have under way, and more than it may have pending."""
    monkeypatch.setattr(webhooks, "MAX_PENDING_PER_HOST", webhooks.MAX_REQUESTS_PER_HOST + 4)
    monkeypatch.setattr(webhooks, "MAX_PENDING", webhooks.MAX_REQUESTS_PER_HOST + 8)
    listener = listen()
    # The kernel accepts the connections, and no process reads from them.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for _ in range(webhooks.MAX_REQUESTS_PER_HOST * 2):
            append(f"http://localhost:{silent.getsockname()[1]}/secret-path")
        append(listener.url("/told"))
        with sending(settings, webhook_hosts=["127.0.0.1:*", "localhost:*"]):
            assert listener.next()[0] == "/told"
    assert "secret-path" not in caplog.text


@pytest.mark.slow
def test_an_id_that_the_sender_chose_forges_no_log_line(settings, listen, append, caplog):
    listener = listen(status=500)
    chosen = [("due-callback", listener.url().encode()), ("due-id", b"a\nforged line")]
    append(topic=TopicNames(settings).rejected, headers=chosen)
    with sending(settings, webhook_attempts=1):
        listener.next()
        eventually(lambda: any("given up" in each for each in caplog.messages), within_s=PATIENCE_S)

    (given_up,) = [each for each in caplog.messages if "given up" in each]
    assert given_up.endswith(r"id=a\nforged line")

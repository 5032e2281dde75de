"""The API in a thread of this process, on a real broker, whose wheel is filled by hand."""

import threading
from contextlib import ExitStack, contextmanager
from urllib.parse import urlsplit

import httpx
import pytest
from playwright.sync_api import expect, sync_playwright
from tests.support.clocks import eventually
from tests.support.servers import program
from tests.support.topics import created_topics, small_settings
from tests.support.wheel import WheelWriter

from duetime.api.server import server
from duetime.core import headers as H
from duetime.core.messages import MessageId
from duetime.core.settings import Settings
from duetime.local.process import free_port

#: No Kafka: nothing listens there.
NOWHERE = Settings(bootstrap="127.0.0.1:1", wheel_levels=3)

#: What a test may wait for something to be seen: a look at Kafka every 2 s, on a busy machine.
PATIENCE_MS = 60_000

#: What is in the page itself, or made by it.
INLINE = {"data", "blob", "about"}


def alike(settings, directory):
    """The same with a port and a spool of its own."""
    own = {"api_port": free_port(), "api_spool": directory / "spool.db"}
    return settings.model_copy(update=own)


def guarded(settings, token, directory):
    """The same, for whoever has this token alone."""
    tokens = {"api_tokens": {"all": {"token": token}}}
    return alike(type(settings)(**settings.model_dump() | tokens), directory)


class RunningServer:
    """A server in a thread of this process."""

    def __init__(self, settings):
        self.settings = settings
        self._server = server(settings)
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        eventually(lambda: self._server.started or not self._thread.is_alive())
        assert self._thread.is_alive()

    def stop(self):
        self._server.should_exit = True
        self._thread.join()


@pytest.fixture
def serving(tmp_path):
    """Starts a server with these settings; returns a client of it."""
    opened = ExitStack()

    def serve(settings, **options):
        named = alike(settings, tmp_path)
        opened.callback(RunningServer(named).stop)
        return opened.enter_context(httpx.Client(base_url=named.api_url, timeout=30, **options))

    with opened:
        yield serve


@pytest.fixture
def api(serving, settings, topics, monkeypatch):  # noqa: ARG001 (the topics must be there)
    """A client of a server whose Kafka is up, however busy the machine is: nothing is spooled."""
    monkeypatch.setattr("duetime.api.dispatcher.ACKNOWLEDGE_TIMEOUT_S", 25.0)
    return serving(settings)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A client of a server without a Kafka."""
    with opened(NOWHERE, tmp_path_factory.mktemp("api")) as client:
        yield client


@contextmanager
def opened(settings, directory):
    """A client of a server with these settings, for several tests."""
    with client_of(alike(settings, directory)) as client:
        yield client


@contextmanager
def client_of(settings):
    """A client of a server with these settings, its port and its spool included."""
    running = RunningServer(settings)
    with httpx.Client(base_url=settings.api_url, timeout=30) as client:
        yield client
    running.stop()


@pytest.fixture(scope="module")
def browser():
    """Where there is no Chromium, tests are skipped on a laptop and fail in CI."""
    chromium = program("chromium", "chromium")
    own = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium, args=own)
        yield opened
        opened.close()


@pytest.fixture
def look(browser):
    """Opens the page of these settings; at the end nothing may have gone wrong in it.

    Nor may it have asked any other host: it works where there is no other.
    """
    contexts, wrong = [], []

    def opened(where, *, clock=False, **options):
        begin = where if isinstance(where, str) else where.api_url
        contexts.append(browser.new_context(locale="en-GB", **options))
        contexts[-1].set_default_timeout(PATIENCE_MS)
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda said: wrong.append(said.text) if is_wrong(said) else None)
        contexts[-1].on(
            "request", lambda asked: wrong.append(asked.url) if is_far(asked, begin) else None
        )
        if clock:
            page.clock.install()
        page.goto(begin)
        return page

    expect.set_options(timeout=PATIENCE_MS)
    yield opened
    for each in contexts:
        each.close()
    assert wrong == []


def is_far(asked, begin):
    """Whether a request goes to another host, or to another port, than the page came from."""
    own, other = urlsplit(begin), urlsplit(asked.url)
    return other.scheme not in INLINE and other[:2] != own[:2]


def is_wrong(said):
    """An answer that is a problem, or none at all, is no fault of the page."""
    return said.type == "error" and not said.text.startswith("Failed to load resource")


@pytest.fixture(scope="module")
def served(broker, tmp_path_factory):
    """The settings of one API that the tests share: each has topics of its own."""
    settings = alike(small_settings(broker.bootstrap), tmp_path_factory.mktemp("api"))
    with created_topics(settings):
        running = RunningServer(settings)
        yield settings
        running.stop()


@pytest.fixture
def waiting(served, now_ms):
    return WheelWriter(served, now_ms)


def failed(wheel, topic, retry_ms):
    """Write one that is tried again then, was due two minutes before, and failed three times."""
    identity = MessageId(due_ms=retry_ms - 120_000, unique=f"failed-{retry_ms}")
    state = f"1::{retry_ms}:3:{identity.due_ms + 5}"
    values = (topic, None, state, str(identity.due_ms), str(identity))
    wheel.foreign(retry_ms, list(zip(H.SCHEDULED, values, strict=True)))
    return identity


def problem_of(answer):
    assert answer.headers["content-type"] == "application/problem+json"
    told = answer.json()
    assert told["status"] == answer.status_code
    assert told["type"] == f"urn:duetime:problem:{told['reason']}"
    return answer.status_code, told["reason"]


#: How many records the client has room for.
ROOM = 3


def with_room(settings):
    """Return settings of a client whose queue has room for ROOM records."""
    few = {"queue.buffering.max.messages": ROOM}
    return settings.model_copy(update={"librdkafka_properties": few})

"""The API in a thread of this process, on a real broker, whose wheel is filled by hand."""

import threading
from contextlib import ExitStack

import httpx
import pytest
from tests.conftest import eventually

from duetime.api.address import url
from duetime.api.serve import server
from duetime.config import Settings
from duetime.local.ports import free_port

#: No Kafka: nothing listens there.
NOWHERE = Settings(bootstrap="127.0.0.1:1", wheel_levels=3)


def alike(settings, directory):
    """The same with a port and a spool of its own."""
    own = {"api_port": free_port(), "api_spool": directory / "spool.db"}
    return settings.model_copy(update=own)


class Running:
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
        opened.callback(Running(named).stop)
        return opened.enter_context(httpx.Client(base_url=url(named), timeout=30, **options))

    with opened:
        yield serve


@pytest.fixture
def api(serving, settings, topics):  # noqa: ARG001 (the topics must be there)
    return serving(settings)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A client of a server without a Kafka."""
    settings = alike(NOWHERE, tmp_path_factory.mktemp("api"))
    running = Running(settings)
    with httpx.Client(base_url=url(settings), timeout=30) as client:
        yield client
    running.stop()


def problem_of(answer):
    assert answer.headers["content-type"] == "application/problem+json"
    told = answer.json()
    assert told["status"] == answer.status_code
    assert told["type"] == f"urn:duetime:problem:{told['reason']}"
    return answer.status_code, told["reason"]

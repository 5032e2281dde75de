"""Limits that hold for every request: these tests need no Kafka, and speak HTTP by themselves."""

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import pytest
from prometheus_client import REGISTRY
from tests.support.api import NOWHERE, problem_of
from tests.support.clocks import eventually

from duetime.core.errors import KafkaError
from duetime.core.settings import Settings

#: As many requests as the framework has threads for.
THREADS = 40

#: More than the framework has threads.
MANY = 100

BEGINNING = b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def connected(client):
    return socket.create_connection((client.base_url.host, client.base_url.port), timeout=30)


def trickled(connection, most=400):
    """What is answered to who sends a byte now and then, until the server hangs up."""
    connection.settimeout(0.05)
    answer = b""
    for _ in range(most):
        # It may have hung up, and what it said is still to be read.
        with suppress(ConnectionError):
            connection.send(b" ")
        try:
            received = connection.recv(65_536)
        except TimeoutError:
            continue
        except ConnectionResetError:
            return answer
        if not received:
            return answer
        answer += received
    raise AssertionError("it waits for ever")


def test_a_body_that_trickles_in_is_given_up_in_time(serving):
    client = serving(NOWHERE.model_copy(update={"api_request_timeout_seconds": 0.3}))
    before = answered("POST", "503")
    with connected(client) as connection:
        connection.sendall(BEGINNING + b"Content-Length: 1000000\r\n\r\n{")
        head, _, body = trickled(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert b"\r\nconnection: close" in head.lower()
    assert json.loads(body)["reason"] == "timeout"
    eventually(lambda: answered("POST", "503") == before + 1)


def test_without_a_token_no_body_is_waited_for(serving):
    tokens = {"api_tokens": {"all": {"token": "0123456789abcdef"}}}
    client = serving(Settings(**NOWHERE.model_dump() | tokens))
    with connected(client) as connection:
        connection.sendall(BEGINNING + b"Content-Length: 1000000\r\n\r\n{")
        assert connection.recv(65_536).startswith(b"HTTP/1.1 401 ")


def test_threads_of_requests_that_were_given_up_are_so_many_at_most(serving, monkeypatch):
    over = threading.Event()

    def wait_for_kafka(*_):
        over.wait()
        raise KafkaError("it does not answer")

    monkeypatch.setattr("duetime.api.routes.health.read_status", wait_for_kafka)
    client = serving(NOWHERE.model_copy(update={"api_request_timeout_seconds": 0.5}))
    most = workers() + THREADS
    try:
        for _ in range(3):
            with ThreadPoolExecutor(THREADS) as pool:
                answers = list(pool.map(lambda _: client.get("/v1/status"), range(THREADS)))
            assert {problem_of(each) for each in answers} == {(503, "timeout")}
            assert {each.headers["retry-after"] for each in answers} == {"5"}
            assert workers() <= most
            assert client.get("/metrics").status_code == 200
    finally:
        over.set()
    # Where they end, there is room again.
    eventually(lambda: problem_of(client.get("/v1/status")) == (503, "kafka"))


def workers():
    return sum("AnyIO" in each.name for each in threading.enumerate())


def test_endless_requests_block_no_other_one_and_not_the_shutdown(serving):
    client = serving(NOWHERE)
    with ExitStack() as opened:
        for number in range(MANY):
            connection = opened.enter_context(connected(client))
            # In the headers, and in the body.
            end = b"Content-Length: 9\r\n\r\n{" if number % 2 else b"X-Slow: "
            connection.sendall(BEGINNING + end)
        # In a thread, in the event loop, and with a body of its own.
        assert client.get("/v1/pending", params={"from": "?"}).status_code == 422
        assert client.get("/healthz").status_code == 200
        assert client.post("/v1/messages", json={"topic": "t", "in": "1m"}).status_code == 202


@pytest.mark.parametrize(
    ("method", "path", "label", "status"),
    [
        ("GET", "/healthz", "GET", "200"),
        ("POST", "/v1/messages", "POST", "422"),
        ("DELETE", "/v1/messages/order-17", "DELETE", "422"),
        ("PUT", "/v1/messages", "other", "405"),
        ("PROPFIND", "/v1/nothing", "other", "404"),
    ],
)
def test_requests_are_counted_by_method_and_status(alone, method, path, label, status):
    before, took_s = answered(label, status), seconds(label, status)
    assert str(alone.request(method, path, json={}).status_code) == status
    # It is counted once the answer is sent.
    eventually(lambda: answered(label, status) == before + 1)
    assert 0 < seconds(label, status) - took_s < 30


def answered(method, status):
    return sample("count", method, status)


def seconds(method, status):
    return sample("sum", method, status)


def sample(part, method, status):
    labels = {"method": method, "status": status}
    return REGISTRY.get_sample_value(f"duetime_api_request_seconds_{part}", labels) or 0


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_page_of_another_site_changes_nothing(serving, site):
    client = serving(NOWHERE)
    for path in ("/v1/messages", "/v1/schedules/daily/pause"):
        answer = client.post(path, headers={"Sec-Fetch-Site": site})
        assert problem_of(answer) == (403, "foreign-origin")
    # A link to the dashboard is nothing bad.
    assert client.get("/", headers={"Sec-Fetch-Site": site}).status_code == 200
    own = client.post("/v1/messages", json=[], headers={"Sec-Fetch-Site": "same-origin"})
    assert own.status_code == 422


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1"])
def test_a_page_of_another_origin_changes_nothing_in_an_older_browser(serving, origin):
    client = serving(NOWHERE)
    message = {"topic": "t", "in": "1m"}
    answer = client.post("/v1/messages", json=message, headers={"Origin": origin})
    assert problem_of(answer) == (403, "foreign-origin")
    assert client.get("/healthz", headers={"Origin": origin}).status_code == 200
    own = {"Origin": str(client.base_url)}
    assert client.post("/v1/messages", json=message, headers=own).status_code == 202


def test_where_a_token_is_needed_a_proxy_may_change_the_host(serving):
    tokens = {"api_tokens": {"all": {"token": "0123456789abcdef"}}}
    client = serving(Settings(**NOWHERE.model_dump() | tokens))
    headers = {"Authorization": "Bearer 0123456789abcdef", "Origin": "http://duetime.example"}
    assert client.post("/v1/messages", json=[], headers=headers).status_code == 422


@pytest.mark.parametrize("host", ["rebound.example", "127.0.0.1.example:8080", "10.0.0.1"])
def test_a_name_that_leads_to_this_machine_is_not_this_machine(serving, host):
    client = serving(NOWHERE)
    assert problem_of(client.get("/healthz", headers={"Host": host})) == (403, "foreign-origin")


@pytest.mark.parametrize("host", ["LOCALHOST", "127.0.0.1:8080", "[::1]:8080"])
def test_this_machine_is_called_by_any_of_its_names(serving, host):
    assert serving(NOWHERE).get("/healthz", headers={"Host": host}).status_code == 200


def test_where_a_token_is_needed_the_host_may_have_any_name(serving):
    tokens = {"api_tokens": {"all": {"token": "0123456789abcdef"}}}
    client = serving(Settings(**NOWHERE.model_dump() | tokens))
    assert client.get("/healthz", headers={"Host": "duetime.example"}).status_code == 200

"""What the API writes into its log: ids, and never a payload or a token."""

import base64
import json
import os
import subprocess
import sys

import httpx
import pytest
from tests.support.api import NOWHERE, alike
from tests.support.clocks import eventually

GOOD = "sentinel-token-0123456789"
SECRETS = ("sentinel", base64.b64encode(b"sentinel").decode()[:-2])

MESSAGE = {
    "topic": "orders",
    "in": "1h",
    "key": "sentinel-key",
    "value": {"sentinel-name": "sentinel-value"},
    "headers": {"sentinel-header": "sentinel-header-value"},
}

#: Good ones and wrong ones: what is in each may not be in the log.
BODIES = (
    MESSAGE | {"id": "known-id"},
    MESSAGE | {"id": "known-id", "value": "sentinel-other"},
    MESSAGE | {"value": None, "value_base64": base64.b64encode(b"sentinel").decode()},
    MESSAGE | {"value_base64": "sentinel?"},
    MESSAGE | {"sentinel-field": "sentinel"},
    MESSAGE | {"headers": {"due-topic": "sentinel"}},
    MESSAGE | {"in": "sentinel"},
    MESSAGE | {"partition": "sentinel"},
    [MESSAGE, MESSAGE | {"in": None}],
    MESSAGE | {"value": "sentinel" * 300_000},
)

AUTHORISATIONS = (
    f"Bearer {GOOD}",
    "Bearer sentinel-wrong",
    "Bearer",
    "Basic sentinel",
    "sentinel",
    "Bearer sentinel sentinel",
    "Bearer \xff-sentinel".encode("latin-1"),
)


@pytest.mark.parametrize("form", ["text", "json"])
def test_neither_payloads_nor_tokens_are_in_the_log(tmp_path, form):
    settings = alike(NOWHERE, tmp_path)
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "duetime", "api", "--verbose"],
            env=os.environ | of(settings, form),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            ask(settings.api_url)
        finally:
            process.terminate()
            process.wait(20)

    written = log.read_text()
    assert "listening" in written
    assert "spooling started" in written
    for secret in SECRETS:
        assert secret.lower() not in written.lower()
    if form == "json":
        told = [json.loads(line) for line in written.splitlines()]
        assert {"timestamp", "level", "logger", "event"} <= set.intersection(*map(set, told))


def of(settings, form):
    """The environment of the process."""
    return {
        "DUETIME_BOOTSTRAP": settings.bootstrap,
        "DUETIME_API_PORT": str(settings.api_port),
        "DUETIME_API_SPOOL": str(settings.api_spool),
        "DUETIME_API_TOKENS": json.dumps({"shop": {"token": GOOD}}),
        "DUETIME_LOG_FORMAT": form,
    }


def ask(address):
    """All the requests that could be remembered."""
    with httpx.Client(base_url=address, timeout=30) as client:
        eventually(lambda: answers(client))
        for authorisation in AUTHORISATIONS:
            headers = {"Authorization": authorisation}
            for body in BODIES:
                client.post("/v1/messages", json=body, headers=headers)
            client.get("/v1/pending?from=sentinel", headers=headers | {"X-Other": "sentinel"})
        headers = {"Authorization": AUTHORISATIONS[0], "Content-Type": "application/json"}
        client.post("/v1/messages", content=b'{"value": "sentinel', headers=headers)
        client.post("/v1/messages", content=b"\xffsentinel", headers=headers)
        client.get("/v1/messages", params={"key": "sentinel", "from": "sentinel"}, headers=headers)


def answers(client):
    try:
        return client.get("/healthz").status_code == 200
    except httpx.TransportError:
        return False

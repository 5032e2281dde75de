"""What the server refuses to begin with, and TLS."""

import re
import ssl
import subprocess

import pytest
from tests.support.api import NOWHERE, alike

from duetime.api.server import check
from duetime.core.errors import ConfigError, SetupError
from duetime.core.setting_types import ApiToken
from duetime.core.settings import Settings

TOKEN = ApiToken.model_validate({"token": "0123456789abcdef"})


def test_other_machines_are_not_let_in_without_a_token(tmp_path):
    own = alike(NOWHERE, tmp_path).model_dump(include={"api_port", "api_spool"})
    for host in ("0.0.0.0", "192.168.1.7", "::", "kafka.example.com"):  # noqa: S104 (refused)
        with pytest.raises(ConfigError, match="add a token"):
            check(Settings(api_host=host))
        check(Settings(**own, api_host=host, api_tokens={"one": TOKEN}))
    for host in ("127.0.0.1", "::1", "localhost"):
        check(Settings(**own, api_host=host))


def test_a_token_is_in_no_text_of_the_settings():
    settings = Settings(api_tokens={"one": TOKEN})
    assert not re.search("0123456789abcdef", f"{settings!r} {settings.model_dump_json()}")


def test_a_certificate_without_a_key_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="go together"):
        check(Settings(api_tls_certificate=tmp_path / "c.pem"))
    with pytest.raises(ConfigError, match="no pair"):
        check(Settings(api_tls_certificate=tmp_path / "c.pem", api_tls_key=tmp_path / "k.pem"))


def test_a_port_that_is_taken_is_told_in_a_sentence(alone):
    with pytest.raises(SetupError, match="in use"):
        check(Settings(api_port=alone.base_url.port))


def test_it_speaks_tls(serving, tmp_path):
    pair = {"certificate": tmp_path / "c.pem", "key": tmp_path / "k.pem"}
    subprocess.run(
        [
            *("/usr/bin/openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-out", pair["certificate"], "-keyout", pair["key"]),
        ],
        check=True,
        capture_output=True,
    )
    settings = NOWHERE.model_copy(update={f"api_tls_{name}": path for name, path in pair.items()})
    check(alike(settings, tmp_path))
    client = serving(settings, verify=ssl.create_default_context(cafile=pair["certificate"]))
    assert client.base_url.scheme == "https"
    assert client.get("/healthz").status_code == 200

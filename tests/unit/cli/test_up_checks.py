"""Checks of `up` before it starts anything, and its API process."""

import fcntl
import socket
from contextlib import contextmanager

from tests.support.clocks import eventually

from duetime.cli.run import api_process
from duetime.core.settings import Settings
from duetime.local.process import free_port


@contextmanager
def taken():
    """A port in use."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", free_port()))
        other.listen()
        yield other.getsockname()[1]


def test_an_unknown_store_is_named_before_the_lock(duetime, tmp_path):
    with (tmp_path / "up.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused = duetime("up", "--data", tmp_path, "--store", "foo")
    assert refused.code == 1
    assert "store" in refused.err
    assert "another duetime up" not in refused.err


def test_an_unreachable_store_is_named_before_kafka_starts(duetime, tmp_path, caplog):
    with taken() as port:
        away = f"redis://127.0.0.1:{free_port()}/0"
        refused = duetime("up", "--data", tmp_path, "--store", away, "--api-port", port)
    assert refused.code == 1
    assert "Redis at" in refused.err
    assert not (tmp_path / "broker").exists()
    assert f"port {port} is in use by another program" in caplog.text
    assert "choose another with --api-port" in caplog.text


def test_the_reason_for_no_api_is_in_place_of_its_url(tmp_path):
    with taken() as port:
        settings = Settings(bootstrap="127.0.0.1:1", api_port=port)
        with api_process(settings, tmp_path, None) as said:
            eventually(lambda: said().startswith(f"none: port {port} is in use"), said, 60)


def test_the_spool_is_in_the_data_directory_unless_configured(tmp_path):
    settings = Settings(bootstrap="127.0.0.1:1", api_port=free_port())
    with api_process(settings, tmp_path, None):
        eventually((tmp_path / "spool.db").exists)
    own = settings.model_copy(update={"api_spool": tmp_path / "own.db"})
    with api_process(own, tmp_path, None):
        eventually((tmp_path / "own.db").exists)

"""What `up` finds before it starts anything, and what it shows to be run."""

import fcntl
import socket
from contextlib import contextmanager

from tests.conftest import eventually

from duetime.cli.beside import api_beside
from duetime.config import Settings
from duetime.local.ports import free_port


@contextmanager
def taken():
    """A port that somebody listens on."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", free_port()))
        other.listen()
        yield other.getsockname()[1]


def test_a_store_that_is_none_is_named_also_where_another_works_there(duetime, tmp_path):
    with (tmp_path / "up.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused = duetime("up", "--data", tmp_path, "--store", "foo")
    assert refused.code == 1
    assert "store" in refused.err
    assert "another duetime up" not in refused.err


def test_a_store_that_does_not_answer_is_told_before_kafka_is_started(duetime, tmp_path, caplog):
    with taken() as port:
        away = f"redis://127.0.0.1:{free_port()}/0"
        refused = duetime("up", "--data", tmp_path, "--store", away, "--api-port", port)
    assert refused.code == 1
    assert "Redis at" in refused.err
    assert not (tmp_path / "broker").exists()
    assert f"port {port} is in use by another program" in caplog.text
    assert "choose another with --api-port" in caplog.text


def test_why_there_is_no_api_is_said_where_its_address_would_be(tmp_path):
    with taken() as port:
        settings = Settings(bootstrap="127.0.0.1:1", api_port=port)
        with api_beside(settings, tmp_path, None) as said:
            eventually(lambda: said().startswith(f"none: port {port} is in use"), said, 60)


def test_what_the_api_accepts_is_kept_in_the_data_directory_unless_its_file_is_named(tmp_path):
    settings = Settings(bootstrap="127.0.0.1:1", api_port=free_port())
    with api_beside(settings, tmp_path, None):
        eventually((tmp_path / "spool.db").exists)
    own = settings.model_copy(update={"api_spool": tmp_path / "own.db"})
    with api_beside(own, tmp_path, None):
        eventually((tmp_path / "own.db").exists)

import pytest
from tests.support.command import by_name

from duetime.cli import admin
from duetime.cli.admin import checkup, verdict
from duetime.core.clock import Offset
from duetime.core.errors import DuetimeError
from duetime.core.settings import Settings


@pytest.fixture
def nowhere(monkeypatch):
    monkeypatch.setattr(admin, "TIMEOUT_S", 0.2)
    return Settings(bootstrap="127.0.0.1:1")


def test_without_a_broker_topics_are_not_checked(nowhere):
    checks = by_name(checkup(nowhere))
    assert list(checks) == ["Java", "jars", "broker"]
    assert not checks["broker"].ok
    assert "does not answer at 127.0.0.1:1" in checks["broker"].detail


def test_missing_java_and_jars_are_named_with_what_to_do(nowhere, monkeypatch, tmp_path):
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setenv("DUETIME_JARS", str(tmp_path))
    checks = by_name(checkup(nowhere))
    assert not checks["Java"].ok
    assert "install Java 17" in checks["Java"].detail
    assert not checks["jars"].ok
    assert "make setup" in checks["jars"].detail


@pytest.mark.parametrize(
    ("ahead_ms", "error_ms"), [(0, 1), (500, 1), (-500, 1), (900, 450), (-900, 450)]
)
def test_half_a_second_apart_is_near_enough(ahead_ms, error_ms):
    assert f"{abs(ahead_ms)} ms" in verdict(Offset(ahead_ms=ahead_ms, error_ms=error_ms))


@pytest.mark.parametrize(("ahead_ms", "error_ms"), [(502, 1), (-502, 1), (0, 501)])
def test_a_larger_or_uncertain_difference_is_wrong(ahead_ms, error_ms):
    with pytest.raises(DuetimeError):
        verdict(Offset(ahead_ms=ahead_ms, error_ms=error_ms))


@pytest.mark.parametrize(
    ("setting", "said"), [("0", "8 times"), ("3", "3 times"), ("1", "one try")]
)
def test_the_network_check_names_the_number_of_tries(setting, said, monkeypatch, tmp_path):
    path = tmp_path / "tcp_orphan_retries"
    path.write_text(f"{setting}\n")
    monkeypatch.setattr(admin, "ORPHAN_RETRIES", path)
    assert said in admin._network()

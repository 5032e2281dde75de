import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from tests.support import ROOT

from duetime.core.errors import ConfigError
from duetime.core.setting_types import OTHERS
from duetime.core.settings import Settings, load_settings

EXAMPLES = sorted((ROOT / "examples").glob("*/duetime.toml"))


@pytest.fixture(autouse=True)
def nothing_from_outside(monkeypatch, tmp_path):
    """Neither this machine's environment nor a file in the working directory has a say."""
    monkeypatch.chdir(tmp_path)
    for name in ["config", *Settings.model_fields]:
        monkeypatch.delenv(f"DUETIME_{name.upper()}", raising=False)


def refusal(**overrides):
    with pytest.raises(ConfigError) as error:
        load_settings(**overrides)
    return error.value.detail


def test_the_defaults_fit_together():
    settings = load_settings()
    assert settings.wheel.span_ms() > 30 * 365 * 86_400_000
    assert settings.delay_lanes.lanes == 21


def test_every_setting_has_a_default_and_says_what_it_does():
    for name, field in Settings.model_fields.items():
        assert not field.is_required(), name
        assert field.description, name


def test_the_command_line_goes_over_the_environment_and_that_over_the_file(monkeypatch, tmp_path):
    tmp_path.joinpath("duetime.toml").write_text(
        'namespace = "file"\nbootstrap = "file:1"\ndriver_memory = "3g"\n'
    )
    monkeypatch.setenv("DUETIME_NAMESPACE", "environment")
    monkeypatch.setenv("DUETIME_BOOTSTRAP", "environment:1")
    settings = load_settings(bootstrap="line:1", release_lead_ms=None)
    chosen = (
        settings.bootstrap,
        settings.namespace,
        settings.driver_memory,
        settings.release_lead_ms,
    )
    assert chosen == ("line:1", "environment", "3g", 2_000)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.parent.name)
def test_the_files_of_the_examples_can_be_read(path, monkeypatch):
    by_default = load_settings()
    monkeypatch.setenv("DUETIME_CONFIG", str(path))
    assert load_settings() != by_default


def test_a_file_that_is_named_must_exist(monkeypatch):
    monkeypatch.setenv("DUETIME_CONFIG", "missing.toml")
    assert "missing.toml" in refusal()


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    tmp_path.joinpath("duetime.toml").write_text("namespace = ")
    assert "duetime.toml" in refusal()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("namespace", "a.b"),
        ("namespace", ""),
        ("intake_partitions", 0),
        ("max_message_bytes", 0),
        ("release_lead_ms", "soon"),
        ("checkpoint_interval_seconds", 1),
        ("no_such_setting", 1),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_its_name(name, value):
    assert name in refusal(**{name: value})


@pytest.mark.parametrize(
    ("variable", "detail"),
    [
        ("DUETIME_BOOTSTRP", "there is no setting bootstrp: did you mean bootstrap?"),
        ("duetime_metric_port", "there is no setting metric_port: did you mean metrics_port?"),
        ("DUETIME_ZZZ", "there is no setting zzz: docs/configuration.md has them all"),
    ],
)
def test_unknown_variable_of_the_environment_is_refused(monkeypatch, variable, detail):
    monkeypatch.setenv(variable, "9100")
    assert refusal() == f"{variable} in the environment: {detail}"


def test_variables_of_others_with_our_prefix_are_ignored(monkeypatch):
    ours = {"DUETIME_JARS": "jars", "DUETIME_DEBUG": "1", "DUETIME_SPARK_LOG": "info"}
    # As Kubernetes does of the services duetime and duetime-driver.
    of_services = {
        "DUETIME_SERVICE_HOST": "10.0.0.1",
        "DUETIME_SERVICE_PORT_HTTP": "80",
        "DUETIME_PORT": "tcp://10.0.0.1:80",
        "DUETIME_DRIVER_PORT_7078_TCP_ADDR": "10.0.0.2",
    }
    for name, value in (ours | of_services).items():
        monkeypatch.setenv(name, value)
    assert load_settings() == Settings()


def test_every_variable_of_the_sources_is_a_setting_or_known_to_be_none():
    sources = ROOT / "src"
    named = {
        each
        for path in [*sources.rglob("*.py"), *sources.rglob("*.properties")]
        for each in re.findall(r"\bDUETIME_([A-Z_]*[A-Z])\b", path.read_text(encoding="utf-8"))
    }
    assert {each.lower() for each in named} <= {*Settings.model_fields, *OTHERS}


@pytest.mark.parametrize(
    ("text", "detail"),
    [
        ('bootstrp = "x"', "there is no setting bootstrp: did you mean bootstrap?"),
        ("clusters = 5", "setting clusters: it must be a table"),
        ('release_lead_ms = "soon"', "setting release_lead_ms: it must be a whole number"),
        ("release_lead_ms = -1", "setting release_lead_ms: it must be 0 or more"),
        (
            '[api_tokens.a]\ntoken = "short"',
            "setting api_tokens.a.token: it must have 16 characters or more",
        ),
        (
            "short_delay_threshold_ms = -4",
            (
                "short_delay_threshold_ms (-4) must be at least release_lead_ms + "
                "wheel_tick_ms (3000), or windows would be planned before they are full"
            ),
        ),
    ],
)
def test_errors_in_the_file_are_described_in_a_users_words(tmp_path, text, detail):
    tmp_path.joinpath("duetime.toml").write_text(text)
    assert refusal() == detail


def test_a_table_in_the_environment_that_is_no_json_is_told_as_such(monkeypatch):
    monkeypatch.setenv("DUETIME_CLUSTERS", "secret")
    assert refusal() == "setting clusters: in the environment it must be JSON"


@pytest.mark.parametrize(
    ("overrides", "word"),
    [
        ({"short_delay_threshold_ms": 1_500}, "short_delay_threshold_ms"),
        ({"release_lead_ms": 3_500}, "short_delay_threshold_ms"),
        ({"wheel_tick_ms": 5_000}, "short_delay_threshold_ms"),
        ({"short_delay_threshold_ms": 5_000}, "short_delay_threshold_ms"),
        ({"wheel_slots": 8}, "wheel_slots"),
        ({"wheel_slots": 16, "release_lead_ms": 2_500}, "wheel_slots"),
        ({"wheel_levels": 0}, "levels"),
        ({"wheel_levels": 12}, "wheel_levels"),
        ({"wheel_tick_ms": 0}, "tick_ms"),
        ({"release_lead_ms": -1}, "release_lead_ms"),
    ],
    ids=str,
)
def test_times_that_do_not_fit_together_are_refused_before_anything_starts(overrides, word):
    assert word in refusal(**overrides)


@given(st.integers(-5_000, 10_000), st.integers(-5_000, 10_000), st.integers(-10, 6_000))
def test_whatever_is_accepted_plans_a_window_after_it_is_full(
    release_lead_ms, short_delay_threshold_ms, tick_ms
):
    try:
        settings = load_settings(
            release_lead_ms=release_lead_ms,
            short_delay_threshold_ms=short_delay_threshold_ms,
            wheel_tick_ms=tick_ms,
        )
    except ConfigError:
        return
    assert (
        0 <= settings.release_lead_ms <= settings.short_delay_threshold_ms - settings.wheel_tick_ms
    )


def test_a_password_is_in_no_text_of_the_settings():
    settings = load_settings(sasl_password="correct horse")  # noqa: S106 (nobody's)
    assert "correct horse" not in f"{settings!r} {settings} {settings.model_dump()}"


def test_settings_do_not_change_once_read():
    settings = load_settings()
    with pytest.raises(ValidationError):
        settings.namespace = "other"


@pytest.mark.parametrize(
    "overrides",
    [
        {"api_max_buffered_bytes": 2_000, "api_max_body_bytes": 2_001},
        {"api_max_buffered_bytes": 1_000_000},
    ],
)
def test_the_largest_body_must_find_room(overrides):
    assert "api_max_buffered_bytes" in refusal(**overrides)


def test_room_for_bodies_follows_from_the_largest():
    assert Settings(api_max_body_bytes=2_000).bodies_bytes == 8_000
    assert Settings(api_max_body_bytes=2_000, api_max_buffered_bytes=2_000).bodies_bytes == 2_000

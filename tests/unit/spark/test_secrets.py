"""Secrets reach tasks in the environment, and no task carries one."""

import pickle

import pytest
from pydantic import SecretStr

from duetime.core.setting_types import Cluster
from duetime.core.settings import Settings
from duetime.kafka.connection import spark_properties
from duetime.spark.secrets import TaskSettings, task_environment

WORD = "correct-horse"


@pytest.fixture
def settings():
    return Settings(
        sasl_mechanism="PLAIN",
        sasl_username="u",
        sasl_password=SecretStr(WORD),
        store=SecretStr(f"redis://:{WORD}@127.0.0.1:1/0"),
        librdkafka_properties={"ssl.key.password": WORD, "linger.ms": "5"},
        java_properties={"ssl.truststore.password": WORD},
        clusters={
            "eu": Cluster(
                bootstrap="eu:1", sasl_mechanism="PLAIN", sasl_password=SecretStr(WORD * 2)
            )
        },
    )


@pytest.fixture
def given(settings, monkeypatch):
    """The environment has them."""
    for name, value in task_environment(settings).items():
        monkeypatch.setenv(name, value)
    return settings


@pytest.mark.parametrize("cluster", [None, "eu"])
def test_options_of_kafka_name_secrets_and_have_none(given, cluster):
    options = spark_properties(given.at(cluster))
    assert WORD not in str(options)
    suffix = "_6575" if cluster else ""
    assert options["kafka.sasl.jaas.config"] == f"${{env:TASK_SECRET_SASL_JAAS_CONFIG{suffix}}}"
    assert options["kafka.config.providers"] == "env"


def test_options_have_the_secrets_where_no_environment_has(settings):
    assert WORD in spark_properties(settings)["kafka.sasl.jaas.config"]
    assert TaskSettings.of(settings).public is settings


@pytest.mark.parametrize("cluster", [None, "eu"])
def test_settings_of_a_task_get_their_secrets_there(given, cluster):
    at = given.at(cluster)
    carried = pickle.dumps(TaskSettings.of(at))
    assert WORD.encode() not in carried
    found = pickle.loads(carried).read()  # noqa: S301 (of this test)
    for name in ("store", "sasl_password", "librdkafka_properties", "namespace", "bootstrap"):
        assert getattr(found, name) == getattr(at, name)

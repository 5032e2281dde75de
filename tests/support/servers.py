"""The servers of all tests: one broker, one Redis and one Spark session in each process."""

import os
import shutil
import subprocess
from contextlib import contextmanager
from types import MappingProxyType

import pytest
from tests.support.local_redis import LocalRedis

from duetime.core.errors import SetupError
from duetime.core.settings import Settings
from duetime.local.broker import LocalBroker
from duetime.local.jars import pipeline_jars
from duetime.local.process import HOST
from duetime.spark.session import spark_session

#: A row of Spark's Kafka source.
RECORD = (
    "topic string, partition int, offset bigint, timestamp timestamp, key binary, value binary, "
    "headers array<struct<key:string,value:binary>>"
)


@pytest.fixture(scope="module")
def spark(_jvm_ends_well):
    """The one session of this process; a new one in the same JVM if a pipeline stopped the last."""
    return spark_session(Settings(), pipeline_jars())


@pytest.fixture(scope="session")
def _jvm_ends_well():
    yield
    from pyspark.sql import SparkSession  # noqa: PLC0415 (most tests run without Spark)

    if session := SparkSession.getActiveSession():
        session.stop()


@pytest.fixture(scope="session")
def broker(tmp_path_factory):
    """A real Kafka. Where it cannot start, tests are skipped on a laptop and fail in CI."""
    local = LocalBroker(tmp_path_factory.mktemp("kafka"))
    try:
        local.start()
    except SetupError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
    yield local
    local.stop()


def program(name, package):
    """Where it is. What is missing skips on a laptop and fails in CI."""
    found = shutil.which(name)
    if found is None:
        assert not os.environ.get("CI")
        pytest.skip(f"there is no {name} (Debian: {package})")
    return found


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory):
    """A real Redis, for whoever does not harm it. Skipped and failed as the broker is."""
    with local_redis(tmp_path_factory.mktemp("redis")) as server:
        yield server


def aerospike_url():
    """Of the server that DUETIME_AEROSPIKE=host:port names: none can be installed in CI."""
    place = os.environ.get("DUETIME_AEROSPIKE")
    if not place:
        pytest.skip("DUETIME_AEROSPIKE=host:port names no server")
    return f"aerospike://{place}" + ("" if "/" in place else "/test")


@contextmanager
def local_redis(directory, properties=MappingProxyType({})):
    """A Redis server with a directory of its own, for tests that damage it."""
    server = LocalRedis(directory, properties)
    try:
        server.start()
    except SetupError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A key and its certificate for this machine, each in a PEM file."""
    directory = tmp_path_factory.mktemp("tls")
    key, chain = directory / "key.pem", directory / "chain.pem"
    words = (
        f"req -x509 -newkey rsa:2048 -nodes -keyout {key} -out {chain} -days 2 -subj /CN=duetime"
    )
    alternative = ["-addext", f"subjectAltName=IP:{HOST}"]
    openssl = program("openssl", "openssl")
    subprocess.run([openssl, *words.split(), *alternative], check=True, capture_output=True)
    return key, chain

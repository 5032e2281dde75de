"""A pipeline whose messages wait in a Redis of its own."""

import json

import pytest
from pydantic import SecretStr
from tests.support.live import Live, fresh_settings, with_topics
from tests.support.servers import local_redis
from tests.support.topics import FROM_OUTSIDE


@pytest.fixture(scope="module")
def own_redis(tmp_path_factory):
    with local_redis(tmp_path_factory.mktemp("redis")) as found:
        yield found


@pytest.fixture(scope="module")
def redis_live(broker, own_redis, tmp_path_factory):
    """Everything but the pipeline."""
    settings = fresh_settings(broker.bootstrap, tmp_path_factory.mktemp("checkpoint"))
    found = Live(settings.model_copy(update={"store": SecretStr(own_redis.url)}))
    with with_topics(found):
        yield found


@pytest.fixture(scope="module")
def redis_environment(redis_live, own_redis):
    """Return the settings of every command; the store's URL may hold a password."""
    given = redis_live.settings.model_dump(
        mode="json", exclude_defaults=True, exclude=FROM_OUTSIDE | {"store"}
    )
    with pytest.MonkeyPatch.context() as patch:
        for name, value in given.items():
            text = value if isinstance(value, str) else json.dumps(value)
            patch.setenv(f"DUETIME_{name.upper()}", text)
        patch.setenv("DUETIME_STORE", own_redis.url)
        yield

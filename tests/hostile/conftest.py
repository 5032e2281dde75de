"""Fixtures of tests that start and kill pipelines."""

import pytest
from tests.support.live import with_topics


@pytest.fixture(scope="module")
def live(down, tmp_path_factory):
    """Everything but a pipeline, which each test starts and kills."""
    with with_topics(down(tmp_path_factory.mktemp("checkpoint"))) as found:
        yield found

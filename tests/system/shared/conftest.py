"""One pipeline (`live`) for all tests of this folder."""

import pytest
from tests.support.live import QUEUES, RETRY_TOPICS, await_first_messages, led, with_topics


# To the package: others, in the same process, stop Spark as a command does at its end.
@pytest.fixture(scope="package")
def live(down, tmp_path_factory, _jvm_ends_well):
    """One pipeline for all of them."""
    directory = tmp_path_factory.mktemp("checkpoint")
    found = down(directory, queues=QUEUES, retry_topics=RETRY_TOPICS)
    with with_topics(found), led(found):
        # A cold JVM takes seconds for these, and tests that count on seconds must not meet that.
        await_first_messages(found, delays_s=(0, 1, 6))
        yield found


@pytest.fixture
def settings(live):
    """The pipeline's own; the writer into its wheel works with them."""
    return live.settings


@pytest.fixture
def topics(live):
    """They are there, and stay."""
    return live.names


@pytest.fixture
def sender(live):
    """A producer of the client library."""
    from duetime.client import Producer as Client  # noqa: PLC0415 (another Producer is above)

    with Client(live.settings) as client:
        yield client

"""Settings of topics while the broker that has to describe them does not answer."""

import time

from confluent_kafka.admin import AdminClient

from duetime.kafka.descriptions import REQUEST_TIMEOUT_S, TopicSettingsCache

#: An admin client of a broker that does not answer.
SILENT = AdminClient({"bootstrap.servers": "127.0.0.1:1", "log_level": 0})

#: How long a refresh may take, in seconds: far less than a request that is not answered.
SOON_S = REQUEST_TIMEOUT_S / 2


def test_a_new_topic_is_waited_for_only_briefly():
    cache = TopicSettingsCache(SILENT)
    begun_s = time.monotonic()
    assert cache.refresh(["orders"], timeout_s=0.05) == {}
    # Nor does the next one wait for the first description.
    assert cache.refresh(["orders", "bills"], timeout_s=0.05) == {}
    assert time.monotonic() - begun_s < SOON_S
    # A table without its topics would say that they do not exist.
    assert not cache.is_complete

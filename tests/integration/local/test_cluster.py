"""A cluster of three brokers, of which one is cut off from all networks."""

import os
from contextlib import suppress

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, NewTopic
from tests.support.clocks import eventually

from duetime.core.errors import SetupError
from duetime.local.broker import REPLICATED, Node, new_cluster, started
from duetime.local.network import namespaces

TOPIC, BROKERS = "letters", 3

#: A broker that is not heard of is given up soon.
SOON = {"broker.session.timeout.ms": "3000"}


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make networks")
def test_a_broker_that_is_cut_off_gives_way_and_follows_once_it_is_back(tmp_path):
    with namespaces(BROKERS) as places:
        nodes = [Node(properties=REPLICATED | SOON, namespace=each) for each in places]
        brokers = new_cluster(tmp_path, nodes)
        with started(brokers):
            addresses = ",".join(each.bootstrap for each in brokers)
            admin = AdminClient({"bootstrap.servers": addresses, "log_level": 0})
            admin.create_topics([NewTopic(TOPIC, 1, BROKERS)])[TOPIC].result()

            def state():
                """Its leader and how many replicas are in sync, as far as they are known."""
                found = None
                # The one that is asked may be the one that is cut off.
                with suppress(KafkaException):
                    found = admin.list_topics(TOPIC, timeout=1).topics[TOPIC].partitions.get(0)
                return (found.leader, len(found.isrs)) if found else (-1, 0)

            eventually(lambda: state()[1] == BROKERS, "all in sync")
            leader = state()[0]
            places[leader - 1].cut()
            eventually(lambda: state()[0] not in {leader, -1}, "another leader")
            places[leader - 1].heal()
            eventually(lambda: state()[1] == BROKERS, "all in sync again")


def test_a_network_that_cannot_be_made_says_what_it_needs(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SetupError, match="needs root on Linux, and iproute2"), namespaces(1):
        pass

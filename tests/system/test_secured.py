"""A cluster that wants TLS and a password: every client of duetime gets through, Spark's too."""

from datetime import timedelta

import pytest
from tests.conftest import small_settings
from tests.system.conftest import Live

from duetime.admin import create_topics
from duetime.bench.crash import pipeline_process
from duetime.errors import KafkaError
from duetime.local.broker import LocalBroker
from duetime.local.ports import free_port
from duetime.local.properties import HOST

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(300)]

USER, PASSWORD = "duetime", 's"e\\cret'


@pytest.fixture(scope="module")
def secured(certificate, tmp_path_factory):
    """The settings for a broker that has a listener with SASL over TLS beside its own."""
    key, chain = certificate
    store = key.with_name("store.pem")
    store.write_text(key.read_text() + chain.read_text())
    plain, controller, port = free_port(), free_port(), free_port()
    module = "org.apache.kafka.common.security.plain.PlainLoginModule"
    password = PASSWORD.replace("\\", "\\\\").replace('"', '\\"')
    kinds = {"PLAINTEXT": "PLAINTEXT", "CONTROLLER": "PLAINTEXT", "SECURE": "SASL_SSL"}
    jaas = f'{module} required user_{USER}="{password}";'
    properties = {
        "listeners": f"PLAINTEXT://{HOST}:{plain},CONTROLLER://{HOST}:{controller},"
        f"SECURE://{HOST}:{port}",
        "controller.quorum.voters": f"1@{HOST}:{controller}",
        "listener.security.protocol.map": ",".join(
            f"{name}:{each}" for name, each in kinds.items()
        ),
        "sasl.enabled.mechanisms": "PLAIN",
        "listener.name.secure.plain.sasl.jaas.config": jaas,
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(store),
    }
    with LocalBroker(tmp_path_factory.mktemp("kafka"), plain, properties):
        yield small_settings(
            f"{HOST}:{port}",
            checkpoint=tmp_path_factory.mktemp("checkpoint").as_uri(),
            security_protocol="SASL_SSL",
            sasl_mechanism="PLAIN",
            sasl_username=USER,
            sasl_password=PASSWORD,
            ssl_ca=chain,
        )


def test_messages_are_delivered_through_tls_and_a_password(secured):
    from duetime.client import Producer as Client  # noqa: PLC0415 (another Producer is in conftest)

    create_topics(secured)
    live = Live(secured)
    topic = live.topic()
    with pipeline_process(secured), Client(secured) as client:
        ids = {client.produce(topic, "x", in_=timedelta(seconds=each)) for each in (0, 1, 6)}
        arrived = live.inbox(topic).take(3)
    assert {each.id for each in arrived} == ids
    live.close()


def test_a_wrong_password_gets_nothing_and_is_told_so_at_once(secured):
    wrong = secured.model_copy(update={"sasl_password": type(secured.sasl_password)("wrong")})
    with pytest.raises(KafkaError, match="turns us away"):
        create_topics(wrong)

"""A cluster that wants TLS and a password: every client of duetime gets through, Spark's too."""

import uuid
from datetime import timedelta

import pytest
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    NewTopic,
    ResourcePatternType,
    ResourceType,
)
from tests.support.live import Inbox, Live, await_first_messages
from tests.support.topics import small_settings

from duetime.bench.chaos import duetime_process
from duetime.cli.admin import checkup
from duetime.core.errors import KafkaError
from duetime.kafka.admin import create_topics
from duetime.kafka.connection import ensure_reachable
from duetime.local.broker import LocalBroker
from duetime.local.process import HOST, free_port

pytestmark = pytest.mark.timeout(1_200)

USER, PASSWORD = "duetime", 's"e\\cret'

#: A query that fails a second time does not start again sooner, in ms.
RECOVERY_MS = 10_000

#: How the broker's other listener is reached, where everything is allowed.
PLAIN = {"security_protocol": "PLAINTEXT", "ssl_ca": None}


@pytest.fixture(scope="module")
def secured(certificate, tmp_path_factory):
    """A broker with a listener for SASL over TLS: its own, that one, and the certificate."""
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
        # Everybody may do everything, but with topics that have rules of their own.
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "allow.everyone.if.no.acl.found": "true",
        "super.users": "User:ANONYMOUS",
        "listener.name.secure.plain.sasl.jaas.config": jaas,
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(store),
    }
    with LocalBroker(tmp_path_factory.mktemp("kafka"), plain, properties):
        yield f"{HOST}:{plain}", f"{HOST}:{port}", chain


@pytest.fixture
def settings(secured, tmp_path):
    """A namespace of its own there, reached with a password."""
    _, bootstrap, chain = secured
    return small_settings(
        bootstrap,
        checkpoint=tmp_path.as_uri(),
        security_protocol="SASL_SSL",
        sasl_mechanism="PLAIN",
        sasl_username=USER,
        sasl_password=PASSWORD,
        ssl_ca=chain,
        max_delivery_attempts=2,
        retry_backoff_ms=200,
    )


def right(topic, operation, kind=AclBinding):
    """The rule that duetime's user may do this with the topic, or what finds it."""
    place = ResourceType.TOPIC, topic, ResourcePatternType.LITERAL
    return kind(*place, f"User:{USER}", "*", operation, AclPermissionType.ALLOW)


def administrator(secured):
    """A client that may give rights: one without a password has all of them."""
    return AdminClient({"bootstrap.servers": secured[0]})


def topic_with_rights(live, secured, *operations):
    """A destination with which duetime's user may do this, and no more."""
    admin, name = administrator(secured), f"to_{uuid.uuid4().hex[:8]}"
    for created in admin.create_acls([right(name, each) for each in operations]).values():
        created.result()
    for created in admin.create_topics([NewTopic(name, num_partitions=1)]).values():
        created.result()
    live.inbox_when_there(name)
    return name


@pytest.mark.hostile
@pytest.mark.slow
def test_messages_to_a_topic_that_forbids_writing_become_dead_letters(secured, settings):
    from duetime.client import Producer as Client  # noqa: PLC0415 (another Producer is in conftest)

    create_topics(settings)
    live = Live(settings)
    topic = live.topic()
    theirs = topic_with_rights(live, secured, AclOperation.DESCRIBE, AclOperation.READ)
    with duetime_process(settings), Client(settings) as client:
        delays = [timedelta(seconds=each) for each in (0, 1, 6)]
        refused = {client.produce(theirs, "x", in_=each) for each in delays}
        ids = {client.produce(topic, "x", in_=each) for each in delays}
        arrived = live.inbox(topic).take(3)
        letters = live.inbox(live.names.dead_letter).take(3)
    assert {each.id for each in arrived} == ids
    assert {each.id for each in letters} == refused
    assert {each.by_name["due-error"] for each in letters} == {b"not-authorised"}
    assert {each.by_name["due-attempts"] for each in letters} == {b"2"}
    live.close()


@pytest.mark.hostile
@pytest.mark.slow
def test_right_that_is_taken_fails_two_sinks_at_most_and_delays_others(secured, settings, capfd):
    from duetime.client import Producer as Client  # noqa: PLC0415 (another Producer is in conftest)

    create_topics(settings)
    live = Live(settings)
    topic = live.topic()
    write = AclOperation.WRITE
    theirs = topic_with_rights(live, secured, AclOperation.DESCRIBE, AclOperation.READ, write)
    ends = live.inbox(theirs, live.names.dead_letter)
    with duetime_process(settings), Client(settings) as client:
        await_first_messages(live)
        step = timedelta(milliseconds=50)
        ids = {client.produce(topic, "x", in_=each * step) for each in range(400)}
        given = {client.produce(theirs, "x", in_=each * step) for each in range(400)}
        client.flush()
        ends.until(lambda: len(ends.arrived) > 50, "the first")
        admin = administrator(secured)
        for taken in admin.delete_acls([right(theirs, write, AclBindingFilter)]).values():
            assert taken.result()
        arrived = live.inbox(topic).take(400)
        ended = ends.take(400)
    letters = [each for each in ended if each.topic != theirs]
    assert {each.id for each in arrived} == ids
    assert {each.id for each in ended} == given
    assert letters
    # The broker says so first, and the topic's description later.
    assert all(b"uthoriz" in each.by_name["due-error-detail"] for each in letters)
    assert max(each.late_ms for each in arrived) < RECOVERY_MS
    log = capfd.readouterr().err
    assert log.count("query failed") + log.count("release job failed") <= 2
    live.close()


@pytest.mark.slow
@pytest.mark.hostile
def test_a_topic_that_forbids_reading_gets_one_warning_and_all_messages(secured, settings, capfd):
    from duetime.client import Producer as Client  # noqa: PLC0415 (another Producer is in conftest)

    create_topics(settings)
    live = Live(settings)
    unread = topic_with_rights(live, secured, AclOperation.DESCRIBE, AclOperation.WRITE)
    inbox = Inbox(settings.model_copy(update=PLAIN | {"bootstrap": secured[0]}), [unread])
    with Client(settings) as client:
        step = timedelta(milliseconds=100)
        with duetime_process(settings):
            # It has nothing to read back: the warning is of the next one.
            await_first_messages(live)
            ids = {client.produce(unread, "x", in_=each * step) for each in range(300)}
            client.flush()
            inbox.until(lambda: len(inbox.arrived) > 20, "the first")
        with duetime_process(settings):
            inbox.until(lambda: {each.id for each in inbox.arrived} >= ids, "all")
    log = capfd.readouterr().err.splitlines()
    told = [line for line in log if "may be delivered twice" in line]
    assert len(told) == 1
    assert f"topic={unread}" in told[0]
    inbox.close()
    live.close()


@pytest.fixture
def wrong(settings):
    """The same with another password."""
    return settings.model_copy(update={"sasl_password": type(settings.sasl_password)("wrong")})


@pytest.mark.slow
@pytest.mark.parametrize("ask", [create_topics, ensure_reachable])
def test_a_wrong_password_gets_nothing_and_is_told_so_at_once(wrong, ask):
    with pytest.raises(KafkaError, match="turns us away"):
        ask(wrong)


def test_the_checkup_says_that_the_password_is_wrong(wrong):
    (broker,) = [each for each in checkup(wrong) if each.name == "broker"]
    assert not broker.ok
    assert "turns us away" in broker.detail

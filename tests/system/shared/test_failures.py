"""Messages that cannot be delivered harm no others, are tried again, and end as dead letters."""

import uuid
from datetime import timedelta

import httpx
import pytest
from confluent_kafka.admin import NewPartitions
from tests.support.api import RunningServer, alike
from tests.support.clocks import eventually
from tests.support.live import (
    GROWING,
    LATE_MS,
    LONG_WAITED,
    PATIENCE_S,
    RETRY_TOPICS,
    STUBBORN,
    now_ms,
)
from tests.support.topics import TRACE

from duetime.client.cancellation import find_failed_message
from duetime.core import headers as H
from duetime.core.messages import MessageId
from duetime.core.setting_types import ApiToken

pytestmark = pytest.mark.timeout(1_200)


@pytest.fixture
def dead(live):
    return live.inbox(live.names.dead_letter)


def missing_topic():
    """A name that no broker will create."""
    return f"missing-{uuid.uuid4().hex[:8]}"


def of(dead, identity):
    """The dead letter of this message."""
    dead.until(lambda: any(each.id == identity for each in dead.arrived), f"dead {identity}")
    (letter,) = [each for each in dead.arrived if each.id == identity]
    return letter


@pytest.mark.slow
@pytest.mark.parametrize("delay_s", [0, 1, 6])
def test_a_partition_that_the_destination_lacks_harms_no_other_message(live, sender, dead, delay_s):
    topic = live.topic()
    lost = sender.produce(
        topic,
        b"\x00\xff",
        key="k",
        headers={"h": "1", **dict(TRACE)},
        partition=7,
        in_=timedelta(seconds=delay_s),
    )
    kept = sender.produce(topic, "kept", in_=timedelta(seconds=delay_s))

    (arrived,) = live.inbox(topic).take(1)
    assert arrived.id == kept
    assert arrived.late_ms < LATE_MS
    letter = of(dead, lost)
    assert (letter.key, letter.value) == (b"k", b"\x00\xff")
    assert letter.headers[:3] == [("h", b"1"), *TRACE]
    assert letter.by_name["due-error"] == b"no-such-partition"
    assert letter.by_name["due-attempts"] == b"2"
    assert int(letter.by_name["due-failed-first-ms"]) < int(letter.by_name["due-failed-last-ms"])


@pytest.mark.slow
def test_a_destination_may_have_attempts_and_a_backoff_of_its_own(live, sender, dead):
    live.create([STUBBORN])
    letter = of(dead, sender.produce(STUBBORN, "x", partition=7, in_=timedelta(0)))
    policy = RETRY_TOPICS[STUBBORN]
    assert letter.by_name["due-attempts"] == str(policy["attempts"]).encode()
    first_ms, last_ms = (int(letter.by_name[f"due-failed-{each}-ms"]) for each in ("first", "last"))
    # Two waits, the second twice as long, each cut to half of it or more.
    assert last_ms - first_ms >= (1 + 2) * policy["backoff_ms"] / 2


@pytest.mark.slow
def test_a_topic_that_comes_to_be_gets_its_message(live, sender, dead):
    """The brokers here create topics by themselves, and the message waits for that."""
    topic = missing_topic()
    sent = sender.produce(topic, "first", in_=timedelta(0))

    (arrived,) = live.inbox_when_there(topic).take(1)
    assert arrived.id == sent
    of(dead, sender.produce(live.topic(), "later", partition=7, in_=timedelta(0)))
    assert sent not in {each.id for each in dead.arrived}


@pytest.mark.slow
def test_a_missing_topic_is_created_when_its_first_message_is_taken_in(live, sender):
    topic, before_ms = missing_topic(), now_ms()
    sender.produce(topic, "first", in_=timedelta(seconds=20))

    live.inbox_when_there(topic)
    assert now_ms() < before_ms + 20_000


def test_several_missing_topics_are_created_before_messages_are_due(live, sender):
    topics, due = [missing_topic() for _ in range(20)], timedelta(seconds=20)
    before_ms = now_ms()
    for each in topics:
        sender.produce(each, "first", in_=due)

    for each in topics:
        live.inbox_when_there(each)
    assert now_ms() < before_ms + 20_000


@pytest.mark.slow
def test_a_name_that_no_topic_can_have_beside_another_is_a_dead_letter(live, sender, dead):
    """Kafka refuses `a.b` beside `a_b`."""
    beside = live.topic()
    letter = of(dead, sender.produce(beside.replace("_", "."), "x", in_=timedelta(0)))
    assert letter.by_name["due-error"] == b"unknown-topic"
    assert letter.by_name["due-topic"] == beside.replace("_", ".").encode()


@pytest.mark.slow
def test_a_record_larger_than_the_destination_takes_is_a_dead_letter(live, sender, dead):
    topic = live.topic(config={"max.message.bytes": "1000"})
    large = sender.produce(topic, "x" * 2_000, in_=timedelta(seconds=1))
    small = sender.produce(topic, "x" * 500, in_=timedelta(seconds=1))

    assert live.inbox(topic).take(1)[0].id == small
    assert of(dead, large).by_name["due-error"] == b"too-large-for-topic"


@pytest.mark.slow
def test_a_partition_that_is_added_in_time_gets_its_message(live, sender):
    (topic,) = live.create([GROWING])
    sent = sender.produce(topic, "x", headers=dict(TRACE), partition=1, in_=timedelta(0))
    live.admin.create_partitions([NewPartitions(topic, 2)])[topic].result()

    (arrived,) = live.inbox_when_there(topic, partitions=2).take(1)
    assert (arrived.id, arrived.partition) == (sent, 1)
    assert arrived.headers[2:] == list(TRACE)


def test_an_expired_message_is_not_delivered(live, dead):
    topic, due_ms = live.topic(), now_ms() - 1_000
    headers = {
        H.DUE_TOPIC: topic,
        H.DUE_AT_MS: due_ms,
        H.DUE_EXPIRES_MS: due_ms + 1,
        H.DUE_ID: "late",
    }
    live.send(live.names.native, "x", headers=[(k, str(v)) for k, v in headers.items()])
    live.flush()

    letter = of(dead, f"{due_ms:012x}-late")
    assert letter.by_name["due-error"] == b"expired"
    assert letter.by_name["due-attempts"] == b"1"


@pytest.fixture
def api(live, tmp_path):
    """Where a token is needed, and each has topics of its own."""
    tokens = {
        name: {"token": name * 4, "topics": topics}
        for name, topics in {"shop": [LONG_WAITED], "bank": ["bills"]}.items()
    }
    tokens["root"] = {"token": "root" * 4}
    known = {name: ApiToken.model_validate(each) for name, each in tokens.items()}
    settings = alike(live.settings, tmp_path).model_copy(update={"api_tokens": known})
    running = RunningServer(settings)
    with httpx.Client(base_url=settings.api_url, timeout=PATIENCE_S) as client:
        yield client
    running.stop()


def token_of(name):
    return {"Authorization": f"Bearer {name * 4}"}


def asked_to_cancel(api, identity, name):
    answer = api.delete(f"/v1/messages/{identity}", headers=token_of(name))
    return (answer.status_code, answer.json()["reason"] if answer.content else None)


@pytest.mark.slow
def test_a_message_that_waits_for_a_retry_is_cancelled(live, sender, dead, api):
    live.create([LONG_WAITED])
    lost = sender.produce(LONG_WAITED, "x", partition=7, in_=timedelta(0))
    sender.flush()
    live.inbox(live.names.retry).until_id(lost)

    assert asked_to_cancel(api, lost, "bank") == (409, "too-late")
    # A busy pipeline may not have read yet what has failed: then it is to be asked again.
    eventually(lambda: asked_to_cancel(api, lost, "shop") == (204, None))
    # It is read by now, and is kept: for whoever asks again.
    live.inbox(live.names.retry).until_id(lost)
    assert asked_to_cancel(api, lost, "root") == (204, None)
    shown = api.get(f"/v1/messages/{lost}", headers=token_of("shop")).json()
    assert (shown["attempts"], shown["cancelled"]) == (1, True)
    hidden = api.get(f"/v1/messages/{lost}", headers=token_of("bank")).json()
    assert (hidden["reason"], "could not" in hidden["detail"]) == ("too-late", False)

    # It would have been tried again by then, and died.
    (retry_ms,) = find_failed_message(MessageId.parse(lost), live.settings, now_ms()).retries_ms
    later = timedelta(milliseconds=retry_ms - now_ms() + 1_000)
    of(dead, sender.produce(live.topic(), "later", partition=7, in_=later))
    assert lost not in {each.id for each in dead.arrived}


def test_cancelling_a_dead_letter_is_too_late_and_says_what_it_is(live, sender, dead, api):
    lost = sender.produce(live.topic(), "x", partition=7, in_=timedelta(0))
    of(dead, lost)
    for ask in (api.delete, api.get):
        told = ask(f"/v1/messages/{lost}", headers=token_of("root")).json()
        assert (told["status"], told["reason"]) == (409, "too-late")
        assert told["detail"].endswith("could not be delivered, and is a dead letter")

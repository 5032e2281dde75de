import pytest
from hypothesis import given
from hypothesis import strategies as st

from duetime.core import headers as H
from duetime.core.errors import InvalidMessage, Reason
from duetime.core.messages import LATEST_MS, MessageId, check_destination, check_unique

ID_CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._:=~+-"

instants = st.integers(0, LATEST_MS)
uniques = st.text(ID_CHARACTERS + "@", min_size=1, max_size=200)


def reason_of(check, *arguments):
    with pytest.raises(InvalidMessage) as refusal:
        check(*arguments)
    return refusal.value.reason


@given(instants, uniques)
def test_an_id_is_read_as_it_was_written(due_ms, unique):
    written = MessageId(due_ms=due_ms, unique=unique)
    assert MessageId.parse(str(written)) == written


@given(instants, instants, uniques)
def test_ids_sort_by_due_time(one_ms, other_ms, unique):
    one, other = (str(MessageId(due_ms=due_ms, unique=unique)) for due_ms in (one_ms, other_ms))
    assert (one < other) == (one_ms < other_ms)


def test_the_worked_example():
    assert str(MessageId(due_ms=1_798_131_600_000, unique="order-17")) == "01a2a8feca80-order-17"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "order-17",
        "01a2a8feca80",
        "01a2a8feca80-",
        "01A2A8FECA80-x",
        "1a2a8feca80-x",
        "001a2a8feca80-x",
        "01a2a8feca80-a b",
        "01a2a8feca80-x\n",
        "\n01a2a8feca80-x",
        "01a2a8feca80-é",
        "01a2a8feca80-a/b",
        "01a2a8feca80-" + "x" * 201,
    ],
)
def test_invalid_id_is_refused(text):
    assert reason_of(MessageId.parse, text) == Reason.BAD_ID


@pytest.mark.parametrize("due_ms", [-1, LATEST_MS + 1])
def test_an_id_cannot_carry_an_instant_out_of_range(due_ms):
    assert reason_of(lambda: MessageId(due_ms=due_ms, unique="x")) == Reason.BAD_DUE_TIME


@given(st.text(ID_CHARACTERS, min_size=1, max_size=200))
def test_a_senders_id_may_have_letters_digits_and_some_signs(unique):
    assert check_unique(unique) == unique


@pytest.mark.parametrize("unique", ["", "@in.0.1", "a b", "a\n", "a/b", "é", "x" * 201, "a\x00"])
def test_a_senders_id_that_could_be_misread_is_refused(unique):
    assert reason_of(check_unique, unique) == Reason.BAD_ID


@pytest.mark.parametrize(
    "topic", ["orders", "a", "A.b_c-9", "x" * 249, "duetimes", "duetime_in", "..."]
)
def test_a_topic_that_kafka_allows_is_a_destination(topic):
    assert check_destination(topic, "duetime") == topic


@pytest.mark.parametrize(
    "topic", ["", ".", "..", "a b", "orders\n", "a/b", "é", "x" * 250, "a\x00b"]
)
def test_invalid_topic_name_is_refused(topic):
    assert reason_of(check_destination, topic, "duetime") == Reason.BAD_TOPIC


@pytest.mark.parametrize(
    "topic", ["__consumer_offsets", "__x", "duetime.in", "duetime.wheel.0", "jobs__markers"]
)
def test_internal_topics_are_no_destinations(topic):
    assert reason_of(check_destination, topic, "duetime") == Reason.INTERNAL_TOPIC


def test_markers_topic_of_any_name_is_no_destination():
    assert check_destination("work", "duetime") == "work"
    assert reason_of(check_destination, "work", "duetime", ("work",)) == Reason.INTERNAL_TOPIC


def test_every_reason_is_one_word_for_a_header():
    for reason in Reason:
        assert str(reason) == reason.lower().replace("_", "-")
        assert " " not in reason


def test_dead_letter_headers_are_read_as_they_were_written():
    own = [("a", b"1"), ("due-id", b"old")]
    texts = {"due-topic": "orders", "due-id": "x", "due-partition": None, "due-attempts": 2}
    headers = [*own, *H.dead_letter(texts)]
    found = H.split(headers, H.DEAD_LETTER)
    assert found is not None
    assert (found[0], found[1]["due-attempts"], found[1]["due-partition"]) == (own, "2", "")
    assert list(found[1]) == list(H.DEAD_LETTER)
    assert H.split(headers[:-1], H.DEAD_LETTER) is None
    spoiled = [*headers[:-1], (headers[-1][0], b"\xff")]
    assert H.split(spoiled, H.DEAD_LETTER) is None

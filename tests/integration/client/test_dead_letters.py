"""Dead letters are listed, shown, and redriven once."""

import json

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from tests.support.topics import dead_letters_of

from duetime.client.dead_letters import DeadLetterFilter, DeadLetters
from duetime.core.clock import SystemClock
from duetime.core.errors import KafkaError, UnknownMessage
from duetime.core.topics import TopicNames
from duetime.kafka.connection import librdkafka_properties
from duetime.kafka.producer import transaction

pytestmark = pytest.mark.usefixtures("topics")

ANY = DeadLetterFilter()


@pytest.fixture
def letters(settings):
    return DeadLetters(settings)


@pytest.fixture
def die(settings):
    return dead_letters_of(settings)


def taken_in(settings):
    """Return the committed records, which intake would read."""
    properties = {"group.id": "look", "enable.partition.eof": True, "enable.auto.commit": False}
    consumer = Consumer(librdkafka_properties(settings) | properties)
    topic = TopicNames(settings).transactional
    consumer.assign([TopicPartition(topic, each, 0) for each in range(settings.intake_partitions)])
    records, ended = [], set()
    while len(ended) < settings.intake_partitions:
        for one in consumer.consume(100, timeout=1.0):
            if one.error():
                ended.add(one.partition())
            else:
                records.append(one)
    consumer.close()
    return records


@pytest.mark.slow
def test_a_dead_letter_has_the_message_and_the_reason(letters, die):
    die()
    (letter,) = letters.latest(ANY, 10)
    assert letter == letters.find(0)
    assert (letter.topic, letter.partition, letter.due_ms) == ("to", 3, 1_000)
    assert letter.cluster == "eu"
    assert (letter.reason, letter.detail, letter.attempts) == ("unknown-topic", "so it is", 10)
    assert (letter.first_ms, letter.last_ms) == (1_500, 2_000)
    assert (letter.key, letter.value, letter.headers) == (b"k", b"\xff", (("h", b"\x00"),))


def test_a_foreign_record_is_no_dead_letter(settings, letters, die):
    producer = Producer(librdkafka_properties(settings))
    producer.produce(TopicNames(settings).dead_letter, b"x", headers=[("due-topic", b"\xff")])
    producer.flush(30)
    die()
    assert [each.offset for each in letters.latest(ANY, 10)] == [1]
    with pytest.raises(UnknownMessage, match="offset 0"):
        letters.find(0)


@pytest.mark.slow
def test_letters_are_selected_and_the_latest_are_listed(letters, die):
    for number in range(4):
        die(topic=f"to-{number % 2}", reason=f"r-{number // 2}", last_ms=1_000 * number)
    assert [each.offset for each in letters.latest(ANY, 3)] == [1, 2, 3]
    assert [each.offset for each in letters.latest(DeadLetterFilter(topic="to-1"), 9)] == [1, 3]
    assert [each.offset for each in letters.latest(DeadLetterFilter(reason="r-1"), 9)] == [2, 3]
    assert [each.offset for each in letters.latest(DeadLetterFilter(since_ms=2_000), 9)] == [2, 3]


@pytest.mark.slow
def test_a_dead_letter_is_redriven_once(settings, letters, die):
    die(), die(topic="other")
    assert letters.redrive(DeadLetterFilter(topic="to"), SystemClock()) == 1
    assert letters.redrive(ANY, SystemClock()) == 1
    assert letters.redrive(ANY, SystemClock()) == 0
    assert letters.latest(ANY, 10) == []
    first, second = sorted(taken_in(settings), key=lambda one: dict(one.headers())["due-topic"])
    assert (first.key(), first.value()) == (b"k", b"\xff")
    headers = dict(first.headers())
    assert (headers["due-topic"], headers["due-partition"]) == (b"other", b"3")
    assert headers["due-cluster"] == b"eu"
    assert headers["h"] == b"\x00"
    assert headers["due-id"] != dict(second.headers())["due-id"]


@pytest.mark.slow
def test_reserved_headers_do_not_prevent_a_redrive(settings, letters, die):
    taken = "due-at-ms", "due-id", "due-in-ms", "due-cron", "due-zone", "due-until", "due-misfire"
    taken += ("due-replaces",)
    die(passed_on=[(name, b"1") for name in taken] + [("due-callback", b"http://x")])
    assert letters.redrive(ANY, SystemClock()) == 1
    (again,) = taken_in(settings)
    names = [name for name, _ in again.headers()]
    own = ["h", "due-callback"]
    assert names == ["due-topic", "due-at-ms", "due-id", "due-partition", "due-cluster", *own]


def test_a_fenced_redrive_sends_nothing(settings, letters, die):
    die()

    def late():
        # Another redrive begins and ends while this one has sent and not committed.
        with transaction(settings, "redrive") as send:
            (letter,) = letters.latest(ANY, 1)
            send(letters._message_and_note(letter, 5_000))
            assert letters.redrive(ANY, SystemClock()) == 1

    with pytest.raises(KafkaError):
        late()
    assert len(taken_in(settings)) == 1


class TestCommand:
    """`duetime dead-letters ...`"""

    @pytest.fixture
    def duetime(self, on_broker, capsys):  # noqa: ARG002 (the command finds it)
        from duetime.cli import main  # noqa: PLC0415 (only these tests need it)

        def run(*arguments):
            code = main(["dead-letters", *arguments])
            return code, *capsys.readouterr()

        return run

    def test_list_show_and_redrive(self, duetime, die):
        assert duetime("list") == (0, "no dead letters\n", "")
        die(value=b"precious")
        assert "unknown-topic" in duetime("list")[1]
        (told,) = json.loads(duetime("list", "--json")[1])
        assert (told["offset"], told["topic"]) == (0, "to")
        assert "precious" not in json.dumps(told)
        assert "precious" in duetime("show", "0")[1]
        assert duetime("redrive", "0")[1] == "redriven: 1\n"
        assert duetime("redrive", "--all")[1] == "redriven: 0\n"
        assert duetime("show", "0")[0] == 4

    def test_redrive_names_missing_offsets(self, duetime, die):
        die()
        assert duetime("redrive", "98", "0", "99") == (
            0,
            "redriven: 1\n",
            "no dead letter at offset 98, 99, or it was redriven\n",
        )
        code, told, error = duetime("redrive", "0", "99")
        assert (code, told) == (4, "")
        assert "at offset 0, 99, or it was redriven" in error

    def test_redrive_needs_a_selection(self, duetime):
        code, _, error = duetime("redrive")
        assert code == 2
        assert "--all" in error

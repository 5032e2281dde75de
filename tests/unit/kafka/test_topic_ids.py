"""The metadata of a committed offset, and whether the offset belongs to the log."""

import pytest

from duetime.kafka.offsets import Commit, LogIdentity, belongs


def test_a_note_round_trips():
    note = LogIdentity(topic_id="a1", started_ms=5)
    assert LogIdentity.parse(note.text()) == note
    assert LogIdentity.parse(LogIdentity().text()) == LogIdentity()


@pytest.mark.parametrize(
    ("text", "started_ms"), [("1700000000000", 1_700_000_000_000), ("", None), ("true", None)]
)
def test_a_note_of_an_earlier_version_is_an_instant(text, started_ms):
    assert LogIdentity.parse(text) == LogIdentity(started_ms=started_ms)


@pytest.mark.parametrize("text", ["moved by hand", "[]", '{"topic_id": 1, "started_ms": "x"}', "{"])
def test_a_foreign_note_is_ignored(text):
    assert LogIdentity.parse(text) == LogIdentity()


@pytest.mark.parametrize(
    ("end", "noted", "topic_id", "is_of_log"),
    [
        (10, "a1", "a1", True),
        (11, "a1", "a1", True),
        # The log lost its end.
        (9, "a1", "a1", False),
        # The topic was created again, and has more records than the first one had.
        (11, "a1", "b2", False),
        # Brokers before 2.8 give topics no ids.
        (10, "a1", None, True),
        (10, None, "a1", True),
    ],
)
def test_an_offset_belongs_to_a_log_with_its_id_and_length(end, noted, topic_id, is_of_log):
    commit = Commit(10, LogIdentity(topic_id=noted).text())
    assert belongs(commit, end, topic_id) is is_of_log

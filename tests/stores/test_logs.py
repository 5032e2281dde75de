"""What is noted beside an offset, and whether the offset belongs to the log. Without a broker."""

import pytest

from duetime.stores.logs import Commit, LogNote, belongs


def test_a_note_is_read_as_it_was_written():
    note = LogNote(topic_id="a1", begun_ms=5)
    assert LogNote.parse(note.text()) == note
    assert LogNote.parse(LogNote().text()) == LogNote()


@pytest.mark.parametrize(
    ("text", "begun_ms"), [("1700000000000", 1_700_000_000_000), ("", None), ("true", None)]
)
def test_a_note_of_an_earlier_version_has_the_instant_alone(text, begun_ms):
    assert LogNote.parse(text) == LogNote(begun_ms=begun_ms)


@pytest.mark.parametrize("text", ["moved by hand", "[]", '{"topic_id": 1, "begun_ms": "x"}', "{"])
def test_a_note_of_another_tool_says_nothing(text):
    assert LogNote.parse(text) == LogNote()


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
def test_an_offset_belongs_to_a_log_that_reaches_it_and_has_its_id(end, noted, topic_id, is_of_log):
    commit = Commit(10, LogNote(topic_id=noted).text())
    assert belongs(commit, end, topic_id) is is_of_log

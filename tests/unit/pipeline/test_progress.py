"""The offsets before which a real-time query has given all to its producer."""

import pytest

from duetime.pipeline.recovery.progress import LastRecords

IN = ("in", 0)


@pytest.fixture
def last():
    return LastRecords()


def test_the_last_record_is_given_away_once_its_task_fetches_again(last):
    assert last.add({IN: 7}, {IN: 10}.get) == {IN: 7}
    # That fetch may be from before the note.
    assert last.add({IN: 7}, {IN: 11}.get) == {IN: 7}
    assert last.add({IN: 7}, {IN: 12}.get) == {IN: 8}
    assert last.add({IN: 7}, {IN: 12}.get) == {IN: 8}


def test_a_task_that_does_not_fetch_may_still_have_it(last):
    for _ in range(5):
        assert last.add({IN: 7}, {IN: 10}.get) == {IN: 7}


def test_fetches_before_a_record_say_nothing_of_it(last):
    last.add({IN: 7}, {IN: 10}.get)
    last.add({IN: 7}, {IN: 10}.get)
    assert last.add({IN: 9}, {IN: 20}.get) == {IN: 9}
    assert last.add({IN: 9}, {IN: 20}.get) == {IN: 9}
    assert last.add({IN: 9}, {IN: 21}.get) == {IN: 10}

"""Metrics of a queue, from the tracker's commits and the dead letters."""

from duetime.pipeline.monitoring.exporter import QueueCounter


def test_an_overdue_message_without_a_dead_letter_counts_as_redelivered():
    counted = QueueCounter(out=5, dead=2)
    assert counted.update(out=9, dead=3) == (3, 1)
    assert counted.update(out=9, dead=3) == (0, 0)


def test_a_dead_letter_before_its_commit_makes_no_count_too_high():
    counted = QueueCounter(out=0, dead=0)
    assert counted.update(out=1, dead=2) == (0, 2)
    assert counted.update(out=3, dead=2) == (1, 0)


def test_dead_letters_of_a_recreated_topic_are_counted_on():
    assert QueueCounter(out=9, dead=5).update(out=10, dead=1) == (0, 1)


def test_dead_letters_of_a_topic_unreadable_once_are_not_counted_twice():
    counted = QueueCounter(out=9, dead=5)
    assert [counted.update(out=9, dead=dead) for dead in (0, 5, 6)] == [(0, 0), (0, 0), (0, 1)]

"""Deletions are deferred while recovery reads."""

from contextlib import suppress

import pytest

from duetime.stores.wheel_store import DeletionGuard

A, B = ("a", 0), ("b", 1)


@pytest.fixture
def freed():
    return []


def test_deletion_without_a_reader_is_immediate(freed):
    guard = DeletionGuard()
    guard.delete({A: 5}, freed.append)
    with guard.hold():
        pass
    guard.delete({B: 1}, freed.append)
    assert freed == [{A: 5}, {B: 1}]


def test_deferred_deletions_run_after_the_last_reader(freed):
    guard = DeletionGuard()
    with guard.hold():
        guard.delete({A: 5}, freed.append)
        with guard.hold():
            guard.delete({A: 3, B: 1}, freed.append)
        guard.delete({B: 2}, freed.append)
        assert freed == []
    guard.delete({A: 4}, freed.append)
    assert freed == [{A: 5, B: 2}]
    guard.delete({}, freed.append)
    assert freed[1:] == [{}]


def test_a_failed_reader_holds_nothing(freed):
    guard = DeletionGuard()
    with suppress(ZeroDivisionError), guard.hold():
        guard.delete({A: 5}, freed.append)
        raise ZeroDivisionError
    guard.delete({}, freed.append)
    assert freed == [{A: 5}]

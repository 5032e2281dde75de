"""What is to be freed is put off while somebody reads."""

from contextlib import suppress

import pytest

from duetime.stores.keeping import Keeping

A, B = ("a", 0), ("b", 1)


@pytest.fixture
def freed():
    return []


def test_what_is_freed_while_nobody_reads_is_freed_at_once(freed):
    keeping = Keeping()
    keeping.free({A: 5}, freed.append)
    with keeping.reading():
        pass
    keeping.free({B: 1}, freed.append)
    assert freed == [{A: 5}, {B: 1}]


def test_what_is_put_off_is_freed_with_what_is_freed_after_the_last_has_read(freed):
    keeping = Keeping()
    with keeping.reading():
        keeping.free({A: 5}, freed.append)
        with keeping.reading():
            keeping.free({A: 3, B: 1}, freed.append)
        keeping.free({B: 2}, freed.append)
        assert freed == []
    keeping.free({A: 4}, freed.append)
    assert freed == [{A: 5, B: 2}]
    keeping.free({}, freed.append)
    assert freed[1:] == [{}]


def test_who_fails_to_read_does_not_keep_anything(freed):
    keeping = Keeping()
    with suppress(ZeroDivisionError), keeping.reading():
        keeping.free({A: 5}, freed.append)
        raise ZeroDivisionError
    keeping.free({}, freed.append)
    assert freed == [{A: 5}]

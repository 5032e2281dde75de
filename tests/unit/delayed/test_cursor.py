import pytest
from hypothesis import given
from hypothesis import strategies as st

from duetime.delayed.index import Cursor, DeliverAfterIndex, Late
from duetime.delayed.segments import entries_of

numbers = st.integers(-1, 2**63 - 1)
lates = st.builds(Late, deliver_after_ms=numbers, offset=numbers, end=numbers)
cursors = st.builds(
    Cursor, deliver_after_ms=numbers, offset=numbers, end=numbers, late=st.none() | lates
)


@given(cursors)
def test_a_cursor_comes_back_from_its_text(cursor):
    assert Cursor.parse(str(cursor)) == cursor


@pytest.mark.parametrize(
    "text", ["", "5", "deliver-after-1", "deliver-after-1:1:2", "deliver-after-1:1:2:x", "other:1"]
)
def test_metadata_of_other_tools_is_no_cursor(text):
    assert Cursor.parse(text) is None


def test_the_example_of_the_drawing():
    index = DeliverAfterIndex(Cursor.start(0), 0)
    index.append(entries_of([30, 10, 20], range(3)), now_ms=25)
    told = taken(index, 25)
    index.append(entries_of([5, 15], range(3, 5)), now_ms=25)
    told += taken(index, 25) + taken(index, 30)
    assert [offset for offset, _ in told] == [1, 2, 3, 4, 0]
    assert [cursor.removeprefix("deliver-after-1:") for _, cursor in told] == [
        "10:1:3",
        "20:2:3",
        "20:2:3:5:3:5",
        "20:2:5",
        "30:0:5",
    ]


def test_an_entry_takes_sixteen_bytes():
    index = DeliverAfterIndex(Cursor.start(0), 0)
    for start in range(0, 200_000, 1_000):
        offsets = range(start, start + 1_000)
        index.append(entries_of([5_000 + each for each in offsets], offsets), now_ms=0)
    assert 16 <= index.nbytes / 200_000 < 17


def taken(index, now_ms):
    batch = index.take(now_ms, 10)
    return [
        (int(entry["offset"]), str(batch.cursor(position)))
        for position, entry in enumerate(batch.entries)
    ]

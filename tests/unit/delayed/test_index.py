"""The index against a simple model: sort everything by (deliverAfter, offset), cut at now."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.index_files import damage, files_in

from duetime.delayed.index import Cursor, DeliverAfterIndex, SegmentLimits
from duetime.delayed.segments import ClosedSegment, SegmentLost, entries_of

#: After all due times of these tests.
DOOMSDAY_MS = 10_000_000


class Model:
    """The index as sorted lists. Late records are checked once the last late ones are taken."""

    def __init__(self):
        self.log = []
        self.delivered = []
        self.place = (-1, -1)
        self.known = 0

    def take(self, now_ms, limit):
        if not self._late():
            self.known = len(self.log)
        late = self._late()
        due = sorted(each for each in late or self._pending() if each[0] <= now_ms)[:limit]
        self.delivered += due
        if due and not late:
            self.place = due[-1]
        return due

    def restart(self, cursor, delivered):
        self.delivered = list(delivered)
        self.place, self.known = (cursor.deliver_after_ms, cursor.offset), cursor.known_end

    def _pending(self):
        known = [(time_ms, offset) for offset, time_ms in enumerate(self.log[: self.known])]
        return [each for each in known if each not in self.delivered]

    def _late(self):
        return [each for each in self._pending() if each <= self.place]


class Subject:
    """The index over the same log, used as a reader uses it."""

    def __init__(self, log, files=None, records=8):
        self.log = log
        self._files = files
        self._limits = SegmentLimits(records=records, age_ms=500)
        self.index = DeliverAfterIndex(Cursor.start(0), 0, files=files, limits=self._limits)

    def read(self, now_ms, end=None):
        """Append what the log has, up to its end."""
        start, end = self.index.end, len(self.log) if end is None else end
        if start < end:
            self.index.append(entries_of(self.log[start:end], range(start, end)), now_ms)

    def restart(self, cursor, committed, now_ms):
        cursor = Cursor.parse(str(cursor))
        self.index = DeliverAfterIndex(cursor, committed, files=self._files, limits=self._limits)
        for segment in self._files.segments(committed) if self._files else ():
            if segment.start >= self.index.end:
                self.read(now_ms, segment.start)
                self.index.close()
                self.index.adopt(segment)
        self.read(now_ms)


def pairs(entries):
    return [(int(time_ms), int(offset)) for time_ms, offset in entries]


#: When a record is to be delivered, from when it is produced: often before, and often equal.
delays = st.one_of(st.integers(-1_500, 3_000), st.sampled_from([-1_000, -1_000, 0, 500]))
steps = st.one_of(
    st.tuples(st.just("produce"), st.lists(delays, min_size=1, max_size=12)),
    st.tuples(st.just("wait"), st.integers(1, 1_200)),
    st.tuples(st.just("take"), st.integers(1, 6)),
    st.tuples(st.just("restart"), st.integers(0, 5)),
    st.tuples(st.sampled_from(["lose a file", "damage a file"]), st.integers(0, 5)),
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(steps, min_size=5, max_size=60), st.booleans())
def test_any_interleaving_gives_the_sorted_order(script, with_files):
    with TemporaryDirectory() as directory:
        run = Run(files_in(directory) if with_files else None)
        for step, argument in script:
            getattr(run, step.replace(" ", "_"))(argument)
        run.drain()


class Run:
    """Model and index, which must be equal after every step."""

    def __init__(self, files):
        self.now_ms = 5_000
        self.model = Model()
        self.subject = Subject(self.model.log, files)
        self._files = files
        #: After each record returned: its cursor, the offset to commit, and what was delivered.
        self._commits = [(Cursor.start(0), 0, [])]

    def produce(self, delays):
        self.model.log += [self.now_ms + each for each in delays]

    def wait(self, ms):
        self.now_ms += ms

    def take(self, limit):
        self.subject.read(self.now_ms)
        before = list(self.model.delivered)
        expected = self.model.take(self.now_ms, limit)
        batch = self.subject.index.take(self.now_ms, limit)
        assert pairs(batch.entries) == expected
        assert all(time_ms <= self.now_ms for time_ms, _ in expected)
        for position in range(len(expected)):
            self._check_cursor(batch.cursor(position), before, expected, position)
        return expected

    def restart(self, back):
        del self._commits[max(1, len(self._commits) - back) :]
        cursor, committed, delivered = self._commits[-1]
        self.model.restart(cursor, delivered)
        self.subject.restart(cursor, committed, self.now_ms)

    def lose_a_file(self, which):
        self._harm(which, lambda path: path.unlink())

    def damage_a_file(self, which):
        self._harm(which, damage)

    def drain(self):
        self.now_ms = DOOMSDAY_MS
        while self.take(7):
            pass
        log = [(time_ms, offset) for offset, time_ms in enumerate(self.model.log)]
        assert sorted(self.model.delivered) == sorted(log)

    def _check_cursor(self, cursor, before, batch, position):
        done = before + batch[: position + 1]
        log = entries_of(self.model.log, range(len(self.model.log)))
        assert sorted(pairs(log[cursor.delivered(log)])) == sorted(done)
        left = [offset for _, offset in batch[position + 1 :]]
        committed = min([self.subject.index.first_pending(), *left])
        assert {offset for _, offset in done}.issuperset(range(committed))
        self._commits.append((cursor, committed, done))

    def _harm(self, which, harm):
        found = sorted(Path(self._files.location).rglob("*.parquet")) if self._files else []
        if found:
            harm(found[which % len(found)])
            # As a reader does when it detects the damage.
            self.restart(0)


def test_groups_do_not_share_segments(tmp_path):
    subject = Subject([5], files_in(str(tmp_path), "shop/eu"), records=1)
    subject.read(0)
    assert len(list(files_in(str(tmp_path), "shop/eu").segments(0))) == 1
    assert list(files_in(str(tmp_path)).segments(0)) == []
    # Committed segments are not needed.
    assert list(files_in(str(tmp_path), "shop/eu").segments(1)) == []
    assert list(tmp_path.rglob("*.parquet")) == []


def test_a_lost_segment_leaves_the_others_complete():
    index, is_lost = DeliverAfterIndex(Cursor.start(0), 0), True

    def lost():
        if is_lost:
            raise SegmentLost("file")
        return entries_of([20], [1])

    first = ClosedSegment(
        start=0, end=1, count=1, first_ms=10, last_ms=10, load=lambda: entries_of([10], [0])
    )
    index.adopt(first)
    index.adopt(ClosedSegment(start=1, end=2, count=1, first_ms=20, last_ms=20, load=lost))
    with pytest.raises(SegmentLost):
        index.take(1_000, 10)
    assert index.first_pending() == 0
    is_lost = False
    assert pairs(index.take(1_000, 10).entries) == [(10, 0), (20, 1)]

"""The spool in any order of calls, with crashes between them, against a model in memory."""

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.support.spooling import MIB, record

from duetime.api.spool import Spool

#: States of a record that the API has accepted, beside the instant when it was taken, in ms.
NEW, SET_ASIDE = "new", "set aside"

#: The numbers of records: so few that most meet an earlier one.
NUMBERS = range(8)

#: The files of SQLite's write-ahead log, beside the one that is named.
FILES = "", "-wal"


class SpoolStates(RuleBasedStateMachine):
    """A spool, and what must be in it: the state of each id, in the order of arrival."""

    def __init__(self):
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.crashes = 0
        self.spool = Spool(self.path, MIB)
        self.states = {}
        self.numbers = {}
        self.clock_ms = 0

    @property
    def path(self):
        return self.directory / f"spool-{self.crashes}.db"

    @property
    def taken(self):
        return {id_: at for id_, at in self.states.items() if isinstance(at, int)}

    @property
    def new(self):
        return [id_ for id_, state in self.states.items() if state == NEW]

    def instant(self):
        self.clock_ms += 1
        return self.clock_ms

    @rule(
        numbers=st.lists(st.sampled_from(NUMBERS), min_size=1, max_size=3, unique=True),
        was_given=st.booleans(),
    )
    def put(self, numbers, was_given):
        taken_ms = self.instant() if was_given else None
        found = self.spool.put((record(each), taken_ms) for each in numbers)
        for each, number in zip(numbers, found, strict=True):
            id_ = str(record(each).id)
            is_there = self.states.get(id_, SET_ASIDE) != SET_ASIDE
            assert (number is None) == is_there
            if not is_there:
                self.states.pop(id_, None)
                self.states[id_] = taken_ms or NEW
                self.numbers[id_] = number

    @rule(most=st.integers(1, 4), max_bytes=st.sampled_from([1, MIB]))
    def take(self, most, max_bytes):
        now_ms = self.instant()
        found = [str(each.record.id) for each in self.spool.take(most, now_ms, max_bytes)]
        assert found == self.new[: most if max_bytes > 1 else 1]
        self.states |= dict.fromkeys(found, now_ms)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def remove(self, data):
        gone = data.draw(st.lists(st.sampled_from(sorted(self.taken)), unique=True))
        self.spool.remove(self.numbers[each] for each in gone)
        for each in gone:
            del self.states[each]

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def set_aside(self, data):
        id_ = data.draw(st.sampled_from(sorted(self.taken)))
        self.spool.set_aside(self.numbers[id_])
        self.states[id_] = SET_ASIDE

    @rule(number=st.sampled_from(NUMBERS))
    def withdraw(self, number):
        id_ = str(record(number).id)
        assert self.spool.withdraw(record(number).id) == (self.states.get(id_) == NEW)
        if self.states.get(id_) == NEW:
            del self.states[id_]

    @rule(data=st.data(), taken_meanwhile=st.integers(0, 2))
    def crash_and_settle(self, data, taken_meanwhile):
        self.crash()
        unconfirmed = self.spool.unconfirmed()
        arrived = set()
        if unconfirmed:
            arrived = set(data.draw(st.lists(st.sampled_from(sorted(unconfirmed)), unique=True)))
        if taken_meanwhile:
            self.take(taken_meanwhile, MIB)
        self.spool.settle(unconfirmed, arrived)
        for id_ in unconfirmed:
            self.states[id_] = NEW
        for id_ in arrived:
            del self.states[id_]

    @rule()
    def crash(self):
        """Go on with the files as they are on the disk at this instant."""
        before, self.crashes = self.path, self.crashes + 1
        for each in FILES:
            shutil.copy(f"{before}{each}", f"{self.path}{each}")
        self.spool.close()
        self.spool = Spool(self.path, MIB)

    @invariant()
    def nothing_is_lost_or_made_up(self):
        waiting = {id_ for id_, state in self.states.items() if state != SET_ASIDE}
        assert self.spool.depth() == len(waiting)
        assert self.spool.unconfirmed() == self.taken
        for number in NUMBERS:
            id_ = record(number).id
            found = self.spool.find(id_)
            assert (found is not None) == (str(id_) in waiting)
            assert found is None or found == record(number)

    def teardown(self):
        self.spool.close()
        shutil.rmtree(self.directory)


class TestSpoolStates(SpoolStates.TestCase):
    settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

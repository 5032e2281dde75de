"""The judge of histories: it accepts what may be, and finds what may not."""

import pytest

from duetime.bench.history import VIOLATIONS, Kind, Operation, judge
from duetime.bench.testbed import Arrival
from duetime.core.errors import KafkaError, TooLate, UnknownMessage
from duetime.core.messages import MessageId

ID, OTHER = (str(MessageId(due_ms=1_000, unique=each)) for each in ("a", "b"))
NEW = str(MessageId(due_ms=9_000, unique="a~1"))

NO_ANSWER, LATE, UNKNOWN = KafkaError("no answer"), TooLate("late"), UnknownMessage("unknown")

PRODUCED = Operation(Kind.PRODUCE, ID, 0, 1)
UNSURE = Operation(Kind.PRODUCE, ID, 0, 1, NO_ANSWER)


def cancelled(error=None):
    return Operation(Kind.CANCEL, ID, 2, 3, error)


def rescheduled(error=None):
    return Operation(Kind.RESCHEDULE, ID, 2, 3, error, None if error else NEW)


def arrivals(*ids, late_ms=0):
    return [Arrival(MessageId.parse(each).due_ms, late_ms, each.encode()) for each in ids]


@pytest.mark.parametrize(
    ("history", "delivered"),
    [
        ([PRODUCED], [ID]),
        ([UNSURE], []),
        ([UNSURE], [ID]),
        ([PRODUCED, cancelled()], []),
        ([PRODUCED, cancelled(LATE)], [ID]),
        ([PRODUCED, cancelled(LATE)], []),
        ([PRODUCED, cancelled(NO_ANSWER)], []),
        ([PRODUCED, rescheduled()], [NEW]),
        ([PRODUCED, rescheduled()], [ID, NEW]),
        ([PRODUCED, rescheduled(LATE)], [ID]),
        ([PRODUCED, rescheduled(NO_ANSWER)], [NEW]),
        ([PRODUCED, rescheduled(NO_ANSWER)], [ID]),
    ],
)
def test_what_may_be_is_accepted(history, delivered):
    figures, stories = judge(history, arrivals(*delivered))
    assert {name: figures[name] for name in VIOLATIONS} == dict.fromkeys(VIOLATIONS, 0)
    assert stories == []


@pytest.mark.parametrize(
    ("history", "delivered", "violation"),
    [
        ([PRODUCED], [], "lost"),
        ([PRODUCED], [ID, ID], "duplicated"),
        ([UNSURE], [ID, ID], "duplicated"),
        ([PRODUCED, cancelled()], [ID], "uncancelled"),
        ([PRODUCED, cancelled(LATE)], [ID, ID], "duplicated"),
        ([PRODUCED, rescheduled()], [ID], "lost"),
        ([PRODUCED, rescheduled()], [NEW, NEW], "duplicated"),
        ([PRODUCED, rescheduled(UNKNOWN)], [], "lost"),
        ([PRODUCED, rescheduled(NO_ANSWER)], [NEW, NEW], "duplicated"),
        ([PRODUCED], [ID, OTHER], "unexpected"),
        ([PRODUCED], [ID, NEW], "unexpected"),
    ],
)
def test_what_may_not_be_is_found(history, delivered, violation):
    figures, (story,) = judge(history, arrivals(*delivered))
    assert {name: figures[name] for name in VIOLATIONS} == dict.fromkeys(VIOLATIONS, 0) | {
        violation: 1
    }
    assert story.startswith(f"{violation}: ")


def test_an_early_delivery_is_found_and_told():
    figures, (story,) = judge([PRODUCED], arrivals(ID, late_ms=-1))
    assert figures["early"] == 1
    assert story == f"early: {ID}: produce at 0.0, 1.0 s: done"


def test_operations_are_counted_by_kind_and_answer():
    figures, _ = judge([PRODUCED, cancelled(LATE), cancelled()], [])
    assert (figures["produce_done"], figures["cancel_done"], figures["cancel_failed"]) == (1, 1, 1)

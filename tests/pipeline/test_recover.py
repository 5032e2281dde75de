"""What was in flight when intake ended, without a broker: which cancels are heard, and of what."""

from datetime import UTC, datetime

import pytest
from tests.conftest import RECORD

from duetime.config import Settings
from duetime.message import MessageId
from duetime.pipeline.intake import Intake
from duetime.pipeline.recover import _cancelled, _first_of_its_id
from duetime.topics import TopicNames

pytestmark = pytest.mark.system

SETTINGS = Settings()

#: When all that is sent here was sent, and a while later.
SENT, LATER_MS = datetime(2026, 1, 1, tzinfo=UTC), 3_600_000
SENT_MS = int(SENT.timestamp()) * 1_000


@pytest.fixture(scope="module")
def intake(spark):  # noqa: ARG001 (its columns need one)
    return Intake(SETTINGS)


def cancels(spark, *of):
    """Records of the control topic; each cancels an id, or its retry at an instant."""
    rows = []
    for offset, (identity, retry_ms) in enumerate(of):
        at = [] if retry_ms is None else [("due-at-ms", b"%d" % retry_ms)]
        headers = [("due-op", b"cancel"), *at]
        place = TopicNames(SETTINGS).control, 0, offset, SENT
        rows.append((*place, str(identity).encode(), None, headers))
    return spark.createDataFrame(rows, RECORD)


class Sieve:
    """What was sent to the control topic."""

    def __init__(self, sent):
        self._sent = sent

    def taken_in(self, _topic, _since_ms):
        return self._sent


def test_a_cancel_of_a_retry_is_of_no_message_that_is_taken_in(spark, intake):
    first, second = (MessageId(due_ms=SENT_MS + ms, unique="daily") for ms in (10_000, LATER_MS))
    # The second message is due when the first one is tried again.
    sent = cancels(spark, (first, second.due_ms))
    assert _cancelled(Sieve(sent), SETTINGS, intake, SENT_MS).collect() == []
    sent = cancels(spark, (first, second.due_ms), (second, None), (second, second.due_ms))
    found = _cancelled(Sieve(sent), SETTINGS, intake, SENT_MS).collect()
    assert [row.id for row in found] == [str(second)]


def test_a_cancel_that_came_too_late_is_not_heard(spark, intake):
    near = MessageId(due_ms=SENT_MS + SETTINGS.horizon_ms - 1, unique="near")
    far = MessageId(due_ms=SENT_MS + SETTINGS.horizon_ms, unique="far")
    sent = cancels(spark, (near, None), (far, None))
    found = _cancelled(Sieve(sent), SETTINGS, intake, SENT_MS).collect()
    assert [row.id for row in found] == [str(far)]


def test_of_cancels_of_one_id_those_of_other_instants_are_kept(spark, intake, now_ms):
    identity = MessageId(due_ms=now_ms + LATER_MS, unique="m")
    instants = [None, now_ms + 2 * LATER_MS, now_ms + 3 * LATER_MS, now_ms + 2 * LATER_MS, None]
    sent = cancels(spark, *((identity, each) for each in instants))
    asked = sent.transform(intake.understood).transform(intake.judged).transform(intake.identified)
    left = asked.where("is_cancel").transform(_first_of_its_id)
    assert sorted(row.offset for row in left.collect()) == [0, 1, 2]

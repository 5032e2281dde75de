"""`duetime bench failover`: the leader is cut off from the broker, and works on."""

import pytest

from duetime.bench.chaos import failover
from duetime.bench.history import VIOLATIONS

pytestmark = pytest.mark.timeout(1_200)


@pytest.mark.parametrize("is_transactional", [True, False])
def test_a_leader_that_is_cut_off_loses_nothing_and_sends_nothing_twice(
    monkeypatch, is_transactional
):
    monkeypatch.setenv("DUETIME_TRANSACTIONAL_DELIVERY", str(is_transactional).lower())
    found = failover(None, times=1, rate=200, pause="0s", cut="20s")
    assert found["delivered"] == found["sent"]
    assert (found["lost"], found["duplicated"], found["early"]) == (0, 0, 0)
    assert {found["history"][name] for name in VIOLATIONS} == {0}

"""`duetime bench failover`: the leader is cut off from the broker, and works on."""

import pytest

from duetime.bench.chaos import failover
from duetime.bench.history import VIOLATIONS

pytestmark = pytest.mark.timeout(1_200)


@pytest.mark.parametrize("is_transactional", [True, False])
def test_a_leader_that_is_cut_off_loses_nothing(monkeypatch, is_transactional):
    """Only the broker can refuse the requests that the network holds until the cut is healed.

    It does so in transactions. Otherwise their messages may come twice (docs/guarantees.md).
    """
    monkeypatch.setenv("DUETIME_TRANSACTIONAL_DELIVERY", str(is_transactional).lower())
    found = failover(None, times=1, rate=200, pause="0s", cut="20s")
    assert found["delivered"] == found["sent"]
    excluded = {*VIOLATIONS} if is_transactional else {*VIOLATIONS} - {"duplicated"}
    assert {found[each] for each in excluded & found.keys()} == {0}
    assert {found["history"][each] for each in excluded} == {0}

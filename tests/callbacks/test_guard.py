"""Which addresses a stranger may name."""

from ipaddress import ip_address

import pytest

from duetime.callbacks.guard import Guarded
from duetime.config import Settings


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "169.254.169.254", "::1", "fe80::1", "::ffff:127.0.0.1",
     "fd00:ec2::254", "100.100.100.200", "224.0.0.1", "2002:7f00:1::", "2002:a9fe:a9fe::",
     "64:ff9b::a9fe:a9fe", "fd20:ce::254", "168.63.129.16", "2001:0:7f00:1::"],
)  # fmt: skip
def test_special_addresses_are_not_allowed(address):
    guarded = Guarded(Settings(), 1)
    assert not guarded.is_allowed(ip_address(address))


@pytest.mark.parametrize(
    "address", ["10.1.2.3", "93.184.216.34", "2606:2800:220:1::1", "64:ff9b::5db8:d822"]
)
def test_other_addresses_are(address):
    assert Guarded(Settings(), 1).is_allowed(ip_address(address))

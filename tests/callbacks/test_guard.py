"""Which addresses a stranger may name."""

from ipaddress import ip_address

import pytest

from duetime.callbacks.guard import Guarded
from duetime.config import Settings


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "169.254.169.254", "::1", "fe80::1", "::ffff:127.0.0.1",
     "fd00:ec2::254", "100.100.100.200", "224.0.0.1", "2002:7f00:1::", "2002:a9fe:a9fe::",
     "64:ff9b::a9fe:a9fe", "fd20:ce::254", "168.63.129.16", "2001:0:7f00:1::", "::",
     "240.0.0.1", "ff02::1"],
)  # fmt: skip
def test_special_addresses_are_not_allowed(address):
    guarded = Guarded(Settings(), 1)
    assert not guarded.is_allowed(ip_address(address))


PRIVATE = {
    "10.1.2.3": "10.0.0.0/8",
    "172.16.0.1": "172.16.0.0/12",
    "172.31.255.255": "172.16.0.0/12",
    "192.168.0.1": "192.168.0.0/16",
    "100.64.0.1": "100.64.0.0/10",
    "198.18.0.1": "198.18.0.0/15",
    "fd12::1": "fc00::/7",
    "fec0::1": "fec0::/10",
    "::ffff:10.1.2.3": "10.0.0.0/8",
    "64:ff9b::a01:203": "10.0.0.0/8",
}


@pytest.mark.parametrize("address", PRIVATE)
def test_private_networks_are_reached_only_where_they_are_configured(address):
    assert not Guarded(Settings(), 1).is_allowed(ip_address(address))
    elsewhere = Settings(callback_networks=["127.0.0.0/8", "10.9.0.0/16", "fd00:9::/32"])
    assert not Guarded(elsewhere, 1).is_allowed(ip_address(address))

    there = Settings(callback_networks=[PRIVATE[address]])
    assert Guarded(there, 1).is_allowed(ip_address(address))


@pytest.mark.parametrize(
    "address", ["172.32.0.1", "93.184.216.34", "2606:2800:220:1::1", "64:ff9b::5db8:d822"]
)
def test_other_addresses_are(address):
    assert Guarded(Settings(), 1).is_allowed(ip_address(address))

"""Webhooks are protected against hostile URLs and servers."""

import socket
import threading
import time
from ipaddress import ip_address

import pytest
from tests.support.clocks import eventually

from duetime.core.settings import Settings
from duetime.pipeline.ssrf import SsrfSafeTransport
from duetime.pipeline.webhooks import Webhook, WebhookWorker


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "169.254.169.254", "::1", "fe80::1", "::ffff:127.0.0.1",
     "fd00:ec2::254", "100.100.100.200", "224.0.0.1", "2002:7f00:1::", "2002:a9fe:a9fe::",
     "64:ff9b::a9fe:a9fe", "fd20:ce::254", "168.63.129.16", "2001:0:7f00:1::", "::",
     "240.0.0.1", "ff02::1"],
)  # fmt: skip
def test_special_addresses_are_not_allowed(address):
    transport = SsrfSafeTransport(Settings(), 1)
    assert not transport.is_allowed(ip_address(address))


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
def test_private_networks_are_allowed_only_where_they_are_configured(address):
    assert not SsrfSafeTransport(Settings(), 1).is_allowed(ip_address(address))
    elsewhere = Settings(webhook_networks=["127.0.0.0/8", "10.9.0.0/16", "fd00:9::/32"])
    assert not SsrfSafeTransport(elsewhere, 1).is_allowed(ip_address(address))

    there = Settings(webhook_networks=[PRIVATE[address]])
    assert SsrfSafeTransport(there, 1).is_allowed(ip_address(address))


@pytest.mark.parametrize(
    "address", ["172.32.0.1", "93.184.216.34", "2606:2800:220:1::1", "64:ff9b::5db8:d822"]
)
def test_other_addresses_are_allowed(address):
    assert SsrfSafeTransport(Settings(), 1).is_allowed(ip_address(address))


@pytest.fixture
def dripping_server():
    """A server that answers one byte at a time, without end; gives its port."""
    closing = threading.Event()

    def drip(server):
        connection, _ = server.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 200 OK\r\nx-long: ")
            while not closing.wait(0.05):
                try:
                    connection.sendall(b"x")
                except OSError:
                    return

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=drip, args=[server])
        thread.start()
        yield server.getsockname()[1]
        closing.set()
        thread.join()


def test_a_server_that_drips_its_answer_is_given_up_in_time(dripping_server, caplog):
    settings = Settings(
        bootstrap="127.0.0.1:1",
        webhook_networks=["127.0.0.0/8"],
        webhook_attempts=1,
        webhook_timeout_seconds=0.3,
    )
    worker = WebhookWorker(settings)
    url = f"http://127.0.0.1:{dripping_server}/"
    webhook = Webhook(url, b"host", b"{}", "id")
    worker._pending.append(webhook)

    def is_done():
        worker._send(time.monotonic())
        return webhook.is_done

    eventually(is_done, within_s=10.0)
    assert [each.message for each in caplog.records if "given up" in each.message]
    worker.close()

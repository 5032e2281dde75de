"""Protection against server-side request forgery (OWASP SSRF): which URLs a webhook may reach.

The URL comes from a sender, and must not reach what only this machine or its network can. Hosts are
those on the allow-list. Addresses are those of the Internet and of `webhook_networks`. A request
connects to the very address that was checked, and follows no redirect.
"""

import fnmatch
import ipaddress
import socket

import httpx

from duetime.core.settings import Settings

#: Addresses at which clouds give a machine its credentials, besides the link-local ones.
METADATA = frozenset(
    map(
        ipaddress.ip_address,
        (
            "100.100.100.200",  # Alibaba Cloud
            "168.63.129.16",  # Azure
            "192.0.0.192",  # Oracle Cloud
            "fd00:42::42",  # Scaleway
            "fd00:c1::a9fe:a9fe",  # Oracle Cloud
            "fd00:ec2::23",  # AWS EKS
            "fd00:ec2::254",  # AWS EC2
            "fd20:ce::254",  # Google Cloud
        ),
    )
)

#: IPv6 addresses that a network without IPv4 translates to IPv4 (RFC 6052).
NAT64 = ipaddress.ip_network("64:ff9b::/96")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class AddressRefused(httpx.TransportError):
    """The host has an address that webhooks may not connect to."""


class SsrfSafeTransport(httpx.BaseTransport):
    """HTTP to the addresses that a sender may name."""

    def __init__(self, settings: Settings, max_connections: int) -> None:
        self._networks = settings.webhook_networks
        self._http = httpx.HTTPTransport(
            # A kept connection is found by its address, not by the name in its certificate.
            limits=httpx.Limits(max_connections=max_connections, max_keepalive_connections=0)
        )

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Resolve the host, check all its addresses, and connect to the first.

        Raises AddressRefused, and httpx.TransportError where the host cannot be reached.
        """
        url = request.url
        request.url = url.copy_with(host=str(self._resolve(url.host, _port(url))))
        request.extensions |= {"sni_hostname": url.host}
        return self._http.handle_request(request)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _resolve(self, host: str, port: int) -> Address:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise httpx.ConnectError("its host is not known") from error
        # A link-local address is followed by a `%` and the interface.
        addresses = [ipaddress.ip_address(str(each[4][0]).partition("%")[0]) for each in found]
        for each in addresses:
            if not self.is_allowed(each):
                raise AddressRefused(
                    f"its host is at {each}, which webhook_networks does not allow"
                )
        return addresses[0]

    def is_allowed(self, address: Address) -> bool:
        """Return whether webhooks may connect there; an address within an address counts too."""
        return all(
            any(each in network for network in self._networks) or _is_public(each)
            for each in _targets(address)
        )


def is_listed(url: str, settings: Settings) -> bool:
    """Return whether `url` is http(s) to a host of `webhook_hosts`.

    A host that is listed without a port stands for ports 80 and 443.
    """
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, UnicodeError):
        return False
    if parsed.scheme not in ("http", "https"):
        return False
    host, port = parsed.host.lower(), _port(parsed)
    names = [f"{host}:{port}"] + ([host] if port in (80, 443) else [])
    return any(
        fnmatch.fnmatchcase(name, pattern.lower())
        for name in names
        for pattern in settings.webhook_hosts
    )


def _port(url: httpx.URL) -> int:
    return url.port or (443 if url.scheme == "https" else 80)


def _targets(address: Address) -> list[Address]:
    """Return where packets to an address end: itself, and the IPv4 address written in it."""
    if isinstance(address, ipaddress.IPv4Address):
        return [address]
    if address.ipv4_mapped:
        return [address.ipv4_mapped]
    if address in NAT64:
        return [ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)]
    embedded = [address.sixtofour, *(address.teredo or ())]
    return [address, *(each for each in embedded if each)]


def _is_public(address: Address) -> bool:
    """Return whether it is an address of the Internet, and no special one.

    Not global are loopback, link-local and private addresses (10/8, 172.16/12, 192.168/16,
    fc00::/7) and those that a provider shares among its customers (100.64/10).
    """
    is_site_local = isinstance(address, ipaddress.IPv6Address) and address.is_site_local
    return address.is_global and not (
        address.is_multicast or address.is_reserved or is_site_local or address in METADATA
    )

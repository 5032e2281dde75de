"""HTTP to no more than callbacks may reach.

The URL is a sender's, and must not reach what only this machine or its network can: hosts are those
on the allow-list, addresses are those of the Internet and of `callback_networks`, the address that
is connected to is the one that was checked, and no redirect is followed.
"""

import asyncio
import fnmatch
import ipaddress
import socket

import httpx

from duetime.config import Settings

#: Addresses where clouds tell a machine its secrets, besides the link-local ones.
METADATA = tuple(
    map(
        ipaddress.ip_address,
        (
            "100.100.100.200",
            "168.63.129.16",
            "192.0.0.192",
            "fd00:42::42",
            "fd00:c1::a9fe:a9fe",
            "fd00:ec2::23",
            "fd00:ec2::254",
            "fd20:ce::254",
        ),
    )
)

#: Addresses of the IPv4 Internet on a network without it (RFC 6052).
NAT64 = ipaddress.ip_network("64:ff9b::/96")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Refused(httpx.TransportError):
    """The host is at an address that may not be connected to."""


class Guarded(httpx.AsyncBaseTransport):
    """HTTP to addresses that a stranger may name."""

    def __init__(self, settings: Settings, connections: int) -> None:
        self._networks = settings.callback_networks
        self._http = httpx.AsyncHTTPTransport(
            # Kept ones are told apart by address, and not by the name in their certificate.
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=0)
        )

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Look the host up, check what was found, and connect to just that."""
        url = request.url
        request.url = url.copy_with(host=str(await self._address(url.host, _port(url))))
        request.extensions |= {"sni_hostname": url.host}
        return await self._http.handle_async_request(request)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _address(self, host: str, port: int) -> Address:
        try:
            found = await asyncio.get_running_loop().getaddrinfo(
                host, port, type=socket.SOCK_STREAM
            )
        except OSError as error:
            raise httpx.ConnectError("its host is not known") from error
        # A link-local one has the interface behind a `%`.
        addresses = [ipaddress.ip_address(str(each[4][0]).partition("%")[0]) for each in found]
        for address in addresses:
            if not self.is_allowed(address):
                raise Refused(f"its host is at {address}, which callback_networks does not allow")
        return addresses[0]

    def is_allowed(self, address: Address) -> bool:
        """Whether a stranger may name it; an address within an address counts as well."""
        return all(
            any(each in network for network in self._networks) or _is_ordinary(each)
            for each in _meant(address)
        )


def is_listed(url: str, settings: Settings) -> bool:
    """Whether the URL is http(s) to a host of `callback_hosts`; without a port there, 80 or 443."""
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
        for pattern in settings.callback_hosts
    )


def _port(url: httpx.URL) -> int:
    return url.port or (443 if url.scheme == "https" else 80)


def _meant(address: Address) -> list[Address]:
    """Where packets to an address end: itself, and the IPv4 address that is written in it."""
    if isinstance(address, ipaddress.IPv4Address):
        return [address]
    if address.ipv4_mapped:
        return [address.ipv4_mapped]
    if address in NAT64:
        return [ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)]
    within = [address.sixtofour, *(address.teredo or ())]
    return [address, *(each for each in within if each)]


def _is_ordinary(address: Address) -> bool:
    """Whether it is an address of the Internet: no network of somebody's own, and nothing special.

    Not global are loopback, link-local and private ones (10/8, 172.16/12, 192.168/16, fc00::/7) and
    those that a provider shares among its customers (100.64/10).
    """
    is_site_local = isinstance(address, ipaddress.IPv6Address) and address.is_site_local
    return address.is_global and not (
        address.is_multicast or address.is_reserved or is_site_local or address in METADATA
    )

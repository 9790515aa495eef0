"""The nodes behind a name, such as a headless Service's: its addresses, which a thread asks for again and again."""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from kvoffd.system.threads import AbandonableThreads
from kvoffd.tiers.store import name_of

RETRY_S = 5.0
"""Longest pause after a name could not be resolved."""
MAX_ADDRESSES = 4096
"""Addresses of one name that are kept."""


class PeerName(NamedTuple):
    """A name of several nodes, with their port.

    Attributes:
        text: as it is configured.
    """

    text: str
    host: str
    port: int


class Resolved(NamedTuple):
    """The answer about a name.

    Attributes:
        addresses: ``host:port`` of each node but this one; None if the name could not be resolved.
        problem: why not, half a sentence.
    """

    addresses: Sequence[str] | None
    problem: str = ""


class NameResolver:
    """Resolves names in a thread, which a call of the resolver may hold for long.

    Args:
        listen: where this node lends, as ``host:port``; empty if it does not. Its own address is left out.
        every_s: interval at which it does so.
        on_answer: called in the thread with the index of a name and the answer.

    Raises NoMoreThreads.
    """

    def __init__(
        self, names: Sequence[PeerName], listen: str, every_s: float, on_answer: Callable[[int, Resolved], None]
    ) -> None:
        self._names, self._listen, self._every_s, self._on_answer = names, listen, every_s, on_answer
        self._closed = threading.Event()
        self._thread = AbandonableThreads([("kvoffd-names", self._run)], self._closed.set)

    def close(self) -> None:
        """End the thread, without waiting for it: it uses nothing of the daemon's."""
        self._closed.set()

    def _run(self) -> None:
        pause_s = 0.0
        while not self._closed.wait(pause_s):
            pause_s = self._every_s
            for number, name in enumerate(self._names):
                try:
                    answer = resolve(name, self._listen)
                except Exception as error:  # the next may succeed
                    answer = Resolved(None, str(error) or type(error).__name__)
                if answer.addresses is None:
                    pause_s = min(pause_s, RETRY_S)
                if self._closed.is_set():
                    return
                self._on_answer(number, answer)


def resolve(name: PeerName, listen: str) -> Resolved:
    """Return the addresses of a name, without this node's, which lends at ``listen``."""
    try:
        found = socket.getaddrinfo(name.host, name.port, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:  # an invalid host name is a ValueError
        return Resolved(None, str(getattr(error, "strerror", None) or error))
    hosts = dict.fromkeys(str(place[0]) for *_, place in found)
    kept = [host for host in _of_one_kind(hosts, name.port, listen) if not is_own(host, name.port, listen=listen)]
    return Resolved([name_of((host, name.port)) for host in kept[:MAX_ADDRESSES]])


def _of_one_kind(hosts: Iterable[str], port: int, listen: str) -> list[str]:
    """Return the IPv4 or the IPv6 addresses: a node that has both is one node.

    If this node lends at an address of one kind, the others, with the same settings, do too: that kind is returned.
    Otherwise it is the kind with more addresses: some nodes may have only one kind, as while a cluster gets the other.
    If there are as many of both, or this node has no route to the IPv6 ones, it is IPv4.
    """
    ipv4, ipv6 = list[str](), list[str]()
    for host in hosts:
        if "%" not in host:  # else it is an address of a single link
            (ipv6 if ":" in host else ipv4).append(host)
    if (at := _listening_at(listen)) is not None and ipv4 and ipv6:
        return ipv4 if at.version == 4 else ipv6
    return ipv6 if len(ipv6) > len(ipv4) and (not ipv4 or _own_address(ipv6[0], port)) else ipv4


def is_own(host: str, port: int, *, listen: str) -> bool:
    """Return whether this node, which lends at ``listen``, is at an address."""
    if listen.rpartition(":")[2] != str(port):
        return False
    at, one = _listening_at(listen), ipaddress.ip_address(host)
    if at is not None and at.version == one.version and not at.is_unspecified:
        return at == one
    return _own_address(host, port) == host


def _listening_at(listen: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address of ``host:port`` if it is of one kind; None for a name, and for all addresses of both."""
    with suppress(ValueError):
        at = ipaddress.ip_address(listen.rpartition(":")[0].strip("[]"))
        if at.version == 4 or not at.is_unspecified:
            return at
    return None


def _own_address(host: str, port: int) -> str:
    """Return the address that this node has on the way to a host: the host's, if it is this node. Empty for no way."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return ""

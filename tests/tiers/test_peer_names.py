"""The addresses of a name of many nodes, as a headless Service's."""

from __future__ import annotations

import socket
from collections import deque
from functools import partial
from typing import Any

import pytest

from kvoffd.tiers import peer_names
from kvoffd.tiers.peer_names import MAX_ADDRESSES, NameResolver, PeerName, Resolved, is_own, resolve
from tests.kit.waiting import wait_until

NAME = PeerName("dns+engines:7400", "engines", 7400)


def answer_with(monkeypatch: pytest.MonkeyPatch, *hosts: str) -> None:
    def getaddrinfo(host: str, port: int, **_: Any) -> list[tuple[Any, ...]]:
        assert (host, port) == ("engines", 7400)
        return [
            (socket.AF_INET6 if ":" in one else socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in hosts
        ]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


@pytest.mark.parametrize(
    ("hosts", "addresses"),
    [
        (["10.0.0.1", "10.0.0.2", "10.0.0.1"], ["10.0.0.1:7400", "10.0.0.2:7400"]),
        (["fd00::1", "10.0.0.2", "fd00::2", "10.0.0.1"], ["10.0.0.2:7400", "10.0.0.1:7400"]),
        (["fd00::1", "10.0.0.2", "fe80::1%eth0", "fe80::2%eth0"], ["10.0.0.2:7400"]),
        (["10.0.0.2", "fd00::1", "10.0.0.3"], ["10.0.0.2:7400", "10.0.0.3:7400"]),
        (["fd00::1", "fe80::1%eth0"], ["[fd00::1]:7400"]),
        ([], []),
    ],
)
def test_each_node_has_one_address(monkeypatch: pytest.MonkeyPatch, hosts: list[str], addresses: list[str]) -> None:
    answer_with(monkeypatch, *hosts)
    assert resolve(NAME, "") == Resolved(addresses)


@pytest.mark.parametrize("has_ipv6", [True, False])
def test_of_both_kinds_the_one_with_more_nodes_is_kept_if_there_is_a_way(
    monkeypatch: pytest.MonkeyPatch, has_ipv6: bool
) -> None:
    """A node that got no IPv4 address yet has blocks too, and must hear of clears."""
    answer_with(monkeypatch, "10.0.0.1", "fd00::1", "fd00::2")
    monkeypatch.setattr(peer_names, "_own_address", lambda host, port: "fd00::9" if has_ipv6 else "")
    kept = ["[fd00::1]:7400", "[fd00::2]:7400"] if has_ipv6 else ["10.0.0.1:7400"]
    assert resolve(NAME, "") == Resolved(kept)


@pytest.mark.parametrize(
    ("listen", "kept"),
    [
        ("10.0.0.1:7400", ["10.0.0.2:7400"]),
        ("0.0.0.0:7400", ["10.0.0.1:7400", "10.0.0.2:7400"]),
        ("[fd00::1]:7400", ["[fd00::2]:7400", "[fd00::3]:7400"]),
        ("[::]:7400", ["[fd00::1]:7400", "[fd00::2]:7400", "[fd00::3]:7400"]),
        ("*:7400", ["[fd00::1]:7400", "[fd00::2]:7400", "[fd00::3]:7400"]),
    ],
)
def test_addresses_are_of_the_kind_at_which_nodes_lend(
    monkeypatch: pytest.MonkeyPatch, listen: str, kept: list[str]
) -> None:
    """The third node has IPv6 alone; that is no reason to look for the others where none of them listens."""
    answer_with(monkeypatch, "10.0.0.1", "fd00::1", "10.0.0.2", "fd00::2", "fd00::3")
    monkeypatch.setattr(peer_names, "_own_address", lambda host, port: "fd00::9")
    assert resolve(NAME, listen) == Resolved(kept)


def test_no_more_than_the_bound_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(monkeypatch, *(f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}" for n in range(MAX_ADDRESSES + 10)))
    found = resolve(NAME, "").addresses
    assert found is not None
    assert len(found) == MAX_ADDRESSES


def test_a_name_that_is_not_known_has_a_reason() -> None:
    found = resolve(NAME._replace(host="no-such-host.invalid"), "")
    assert found.addresses is None
    assert found.problem
    assert resolve(NAME._replace(host="a" * 70), "").addresses is None


@pytest.mark.parametrize(
    ("host", "listen", "own"),
    [
        ("127.0.0.1", "*:7400", True),
        ("127.0.0.1", ":7400", True),
        ("127.0.0.1", "127.0.0.1:7400", True),
        ("127.0.0.2", "127.0.0.1:7400", False),
        ("127.0.0.1", "*:7401", False),
        ("127.0.0.1", "", False),
        ("192.0.2.1", "*:7400", False),
        ("2001:db8::1", "[::]:7400", False),
        ("127.0.0.1", "localhost:7400", True),
        ("::1", "[0:0::1]:7400", True),
        ("127.0.0.1", "[::1]:7400", True),
        ("192.0.2.1", "[::1]:7400", False),
    ],
)
def test_a_node_leaves_itself_out(host: str, listen: str, own: bool) -> None:
    assert is_own(host, 7400, listen=listen) is own


def test_a_name_is_resolved_again_after_an_error_of_any_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_own(host: str, port: int, *, listen: str) -> bool:
        raise OSError(24, "Too many open files")

    answer_with(monkeypatch, "10.0.0.1")
    monkeypatch.setattr(peer_names, "RETRY_S", 0.01)
    heard: list[Resolved] = []
    with monkeypatch.context() as patch:
        patch.setattr(peer_names, "is_own", is_own)
        resolver = NameResolver([NAME], "*:7400", 60.0, lambda _, answer: heard.append(answer))
        wait_until(lambda: heard)
        assert heard[0].addresses is None
        assert "Too many open files" in heard[0].problem
    wait_until(lambda: heard[-1] == Resolved(["10.0.0.1:7400"]))
    resolver.close()


def test_names_are_resolved_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = deque([Resolved(["10.0.0.1:7400"]), Resolved(None, "gone"), Resolved([])])
    last = answers[-1]
    monkeypatch.setattr(peer_names, "resolve", lambda name, listen: answers.popleft() if answers else last)
    heard: list[tuple[int, Resolved]] = []
    resolver = NameResolver([NAME], "*:7400", 0.01, lambda number, answer: heard.append((number, answer)))
    wait_until(lambda: len(heard) > 3)
    assert [answer for _, answer in heard[:4]] == [Resolved(["10.0.0.1:7400"]), Resolved(None, "gone"), last, last]
    resolver.close()
    wait_until(partial(resolver._thread.join, 0.0))

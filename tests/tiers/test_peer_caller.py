"""Every node behind a name is called at a clear of all, and those that have not cleared are named."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock

import pytest
import zmq

from kvoffd.tiers import peer_caller
from kvoffd.tiers.peer_caller import MAX_NAMED, NOT_CALLED, Calls, PeerCaller
from kvoffd.tiers.peer_messages import GENERATION_BYTES, Follow, peer_socket
from kvoffd.tiers.peer_names import PeerName
from tests.kit.answering_nodes import AnsweringNodes, cleared
from tests.kit.ports import free_port
from tests.kit.waiting import wait_until

SECRET, FINGERPRINT, GENERATION = b"a secret of tests", b"f" * 32, 1_700_000_000
CLEARED_AT = 10**6 * GENERATION + 5


class Rig:
    """A name with nodes at addresses of the loopback."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        self.port = free_port()
        self.hosts = [f"127.0.1.{1 + number}" for number in range(count)]
        self.addresses = [f"{host}:{self.port}" for host in self.hosts]
        self.name = PeerName(f"dns+engines:{self.port}", "engines", self.port)
        monkeypatch.setattr(socket, "getaddrinfo", self._resolve)

    def _resolve(self, host: str, port: int, **_: Any) -> list[tuple[Any, ...]]:
        if not self.hosts:
            raise OSError("Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in self.hosts]

    @contextmanager
    def caller(self, secret: bytes = SECRET) -> Iterator[PeerCaller]:
        caller = PeerCaller([self.name], "", secret)
        try:
            yield caller
        finally:
            caller.close()

    def call(self, caller: PeerCaller, known: Sequence[str] = ()) -> Calls:
        calls = caller.call(FINGERPRINT, GENERATION, CLEARED_AT, [known])
        wait_until(lambda: calls.ended, 60.0)
        return calls


def test_all_nodes_are_called_once_and_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_caller, "CALLED_AT_ONCE", 4)
    monkeypatch.setattr(peer_caller, "CALLS_S", 60.0)
    monkeypatch.setattr(peer_caller, "CALL_S", 60.0)
    rig = Rig(monkeypatch, 30)
    made, most = list[zmq.Socket[bytes]](), 0

    def counted(*arguments: Any) -> zmq.Socket[bytes]:
        nonlocal most
        made.append(peer_socket(*arguments))
        most = max(most, sum(not one.closed for one in made))
        return made[-1]

    monkeypatch.setattr(peer_caller, "peer_socket", counted)
    with AnsweringNodes(SECRET, rig.addresses) as nodes, rig.caller() as caller:
        calls = rig.call(caller)
        assert Counter(nodes.asked) == Counter(rig.addresses)
        assert (len(made), most) == (30, 4)
        assert list(calls.unreached({})) == []


def test_a_node_that_has_not_cleared_yet_is_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_caller, "CALLS_S", 60.0)
    rig, asked = Rig(monkeypatch, 12), Counter[str]()

    def answer(address: str, follow: Follow) -> bytes | None:
        asked[address] += 1
        if address == rig.addresses[3] and asked[address] == 1:
            return bytes(GENERATION_BYTES) + b"\1"  # it has too many resets to follow
        if address == rig.addresses[5] and asked[address] == 1:
            return follow.generation.to_bytes(GENERATION_BYTES, "little") + b"\0"  # it is not written
        return b"" if address == rig.addresses[7] and asked[address] == 1 else cleared(address, follow)

    with AnsweringNodes(SECRET, rig.addresses, answer), rig.caller() as caller:
        assert list(rig.call(caller).unreached({})) == []
    assert {one for one, count in asked.items() if count > 1} == {rig.addresses[number] for number in (3, 5, 7)}


def test_a_node_whose_number_is_higher_is_called_again_with_one_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be an earlier clear's, by a clock that is ahead: the node would keep what it has stored since."""
    monkeypatch.setattr(peer_caller, "CALLS_S", 60.0)
    rig, numbers = Rig(monkeypatch, 9), dict[str, int]()
    numbers[rig.addresses[4]] = GENERATION + 3600
    cleared_at = dict[str, list[int]]()

    def answer(address: str, follow: Follow) -> bytes | None:
        assert follow.cleared_at == CLEARED_AT
        if follow.generation > numbers.get(address, 0):
            numbers[address] = follow.generation
            cleared_at.setdefault(address, []).append(follow.generation)
        return numbers[address].to_bytes(GENERATION_BYTES, "little") + b"\1"

    with AnsweringNodes(SECRET, rig.addresses, answer), rig.caller() as caller:
        assert list(rig.call(caller).unreached({})) == []
    ahead = {rig.addresses[4]: [GENERATION + 3601]}
    assert cleared_at == {address: [GENERATION] for address in rig.addresses} | ahead


def test_a_number_that_no_node_can_have_is_a_problem_of_the_node_that_answers_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer_caller, "CALLS_S", 1.0)
    rig, asked = Rig(monkeypatch, 1), list[int]()

    def answer(address: str, follow: Follow) -> bytes | None:
        asked.append(follow.generation)
        return b"\xff" * GENERATION_BYTES + b"\1"

    with AnsweringNodes(SECRET, rig.addresses, answer), rig.caller() as caller:
        (sentence,) = rig.call(caller).unreached({})
    assert "was not written by a node" in sentence
    assert set(asked) == {GENERATION}


def test_nodes_that_have_not_cleared_in_time_are_named_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_caller, "CALLS_S", 2.0)
    monkeypatch.setattr(peer_caller, "CALL_S", 0.5)
    rig = Rig(monkeypatch, 12)

    def answer(address: str, follow: Follow) -> bytes | None:
        right = cleared(address, follow)
        return right[:-1] + b"\0" if right is not None and address == rig.addresses[2] else right

    dark = rig.addresses[5:7]
    there = [one for one in rig.addresses if one not in dark]
    with AnsweringNodes(SECRET, there, answer), rig.caller() as caller:
        calls = rig.call(caller)
    (sentence,) = calls.unreached({})
    assert sentence.startswith(f"{rig.name.text}: 3 of its 12 nodes have not cleared: {rig.addresses[2]} (")
    assert "kvoffd.state" in sentence
    assert all(f"{one} (no answer)" in sentence for one in dark)
    heard = {f"peer://{rig.addresses[2]}": "", f"peer://{dark[0]}": "It refuses.", f"peer://{dark[1]}": ""}
    heard |= {f"peer://{there[0]}": "It has not answered yet."}
    (sentence,) = calls.unreached(heard)
    assert sentence.endswith(f"1 of its 12 nodes have not cleared: {dark[0]} (It refuses).")


def test_without_the_secret_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_caller, "CALLS_S", 1.0)
    rig = Rig(monkeypatch, 9)
    with AnsweringNodes(SECRET, rig.addresses) as nodes, rig.caller(b"another secret") as caller:
        (sentence,) = rig.call(caller).unreached({})
        assert "9 of its 9 nodes" in sentence
        assert nodes.asked == []


def test_a_name_that_cannot_be_resolved_is_a_problem_and_its_last_nodes_are_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(monkeypatch, 9)
    rig.hosts = []
    with AnsweringNodes(SECRET, rig.addresses) as nodes, rig.caller() as caller:
        calls = rig.call(caller, rig.addresses)
        assert list(calls.unreached({})) == [f"{rig.name.text}: its nodes are not known: Name or service not known."]
        assert set(nodes.asked) == set(rig.addresses)


def test_known_nodes_are_called_while_a_name_server_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may take longer than all calls may, and the names of its nodes are known."""
    monkeypatch.setattr(peer_caller, "CALLS_S", 60.0)
    monkeypatch.setattr(peer_caller, "KNOWN_S", 60.0)
    rig, answers = Rig(monkeypatch, 9), threading.Event()

    def resolve(host: str, port: int, **_: Any) -> list[tuple[Any, ...]]:
        assert answers.wait(120.0)
        return rig._resolve(host, port)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    try:
        with AnsweringNodes(SECRET, rig.addresses) as nodes, rig.caller() as caller:
            calls = caller.call(FINGERPRINT, GENERATION, CLEARED_AT, [rig.addresses[:8]])
            wait_until(lambda: calls.problems == dict.fromkeys(rig.addresses[:8], ""), 20.0)
            (sentence,) = calls.unreached({})
            assert sentence == f"{rig.name.text}: its nodes are not known: the name is being resolved."
            answers.set()
            wait_until(lambda: calls.ended, 60.0)
            assert list(calls.unreached({})) == []
            assert nodes.asked[8:] == rig.addresses[8:], "only the one that was not known"
    finally:
        answers.set()


@pytest.mark.parametrize("closes", [True, False])
def test_after_a_name_that_took_all_the_time_or_the_end_no_other_is_resolved(
    monkeypatch: pytest.MonkeyPatch, closes: bool
) -> None:
    """Each may take as long, and other clears wait for the thread."""
    monkeypatch.setattr(peer_caller, "CALLS_S", 60.0 if closes else 0.05)
    resolved, goes_on = list[str](), threading.Event()

    def resolve(host: str, port: int, **_: Any) -> list[tuple[Any, ...]]:
        resolved.append(host)
        assert goes_on.wait(120.0)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    names = [PeerName(f"dns+{host}:7400", host, 7400) for host in ("one", "other")]
    caller = PeerCaller(names, "", SECRET)
    began = time.monotonic()
    calls = caller.call(FINGERPRINT, GENERATION, CLEARED_AT, [[], []])
    try:
        wait_until(lambda: bool(resolved) and (closes or time.monotonic() > began + 0.05))
        if closes:
            caller.close()
    finally:
        goes_on.set()
    wait_until(lambda: calls.ended)
    caller.close()
    assert resolved == ["one"]
    assert list(calls.unreached({})) == [f"{names[1].text}: its nodes are not known: the name is being resolved."]


def test_nodes_are_called_once_a_descriptor_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_caller, "CALLS_S", 60.0)
    rig, refusals = Rig(monkeypatch, 9), [20]

    def socket_or_none(*arguments: Any) -> zmq.Socket[bytes]:
        if refusals[0] > 0:
            refusals[0] -= 1
            raise zmq.ZMQError(errno.EMFILE)
        return peer_socket(*arguments)

    monkeypatch.setattr(peer_caller, "peer_socket", socket_or_none)
    with AnsweringNodes(SECRET, rig.addresses) as nodes, rig.caller() as caller:
        assert list(rig.call(caller).unreached({})) == []
        assert Counter(nodes.asked) == Counter(rig.addresses)
        monkeypatch.setattr(peer_caller, "CALLS_S", 0.5)
        refusals[0] = 1_000_000
        (sentence,) = rig.call(caller).unreached({})
    assert "9 of its 9 nodes" in sentence
    assert "Too many open files" in sentence


def test_nodes_that_cannot_be_called_without_descriptors_have_not_cleared(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(monkeypatch, 9)
    with rig.caller() as caller:
        monkeypatch.setattr(zmq, "Context", Mock(side_effect=zmq.ZMQError(errno.EMFILE)))
        (sentence,) = rig.call(caller, rig.addresses[:8]).unreached({})
    assert "9 of its 9 nodes" in sentence
    assert "Too many open files" in sentence
    assert not caplog.records, "an unexpected failure"


def test_clears_that_wait_are_bounded_and_end_with_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_caller, "MAX_CLEARS", 1)
    monkeypatch.setattr(peer_caller, "CALLS_S", 60.0)
    rig = Rig(monkeypatch, 9)
    with rig.caller() as caller:
        first = caller.call(FINGERPRINT, GENERATION, CLEARED_AT, [[]])
        wait_until(lambda: not first.unknown, 60.0)
        second, third = (caller.call(FINGERPRINT, GENERATION, CLEARED_AT, [rig.addresses]) for _ in range(2))
        assert (second.ended, third.ended) == (False, True)
        sentences = list(third.unreached({}))
        assert "too many clears wait" in sentences[0]
        assert sentences[1].count(NOT_CALLED) == 9
    wait_until(lambda: first.ended and second.ended, 60.0)


def test_of_many_nodes_that_have_not_cleared_the_first_ones_are_named() -> None:
    addresses = [f"10.0.{number >> 8}.{number & 255}:7400" for number in range(4096)]
    (sentence,) = Calls({"dns+engines:7400": addresses}, {}, dict.fromkeys(addresses[:96], "")).unreached({})
    assert "4000 of its 4096 nodes" in sentence
    assert sentence.count(NOT_CALLED) == MAX_NAMED
    assert sentence.endswith(f"and {4000 - MAX_NAMED} others.")

"""Attacks by namespaces: many, large ones, and others' names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvoffd_client import SharedMemory
from kvoffd_proto import codec
from kvoffd_proto import messages as m
from kvoffd_proto.errors import ErrorCode
from tests.hostile.target import Target
from tests.kit.struct_wire import WireClient, ids, keys, store_of
from tests.kit.waiting import wait_until

PLACES = 64
SESSIONS = 10
PAGE = 8192


@pytest.fixture(scope="module")
def flags() -> dict[str, str]:
    return {"max_namespaces": str(PLACES), "namespaces_size": "16MiB"}


def open_one(
    client: WireClient, fingerprint: bytes, groups: int = 1, label: str = "x", world_size: int = 1
) -> m.AnyReply:
    specs = [m.GroupSpec("full", 16)] * groups
    request = m.OpenNamespace(client.next_id(), client.token, fingerprint, label, 1, 32, specs, "d" * 65536)
    return client.raw(codec.encode(request))


def test_namespaces_that_are_left_behind_keep_no_place_and_no_memory(target: Target) -> None:
    def attack(directory: Path) -> None:
        opened = 0
        for _ in range(SESSIONS):
            with WireClient(directory) as client:
                replies = [open_one(client, os.urandom(32), 1024) for _ in range(20)]
                assert all(isinstance(reply, m.Error) for reply in replies), "a thousand groups are too many"
                opened += sum(isinstance(open_one(client, os.urandom(32), 60), m.NamespaceOpened) for _ in range(20))
        assert opened > PLACES

    target.attack(attack)
    with WireClient(target.directory) as client:
        assert isinstance(open_one(client, os.urandom(32)), m.NamespaceOpened)


def test_namespaces_that_are_held_leave_places_for_other_users(target: Target) -> None:
    def attack(directory: Path) -> None:
        clients = [WireClient(directory) for _ in range(SESSIONS)]
        replies = [open_one(client, os.urandom(32)) for client in clients for _ in range(20)]
        opened = [reply for reply in replies if isinstance(reply, m.NamespaceOpened)]
        assert 0 < len(opened) < PLACES * 3 / 4
        assert all(reply.code is ErrorCode.TOO_MANY for reply in replies if isinstance(reply, m.Error))
        for client in clients:
            client.close()

    target.attack(attack)


def test_a_block_in_each_does_not_keep_namespaces_for_good(target: Target) -> None:
    def attack(directory: Path) -> None:
        with SharedMemory(PAGE) as memory:
            for number in range(PLACES + 8):
                with WireClient(directory) as client:
                    name = os.urandom(32)
                    assert isinstance(open_one(client, name), m.NamespaceOpened), number
                    registration = client.register(memory, PAGE, fingerprint=name)
                    store = store_of(1, keys(1), ids(0))
                    assert client.result(m.Submit, registration, [store]).ok

    target.attack(attack)


def test_who_opened_a_name_first_does_not_own_it(target: Target) -> None:
    name = os.urandom(32)
    with WireClient(target.directory) as squatter:
        assert isinstance(open_one(squatter, name, 2, "squatted"), m.NamespaceOpened)
        with WireClient(target.directory) as owner:
            refusal = open_one(owner, name)
            assert isinstance(refusal, m.Error)
            assert refusal.code is ErrorCode.NAMESPACE_MISMATCH

    def reopened() -> bool:
        with WireClient(target.directory) as owner:
            return isinstance(open_one(owner, name), m.NamespaceOpened)

    wait_until(reopened, 5.0)


def test_an_operator_clears_the_geometry_of_what_nobody_has_open(target: Target) -> None:
    name = os.urandom(32)
    with WireClient(target.directory) as squatter, SharedMemory(PAGE) as memory:
        assert isinstance(open_one(squatter, name), m.NamespaceOpened)
        registration = squatter.register(memory, PAGE, fingerprint=name)
        assert squatter.store(registration, 1, keys(1), ids(0)).ok
    with WireClient(target.directory, m.Role.ADMIN) as admin, WireClient(target.directory) as owner:
        refusal = open_one(owner, name, 2)
        assert isinstance(refusal, m.Error)
        assert refusal.code is ErrorCode.NAMESPACE_MISMATCH

        def cleared() -> bool:
            admin.ask(m.Clear)
            return isinstance(open_one(owner, name, 2), m.NamespaceOpened)

        wait_until(cleared, 5.0)


def test_names_cannot_write_lines_into_the_log_or_to_a_terminal(target: Target) -> None:
    evil = "x\n2026 ERROR root: all is lost\x1b[2J"
    with WireClient(target.directory, role=None) as client:
        client.ask(m.Hello, m.PROTOCOL_VERSION, m.Role.WORKER, evil, evil)
        assert isinstance(open_one(client, os.urandom(32), label=evil), m.NamespaceOpened)
        with WireClient(target.directory, m.Role.ADMIN) as admin:
            sessions = admin.ask(m.Sessions).sessions
            namespaces = admin.ask(m.Namespaces).namespaces
        shown = [text for one in sessions for text in (one.name, one.software)] + [one.label for one in namespaces]
        assert all(text.isprintable() for text in shown)
    assert "\nx\n2026 ERROR" not in target.daemon.log
    assert "\x1b" not in target.daemon.log
    assert "x?2026 ERROR" in target.daemon.log

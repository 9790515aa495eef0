"""The administrator's client against a real daemon and a misbehaving one."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvoffd_client import AdminClient, DaemonUnavailable, KvoffdClientError, RequestRefused
from kvoffd_client.admin_client import HANDSHAKE_TIMEOUT_S, find_namespace_info, read_stats
from kvoffd_client.errors import why_unreachable
from kvoffd_client.testing import FakeEngine
from kvoffd_proto import admin as a
from kvoffd_proto import messages as m
from kvoffd_proto import stats as s
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.lifeline import Greeting, Refused, encode_frame
from kvoffd_proto.paths import SocketPaths
from tests.kit.daemon import DaemonProcess
from tests.kit.fake_daemon import FakeDaemon
from tests.kit.waiting import LONGER_THAN_A_TEST_S


def test_a_daemon_is_unreachable_from_a_failed_call_on(tmp_path: Path) -> None:
    with AdminClient(tmp_path) as admin:
        assert not admin.unreachable, "it was not tried yet"
        with pytest.raises(DaemonUnavailable):
            admin.stats()
        assert admin.unreachable


def test_why_nobody_is_reached_is_told_apart(tmp_path: Path) -> None:
    def sentence(timeout_s: float = LONGER_THAN_A_TEST_S) -> str:
        with AdminClient(tmp_path, timeout_s) as admin:
            with pytest.raises(DaemonUnavailable) as refusal:
                admin.stats()
        return str(refusal.value)

    assert sentence().startswith(f"There is no kvoffd daemon in {tmp_path}; ")
    with (tmp_path / "kvoffd.lock").open("w") as lock:  # a daemon that was killed leaves it
        assert sentence().startswith(f"There is no kvoffd daemon in {tmp_path}; ")
        fcntl.flock(lock, fcntl.LOCK_EX)
        without_sockets = f"The kvoffd daemon (pid {os.getpid()}) in {tmp_path} has no sockets there: "
        assert sentence().startswith(without_sockets)
        SocketPaths(tmp_path).starting.write_text("starting, 53 % of 64.0 GiB, about 40 s   ")
        starting = f"The kvoffd daemon (pid {os.getpid()}) in {tmp_path} is starting, 53 % of 64.0 GiB, about 40 s."
        assert sentence() == starting
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(SocketPaths(tmp_path).lifeline))
        SocketPaths(tmp_path).jobs.touch()
        assert sentence() == f"The kvoffd daemon in {tmp_path} has ended; start it again."
        listener.listen(0)
        assert sentence(0.2).startswith(f"The server in {tmp_path} accepts connections but does not answer; if it is ")
        assert "runs but accepts no connections" in sentence(), "the one place is taken by the client before"
        listener.listen(9)
        began = time.monotonic()
        assert sentence().startswith(f"The server in {tmp_path} accepts connections but does not answer; ")
        assert time.monotonic() - began < 5 * HANDSHAKE_TIMEOUT_S, "not waited for as long as a busy daemon"
    assert "may not use the kvoffd daemon's sockets" in why_unreachable(
        PermissionError(13, "Permission denied"), "/run/kvoffd"
    )


@contextmanager
def answering(listener: socket.socket, said: bytes, *, asked: bool) -> Iterator[None]:
    """Somebody takes one connection, is asked something or not, and says this."""

    def answer() -> None:
        there, _ = listener.accept()
        with there:
            if asked:
                there.recv(1000)
            there.sendall(said)

    server = threading.Thread(target=answer)
    server.start()
    yield
    server.join()


def test_who_answers_otherwise_is_named_at_once(tmp_path: Path) -> None:
    newer = Greeting(m.PROTOCOL_VERSION + 1, 1, 1, b"t" * m.TOKEN_BYTES)
    paths = SocketPaths(tmp_path)
    with socket.socket(socket.AF_UNIX) as jobs, socket.socket(socket.AF_UNIX) as lifeline:
        jobs.bind(str(paths.jobs))
        lifeline.bind(str(paths.lifeline))
        lifeline.listen()
        for said, sentence in (
            (encode_frame(newer), "install the same kvoffd release"),
            (encode_frame(Refused(ErrorCode.FORBIDDEN, "Not for you.")), "refuses: Not for you."),
            (b"HTTP/1.1 400 Bad Request\r\n\r\n", "is not a kvoffd daemon"),
            (b"", "has ended the connection"),
        ):
            with answering(lifeline, said, asked=False), AdminClient(tmp_path, LONGER_THAN_A_TEST_S) as admin:
                with pytest.raises(DaemonUnavailable, match=sentence):
                    admin.namespaces()


def test_statistics_of_what_is_no_daemon_are_one_sentence() -> None:
    busy = b"HTTP/1.1 503 No\r\n\r\nThe loop does not answer.\n"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        for said in (b"", b"SSH-2.0-x\r\n", b"HTTP/1.1 200 OK\r\n\r\n<html>", busy):
            with answering(listener, said, asked=True):
                with pytest.raises(DaemonUnavailable, match="No statistics of a kvoffd daemon at http:") as why:
                    read_stats(url)
            assert ("The loop does not answer." in str(why.value)) == (said == busy)


def test_typos_of_operators_and_short_sessions_are_no_errors_of_the_daemon(daemon: DaemonProcess) -> None:
    with FakeEngine(daemon.directory, layers=1, blocks=2) as engine, AdminClient(daemon.directory) as admin:
        for _ in range(30):
            with AdminClient(daemon.directory) as short:
                short.namespaces()
        space = engine.namespace.fingerprint
        for kind, fields, code in (
            (a.Clear, (bytes(32),), ErrorCode.UNKNOWN_NAMESPACE),
            (a.FindBlock, (bytes(32), 0, bytes(32)), ErrorCode.UNKNOWN_NAMESPACE),
            (a.FindBlock, (space, 7, bytes(32)), ErrorCode.BAD_GEOMETRY),
            (a.ResetFleet, (space,), ErrorCode.BAD_ARGUMENT),
        ):
            with pytest.raises(RequestRefused) as refused:
                admin.ask(kind, *fields)  # type: ignore[arg-type]
            assert refused.value.code is code
        assert admin.stats().errors == {}


def test_an_answer_of_the_wrong_kind_is_an_error(fake: FakeDaemon) -> None:
    fake.answers[s.Stats] = lambda request, _: m.Done(request.request_id)
    with AdminClient(fake.directory) as admin, pytest.raises(DaemonUnavailable, match="answered Stats with"):
        admin.stats()


def test_a_namespace_is_named_by_label_or_first_digits() -> None:
    named = {"ab12cd34": "tiny", "ab12ffff": "twin", "00112233": "twin", "77770000": "ab12cd34", "88880000": ""}
    there = [
        a.NamespaceInfo(bytes.fromhex(digits.ljust(64, "0")), label, 1, 32, [], [], 0, 0, 0, "{}")
        for digits, label in named.items()
    ]
    for wanted, index in (("tiny", 0), ("AB12F", 1), ("0011", 2), ("7777", 3)):
        assert find_namespace_info(there, wanted) is there[index]
    for wanted in ("twin", "ab12", "ab12cd34"):
        with pytest.raises(KvoffdClientError, match=r"is ambiguous: .*ab12"):
            find_namespace_info(there, wanted)
    whole = "ab12cd34".ljust(64, "0")
    taken = a.NamespaceInfo(bytes.fromhex("99".ljust(64, "0")), whole, 1, 32, [], [], 0, 0, 0, "{}")
    assert find_namespace_info([*there, taken], whole) is there[0], "a client chose its fingerprint as a label"
    with pytest.raises(KvoffdClientError, match="kvoffd-cli namespaces"):
        find_namespace_info([taken], whole)
    for wanted in ("", "ab1", "nobody", "ffff"):
        with pytest.raises(KvoffdClientError, match="kvoffd-cli namespaces"):
            find_namespace_info(there, wanted)

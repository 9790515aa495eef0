"""Requests that are wrong: each is refused with its code and changes nothing, and the session goes on.

A table is a dict: what is wrong, the code, and the request. ``Desk`` is all that a request may be about.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

from kvoffd_client import SharedMemory
from tests.kit.daemon import DaemonProcess
from tests.kit.waiting import wait_until
from tests.kit.wire import (
    GARBAGE,
    GPU,
    NAMESPACE,
    PAGE_BYTES,
    VERSION,
    Eavesdropper,
    Handle,
    Load,
    Page,
    Part,
    Refused,
    Segment,
    Store,
    Tensor,
    WireClient,
    answer,
    books,
    broken_request,
    keys,
    load_of,
    refusal,
    refused,
    store_of,
)

BLOCKS = 8
LEASE, ATTACHED = 1, 7
UNKNOWN = b"?" * 32


class Desk:
    """An engine that has stored key 1 and leased it, and others with which it must not be mixed up."""

    def __init__(self, directory: Path, memory: SharedMemory) -> None:
        self.directory, self.memory = directory, memory
        self.worker = WireClient(directory)
        self.scheduler = WireClient(directory, "scheduler")
        self.admin = WireClient(directory, "admin")
        self.blank = WireClient(directory, None)
        for client in (self.worker, self.scheduler):
            client.open_namespace()
        self.cache = self.worker.register(memory)
        assert self.worker.store(self.cache, keys(1), [0]).ok
        assert self.scheduler.lookup(LEASE, keys(1)).pinned == 1
        self.lease = self.scheduler.lease(LEASE)
        self.worker.attach(memory.fd, ATTACHED)

    def close(self) -> None:
        for client in (self.worker, self.scheduler, self.admin, self.blank):
            client.close()

    def store(self, keys: list[bytes], blocks: list[int] | bytes, **part: object) -> object:
        return self.worker.store(self.cache, keys, blocks, **part)

    def load(self, keys: list[bytes], blocks: list[int] | bytes) -> object:
        return self.worker.load(self.cache, self.lease, keys, blocks)

    def submit(self, *jobs: Store | Load) -> object:
        """A step that is refused."""
        stores = [job for job in jobs if isinstance(job, Store)]
        loads = [job for job in jobs if isinstance(job, Load)]
        return self.worker.step(self.cache, stores, loads)

    def register(
        self,
        *,
        segments: tuple[Handle, ...] = (Segment(ATTACHED, BLOCKS * PAGE_BYTES),),
        tensors: tuple[Tensor, ...] = (Tensor(0, 0, PAGE_BYTES, BLOCKS),),
        groups: tuple[list[Page], ...] = ([Page(0, PAGE_BYTES)],),
        rank: int = 0,
        namespace: bytes = NAMESPACE,
    ) -> bytes:
        return self.worker.register_layout(segments, tensors, groups, rank=rank, namespace=namespace)

    def state(self) -> dict[str, object]:
        """All that a refused request must not have changed."""
        now = books(self.directory)
        space = now.namespaces[NAMESPACE]
        return {
            "pool": (now.free_bytes, now.writing_bytes, now.ready_bytes, now.leaving_bytes, now.pool.pinned_bytes),
            "held": now.held,
            "clients": [
                (one.session_id, one.role, one.leases, one.registrations, one.namespaces) for one in now.clients
            ],
            "jobs": (now.store.jobs, now.load.jobs),
            "keys": (space.lookups, space.asked_keys, space.stored_blocks, space.no_space_keys, space.misses),
            "namespaces": list(now.namespaces),
            "kv events": now.kv_events,
            "memory": self.memory.view.tobytes(),
        }

    def assert_refused(self, table: Table) -> None:
        for wrong, (code, request) in table.items():
            before, errors = self.state(), books(self.directory).errors.get(code, 0)
            assert refused(request, self) == code, wrong
            assert books(self.directory).errors[code] == errors + 1, wrong
            assert self.state() == before, wrong
            for client in (self.worker, self.scheduler, self.admin):
                assert client.health() == "ok", wrong


Table: TypeAlias = dict[str, tuple[str, Callable[[Desk], object]]]


@pytest.fixture
def desk(shared_daemon: DaemonProcess) -> Iterator[Desk]:
    with SharedMemory(BLOCKS * PAGE_BYTES, "test") as memory:
        sat = Desk(shared_daemon.directory, memory)
        yield sat
        sat.close()


def test_frames_that_are_no_request(desk: Desk) -> None:
    desk.assert_refused(
        {name: ("malformed", lambda desk, frame=frame: desk.worker.raw(frame)) for name, frame in GARBAGE.items()}
        | {"a message of three frames": ("malformed", lambda desk: desk.worker.raw(b"one", b"two", b"three"))}
    )
    assert refusal(desk.worker.raw, broken_request(4711)).request == 4711, "else its client would wait for a timeout"


def test_requests_of_the_wrong_session(desk: Desk) -> None:
    def as_another(desk: Desk, routing_id: bytes) -> None:
        with Eavesdropper(desk.directory, routing_id) as other:
            other.stats()

    desk.assert_refused(
        {
            "a token of nobody": ("bad_token", lambda desk: as_another(desk, b"k" + os.urandom(16))),
            "no token": ("bad_token", lambda desk: as_another(desk, b"")),
            "no hello": ("no_hello", lambda desk: desk.blank.stats()),
            "another version": ("bad_version", lambda desk: desk.blank.hello("worker", version=VERSION + 41)),
            "no such role": ("malformed", lambda desk: desk.blank.hello("king")),
            "another role": ("wrong_role", lambda desk: desk.worker.hello("admin")),
            "a worker that looks up": ("wrong_role", lambda desk: desk.worker.lookup(2, keys(1))),
            "a worker that resets": ("wrong_role", lambda desk: desk.worker.reset()),
            "a worker that clears": ("wrong_role", lambda desk: desk.worker.clear()),
            "a scheduler that cancels": ("wrong_role", lambda desk: desk.scheduler.cancel(1)),
            "a scheduler that clears": ("wrong_role", lambda desk: desk.scheduler.clear()),
            "a name too long": ("malformed", lambda desk: desk.blank.hello("worker", name="x" * 129)),
        }
    )
    desk.worker.hello("worker")  # twice does no harm
    with pytest.raises(Refused, match="Lookup is for the role scheduler, not worker"):
        desk.worker.lookup(2, keys(1))


def test_another_version_is_refused_with_both_numbers(desk: Desk) -> None:
    """As a release would send it that had not all of today's fields."""
    for version, hello in (
        (VERSION + 41, lambda: desk.blank.hello("worker", version=VERSION + 41)),
        (4, lambda: desk.blank.raw(b"\x96\xa5hello\x07\x04\xa6worker\xa1n\xa1s")),
    ):
        why = refusal(hello)
        assert f"speaks protocol {version}" in why.message
        assert f"speaks {VERSION}" in why.message
    desk.blank.hello("worker")


def test_a_token_ends_with_its_lifeline(desk: Desk) -> None:
    with WireClient(desk.directory) as other:
        other.close_lifeline()
        wait_until(lambda: other.session not in [client.session_id for client in books(desk.directory).clients])
        errors = books(desk.directory).errors.get("bad_token", 0)
        assert refused(other.stats) == "bad_token"
        assert books(desk.directory).errors.get("bad_token", 0) == errors, "a request that crosses the end is no error"


def test_namespaces_and_keys_that_do_not_fit(desk: Desk) -> None:
    many = [keys(number) for number in range(70)]
    desk.assert_refused(
        {
            "another geometry": ("namespace_mismatch", lambda desk: desk.worker.open_namespace(world_size=2)),
            "other groups": ("namespace_mismatch", lambda desk: desk.worker.open_namespace(groups=2)),
            "too many groups": ("malformed", lambda desk: desk.worker.open_namespace(UNKNOWN, groups=65)),
            "a namespace that is not open": (
                "unknown_namespace",
                lambda desk: desk.scheduler.lookup(2, keys(1), UNKNOWN),
            ),
            "a reset of it": ("unknown_namespace", lambda desk: desk.scheduler.reset(UNKNOWN)),
            "an invalidation in it": ("unknown_namespace", lambda desk: desk.scheduler.invalidate(keys(1), UNKNOWN)),
            "a short key": ("bad_keys", lambda desk: desk.scheduler.lookup(2, [b"short"])),
            "a key and a byte": ("bad_keys", lambda desk: desk.scheduler.lookup(2, [*keys(1), b"x"])),
            "a group that is not there": ("bad_geometry", lambda desk: desk.scheduler.lookup(2, keys(1), group=1)),
            "a short key to store": ("bad_keys", lambda desk: desk.store([b"short"], [0])),
            "a key and a byte to store": ("bad_keys", lambda desk: desk.store([*keys(2), b"x"], [1])),
            "no key": ("bad_block_ids", lambda desk: desk.store([], [])),
            "a key twice": ("bad_keys", lambda desk: desk.store(keys(2, 2), [1, 2])),
            "a group twice": ("bad_keys", lambda desk: desk.submit(Store(9, [Part(keys(2), [1]), Part(keys(3), [2])]))),
            "a group to store that is not there": ("bad_geometry", lambda desk: desk.store(keys(2), [1], group=1)),
            "a good part and a bad one": (
                "bad_geometry",
                lambda desk: desk.submit(Store(9, [Part(keys(2), [1]), Part(keys(3), [2], group=1)])),
            ),
            "too many parts": ("malformed", lambda desk: desk.submit(Store(9, [Part(one, [0]) for one in many]))),
            "too few parents": ("bad_keys", lambda desk: desk.store(keys(2, 3), [1, 2], parents=keys(7))),
            "too many parents": ("bad_keys", lambda desk: desk.store(keys(2, 3), [1, 2], parents=keys(7, 8, 9))),
            "tokens without parents": ("bad_keys", lambda desk: desk.store(keys(2, 3), [1, 2], tokens=bytes(4))),
            "a part of a token": (
                "bad_keys",
                lambda desk: desk.store(keys(2, 3), [1, 2], parents=keys(7, 8), tokens=bytes(3)),
            ),
            "a key to load twice": ("bad_keys", lambda desk: desk.load(keys(1, 1), [1, 2])),
        }
    )


def test_block_ids_leases_and_registrations_that_do_not_fit(desk: Desk) -> None:
    """Each is refused before a byte moves."""
    wrong_ids: dict[str, list[int] | bytes] = {
        "one beyond the tensor": [BLOCKS],
        "a negative one": [-1],
        "the largest": [2**31 - 1],
        "two for a key": [0, 1],
        "none": [],
        "three bytes": bytes(3),
    }
    table: Table = {}
    for name, ids in wrong_ids.items():
        table[f"store: {name}"] = ("bad_block_ids", lambda desk, ids=ids: desk.store(keys(2), ids))
        table[f"load: {name}"] = ("bad_block_ids", lambda desk, ids=ids: desk.load(keys(1), ids))
    desk.assert_refused(
        table
        | {
            "a block twice": ("bad_block_ids", lambda desk: desk.load(keys(1, 2), [1, 1])),
            "a registration of nobody": ("unknown_registration", lambda d: d.worker.store(bytes(16), keys(2), [1])),
            "a count below zero": ("malformed", lambda desk: desk.scheduler.report(-1)),
            "a count larger than any": ("malformed", lambda desk: desk.scheduler.report(2**63 - 1)),
            "an end of one": ("unknown_registration", lambda desk: desk.worker.unregister(bytes(16))),
            "a good store and a bad one": (
                "bad_block_ids",
                lambda desk: desk.submit(store_of(8, keys(2), [1]), store_of(9, keys(3), [BLOCKS])),
            ),
            "a good load and a bad one": (
                "bad_block_ids",
                lambda desk: desk.submit(load_of(8, desk.lease, keys(1), [1]), load_of(9, desk.lease, keys(1), [-1])),
            ),
            "a load without a part": ("bad_block_ids", lambda desk: desk.submit(Load(9, desk.lease, []))),
            "too many jobs": (
                "too_many",
                lambda desk: desk.submit(*(store_of(job, keys(job), [0]) for job in range(2, 1027))),
            ),
        }
    )
    assert (desk.worker.cancel(1, 2, 3), desk.scheduler.release(99)) == (0, 0)


def test_registrations_that_do_not_fit(desk: Desk) -> None:
    """Each is refused, and the memory can be registered afterwards."""
    small, whole = Segment(ATTACHED, PAGE_BYTES), BLOCKS * PAGE_BYTES
    pages = [Page(0, PAGE_BYTES)]
    wrong: dict[str, tuple[str, dict[str, object]]] = {
        "memory that was not attached": ("unknown_segment", {"segments": (Segment(99, whole),)}),
        "memory twice": ("bad_geometry", {"segments": (small, small)}),
        "memory that is larger than it is": ("unsafe_segment", {"segments": (Segment(ATTACHED, whole + 1),)}),
        "memory of all addresses": ("unsafe_segment", {"segments": (Segment(ATTACHED, 2**63 - 1),)}),
        "a GPU that is not there": ("unsupported", {"segments": (GPU,)}),
        "a block too many": ("out_of_bounds", {"tensors": (Tensor(0, 0, PAGE_BYTES, BLOCKS + 1),)}),
        "a byte too far": ("out_of_bounds", {"tensors": (Tensor(0, 1, PAGE_BYTES, BLOCKS),)}),
        "more than 64 bits": ("out_of_bounds", {"tensors": (Tensor(0, 0, 2**62, 3),)}),
        "a tensor in no memory": ("out_of_bounds", {"tensors": (Tensor(1, 0, PAGE_BYTES, BLOCKS),)}),
        "a page of no tensor": ("out_of_bounds", {"groups": ([Page(1, PAGE_BYTES)],)}),
        "a group too many": ("bad_geometry", {"groups": (pages, pages)}),
        "a group without a page": ("bad_geometry", {"groups": ([],)}),
        "a rank too many": ("bad_geometry", {"rank": 1}),
        "a namespace that is not open": ("unknown_namespace", {"namespace": UNKNOWN}),
    }
    table: Table = {}
    for name, (code, changes) in wrong.items():
        table[name] = (code, lambda desk, changes=changes: desk.register(**changes))
    table["a segment of a number that is taken"] = ("malformed", lambda d: d.worker.attach(d.memory.fd, ATTACHED))
    desk.assert_refused(table)
    desk.register()


def test_a_request_that_is_too_large(desk: Desk) -> None:
    """It is refused before it is decoded: so many pages would keep the loop for long."""
    pages = [Page(0, 1)] * 65_536
    desk.assert_refused(
        {"a registration of very many pages": ("too_large", lambda desk: desk.register(groups=(pages,) * 11))}
    )
    assert refused(desk.register, groups=([Page(0, 1)] * 10_000,)) in ("malformed", "too_large")
    large = broken_request(4712, desk.worker.limits["max_frame_bytes"])
    assert refusal(desk.worker.raw, large).request == 4712, "else its client would wait for a timeout"


def test_what_a_session_may_have_is_bounded(memory: SharedMemory) -> None:
    """By counts, which the daemon says at the start; what is free may be used again."""
    limits = {
        "max_frame_bytes": 65536,
        "max_keys_per_request": 4,
        "max_jobs_per_message": 3,
        "max_jobs_in_flight": 2,
        "max_leases": 3,
        "max_leased_keys": 5,
        "max_registrations": 2,
        "max_segments": 3,
        "max_keys_per_submit": 4,
    }
    with (
        DaemonProcess(limits={**limits, "max_namespaces": 8, "max_quotas": 8}) as daemon,
        WireClient(daemon.directory) as worker,
    ):
        assert worker.limits == limits
        with WireClient(daemon.directory, "scheduler") as scheduler:
            for client in (worker, scheduler):
                client.open_namespace()
            cache = worker.register(memory)
            assert worker.store(cache, keys(1, 2, 3), [0, 1, 2]).ok
            before = books(daemon.directory)

            assert refused(worker.raw, bytes(65537)) == "too_large"
            assert refused(scheduler.lookup, 1, keys(*range(5))) == "too_many"
            assert refused(scheduler.invalidate, keys(*range(5))) == "too_many"
            assert refused(worker.store, cache, keys(*range(20, 28)), range(8)) == "too_many"
            four = [store_of(job, keys(30 + job), [job]) for job in range(4)]
            assert refused(worker.step, cache, four) == "too_many"
            assert refused(worker.step, cache, four[:3]) == "too_many"

            for lease in (1, 2, 3):
                assert scheduler.lookup(lease, keys(1)).pinned == 1
            assert refused(scheduler.lookup, 4, keys(1)) == "too_many"
            assert scheduler.release(1, 2) == 2
            assert scheduler.lookup(5, keys(1, 2, 3)).pinned == 3
            assert scheduler.lookup(6, keys(1, 2, 3)).states == "R--", "no more is said to be ready than may be leased"
            assert scheduler.release(3, 5, 6) == 3

            worker.register(memory)
            assert refused(worker.register, memory) == "too_many"
            attached = [refusal(_attach_all, worker, memory.fd) for _ in range(2)]
            assert [why.code for why in attached] == ["too_many"] * 2

            def open_many(client: WireClient) -> str:
                return answer(lambda: [client.open_namespace(os.urandom(32)) for _ in range(8)])

            with WireClient(daemon.directory) as hoarder:
                assert open_many(hoarder) == "too_many"
                assert 1 < len(books(daemon.directory).namespaces) <= 8
            for number in range(10):  # what nobody has open keeps no place for good, though it has a block
                with WireClient(daemon.directory) as newcomer:
                    name = bytes([number]) * 32
                    wait_until(lambda client=newcomer, name=name: answer(client.open_namespace, name) == "taken")
                    assert newcomer.store(newcomer.register(memory, namespace=name), keys(1), [0]).ok
            with WireClient(daemon.directory, "admin") as admin:
                for number in range(8):
                    admin.set_quota(bytes([100 + number]) * 32, number)
                assert refused(admin.set_quota, bytes(32), 1) == "bad_argument"
                admin.set_quota(bytes([100]) * 32, 5)
                admin.set_quota(bytes([100]) * 32, None)
                admin.set_quota(bytes(32), 1)
            assert worker.health() == scheduler.health() == "ok"
            assert books(daemon.directory).pinned_blocks == before.pinned_blocks == 0


def _attach_all(worker: WireClient, fd: int) -> None:
    for _ in range(4):
        worker.attach(fd)


def test_the_number_of_sessions_is_bounded() -> None:
    """One that ends makes a place. The command line still finds one."""
    with DaemonProcess(max_sessions="2") as daemon, WireClient(daemon.directory):

        def newcomer() -> str:
            with WireClient(daemon.directory, None) as client:
                return client.rejected.code if client.rejected else answer(client.hello, "worker")

        with WireClient(daemon.directory):
            assert newcomer() == "too_many"
            assert books(daemon.directory).sessions == 2
            assert books(daemon.directory).health != "ok"
        wait_until(lambda: newcomer() == "taken")


def test_the_log_says_whose_request_was_refused_and_why() -> None:
    with DaemonProcess("1MiB") as daemon, WireClient(daemon.directory, "scheduler") as scheduler:
        assert refused(scheduler.lookup, LEASE, keys(1)) == "unknown_namespace"
        daemon.wait_log("(test) was refused, unknown_namespace: ")
        with WireClient(daemon.directory, None, name="older engine") as engine:
            assert refused(engine.hello, "worker", version=VERSION - 1) == "bad_version"
        daemon.wait_log(f"speaks protocol {VERSION - 1}")
        with WireClient(daemon.directory, None) as engine:  # it does not speak the greeting's, and says that it leaves
            engine.leave()
        daemon.wait_log(f"(pid {os.getpid()}, uid {os.getuid()}) disconnected before its first request")

"""Requests that look right, mostly: from several sessions, about a few namespaces, keys, leases and registrations."""

from __future__ import annotations

from kvoffd.server.service import Service
from kvoffd.server.sessions import Session
from kvoffd_client.jobs import GroupTransfer, Job, submit_of
from kvoffd_proto import admin as a
from kvoffd_proto import messages as m
from kvoffd_proto import stats as s
from kvoffd_proto.messages import PROTOCOL_VERSION, CudaIpcHandle, Handle, MemfdHandle, PageRef, TensorLayout
from tests.fuzz.choices import Choices

PAGE, BLOCKS, KEY_BYTES = 8192, 4, 8
NAMESPACES = (b"A" * 32, b"B" * 32)
WORLD = {NAMESPACES[0]: 1, NAMESPACES[1]: 2}
NAMES = [bytes([number]) * 16 for number in range(3)]
"""Ids of registrations."""
MOSTLY_RIGHT_GROUPS = (0,) * 9 + (1,) * 6 + (2,)
BLOCK_REQUESTS = ("describe", "list")
RARELY_ONE = (0,) * 15 + (1,)


class Requests:
    """Makes requests to ``service`` as ``choices`` decide."""

    def __init__(self, choices: Choices, service: Service) -> None:
        self._choices = choices
        self._service = service
        self._sent = 0

    def _any_session(self) -> Session:
        return self._choices.of(list(self._service.sessions))

    def open(self, fingerprint: bytes) -> m.OpenNamespace:
        world = self._choices.of((WORLD[fingerprint],) * 15 + (3,)) if fingerprint in WORLD else 1
        specs = [m.GroupSpec("full", 16)] * self._choices.of((2,) * 15 + (1,))
        return m.OpenNamespace(1, fingerprint, "l", world, KEY_BYTES, specs, "{}")

    def fingerprint(self, session: Session) -> bytes:
        return self._choices.of((*sorted(session.namespaces) * 5, *NAMESPACES, b"C" * 32))

    def keys(self) -> bytes:
        count = self._choices.of((1, 2, 2, 3, 3, 4, 4, 0, 1, 2, 2, 3, 3, 4, 4, 9))
        start = self._choices.of((0, 0, 0, 0, 1, 2, 4, 6))
        blob = b"".join((start + number).to_bytes(KEY_BYTES, "big") for number in range(count))
        return blob + self._choices.of((b"",) * 15 + (b"x",))

    def part(self) -> GroupTransfer:
        blob = self.keys()
        count = len(blob) // KEY_BYTES + self._choices.of(RARELY_ONE)
        bad = self._choices.of((0,) * 15 + (-1,))
        blocks = b"".join(((number + bad) % 2**32).to_bytes(4, "little") for number in range(count))
        return GroupTransfer(self._choices.of(MOSTLY_RIGHT_GROUPS), blob, blocks, self._choices.of(RARELY_ONE))

    def leased(self, lease_id: int) -> list[GroupTransfer]:
        """The keys of a lease, as many as fit into the memory."""
        cache = self._service.cache
        lease = cache.leases.get(lease_id)
        found = []
        for group, blocks in cache.by_group(lease.blocks) if lease is not None else ():
            if not group.dead:
                keys = cache.blocks.keys(blocks[:BLOCKS], KEY_BYTES)
                ids = b"".join(number.to_bytes(4, "little") for number in range(len(keys) // KEY_BYTES))
                found.append(GroupTransfer(group.group, keys, ids))
        return found

    def parts(self) -> list[GroupTransfer]:
        return [self.part() for _ in range(self._choices.of((1,) * 7 + (2,)))]

    def groups(self) -> list[m.GroupKeys]:
        return [
            m.GroupKeys(self._choices.of(MOSTLY_RIGHT_GROUPS), self.keys())
            for _ in range(self._choices.of((1, 1, 2, 0)))
        ]

    def lease(self, session: Session) -> int:
        """A lease id: of a live lease, the session's next one, or any session's."""
        kind = self._choices.byte()
        alive = list(self._service.cache.leases)
        if kind % 4 and alive and session.role is not m.Role.SCHEDULER:
            return self._choices.of(alive)
        owner = self._any_session() if kind % 8 == 0 else session
        return (owner.id << 32) + 1 + kind // 8 % 4

    def register(self, session: Session, request_id: int) -> m.Register:
        segment = self._choices.of([*session.segments, 5])
        size = self._choices.of((BLOCKS * PAGE, BLOCKS * PAGE, BLOCKS * PAGE, 2**62))
        handle: Handle = MemfdHandle(segment, size)
        if self._choices.byte() % 16 == 0:
            handle = CudaIpcHandle(bytes(64), 4096, bytes(16))
        tensors = [TensorLayout(0, 0, PAGE, self._choices.of((BLOCKS,) * 7 + (BLOCKS + 1,)))]
        page = PageRef(0, self._choices.of((PAGE,) * 7 + (PAGE // 2,)))
        fingerprint = self._choices.of([*sorted(session.namespaces), b"C" * 32])
        rank = self._choices.byte() % 2
        return m.Register(
            request_id, fingerprint, self._choices.of(NAMES), rank, 1, [handle], tensors, [[page], [page]]
        )

    def make(self, session: Session) -> m.AnyRequest:
        """A request, mostly one that the session's role may send."""
        self._sent += 1
        i, choices, name = self._sent, self._choices, self._choices.of([*session.registrations] * 6 + NAMES)
        kinds: dict[m.Role | None, tuple[str, ...]] = {
            m.Role.WORKER: ("store", "store", "store", "load", "load", "register", "register", "results", "cancel"),
            m.Role.SCHEDULER: (*("lookup",) * 9, "release", "release", "invalidate", "reset"),
            m.Role.ADMIN: ("stats", "health", "sessions", "namespaces", "clear", "scrub", *BLOCK_REQUESTS),
            None: ("hello",),
        }
        every = sorted({kind for some in kinds.values() for kind in some} | {"open", "unregister", "stats"})
        match choices.of((*kinds[session.role] * 6, *every)):
            case "store":
                stores = [Job(choices.byte() % 8, self.parts()) for _ in range(1 + choices.byte() % 3)]
                return submit_of(i, name, KEY_BYTES, stores)
            case "load":
                lease_id = self.lease(session)
                parts = self.leased(lease_id) if choices.byte() % 2 else []
                load = Job(choices.byte() % 8, parts or self.parts(), lease_id)
                return submit_of(i, name, KEY_BYTES, [load])
            case "register":
                return self.register(session, i)
            case "unregister":
                return m.Unregister(i, name)
            case "results":
                return m.Results(i, choices.of((0, 1, 2**62)))
            case "cancel":
                return m.Cancel(i, [choices.byte() % 8 for _ in range(3)])
            case "lookup":
                return m.Lookup(i, self.fingerprint(session), self.lease(session), self.groups())
            case "release":
                return m.Release(i, [self.lease(session) for _ in range(2)])
            case "invalidate":
                return m.Invalidate(i, self.fingerprint(session), self.groups())
            case "reset":
                return m.Reset(i, self.fingerprint(session))
            case "open":
                return self.open(self.fingerprint(session))
            case "sessions":
                return a.Sessions(i)
            case "namespaces":
                return a.Namespaces(i)
            case "clear":
                return a.Clear(i, choices.of((None, *NAMESPACES)))
            case "describe":
                return a.DescribeNamespace(i, self.fingerprint(session))
            case "list":
                position, limit = choices.of((0, 0, 1, 9)), choices.of((1, 2, 100))
                return a.ListBlocks(i, self.fingerprint(session), choices.byte() % 3, position, limit)
            case "scrub":
                return a.Scrub(i, bool(choices.byte() % 2))
            case "health":
                return a.Health(i)
            case "hello":
                return m.Hello(i, choices.of((PROTOCOL_VERSION,) * 3 + (99,)), choices.of(list(m.Role)), "n", "")
            case _:
                return s.Stats(i)

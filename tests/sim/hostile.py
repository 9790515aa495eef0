"""A client that lies, guesses and sends garbage. It may harm nobody but itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvoffd_client.worker_client import Job, submit_of
from kvoffd_proto import admin as a
from kvoffd_proto import codec, lifeline
from kvoffd_proto import messages as m
from kvoffd_proto.messages import (
    PROTOCOL_VERSION,
    CudaIpcHandle,
    GroupTransfer,
    Handle,
    MemfdHandle,
    PageRef,
    TensorLayout,
)
from tests.sim.clock import Broken, Process
from tests.sim.memory import Segment
from tests.sim.network import Dealer
from tests.sim.rank import ids

if TYPE_CHECKING:
    from tests.sim.world import World

PAGE = 128
BLOCKS = 4
KEY_BYTES = 8


class Hostile:
    """One such client: connects, does a dozen bad things, dies or lingers."""

    def __init__(self, world: World, number: int) -> None:
        self._world = world
        self._clock = world.clock
        self._rng = world.scenario.rng(f"hostile {number}")
        self.process = Process(world.clock, f"hostile-{number}")
        self._session_id = 0
        self._request_id = 0
        self._fingerprint = bytes([number]) * 32
        self._registration = self._rng.randbytes(16)
        self._job_id = 0
        self._asked: set[int] = set()
        """Requests to release leases of others."""
        self._segment = Segment(PAGE * BLOCKS)
        self._segment.owner_dead = True  # where it lets the daemon write is its own affair
        self._segment.registered[:] = True
        self._dealer = Dealer(world.network, self.process, b"nobody" + bytes([number]), self._reply)
        try:
            self._lifeline = world.network.lifeline(self.process, self._frame)
        except OSError:
            self.process.alive = False

    def die(self) -> None:
        if self.process.alive:
            self.process.alive = False
            self._lifeline.hang_up()
            self._dealer.close()

    def _frame(self, frame: lifeline.FromDaemon | None) -> None:
        if frame is None or isinstance(frame, lifeline.Refused):
            self.die()
        elif isinstance(frame, lifeline.Greeting):
            self._session_id = frame.session_id
            self._dealer = Dealer(self._world.network, self.process, lifeline.routing_id(frame.token), self._reply)
            pause = 0.0
            for deed in self._plan():
                pause += self._rng.uniform(0.0, 0.01)
                self.process.after(pause, deed)
            if self._rng.random() < 0.7:
                self.process.after(pause + self._rng.uniform(0.0, 0.5), self.die)

    def _reply(self, frames: Sequence[bytes]) -> None:
        reply = codec.decode_reply(frames[0]) if len(frames) == 1 else None
        if isinstance(reply, m.Done) and reply.count and reply.request_id in self._asked:
            raise Broken("a hostile client released a lease that is not its own")

    # --- deeds -----------------------------------------------------------------------------------

    def _plan(self) -> list[Callable[[], None]]:
        send, choice, specs = self._send, self._rng.choice, [m.GroupSpec("x", 1)]
        entry: list[Callable[[], None]] = []
        if self._rng.random() < 0.8:
            entry.append(lambda: send(m.Hello, PROTOCOL_VERSION, role, "h", ""))
            entry.append(lambda: send(m.OpenNamespace, self._fingerprint, "h", 1, KEY_BYTES, specs, ""))
        role = choice((m.Role.WORKER, m.Role.WORKER, m.Role.SCHEDULER, m.Role.ADMIN))
        if entry and role is m.Role.WORKER and self._rng.random() < 0.8:
            entry += [self._attach, self._register]
        deeds: list[Callable[[], None]] = [
            self._leases,
            lambda: self._dealer.send((self._rng.randbytes(choice((0, 1, 20, 300))),)),
            self._mutated,
            self._foreign_route,
            lambda: send(m.Hello, PROTOCOL_VERSION + 1, m.Role.ADMIN, "h", ""),
            self._store,
            self._store,
            self._load,
            lambda: send(m.Cancel, [self._job_id, 1, 2, 3, 2**63 - 1, 1]),
            self._lookup,
            self._leases,
            self._bad_register,
            self._attach,
            self._other_geometry,
            lambda: send(m.Unregister, choice((self._registration, bytes(16)))),
            lambda: self._dealer.send(choice(((b"", b"12345678"), (b"", b"1"), (b"a", b"b", b"c"), (b"x" * 70_000,)))),
            lambda: send(m.Results, choice((0, 2**63 - 1))),
        ]
        return entry + [choice(deeds) for _ in range(self._rng.randint(3, 12))]

    def _request(self, kind: type[m.AnyRequest], *fields: Any) -> m.AnyRequest:
        self._request_id += 1
        return kind(self._request_id, *fields)

    def _send(self, kind: type[m.AnyRequest], *fields: Any) -> None:
        self._dealer.send((codec.encode(self._request(kind, *fields)),))

    def _victim(self) -> bytes:
        return self._rng.choice(self._world.contents).spec.fingerprint

    def _attach(self) -> None:
        if self._lifeline.server_open:
            self._lifeline.to_daemon.send((lifeline.Attach(self._rng.choice((0, 0, 1))), self._segment))

    def _register(self) -> None:
        """Register memory correctly, so that later jobs are not refused for the lack of it."""
        handles: list[Handle] = [MemfdHandle(0, self._segment.data.size)]
        tensors, groups = [TensorLayout(0, 0, PAGE, BLOCKS)], [[PageRef(0, PAGE)]]
        name = self._registration
        self._send(m.Register, self._fingerprint, name, 0, 1, handles, tensors, groups)

    def _bad_register(self) -> None:
        tensor = TensorLayout(
            self._rng.choice((0, 1, 65535)),
            self._rng.choice((0, PAGE, 2**63 - 1)),
            self._rng.choice((1, PAGE, 2**62)),
            self._rng.choice((1, BLOCKS, 2**31 - 1)),
        )
        page = PageRef(self._rng.choice((0, 7)), self._rng.choice((1, PAGE + 1, 2**31 - 1)))
        rank = self._rng.choice((0, 3))
        handle: Handle = MemfdHandle(self._rng.choice((0, 0, 9)), self._segment.data.size)
        gpu: Handle = CudaIpcHandle(bytes(64), 1 << 20, bytes(16))
        handles = self._rng.choice(([handle], [handle, handle], [gpu]))
        where = self._rng.choice((self._fingerprint, self._fingerprint, self._victim()))
        name = self._rng.choice((self._registration, self._rng.randbytes(16)))
        per_key = self._rng.choice((1, 1, 65535))
        self._send(m.Register, where, name, rank, per_key, handles, [tensor], [[page]])

    def _parts(self) -> list[GroupTransfer]:
        count = self._rng.randint(0, 3)
        keys = b"".join(self._rng.choice((b"a", b"b", b"c", b"d")) * KEY_BYTES for _ in range(count))
        blocks = [self._rng.choice((0, 1, 2, 3, 4, -1, 2**31 - 1)) for _ in range(self._rng.choice((count, 1, 70)))]
        if self._rng.random() < 0.5:
            keys, blocks = b"".join(bytes([65 + at]) * KEY_BYTES for at in range(3)), [0, 1, 2]
            if self._rng.random() < 0.5:  # all in order but for one block
                wrong = GroupTransfer(0, keys, ids([0, self._rng.choice((BLOCKS, -1)), 2]), 0)
                return [wrong]
        raw = ids(blocks) + self._rng.choice((b"", b"", b"", b"\0"))
        group = self._rng.choice((0, 0, 0, 1, 65535))
        part = GroupTransfer(group, keys, raw, self._rng.choice((0, 0, 1, 65535)))
        return self._rng.choice(([part], [part], [part, part]))

    def _store(self) -> None:
        self._job_id = self._rng.choice((self._job_id, self._job_id + 1))
        name = self._rng.choice((self._registration, self._registration, bytes(16)))
        self._submit(name, Job(self._job_id, self._parts()))

    def _load(self) -> None:
        self._job_id += 1
        self._submit(self._registration, Job(self._job_id, self._parts(), self._some_lease()))

    def _submit(self, registration: bytes, job: Job) -> None:
        made = submit_of(0, registration, KEY_BYTES, [job])
        self._send(m.Submit, registration, made.stores, made.loads)

    def _some_lease(self) -> int:
        session = self._rng.choice((self._session_id, self._rng.randint(1, self._session_id)))
        return (session << 32) | self._rng.randint(1, 5)

    def _leases(self) -> None:
        """Release leases of honest engines, whose ids nobody could guess."""
        foreign = [lease_id for engine in self._world.engines for lease_id in engine.scheduler._leases]
        self._asked.add(self._request_id + 1)
        self._send(m.Release, [*foreign, (self._session_id << 32) | 99])

    def _lookup(self) -> None:
        where = self._rng.choice((self._fingerprint, self._victim()))
        keys = self._rng.choice((b"a" * KEY_BYTES, b"A" * KEY_BYTES, b"a" * 7, b"x" * 9000))
        self._send(m.Lookup, where, self._some_lease(), [m.GroupKeys(0, keys)])

    def _other_geometry(self) -> None:
        victim, specs = self._victim(), [m.GroupSpec("y", 3)]
        # One that is not open yet would be its own: all that may connect and know a fingerprint may open it.
        if victim in self._world.daemon.service.cache.namespaces:
            self._send(m.OpenNamespace, victim, "h", 7, 64, specs, "")

    def _foreign_route(self) -> None:
        """Guess the token of another session."""
        guessed = lifeline.routing_id(self._rng.randbytes(16))
        stranger = Dealer(self._world.network, self.process, guessed, self._reply)
        for request in (self._request(m.Reset, self._victim()), self._request(a.Clear, None)):
            stranger.send((codec.encode(request),))

    def _mutated(self) -> None:
        message = self._request(m.Lookup, self._fingerprint, 2**33, [m.GroupKeys(0, b"a" * KEY_BYTES)])
        frame = bytearray(codec.encode(message))
        for _ in range(self._rng.randint(1, 4)):
            at = self._rng.randrange(len(frame))
            if self._rng.random() < 0.5:
                frame[at] = self._rng.randrange(256)
            else:
                del frame[at]
        self._dealer.send((bytes(frame),))

"""A daemon that tells routers of its blocks, an engine that stores prompts in it, and a subscriber as routers are."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import zmq

from kvoffd_client import SharedMemory
from kvoffd_client.client_options import Closing
from kvoffd_proto import messages as m
from kvoffd_proto.events import END_OF_REPLAY

from .daemon import DaemonProcess
from .ports import free_ports
from .struct_wire import WireClient, ids, key
from .waiting import wait_until

PAGE = 16384
BLOCK_TOKENS, KEY_BYTES = 16, 32
POOL_BLOCKS = 256
TIMEOUT_MS = 5000


class PromptEngine(Closing):
    """One engine, of one worker and one group of full attention, that stores and loads prompts of token ids.

    A block's key is a number that counts from 1; ``keys`` has it by the tokens of the prompt up to the block's end.
    Engines that have one such table know a block by the same key.
    """

    def __init__(
        self, daemon: DaemonProcess, label: str = "model", keys: dict[tuple[int, ...], int] | None = None
    ) -> None:
        self.memory = SharedMemory(POOL_BLOCKS * PAGE, "test")
        self.fingerprint = label.encode().ljust(32, b".")
        groups = [m.GroupSpec("full_attention", BLOCK_TOKENS)]
        self.worker = WireClient(daemon.directory, None)
        self.capabilities = self.worker.hello(m.Role.WORKER).capabilities
        self.scheduler = WireClient(daemon.directory, m.Role.SCHEDULER)
        for one in (self.worker, self.scheduler):
            one.ask(m.OpenNamespace, self.fingerprint, label, 1, KEY_BYTES, groups, "{}")
        self.registration = self.worker.register(self.memory, fingerprint=self.fingerprint)
        self.keys = keys if keys is not None else {}
        self._jobs = self._leases = 0

    def chain(self, prompt: Sequence[int]) -> list[int]:
        """The keys of a prompt's whole blocks."""
        ends = range(BLOCK_TOKENS, len(prompt) + 1, BLOCK_TOKENS)
        return [self.keys.setdefault(tuple(prompt[:end]), len(self.keys) + 1) for end in ends]

    def store(self, prompt: Sequence[int], first: int = 0, *, tells: bool = True) -> None:
        """Store a prompt's blocks from number ``first`` on."""
        self._jobs += 1
        self._submit(stores=[m.Store(self._jobs, [self._transfer(prompt, first, tells)])])

    def load(self, prompt: Sequence[int], first: int = 0, *, tells: bool = True) -> None:
        """Load a prompt's blocks from number ``first`` on, once all of them are in the pool."""
        chain = self.chain(prompt)
        wait_until(lambda: self.held() >= set(chain), TIMEOUT_MS / 1000)
        name = self._look_up(chain)[0]
        self._jobs += 1
        self._submit(loads=[m.Load(self._jobs, name, [self._transfer(prompt, first, tells)])])

    def _transfer(self, prompt: Sequence[int], first: int, tells: bool) -> m.GroupTransfer:
        chain = self.chain(prompt)
        parents = [0, *chain][first : len(chain)] if tells else []
        told = prompt[first * BLOCK_TOKENS : len(chain) * BLOCK_TOKENS] if tells else []
        return m.GroupTransfer(
            0,
            b"".join(map(key, chain[first:])),
            ids(*[number % POOL_BLOCKS for number in chain[first:]]),
            0,
            b"".join(map(key, parents)),
            struct.pack(f"<{len(told)}I", *told),
        )

    def _submit(self, **jobs: Any) -> None:
        result = self.worker.result(m.Submit, self.registration, **jobs)
        assert result.ok, result

    def _look_up(self, numbers: Sequence[int]) -> tuple[int, bytes]:
        """A lease for these keys, and their states."""
        self._leases += 1
        name = self.scheduler.lease(self._leases)
        asked = m.GroupKeys(0, b"".join(map(key, numbers)))
        return name, self.scheduler.ask(m.Lookup, self.fingerprint, name, [asked]).states[0]

    def invalidate(self, *numbers: int) -> None:
        gone = m.GroupKeys(0, b"".join(map(key, numbers)))
        self.scheduler.ask(m.Invalidate, self.fingerprint, [gone])

    def reset(self) -> None:
        self.scheduler.ask(m.Reset, self.fingerprint)

    def held(self) -> set[int]:
        """The keys that the pool has, of all that were ever stored, by a lookup."""
        numbers = sorted(self.keys.values())
        name, states = self._look_up(numbers)
        self.scheduler.ask(m.Release, [name])
        return {number for number, state in zip(numbers, states, strict=True) if state == 2}

    def close(self) -> None:
        self.worker.close()
        self.scheduler.close()
        self.memory.close()


class Subscriber(Closing):
    """A SUB of libzmq that folds what it gets, and sees gaps."""

    def __init__(self, port: int, topic: bytes = b"", *, listens: bool = False) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.SUBSCRIBE, topic)
        address = f"tcp://127.0.0.1:{port}"
        self.socket.bind(address) if listens else self.socket.connect(address)
        self.topics: list[bytes] = []
        self.numbers: list[int] = []
        self.events: list[dict[str, object]] = []
        self.blocks: dict[tuple[str, int], tuple[int | None, tuple[int, ...]]] = {}

    def take_one(self, timeout_ms: int = TIMEOUT_MS) -> bool:
        if not self.socket.poll(timeout_ms):
            return False
        topic, number, payload = self.socket.recv_multipart()
        self.topics.append(topic)
        self.numbers.append(int.from_bytes(number, "big"))
        assert self.numbers == list(range(self.numbers[0], self.numbers[0] + len(self.numbers))), "a gap"
        self.fold(payload)
        return True

    def take_until(self, keys: set[int], medium: str = "CPU") -> None:
        """Take messages until these keys, and no others, are there."""
        deadline = time.monotonic() + TIMEOUT_MS / 1000
        while self.keys(medium) != keys:
            assert time.monotonic() < deadline, f"{sorted(self.keys(medium))} and not {sorted(keys)}"
            self.take_one(timeout_ms=100)

    def keys(self, medium: str = "CPU") -> set[int]:
        return {block for where, block in self.blocks if where == medium}

    def fold(self, payload: bytes) -> None:
        _, events, rank = msgspec.msgpack.decode(payload)
        assert rank == 0
        for event in events:
            self.events.append(event)
            if event["type"] == "AllBlocksCleared":
                self.blocks.clear()
            elif event["type"] == "BlockRemoved":
                for block in event["block_hashes"]:
                    self.blocks.pop((event["medium"], block), None)
            else:
                parent, size = event["parent_block_hash"], event["block_size"]
                for at, block in enumerate(event["block_hashes"]):
                    tokens = tuple(event["token_ids"][at * size : (at + 1) * size])
                    self.blocks[event["medium"], block] = parent, tokens
                    parent = block

    def close(self) -> None:
        self._context.destroy(linger=0)


def replay(address: str, start: int) -> list[tuple[bytes, int, bytes]]:
    """Ask for a replay as vLLM's subscribers do, by an empty frame and eight bytes: topic, number, payload of each."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(address)
    try:
        socket.send_multipart([b"", start.to_bytes(8, "big")])
        found = []
        while True:
            assert socket.poll(TIMEOUT_MS), "the replay did not end"
            empty, topic, number, payload = socket.recv_multipart()
            assert empty == b""
            if number == END_OF_REPLAY:
                return found
            found.append((topic, int.from_bytes(number, "big"), payload))
    finally:
        context.destroy(linger=0)


@contextmanager
def router_daemon(
    node: str = "node-a", host: str = "127.0.0.1", **flags: str
) -> Iterator[tuple[DaemonProcess, int, int]]:
    """A daemon, and its ports for events and replays."""
    port, replay_port = free_ports(2)
    addresses = {"event_address": f"{host}:{port}", "event_replay_address": f"127.0.0.1:{replay_port}"}
    flags = {"event_heartbeat": "0.2s", "leased_share": "1", **flags}
    with DaemonProcess(flags.pop("pool_size", "64MiB"), event_node=node, **addresses, **flags) as daemon:
        yield daemon, port, replay_port

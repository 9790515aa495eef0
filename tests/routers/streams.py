"""Engines without a model: they store prompts, read KV events and publish them with vLLM's own publisher."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch, ZmqEventPublisher
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.kv_offload.base import make_offload_key

from kvoffd_client import NamespaceSpec, SchedulerClient, SharedMemory
from kvoffd_client.session import Closing
from kvoffd_client.vllm.block_tokens import HostBlockEvents
from kvoffd_client.vllm.connector_metadata import ChunkGroup
from kvoffd_proto.messages import GroupSpec
from tests.kit.daemon import DaemonProcess
from tests.kit.ports import free_ports
from tests.kit.waiting import wait_until
from tests.kit.wire import WireClient

BLOCK_TOKENS, PAGE = 16, 16384
POOL_BLOCKS = 64
"""Blocks of a pool of 1 MiB."""
SPACE = NamespaceSpec(b"model".ljust(32, b"."), "model", 1, 32, (GroupSpec("full", BLOCK_TOKENS),), "{}")
ROOT = bytes(32)


def chain(prompt: Sequence[int]) -> list[bytes]:
    """The hashes of a prompt's whole blocks, each of its tokens and the hash before it."""
    found = [ROOT]
    for end in range(BLOCK_TOKENS, len(prompt) + 1, BLOCK_TOKENS):
        tokens = struct.pack(f"<{BLOCK_TOKENS}I", *prompt[end - BLOCK_TOKENS : end])
        found.append(hashlib.sha256(found[-1] + tokens).digest())
    return found[1:]


@dataclass
class Published:
    """What a reader of one stream knows: by medium the blocks, each with its parent."""

    blocks: dict[str, dict[Any, Any]] = field(default_factory=lambda: {"CPU": {}, "STORAGE": {}})

    def fold(self, events: Iterable[Any]) -> None:
        for event in events:
            there = self.blocks[event.medium]
            if isinstance(event, BlockRemoved):
                for block in event.block_hashes:
                    del there[block]
                continue
            assert isinstance(event, BlockStored)
            parent = event.parent_block_hash
            for block in event.block_hashes:
                assert block not in there
                there[block] = parent
                parent = block


class StreamEngine(Closing):
    """One engine of a daemon, of which a router sees nothing but its stream of KV events."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self.memory = SharedMemory(POOL_BLOCKS * PAGE, "test")
        self.worker, self.scheduler = WireClient(daemon.directory), WireClient(daemon.directory, "scheduler")
        for client in (self.worker, self.scheduler):
            client.open_namespace(SPACE.fingerprint, label=SPACE.label)
        self._registration = self.worker.register(self.memory, PAGE, namespace=SPACE.fingerprint)
        self.client = SchedulerClient(daemon.directory, SPACE, subscribe_events=True)
        self._host = HostBlockEvents({0: ChunkGroup(0, 1, BLOCK_TOKENS)}, {0: "full_attention"})
        self.port, self.replay_port = free_ports(2)
        self._publisher = ZmqEventPublisher(0, f"tcp://*:{self.port}", f"tcp://*:{self.replay_port}")
        self.published = Published()
        self._leases = count(1)
        wait_until(lambda: self.client.ready)

    def store(self, prompt: Sequence[int], first: int = 0, *, tells: bool = True) -> None:
        """Store a prompt's blocks from number ``first`` on."""
        keys = chain(prompt)
        parents = [ROOT, *keys][first : len(keys)] if tells else []
        told = prompt[first * BLOCK_TOKENS : len(keys) * BLOCK_TOKENS] if tells else []
        tokens = struct.pack(f"<{len(told)}I", *told)
        blocks = [number % POOL_BLOCKS for number in range(first, len(keys))]
        assert self.worker.store(self._registration, keys[first:], blocks, parents=parents, tokens=tokens).ok

    def held(self, keys: Sequence[bytes]) -> list[bool]:
        """Of each key, whether the pool has it."""
        lease = next(self._leases)
        states = self.scheduler.lookup(lease, keys, SPACE.fingerprint).states
        self.scheduler.release(lease)
        return [state == "R" for state in states]

    def depth(self, prompt: Sequence[int]) -> int:
        """The prompt's leading blocks that the daemon holds."""
        return [*self.held(chain(prompt)), False].index(False)

    def hit(self, prompt: Sequence[int]) -> None:
        """A request comes and is looked up."""
        special: dict[str, Any] = dict.fromkeys(("lora_request", "mm_features", "cache_salt", "prompt_embeds"))
        request = SimpleNamespace(all_token_ids=list(prompt), **special)
        keys = [make_offload_key(key, 0) for key in chain(prompt)]
        self._host.found(request, 0, keys, self.depth(prompt))

    def step(self) -> None:
        """As vLLM's scheduler at the end of a step, but without events too.

        A router's subscription may come after the first events. It asks for what it missed once it hears of later ones.
        """
        events = self._host.take(self)  # type: ignore[arg-type]
        self.published.fold(events)
        self._publisher.publish(KVEventBatch(ts=0.0, events=events))

    def close(self) -> None:
        self._publisher.shutdown()
        self.client.close()
        self.worker.close()
        self.scheduler.close()
        self.memory.close()


def external(keys: Iterable[bytes]) -> list[Any]:
    return [maybe_convert_block_hash(key) for key in keys]  # type: ignore[arg-type]

"""A client of the standard library, pyzmq and MessagePack, written from PROTOCOL.md alone, and a real daemon.

It reads tags, the order of fields, codes and names from the page. So a test fails where the page says too little, and
where the daemon does something else.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import secrets
import socket
import struct
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from tests.kit.daemon import DaemonProcess

PAGE = (Path(__file__).parents[2] / "proto" / "PROTOCOL.md").read_text()
SECTIONS = {part.split("\n", 1)[0]: part for part in PAGE.split("\n#### ")}
TAGS = {name: tags[0] for name, text in SECTIONS.items() if (tags := re.findall(r'an array: `"(\w+)"`', text))}
FIELDS = {name: re.findall(r"^\| \d+ \| `(\w+)` \|", text, re.MULTILINE) for name, text in SECTIONS.items()}
CODES = {int(code): name for code, name in re.findall(r"\| (\d+) \| `(\w+)` \|", SECTIONS["ErrorCode"])}
STATES = {int(state): name for state, name in re.findall(r"\| (\d+) \| (\w+) \|", SECTIONS["KeyState"])}


def said(pattern: str) -> str:
    """What the page says in place of the pattern's group."""
    found = re.search(pattern, " ".join(PAGE.split()))
    assert found, f"the page does not say {pattern}"
    return found[1]


VERSION = int(said(r"There is one version, now (\d+),"))
JOBS = said(r"\| `(\S+)` \| ZeroMQ ROUTER")
EVENTS = said(r"\| `(\S+)` \| ZeroMQ PUB")
LIFELINE = said(r"\| `(\S+)` \| Unix stream")
LENGTH_BYTES = int(said(r"A frame is its length, an unsigned little-endian integer of (\d+) bytes"))
ROUTING_ID = said(r"Its routing id is the byte `(\w)` and the token").encode()
SESSION_TOPIC = said(r"the session's topic `(\S+)` \(both numbers in decimal\)")
KV_TOPIC = said(r"under the topic `(\S+)` and the namespace's fingerprint in lower-case hex")
SEAL = getattr(fcntl, said(r"the seal `(\w+)`"))

KEY_BYTES, TOKENS, BLOCKS_PER_KEY = 8, 4, 2
LAYERS, BLOCKS, STRIDE, PAGE_BYTES = 2, 16, 512, 384
DEADLINE_MS = 30_000


def made(name: str, /, **values: Any) -> list[Any]:
    """The array of a message or a part. Trailing fields that have a default may be missing."""
    fields = FIELDS[name][: len(values)]
    assert set(fields) == set(values), f"{name} has the fields {FIELDS[name]}"
    return ([TAGS[name]] if name in TAGS else []) + [values[field] for field in fields]


def read(name: str, array: list[Any]) -> SimpleNamespace:
    """A message or a part by the names of its fields."""
    if name in TAGS:
        assert array[0] == TAGS[name], array
        array = array[1:]
    return SimpleNamespace(**dict(zip(FIELDS[name], array, strict=False)))


class Refused(Exception):
    """An ``Error`` came, with the code of this name."""


class Client:
    """One session: its lifeline, its DEALER and its SUB. A worker has memory of two layers once it has registered."""

    def __init__(self, directory: Path, role: str) -> None:
        self.role, self.request_ids, self.job_ids = role, count(1), count(1)
        self.results: dict[int, SimpleNamespace] = {}
        self.acknowledged = 0
        self.lifeline = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.lifeline.connect(str(directory / LIFELINE))
        self.greeting = read("Greeting", self.lifeline_frame())
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.jobs = self.context.socket(zmq.DEALER)
        self.jobs.routing_id = ROUTING_ID + self.greeting.token
        self.jobs.connect(f"ipc://{directory / JOBS}")
        topic = SESSION_TOPIC.replace("<epoch>", str(self.greeting.epoch))
        self.topic = topic.replace("<session>", str(self.greeting.session_id)).encode()
        self.events = self.subscribe(directory, self.topic)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.lifeline.close()
        self.context.destroy(linger=0)

    def subscribe(self, directory: Path, topic: bytes) -> zmq.Socket[bytes]:
        subscriber = self.context.socket(zmq.SUB)
        subscriber.subscribe(topic)
        subscriber.connect(f"ipc://{directory / EVENTS}")
        return subscriber

    def lifeline_frame(self) -> list[Any]:
        size = int.from_bytes(self.lifeline.recv(LENGTH_BYTES, socket.MSG_WAITALL), "little")
        return msgspec.msgpack.decode(self.lifeline.recv(size, socket.MSG_WAITALL))

    def send_on_lifeline(self, message: list[Any], descriptors: Sequence[int] = ()) -> None:
        frame = msgspec.msgpack.encode(message)
        socket.send_fds(self.lifeline, [len(frame).to_bytes(LENGTH_BYTES, "little") + frame], descriptors)

    def send(self, request: str, /, **fields: Any) -> None:
        self.request_id = next(self.request_ids)
        self.jobs.send(msgspec.msgpack.encode(made(request, request_id=self.request_id, **fields)))

    def reply(self, name: str) -> SimpleNamespace:
        """The reply to the last request. Raises Refused."""
        assert self.jobs.poll(DEADLINE_MS), f"no {name} came"
        array = msgspec.msgpack.decode(self.jobs.recv())
        assert array[1] == self.request_id
        if array[0] == TAGS["Error"]:
            raise Refused(CODES[read("Error", array).code])
        return read(name, array)

    def ask(self, request: str, /, **fields: Any) -> SimpleNamespace:
        """Send a request and wait for the reply that the page's table names."""
        self.send(request, **fields)
        return self.reply(said(rf"\| \[{request}\]\(\S+\) \| [a-z, ]+ \| \[(\w+)\]"))

    def hello(self) -> SimpleNamespace:
        return self.ask("Hello", protocol_version=VERSION, role=self.role, name="page", software="")

    def open(self, namespace: bytes) -> SimpleNamespace:
        self.namespace = namespace
        groups = [made("GroupSpec", kind="full", tokens_per_block=TOKENS)]
        geometry = {"world_size": 1, "key_bytes": KEY_BYTES, "groups": groups}
        return self.ask("OpenNamespace", namespace=namespace, label="page", description="{}", **geometry)

    def register(self) -> SimpleNamespace:
        descriptor = os.memfd_create("page", os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, LAYERS * BLOCKS * STRIDE)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEAL)
        self.memory = mmap.mmap(descriptor, LAYERS * BLOCKS * STRIDE)
        self.memory[:] = os.urandom(len(self.memory))
        segment_id = next(self.job_ids)
        self.send_on_lifeline(made("Attach", segment_id=segment_id), [descriptor])
        os.close(descriptor)
        assert read("Attached", self.lifeline_frame()).segment_id == segment_id
        self.registration_id, layout = secrets.token_bytes(16), {"stride_bytes": STRIDE, "num_blocks": BLOCKS}
        offsets = [layer * BLOCKS * STRIDE for layer in range(LAYERS)]
        return self.ask(
            "Register",
            namespace=self.namespace,
            registration_id=self.registration_id,
            rank=0,
            blocks_per_key=BLOCKS_PER_KEY,
            segments=[made("MemfdHandle", segment_id=segment_id, size_bytes=len(self.memory))],
            tensors=[made("TensorLayout", segment=0, offset_bytes=offset, **layout) for offset in offsets],
            groups=[[made("PageRef", tensor=layer, page_bytes=PAGE_BYTES) for layer in range(LAYERS)]],
        )

    def submit(self, keys: list[bytes], block_ids: Sequence[int], first: int = 0, lease: int = 0, **more: bytes) -> int:
        """Store, or load where there is a lease, which stays. Returns the job's id; a refusal is a reply."""
        job_id = next(self.job_ids)
        counts = {"key_counts": len(keys), "block_counts": len(block_ids), "first_blocks": first}
        packed = {field: struct.pack("<I", number) for field, number in counts.items()}
        packed |= {"keys": b"".join(keys), "block_ids": struct.pack(f"<{len(block_ids)}i", *block_ids), **more}
        blocks = made("GroupBlocks", group=0, **packed)
        stores, loads = made("Stores", job_ids=[job_id], groups=[blocks]), [[], [], [], []]
        if lease:
            loads = made("Loads", job_ids=[job_id], lease_ids=[lease], keep_lease=[True], groups=[blocks])
            stores = [[], []]
        registration = {"registration_id": self.registration_id, "acknowledged": self.acknowledged}
        self.send("Submit", stores=stores, loads=loads, **registration)
        return job_id

    def result(self, job_id: int) -> SimpleNamespace:
        """A job's result, from ``events.sock``. Asks for it where a number is missing, or a second has passed."""
        while job_id not in self.results:
            batches = []
            if self.events.poll(1000):
                topic, sequence, payload = self.events.recv_multipart()
                batches = [read("Completions", msgspec.msgpack.decode(payload))]
                assert (topic, sequence) == (self.topic, batches[0].sequence.to_bytes(8, "big"))
            if not batches or batches[0].sequence > self.acknowledged + 1:
                reply = self.ask("Results", acknowledged=self.acknowledged)
                batches = [read("Completions", batch) for batch in reply.batches]
                assert batches or job_id in reply.unfinished
            for batch in batches:
                if batch.sequence == self.acknowledged + 1:  # else it came before, in an answer
                    self.acknowledged = batch.sequence
                    results = [read("JobResult", result) for result in batch.results]
                    self.results |= {result.job_id: result for result in results}
        return self.results.pop(job_id)

    def look_up(self, keys: list[bytes]) -> tuple[list[str], SimpleNamespace]:
        groups = [made("GroupKeys", group=0, keys=b"".join(keys))]
        lease_id = 2**32 + secrets.randbits(62)
        reply = self.ask("Lookup", namespace=self.namespace, lease_id=lease_id, groups=groups)
        assert reply.lease_id == lease_id
        return [STATES[state] for state in reply.states[0]], reply


@pytest.fixture
def scheduler(shared_daemon: DaemonProcess) -> Iterator[Client]:
    with Client(shared_daemon.directory, "scheduler") as client:
        assert client.greeting.protocol_version == VERSION
        assert client.hello().session_id == client.greeting.session_id
        assert client.open(secrets.token_bytes(32)).created
        yield client


@pytest.fixture
def worker(shared_daemon: DaemonProcess, scheduler: Client) -> Iterator[Client]:
    with Client(shared_daemon.directory, "worker") as client:
        client.hello()
        assert not client.open(scheduler.namespace).created
        assert client.register().shard_bytes == [LAYERS * BLOCKS_PER_KEY * PAGE_BYTES]
        yield client


def new_keys(number: int) -> list[bytes]:
    return [secrets.token_bytes(KEY_BYTES) for _ in range(number)]


def test_blocks_are_stored_found_loaded_and_released(scheduler: Client, worker: Client) -> None:
    keys = new_keys(3)
    stored = worker.result(worker.submit(keys, range(6)))
    assert (stored.ok, stored.bytes) == (True, 6 * LAYERS * PAGE_BYTES)
    states, found = scheduler.look_up([*keys, *new_keys(1)])
    assert (states, found.pinned) == (["ready", "ready", "ready", "absent"], 3)
    before, sources = bytes(worker.memory), {10: 1, 9: 2, 8: 3, 7: 4}  # the first and the last of six are left out
    assert worker.result(worker.submit(keys, list(sources), first=1, lease=found.lease_id)).ok
    for page in range(LAYERS * BLOCKS):
        layer, block = divmod(page, BLOCKS)
        source = (layer * BLOCKS + sources.get(block, block)) * STRIDE
        rest = before[page * STRIDE + PAGE_BYTES : (page + 1) * STRIDE]
        assert worker.memory[page * STRIDE : (page + 1) * STRIDE] == before[source : source + PAGE_BYTES] + rest
    assert [scheduler.ask("Release", lease_ids=[found.lease_id]).count for _ in range(2)] == [1, 0]
    late = worker.result(worker.submit(keys, range(6), lease=found.lease_id))
    assert (late.ok, CODES[late.error]) == (False, "UNKNOWN_LEASE")
    assert read("GroupKeys", late.failed[0]).keys == b"".join(keys)


def test_kv_events_tell_of_the_blocks(scheduler: Client, worker: Client, shared_daemon: DaemonProcess) -> None:
    root, child = new_keys(2)
    parents, tokens = bytes(KEY_BYTES) + root, struct.pack(f"<{2 * TOKENS}I", *range(2 * TOKENS))
    numbers, events = [], []
    with worker.subscribe(shared_daemon.directory, (KV_TOPIC + worker.namespace.hex()).encode()) as kv_events:
        for _ in range(30):  # ZeroMQ subscribes in the background
            worker.submit(new_keys(1), [0, 1])
            if kv_events.poll(1000):
                break
        assert worker.result(worker.submit([root, child], range(4), parents=parents, tokens=tokens)).ok
        child_alone = [made("GroupKeys", group=0, keys=child)]
        assert scheduler.ask("Invalidate", namespace=scheduler.namespace, groups=child_alone).count == 1
        scheduler.ask("Reset", namespace=scheduler.namespace)
        while not events or events[-1] != made("AllBlocksCleared"):
            assert kv_events.poll(DEADLINE_MS)
            _, number, payload = kv_events.recv_multipart()
            numbers.append(int.from_bytes(number, "big"))
            events += read("EventBatch", msgspec.msgpack.decode(payload)).events
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    of_tier = {"medium": "CPU", "group_idx": 0}
    of_prompt = {"parents": [bytes(KEY_BYTES), root], "token_ids": tokens}
    assert events[-3:-1] == [
        made("BlockStored", block_hashes=[root, child], block_size=TOKENS, **of_tier, **of_prompt),
        made("BlockRemoved", block_hashes=[child], **of_tier),
    ]


def test_a_client_that_leaves_gets_its_memory_back(scheduler: Client, worker: Client) -> None:
    assert worker.ask("Unregister", registration_id=worker.registration_id).count == 1
    worker.submit(new_keys(1), [0, 1])
    with pytest.raises(Refused, match="UNKNOWN_REGISTRATION"):
        worker.reply("Completions")
    worker.send_on_lifeline(made("Leaving"))
    worker.lifeline.shutdown(socket.SHUT_WR)
    assert worker.lifeline_frame() == made("MemoryReleased")
    assert worker.lifeline.recv(1) == b""
    with pytest.raises(Refused, match="BAD_TOKEN"):
        worker.ask("Health")
    assert scheduler.ask("Health").level == "ok"

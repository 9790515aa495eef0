"""Valid inputs for the fuzzer to begin with, so that it gets past the first byte."""

from __future__ import annotations

from functools import cache

from kvoffd.config import SETTINGS, Config
from kvoffd_client.jobs import GroupTransfer, Job, submit_of
from kvoffd_proto import admin as a
from kvoffd_proto import codec, events, lifeline
from kvoffd_proto import messages as m
from kvoffd_proto import stats as s
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import CudaIpcHandle, CudaVmmHandle, MemfdHandle, PageRef, TensorLayout
from tests.fuzz.pages import snapshot

TOKEN, SPACE, NAME = b"t" * 16, b"n" * 32, b"r" * 16
PART = GroupTransfer(0, b"k" * 64, b"\0\0\0\0\1\0\0\0")
KEYS = m.GroupKeys(0, b"k" * 64)
RESULT = m.JobResult(1, False, 5, 0.5, ErrorCode.DEADLINE, [KEYS])
BATCH = m.Completions(1, 0, [RESULT])
SHARD = a.ShardSpec(1, [a.PageSpec(4096)])


@cache
def seeds(name: str) -> list[bytes]:
    """The seeds of the decoder of that name; at least one."""
    return {
        "request": _requests,
        "reply": _replies,
        "completions": lambda: [codec.encode(BATCH)],
        "lifeline_stream": _frames,
        "event_batch": _events,
        "namespaces": lambda: [snapshot()],
        "config_file": _config,
    }.get(name, lambda: [bytes(range(64)), b"\0\1\2\3" * 40])()


def _requests() -> list[bytes]:
    memfd = MemfdHandle(1, 4096)
    handles = [memfd, CudaIpcHandle(bytes(64), 4096, bytes(16)), CudaVmmHandle([1], [4096], bytes(16))]
    requests: list[m.AnyRequest] = [
        m.Hello(1, 1, m.Role.WORKER, "name", "software"),
        m.Results(3, 0),
        m.OpenNamespace(4, SPACE, "label", 2, 32, [m.GroupSpec("full", 16, 4)], "{}"),
        m.Register(5, SPACE, NAME, 0, 1, handles, [TensorLayout(0, 0, 64, 8)], [[PageRef(0, 64)]]),
        m.Unregister(6, NAME),
        m.Lookup(7, SPACE, 2**32 + 1, [KEYS]),
        m.Release(8, [2**32 + 1]),
        m.Invalidate(9, SPACE, [KEYS]),
        m.Reset(10, SPACE),
        submit_of(11, NAME, 32, [Job(1, [PART])]),
        submit_of(12, NAME, 32, [Job(1, [PART], 2**32 + 1)]),
        m.Cancel(13, [1, 2]),
        s.Stats(14),
        a.Health(15),
        a.Sessions(16),
        a.Namespaces(17),
        a.Clear(18, SPACE),
        a.Scrub(19, True),
        a.DescribeNamespace(20, SPACE),
        a.ListBlocks(22, SPACE, 0, 0, 10, "6b6"),
    ]
    return [codec.encode(request) for request in requests]


def _replies() -> list[bytes]:
    replies: list[m.AnyReply] = [
        m.Welcome(1, 1, "0.1", ["memfd"], m.Limits(*[1] * 8), 0, 1, 1),
        m.ResultsReply(1, [BATCH], [1]),
        m.Done(1, 5),
        m.Error(1, ErrorCode.TOO_MANY, "a sentence"),
        m.NamespaceOpened(1, True),
        m.Registered(1, NAME, [4096]),
        m.LookupReply(1, 2**32, [b"\2\0"], 1, 30_000),
        m.CancelReply(1, [1], [2]),
        a.HealthReply(1, a.HealthLevel.DEGRADED, [a.HealthProblem("a_reason", "a sentence")]),
        a.NamespaceDescribed(1, "label", 1, 32, [m.GroupSpec("full", 16)], "{}", [[SHARD], None]),
        a.BlocksListed(1, [a.BlockInfo(b"k" * 32, m.KeyState.READY, 4096, 1, 0, bytes(8))], 0),
        a.ScrubReply(1, True, 5, 4, 3, 4096, 0, 0.5),
    ]
    return [codec.encode(reply) for reply in replies]


def _frames() -> list[bytes]:
    frames: list[lifeline.FromDaemon | lifeline.FromClient] = [
        lifeline.Greeting(1, 1, 1, TOKEN),
        lifeline.Refused(ErrorCode.FORBIDDEN, "a sentence"),
        lifeline.Attach(1),
        lifeline.Leaving(),
        lifeline.Attached(1),
        lifeline.AttachRefused(1, ErrorCode.TOO_MANY, "a sentence"),
        lifeline.MemoryReleased(),
    ]
    encoded = [lifeline.encode_frame(frame) for frame in frames]
    return [*encoded, b"".join(encoded)]


def _events() -> list[bytes]:
    stored = events.BlockStored([b"k" * 32], 16, "CPU", 0)
    told = events.BlockStored([b"k" * 32], 4, "STORAGE", 1, [bytes(32)], bytes(16))
    some: list[events.KvEvent] = [stored, told, events.BlockRemoved([b"k" * 32], "CPU", 0), events.AllBlocksCleared()]
    return [codec.encode(events.EventBatch(1.5, some))]


def _config() -> list[bytes]:
    shown = {setting.name: setting.show(getattr(Config(), setting.field_name)) for setting in SETTINGS}
    return [f'{name} = "{text}"\n'.encode() for name, text in shown.items()] + [b"pool_size = 5\ndisk_deadline = 2.5\n"]

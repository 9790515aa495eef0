"""Prints the wire's reference page: ``python -m kvoffd_proto.reference > proto/PROTOCOL.md``.

Messages, fields, ranges and error sentences are taken from the Structs themselves; the prose between them is at the
end of this module.
"""

from __future__ import annotations

import types
import typing
from enum import Enum, IntEnum
from pathlib import Path

import msgspec
from msgspec import Meta, Struct

from kvoffd_proto import blocks, events, handles, lifeline
from kvoffd_proto import messages as m
from kvoffd_proto.codec import encode
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.sockets import SYSTEM_DIRECTORY, SocketPaths
from kvoffd_proto.wire import fields_of, metas_of

COMMON_REPLIES = (m.Done, m.Error)
PARTS = (
    m.GroupSpec,
    m.GroupKeys,
    m.GroupTransfer,
    m.JobResult,
    handles.TensorLayout,
    handles.PageRef,
    handles.LayerSpec,
    blocks.ShardSpec,
    blocks.PageSpec,
    blocks.BlockInfo,
    blocks.HeldShard,
    blocks.PutShard,
    m.Limits,
    m.PoolStats,
    m.IntegrityStats,
    m.BlockAccessStats,
    m.DirectionStats,
    m.BelowStats,
    m.DiskStats,
    m.LatencyStats,
    m.NamespaceStats,
    m.SessionInfo,
    m.NamespaceInfo,
)
HANDLES = typing.get_args(handles.Handle)
LIFELINE_FROM_DAEMON = typing.get_args(lifeline.FromDaemon)
LIFELINE_FROM_CLIENT = typing.get_args(lifeline.FromClient)
EVENTS = typing.get_args(events.KvEvent)


def documented() -> list[type[Struct]]:
    """Every Struct that the page describes."""
    return [
        *LIFELINE_FROM_DAEMON,
        *LIFELINE_FROM_CLIENT,
        *m.EXCHANGES,
        *m.REPLIES,
        m.Completions,
        *PARTS,
        *HANDLES,
        events.EventBatch,
        *EVENTS,
    ]


def reference() -> str:
    """The page, as Markdown."""
    parts = [_introduction(), _RULES_PROSE, _lifeline_section(), "## Requests and replies\n", _exchange_table()]
    described: set[type[Struct]] = {m.Completions, *COMMON_REPLIES}
    for section in m.Section:
        parts.append(f"### {section}\n")
        parts += [_BLOCKS_PROSE] if section is m.Section.BLOCKS else []
        for request, exchange in _exchanges_of(section):
            parts.append(_struct(request))
            if exchange.answer not in described:
                described.add(exchange.answer)
                parts.append(_struct(exchange.answer))
    parts += ["### Replies of several requests\n", *(_struct(reply) for reply in COMMON_REPLIES)]
    parts += [_COMPLETIONS_PROSE, _struct(m.Completions)]
    parts += ["## Parts\n", "Arrays inside messages.\n", *(_struct(part) for part in PARTS)]
    parts += ["## Handles\n", _HANDLES_PROSE, *(_struct(handle) for handle in HANDLES)]
    parts += [_EVENTS_PROSE, _struct(events.EventBatch), *(_struct(event) for event in EVENTS)]
    parts += [_values(), _errors(), _examples()]
    return "\n".join(parts)


def _exchanges_of(section: m.Section) -> list[tuple[type[Struct], m.Exchange]]:
    return [(request, known) for request, known in m.EXCHANGES.items() if known.section is section]


# --- structs -------------------------------------------------------------------------------------


def _struct(struct: type[Struct]) -> str:
    tag = struct.__struct_config__.tag
    if not struct.__struct_config__.array_like:
        shape = f'a map with `"type": "{tag}"` and'
    elif tag is not None:
        shape = f'an array: `"{tag}"`, then'
    else:
        shape = "an array without a tag:"
    lines = [f"#### {struct.__name__}", "", _docstring(struct), ""]
    fields = fields_of(struct)
    if not fields:
        return "\n".join([*lines, f"Encoded as {shape} nothing else.", ""])
    lines += [f"Encoded as {shape}", "", "| # | field | type | meaning |", "|---|---|---|---|"]
    first = 0 if tag is None or not struct.__struct_config__.array_like else 1
    for number, (item, hint, description) in enumerate(fields, first):
        position = str(number) if struct.__struct_config__.array_like else ""
        lines.append(f"| {position} | `{item.name}` | {_type(hint)}{_default(item)} | {_markdown(description)} |")
    return "\n".join([*lines, ""])


def _default(item: msgspec.structs.FieldInfo) -> str:
    if item.default is not msgspec.NODEFAULT:
        return f"; default {'nil' if item.default is None else item.default}"
    return "; default empty" if item.default_factory is not msgspec.NODEFAULT else ""


def _docstring(documented: type) -> str:
    lines = (documented.__doc__ or "").strip().splitlines()
    return _markdown(" ".join(line.strip() for line in lines).replace("  ", "\n\n"))


def _markdown(plain: str) -> str:
    return plain.replace("``", "`").replace("|", "\\|")


# --- types ---------------------------------------------------------------------------------------


def _type(hint: object, metas: list[Meta] | None = None) -> str:
    """``hint`` in words, with its range."""
    if typing.get_origin(hint) is typing.Annotated:
        return _type(typing.get_args(hint)[0], [*(metas or []), *metas_of(hint)])
    metas = metas or []
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_type(argument, metas) for argument in arguments)
    if origin is list:
        return f"array{_lengths(metas, 'elements')} of {_type(arguments[0])}"
    if origin is dict:
        return f"map of {_type(arguments[0])} to {_type(arguments[1])}"
    assert isinstance(hint, type), hint
    if hint is type(None):
        return "nil"
    if issubclass(hint, Struct):
        return f"[{hint.__name__}](#{hint.__name__.lower()})"
    if issubclass(hint, Enum):
        return f"{'int' if issubclass(hint, IntEnum) else 'str'}, one of [{hint.__name__}](#{hint.__name__.lower()})"
    if hint in (int, float):
        return f"{hint.__name__}{_range(metas)}"
    return f"{hint.__name__}{_lengths(metas, 'bytes' if hint is bytes else 'characters')}"


def _bound(metas: list[Meta], name: str) -> int | None:
    for meta in metas:
        found: int | None = getattr(meta, name)
        if found is not None:
            return found
    return None


def _range(metas: list[Meta]) -> str:
    low, high, below = (_bound(metas, name) for name in ("ge", "le", "lt"))
    if high is None and below is not None:
        high = below - 1
    if low is None and high is None:
        return ""
    if high is None:
        return f" ≥ {_number(low or 0)}"
    return f" {_number(low or 0)} … {_number(high)}"


def _lengths(metas: list[Meta], unit: str) -> str:
    low, high = _bound(metas, "min_length"), _bound(metas, "max_length")
    if low is None and high is None:
        return ""
    if low == high:
        return f" ({low} {unit})"
    if high is None:
        return f" (at least {low} {unit})"
    return f" (at most {high} {unit})" if not low else f" ({low} … {high} {unit})"


def _number(value: int) -> str:
    for power in (63, 31, 32):
        if value == 2**power - 1:
            return f"2^{power} - 1"
        if value == 2**power:
            return f"2^{power}"
    return str(value)


# --- tables --------------------------------------------------------------------------------------


def _exchange_table() -> str:
    lines = ["| request | roles | answer |", "|---|---|---|"]
    for section in m.Section:
        for request, exchange in _exchanges_of(section):
            name, reply = request.__name__, exchange.answer.__name__
            roles = "any" if exchange.roles == m.ANY_ROLE else ", ".join(exchange.roles)
            answer = f"[{reply}](#{reply.lower()})" + (", in a completion" if exchange.answer is m.Completions else "")
            lines.append(f"| [{name}](#{name.lower()}) | {roles} | {answer} |")
    return "\n".join([*lines, "", _REQUESTS_PROSE])


def _values() -> str:
    roles = "\n".join(f"| `{role.value}` |" for role in m.Role)
    return (
        f"## Values\n\n#### Role\n\n{_docstring(m.Role)}\n\n| value |\n|---|\n{roles}\n\n#### States of a key\n\n"
        "| value | name | meaning |\n|---|---|---|\n"
        f"| {m.ABSENT} | absent | Not in the pool. |\n"
        f"| {m.WRITING} | writing | In the pool, but a shard of it is still to be written; it cannot be loaded yet. |\n"
        f"| {m.READY} | ready | Can be loaded; pinned by the lookup's lease. |\n"
        f"| {m.PENDING} | pending | In a tier below the pool and on its way up; ask again. |\n"
    )


def _errors() -> str:
    lines = ["#### ErrorCode", "", _docstring(ErrorCode), "", "| code | name | sentence |", "|---|---|---|"]
    lines += [f"| {code.value} | `{code.name}` | {_markdown(code.sentence)} |" for code in ErrorCode]
    return "\n".join([*lines, ""])


def _examples() -> str:
    token = bytes(range(m.TOKEN_BYTES))
    group = m.GroupTransfer(0, b"k" * 8, (7).to_bytes(m.BLOCK_ID_BYTES, "little"))
    examples: list[tuple[str, bytes]] = [
        (
            "A Greeting on the lifeline, length first",
            lifeline.encode_frame(lifeline.Greeting(m.PROTOCOL_VERSION, 2**40, 3, token)),
        ),
        ("Hello", encode(m.Hello(1, token, m.PROTOCOL_VERSION, m.Role.WORKER, "me", "my 1.0"))),
        ("Store of one key of 8 bytes, from engine block 7", encode(m.Store(2, token, b"r" * 16, 5, [group]))),
        ("Its completion", encode(m.Completions(2**40, 3, 1, 2**30, [m.JobResult(5, True, 4096, 0.5)]))),
        ("Done", encode(m.Done(2, 2**40, 1))),
    ]
    lines = ["## Examples", "", "Frames in hex, to test an encoder against.", ""]
    for title, frame in examples:
        rows = [frame[start : start + 32].hex(" ") for start in range(0, len(frame), 32)]
        lines += [f"{title}:", "", "```", *rows, "```", ""]
    return "\n".join(lines).rstrip("\n") + "\n"


# --- prose ----------------------------------------------------------------------------------------


def _introduction() -> str:
    sockets = SocketPaths(Path(SYSTEM_DIRECTORY))
    described = (
        (SocketPaths.jobs, sockets.jobs),
        (SocketPaths.events, sockets.events),
        (SocketPaths.lifeline, sockets.lifeline),
    )
    table = "\n".join(f"| `{path.name}` | {(entry.__doc__ or '').strip()} |" for entry, path in described)
    return _INTRODUCTION_PROSE.format(version=m.PROTOCOL_VERSION, directory=SYSTEM_DIRECTORY, table=table)


def _lifeline_section() -> str:
    opening = _LIFELINE_PROSE.format(length=lifeline.LENGTH_BYTES, maximum=lifeline.MAX_FRAME_BYTES)
    return "\n".join([opening, *(_struct(frame) for frame in LIFELINE_FROM_DAEMON + LIFELINE_FROM_CLIENT)])


_INTRODUCTION_PROSE = """# The kvoffd protocol, version {version}

This page is generated by `python -m kvoffd_proto.reference > proto/PROTOCOL.md` from the messages that the daemon and
the clients are built from; do not edit it. It is meant to be enough to write a client in any language.

## Sockets

The daemon has three unix sockets in one directory, `{directory}` by default:

| socket | carries |
|---|---|
{table}

`jobs.sock` and `events.sock` are ZeroMQ (ZMTP 3) sockets over `ipc://`. On `jobs.sock` a client uses a DEALER and
sends each request as **one frame**, without an empty delimiter; each reply comes back as one frame. Nothing promises
that replies come in the order of the requests: they are matched by `request_id`. On `events.sock` a client uses a SUB;
each message has three frames: topic, sequence number (8 bytes, big-endian), payload.

## Encoding

Frames are [MessagePack](https://msgpack.org). A message is an **array**: its tag, a string, then its fields in the
order in which they are listed. Parts inside messages are arrays too, most of them without a tag. The events of engines
are the exception: they are maps, because vLLM's are.

* `int` is any MessagePack integer, `float` a 32 or 64 bit float (an integer is taken as well), `bytes` a bin, `str` a
  str in UTF-8, `nil` nil. `2^63 - 1` is the largest integer that is ever used.
* Every field must be there, but for trailing ones that have a default. More elements than listed are refused.
* A value of another type, outside its range or of a wrong length makes the whole message malformed.
* Lists of keys are one `bytes`: the block hashes end to end, each as long as the namespace's `key_bytes`. Lists of
  block ids are one `bytes` of little-endian int32.

## Versioning

There is one version, now {version}, compared for equality and never negotiated. The daemon tells its own in `Greeting`
and refuses a `Hello` with another one with `BAD_VERSION`. Any change of a message or its meaning changes the version.

## Connecting

1. Connect to `lifeline.sock` and read one frame. `Greeting` brings the epoch, the session and its token; `Refused` says
   why not. The daemon knows the peer's user from the kernel.
2. Connect a DEALER to `jobs.sock`, and a SUB to `events.sock` that is subscribed to the session's topic
   `session@<epoch>/<session>/` (both numbers in decimal). Do that **before** the first job: what is published earlier
   is only found by `Replay`.
3. Send `Hello` with the token. Nothing else is taken before it. `Welcome` tells limits, credits and intervals.
4. Scheduler and worker: send `OpenNamespace`. Worker: send each memory descriptor with `Attach`, wait for `Attached`,
   then send `Register`.
5. Send `Heartbeat` at the told interval. It acknowledges completions and renews leases.

Keep the lifeline open as long as the session should live. When it ends, on either side, the session is over at once:
its leases end, its jobs fail, its mappings are closed, its token is refused. A client that sees its end, or an `epoch`
that is not the one of its `Greeting`, must take all its unfinished jobs for failed and begin again at 1.

## Administration over TCP

Where `admin_address` is set the daemon also has a ROUTER on TCP, with the CURVE mechanism of ZeroMQ (RFC 26): a client
gives its own pair of keys and the daemon's public key, and only keys in the daemon's `admin_clients_file` come in.
There is no lifeline and no token: the connection's key says who asks, and every request carries 16 zero bytes as its
token. The session has the role `admin`, whatever `Hello` says, so requests of engines get `WRONG_ROLE`. `Hello` finds
out whether both ends speak one version, and each connection should begin with it. Frames have at most 64 KiB. There
are no events.
"""

_RULES_PROSE = """## Leases, jobs and memory

**Leases.** A `Lookup` pins the keys that are ready under a lease whose id the client makes: `session_id * 2^32 + n`,
with an n that the session never used before. Sent again with the same id it pins nothing more. The lease ends when it
is released, when every rank of the world has loaded under it, when nobody renewed it for `ttl_ms`, or with its
session; from then on its blocks may be evicted. Pass the id to the workers: they name it in `Load`.

**Jobs.** Each rank stores and loads its own shard; a block can be read once the shards of all `world_size` ranks are
written. With `n` block ids, `k` keys and `b` = `blocks_per_key` of the registration, a `Store` must satisfy
`first_block + n = k * b`, a `Load` `(k - 1) * b < first_block + n <= k * b`. A job with a key or a block id that does
not fit is refused whole. The keys that a store's completion lists in `failed` are not in the pool; the client must not
believe that they are.

**Credits.** The latest `credit_bytes`, whatever message told it, is how many bytes of stores the session may have
outstanding. Beyond it a client offers nothing, so that a slow pool never slows the engine down.

**Memory.** The daemon maps a memfd only if it has the seal `F_SEAL_SHRINK`, is as large as it was said to be, and is
writable. It copies without asking again, so:

* Send a `Store` once the blocks' bytes are final, and do not write to them before its completion. A client that cannot
  wait sends `Cancel`, and when the job is still running it **closes its lifeline first**: the daemon makes nothing
  readable whose lifeline was closed before the copy's end.
* After a `Load` do not read or write the blocks before its completion, whatever the deadline. Only the daemon's death,
  seen as the lifeline's end, frees them otherwise.
* After the reply to `Unregister` the daemon touches the memory no more.
"""

_BLOCKS_PROSE = """\
Administrators may look into blocks and write them where the daemon's setting `block_access` allows it
(`read` or `write`), and to the users that `block_uids` names. To read: send `OpenPool` on the lifeline; `PoolOpened`
brings a descriptor of the pool that can be mapped for reading only, whole, all namespaces in it. `GetBlocks` pins
blocks under a lease and tells where they lie in that mapping: from the lease's end on, something else may be there. A
shard is layer-major: the `blocks_per_key` pages of the first layer, then those of the second, as the `shards` of
`NamespaceDescribed` list them. To write: attach a memfd as for `Register`, put the bytes of all ranks' shards into it,
and name it in `PutBlocks`.
"""

_LIFELINE_PROSE = """## Lifeline

`lifeline.sock` is a unix stream. A frame is its length, an unsigned little-endian integer of {length} bytes, and that
many bytes of MessagePack, at least 1 and at most {maximum}. Send a descriptor as ancillary data (SCM_RIGHTS) of the
message that holds the first byte of its `Attach` frame; one descriptor per frame. A frame that breaks these rules ends
the session. `PoolOpened` comes with a descriptor in the same way.
"""

_REQUESTS_PROSE = """\
Any request may be answered by [Error](#error) instead. `Store` and `Load` have no reply of their own:
when they are accepted, their answer is a completion, exactly one per job; when they are refused whole, it is `Error`
with their `request_id`, and no completion comes. Number requests from 1: an `Error` has `request_id` 0 when the frame
held none.
"""

_COMPLETIONS_PROSE = """## Completions

Published on `events.sock` under the session's topic, `session@<epoch>/<session>/`. The second frame is `sequence` in
8 big-endian bytes, the third the message below. ZeroMQ's PUB may drop messages, so the daemon keeps each one until it
is acknowledged by `Heartbeat` or `Replay`. A client that sees a gap in `sequence`, or learns from `HeartbeatReply` that
it lacks the last ones, sends `Replay`. A job that is neither in the answer's `batches` nor in its `unfinished`, and was
not seen before, never reached the daemon and has failed.
"""

_HANDLES_PROSE = """How the daemon reaches memory: tagged arrays. `Welcome.capabilities` lists the kinds that it takes.
"""

_EVENTS_PROSE = """## KV cache events

Published on `events.sock` under the topic `kv@` and the namespace's fingerprint in lower-case hex, in the format of
vLLM's own publisher (`vllm/distributed/kv_events.py`), so that its subscribers can read them. The second frame counts
all KV event messages of the daemon from 0, in 8 big-endian bytes; a subscriber of one namespace sees gaps where others
had events. The third frame is an `EventBatch`.

To ask for messages again, send two frames from a DEALER on `jobs.sock`: an empty one, and the first number wanted in
8 big-endian bytes. The kept messages from there on come back with four frames each, an empty one and then topic,
number and payload; the end is marked by the number -1 (`ff` eight times) with an empty topic and payload. No session is
needed for that.
"""


if __name__ == "__main__":
    print(reference(), end="")

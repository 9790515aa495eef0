"""What all messages of ``jobs.sock`` are made of: annotated values and base classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Annotated, Generic, Literal, NamedTuple, TypeAlias, TypeVar, cast, get_args, get_type_hints

from msgspec import Meta, Struct, structs

from kvoffd_proto.errors import ErrorCode

PROTOCOL_VERSION = 6
"""Raised whenever a message, a field or its meaning changes. Both ends must speak the same one; none is negotiated."""

FINGERPRINT_BYTES = 32
TOKEN_BYTES = 16
MAX_GROUPS = 64
MAX_PAGES = 8192
"""Of a registration in all groups together, and its tensors: each costs the daemon's loop some microseconds."""
BLOCK_ID_BYTES = TOKEN_ID_BYTES = COUNT_BYTES = 4


def doc(description: str | None = None, **bounds: int) -> Meta:
    """Describe a field or a type of fields for the reference page, with the bounds that msgspec checks."""
    return Meta(description=description, **bounds)  # type: ignore[call-overload, no-any-return]


Count = Annotated[int, doc(ge=0, le=2**63 - 1)]
ByteCount = Annotated[int, doc(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, doc(ge=0)]
PerSecond = Annotated[float, doc(ge=0)]
RequestId = Annotated[Count, doc("Chosen by the client, echoed in the reply.")]
Epoch = Annotated[Count, doc("Number of the daemon's run that answers, as in Greeting.")]
SessionId = Annotated[int, doc("Id of the session.", ge=1, lt=2**31)]
Keys = Annotated[bytes, doc("Block hashes, end to end, each of the namespace's ``key_bytes``.")]
Fingerprint = Annotated[
    bytes, doc("The namespace's fingerprint, 32 bytes.", min_length=FINGERPRINT_BYTES, max_length=FINGERPRINT_BYTES)
]
LeaseId = Annotated[
    int, doc("Random, chosen by the scheduler's client: who knows it may load.", ge=2**32, le=2**63 - 1)
]
JobId = Annotated[Count, doc("Unique among the session's unfinished jobs.")]
Acknowledged = Annotated[
    Count, doc("All completions up to this number have arrived, and are forgotten, also where the rest is refused.")
]
RegistrationId = Annotated[
    bytes, doc("Random id made by the worker for this registration.", min_length=16, max_length=16)
]
Rank = Annotated[int, doc("Rank of the worker in its engine, below ``world_size``.", ge=0, lt=4096)]
GroupIndex = Annotated[int, doc("Index of the KV cache group.", ge=0, lt=65536)]


class Role(StrEnum):
    """What a session may do."""

    SCHEDULER = "scheduler"
    WORKER = "worker"
    ADMIN = "admin"


SCHEDULER = (Role.SCHEDULER,)
WORKER = (Role.WORKER,)
ADMIN = (Role.ADMIN,)
ENGINE = SCHEDULER + WORKER
ANY_ROLE = ENGINE + ADMIN


class Section(StrEnum):
    """Headings of the reference page under which requests are described, in the order of the page."""

    SESSION = "Session"
    MEMORY = "Namespaces and memory"
    SCHEDULER = "Scheduler"
    WORKER = "Worker"
    ADMINISTRATION = "Administration"
    BLOCKS = "Blocks"


class KeyState(IntEnum):
    """What a lookup tells of a key, one byte each."""

    ABSENT = 0
    """The daemon does not have it."""
    WRITING = 1
    """It is being stored: a shard of it is missing."""
    READY = 2
    """It can be loaded."""
    PENDING = 3
    """A disk has it, and it comes up: ask again."""
    SHARED = 4
    """A store that nodes share is asked for it, or has it and it comes up: ask again."""


ABSENT, WRITING, READY, PENDING, SHARED = KeyState
COMING = frozenset((PENDING, SHARED))
"""States of keys that come up from below the pool, or may: ask again."""


class Wire(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of parts of messages: encoded as arrays, unknown trailing fields refused."""


class Message(Wire, frozen=True, tag=lambda name: name.lower()):
    """Base of messages: arrays that begin with the lower-case name."""


AnswerT_co = TypeVar("AnswerT_co", bound=Message, covariant=True)


class Request(Message, Generic[AnswerT_co], frozen=True):
    """Base of requests. The parameter is what answers the request: a Reply, or Completions where it is a job."""

    request_id: RequestId


class Reply(Message, frozen=True):
    """Base of replies."""

    request_id: RequestId
    epoch: Epoch


class Exchange(NamedTuple):
    """What ``exchange`` and the base class declare of a request."""

    section: Section
    roles: tuple[Role, ...]
    """Who may send it."""
    answer: type[Message]


EXCHANGES: dict[type[Request[Message]], Exchange] = {}
"""Every request of the protocol. The codec, the reference page and the daemon's table of handlers are made from it."""

RequestT = TypeVar("RequestT", bound=Request[Message])


def exchange(section: Section, roles: tuple[Role, ...]) -> Callable[[type[RequestT]], type[RequestT]]:
    """Make the decorated class a request of the protocol, which ``roles`` may send."""

    def declare(kind: type[RequestT]) -> type[RequestT]:
        (base,) = kind.__orig_bases__  # type: ignore[attr-defined]
        (answer,) = base.__args__
        EXCHANGES[kind] = Exchange(section, roles, answer)
        return kind

    return declare


def answer_type(kind: type[Request[AnswerT_co]]) -> type[AnswerT_co]:
    """What answers requests of this kind."""
    return cast("type[AnswerT_co]", EXCHANGES[kind].answer)


# --- fields and their annotations ----------------------------------------------------------------

_METRIC = "metric"
"""Key of ``Meta.extra`` under which a field has its Metric, MetricPart, MetricLabel or MetricInfo."""


FixedLabel: TypeAlias = tuple[str, str] | tuple[()]
"""Name and value of a label, or none."""


@dataclass(frozen=True)
class Metric:
    """What /metrics shows of a field.

    Its name is ``kvoffd_``, the prefix of the part that the Struct is, the name, and ``_total`` for a counter. Fields
    with the same name are one metric, told apart by ``label``; the help is that of the first.

    Attributes:
        kind: what Prometheus takes it for.
        name: the field's own where empty.
        help: the field's description where empty.
        label: a label that is the same for all.
        key_label: for a map of numbers, the name of the label that holds the key.
        nil: the value while the field is nil; there is no sample where this is None.
        true_for: for a string, the values for which the metric is 1; for others it is 0.
    """

    kind: Literal["counter", "gauge", "histogram"]
    name: str = ""
    help: str = ""
    label: FixedLabel = ()
    key_label: str = ""
    nil: float | None = None
    true_for: tuple[str, ...] = ()


@dataclass(frozen=True)
class MetricPart:
    """What the metrics of a Struct, or of a list of Structs, inside a StatsReply have in common."""

    prefix: str = ""
    label: FixedLabel = ()


@dataclass(frozen=True)
class MetricLabel:
    """The field's value tells the Structs of a list apart: it is a label of that name.

    Attributes:
        short: bytes of the value that the label has, in hexadecimal, unless two Structs begin with the same; 0 for all.
        info_name: the label of the whole value in the Structs' metric ``info``; there is none where this is empty.
    """

    name: str
    short: int = 0
    info_name: str = ""


@dataclass(frozen=True)
class MetricInfo:
    """The field's value is a label of that name in the metric ``info`` of the Structs of a list, and of no other."""

    name: str


def counter(description: str, name: str = "", help: str = "", key_label: str = "") -> Meta:
    """Describe a field that is a counter on /metrics: see Metric."""
    return Meta(description=description, extra={_METRIC: Metric("counter", name, help, key_label=key_label)})


def gauge(
    description: str,
    name: str = "",
    help: str = "",
    label: FixedLabel = (),
    *,
    key_label: str = "",
    nil: float | None = None,
    true_for: tuple[str, ...] = (),
) -> Meta:
    """Describe a field that is a gauge on /metrics: see Metric."""
    return Meta(description=description, extra={_METRIC: Metric("gauge", name, help, label, key_label, nil, true_for)})


def histogram(description: str, name: str = "") -> Meta:
    """Describe a field of type ``Histogram``: see Metric."""
    return Meta(description=description, extra={_METRIC: Metric("histogram", name)})


def metrics_of_part(description: str, prefix: str = "", label: FixedLabel = ()) -> Meta:
    """Describe a field whose Structs hold metrics: see MetricPart."""
    return Meta(description=description, extra={_METRIC: MetricPart(prefix, label)})


def metric_label(description: str, name: str, short: int = 0, info_name: str = "") -> Meta:
    """Describe a field that tells the Structs of a list apart: see MetricLabel."""
    return Meta(description=description, extra={_METRIC: MetricLabel(name, short, info_name)})


def metric_info(description: str, name: str) -> Meta:
    """Describe a field that says more of the Structs of a list: see MetricInfo."""
    return Meta(description=description, extra={_METRIC: MetricInfo(name)})


def metas_of(hint: object) -> list[Meta]:
    """What annotates a type."""
    return [meta for meta in getattr(hint, "__metadata__", ()) if isinstance(meta, Meta)]


def metric_annotation(hint: object) -> Metric | MetricPart | MetricLabel | MetricInfo | None:
    """What a field is on /metrics, if anything."""
    return next((meta.extra[_METRIC] for meta in metas_of(hint) if meta.extra and _METRIC in meta.extra), None)


def fields_of(struct: type[Struct]) -> list[tuple[structs.FieldInfo, object, str]]:
    """The fields of ``struct`` in wire order: field, type with its Metas, description (empty where there is none)."""
    hints = get_type_hints(struct, include_extras=True)
    found = []
    for item in structs.fields(struct):
        hint = hints[item.name]
        descriptions = [meta.description for meta in metas_of(hint) if meta.description]
        found.append((item, hint, descriptions[-1] if descriptions else ""))
    return found


def struct_in(hint: object) -> type[Struct] | None:
    """Return the Struct that a field of this type holds, by itself, optionally or in a list; else None."""
    if isinstance(hint, type) and issubclass(hint, Struct):
        return hint
    return next((found for argument in get_args(hint) if (found := struct_in(argument)) is not None), None)


# --- parts of several messages -------------------------------------------------------------------


BENCH_LABEL = "bench "
"""A namespace whose label begins so is a bench's: no sum has it, and it is forgotten once it is empty and closed."""


class GroupSpec(Wire, frozen=True):
    """One KV cache group of a namespace."""

    kind: Annotated[str, doc("Attention kind as the engine names it, for display.", max_length=64)]
    tokens_per_block: Annotated[int, doc("Tokens that one key covers; 0 if unknown.", ge=0, lt=2**31)]
    window_tokens: Annotated[int, doc("Sliding window in tokens; 0 for none.", ge=0, lt=2**31)] = 0


# --- replies of several requests ----------------------------------------------------------------------


class GroupKeys(Wire, frozen=True):
    """Keys of one group."""

    group: GroupIndex
    keys: Keys


class Done(Reply, frozen=True):
    """Answer to requests that return nothing but a count."""

    count: Annotated[Count, doc("How many blocks, leases or other things the request concerned.")] = 0


class Error(Reply, frozen=True):
    """The request was refused and changed nothing. ``request_id`` is 0 where the frame had none."""

    code: Annotated[ErrorCode, doc("Why the request was refused.")]
    message: Annotated[str, doc("A sentence that says what to do.")]


class NamespaceOpened(Reply, frozen=True):
    created: Annotated[bool, doc("False when the namespace was open already.")]


class NamespaceRequest(Request[NamespaceOpened], frozen=True):
    """Base of requests that open a namespace."""

    namespace: Fingerprint
    label: Annotated[str, doc("Name for operators, such as the model's.", max_length=256)]
    world_size: Annotated[int, doc("Shards that make a block.", ge=1, le=4096)]
    key_bytes: Annotated[int, doc("Length of a block hash in bytes.", ge=8, le=64)]
    groups: Annotated[list[GroupSpec], doc("KV cache groups, by index.", min_length=1, max_length=MAX_GROUPS)]
    description: Annotated[str, doc("What the fingerprint was made of, as JSON, for display.", max_length=65536)]

"""Hints of clients in requests: vLLM's ``kv_hints``, or the same under ``kv_transfer_params``, which HTTP can carry.

Every HTTP user can send these, of any size: a field is looked at only after its type and length.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct
from vllm.v1.kv_offload.base import Locality, Medium, ReqContext

from kvoffd_client.vllm.log import logger
from kvoffd_proto.messages import MAX_GIVER, MAX_HOST_CHARACTERS, MAX_PRIORITY, MAX_TTL_S, PENDING, SHARED, HintAction

HintsOption: TypeAlias = Literal["off", "no_release", "all"]
FIELD = "kv_hints"
SOURCE_FIELD = "remote_kv_source"
"""Field of ``kv_transfer_params`` in which llm-d's router names the pod that has a prompt's blocks."""
FETCH = "kv.fetch"
MAX_ACTIONS = 16
"""Actions of a request that are read."""
MAX_TEXT = 128
"""Characters of an action's type, of a version, and of an owner."""
MAX_TIERS = 16
"""Entries of a request's ``kv_load_tiers`` that are read."""
MAX_LOGGED = 16
"""Kinds of unknown hints that are logged."""
ACTIONS = {"kv.retain": HintAction.RETAIN, "kv.release": HintAction.RELEASE, "kv.prefetch": HintAction.PREFETCH}

_ReadT = TypeVar("_ReadT", bound=Struct)


class RequestHint(NamedTuple):
    """A hint about the blocks of a request, from the token ``start`` on."""

    action: HintAction
    start: int = 0
    priority: int = 0
    ttl_s: float = 0.0


class RequestHints(NamedTuple):
    """The hints of a request, as far as they can be read.

    Attributes:
        known: one of each kind at most: the last.
        unknown: number of those that are not known or cannot be read.
        peer: host of the peer that has the blocks; empty if none is named.
        giver: number of the hints' owner, or of the request if it names none.
        problem: why the first ignored one was ignored; empty if none was.
    """

    known: Sequence[RequestHint]
    unknown: int
    peer: str
    giver: int
    problem: str = ""


NO_HINTS = RequestHints((), 0, "", 0)


_Text: TypeAlias = Annotated[str, Meta(max_length=MAX_TEXT)]


class _Action(Struct):
    action_type: _Text
    action_version: _Text
    payload: Any = msgspec.field(default_factory=dict)


class _Payload(Struct):
    start: Annotated[int, Meta(ge=0)] = 0
    """First token of what the action applies to, as behind a prefix that other prompts share."""
    owner: _Text = ""
    """Secret that the prompts of one owner have in common."""


class _Retain(_Payload, kw_only=True):
    ttl_s: Annotated[float, Meta(gt=0)]
    priority: Annotated[int, Meta(ge=0, le=MAX_PRIORITY)] = 50


class _Source(Struct):
    remote_host: Annotated[str, Meta(max_length=MAX_HOST_CHARACTERS)]


class _Fetch(Struct):
    source_control_endpoint: Annotated[str, Meta(max_length=MAX_HOST_CHARACTERS)]


_logged: set[str] = set()
_random = random.Random()


def read_hints(context: ReqContext, option: HintsOption = "all") -> RequestHints:
    """Read a request's hints. What cannot be read is logged once."""
    params = context.kv_transfer_params if isinstance(context.kv_transfer_params, dict) else {}
    source, envelope = params.get(SOURCE_FIELD), context.kv_hints or params.get(FIELD)
    if option == "off":
        has_some = source is not None or envelope is not None
        return RequestHints((), 0, "", _giver_of(""), 'the engine has the option "hints": "off"' if has_some else "")
    peer, unknown, owner, hints, problems = "", 0, "", dict[HintAction, RequestHint](), list[str]()
    if source is not None:
        try:
            peer = _sendable(_convert(source, _Source).remote_host)
        except ValueError as error:
            problems.append(_log_once(SOURCE_FIELD, error))
            unknown = 1
    actions = list[Any]()
    if envelope is not None:
        try:
            actions = _actions_of(envelope)
        except ValueError as error:
            problems.append(_log_once(FIELD, error))
            unknown += 1
    if (more := len(actions) - MAX_ACTIONS) > 0:
        problems.append(f"those after the first {MAX_ACTIONS}")
        unknown += more
    for sent in actions[:MAX_ACTIONS]:
        kind = "an action"
        try:
            action = _convert(sent, _Action)
            kind = action.action_type
            if kind == FETCH and _is_known(action.action_version):
                endpoint = _convert(action.payload, _Fetch).source_control_endpoint
                peer = _host_of(endpoint) or peer
                continue
            hint, its_owner = _read(action, option)
            owner = _sendable(its_owner) or owner
            hints[hint.action] = hint
        except ValueError as error:
            problems.append(_log_once(kind, error))
            unknown += 1
    return RequestHints(list(hints.values()), unknown, peer, _giver_of(owner), problems[0] if problems else "")


def notes_of(found: RequestHints) -> dict[str, str]:
    """Return what became of a request's hints so far, by what they are called."""
    notes = {name_of(one): "at its end" if one.action is HintAction.RELEASE else "not passed on" for one in found.known}
    if found.peer:
        notes[FETCH] = f"from {found.peer}"
    if found.problem:
        first = f"{found.unknown}, the first of them " if found.unknown > 1 else ""
        notes["ignored:"] = first + found.problem
    return notes


def name_of(hint: RequestHint) -> str:
    return f"kv.{hint.action.value}"


def _actions_of(envelope: object) -> list[Any]:
    """Return the actions of vLLM's ``KvHintsEnvelope``, or of what JSON has in its place. Raises ValueError."""
    fields = _fields(envelope)
    version, actions = fields.get("protocol_version", "1"), fields.get("actions")
    if not isinstance(version, str) or not _is_known(version):
        raise ValueError("its protocol_version is not known")
    if not isinstance(actions, list):
        raise ValueError("its actions are not a list")
    return actions


def _giver_of(owner: str) -> int:
    if not owner:
        return _random.randint(1, MAX_GIVER)
    digest = hashlib.blake2b(owner.encode(), digest_size=8).digest()
    return 1 + int.from_bytes(digest, "big") % MAX_GIVER


def _fields(value: object) -> Mapping[str, Any]:
    """Return an object's fields, by name. Raises ValueError if it has none."""
    if isinstance(value, dict):
        return value
    if isinstance(value, Struct):
        return {name: getattr(value, name) for name in value.__struct_fields__}
    raise ValueError("it is not an object")


def _convert(value: object, to: type[_ReadT]) -> _ReadT:
    """Read the fields of ``to`` alone: there may be any number of others. Raises ValueError."""
    fields = _fields(value)
    try:
        return msgspec.convert({name: fields[name] for name in to.__struct_fields__ if name in fields}, to)
    except OverflowError as error:
        raise ValueError("a number is too large") from error
    except msgspec.ValidationError as error:
        why, _, name = str(error).partition(" - at `$.")
        raise ValueError(f"its {name.rstrip('`')}: {why[0].lower()}{why[1:]}" if name else why) from None


def _host_of(endpoint: str) -> str:
    """Return the host of a URL; empty if it has none. Raises ValueError."""
    host = urlsplit(_sendable(endpoint)).hostname or ""
    if len(host) > MAX_HOST_CHARACTERS:  # small letters may be longer
        raise ValueError("its host is too long")
    return host


def _sendable(text: str) -> str:
    """Return ``text``. Raises ValueError if it cannot be encoded: JSON may have half of a surrogate pair."""
    text.encode()
    return text


def _read(action: _Action, option: HintsOption) -> tuple[RequestHint, str]:
    """Return the hint and its owner. Raises ValueError."""
    if (kind := ACTIONS.get(action.action_type)) is None:
        raise ValueError("kvoffd does not know it")
    if not _is_known(action.action_version):
        raise ValueError("its action_version is not known")
    if kind is HintAction.RELEASE and option != "all":
        raise ValueError('only an engine with the option "hints": "all" obeys it')
    if kind is not HintAction.RETAIN:
        payload = _convert(action.payload, _Payload)
        return RequestHint(kind, payload.start), payload.owner
    retain = _convert(action.payload, _Retain)
    return RequestHint(kind, retain.start, retain.priority, min(retain.ttl_s, MAX_TTL_S)), retain.owner


def _is_known(version: str) -> bool:
    """Return whether this is a version of the first protocol, whose drafts have 0."""
    return len(version) <= MAX_TEXT and version.partition(".")[0] in ("0", "1")


def _log_once(kind: str, error: Exception) -> str:
    """Log the first unknown hint of each kind; return what is wrong with it."""
    if kind not in _logged and len(_logged) < MAX_LOGGED:
        _logged.add(kind)
        logger.warning("kvoffd: a request's hint (%r) is ignored: %s. Later ones are only counted.", kind, error)
    return f"{kind!r}: {error}"


def allowed_tiers(context: ReqContext) -> frozenset[int]:
    """Return the states of the blocks that a request may wait for, by the first MAX_TIERS entries of ``kv_load_tiers``:
    PENDING for those on disks of this node, SHARED for those of shared stores."""
    entries = context.load_tier_filter.matchers[:MAX_TIERS]
    places = {PENDING: Locality.LOCAL, SHARED: Locality.REMOTE}
    return frozenset(
        state for state, place in places.items() if any(entry.matches(Medium.STORAGE, place) for entry in entries)
    )

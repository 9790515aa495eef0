"""Hints of clients in requests: vLLM's ``kv_hints``, or the same under ``kv_transfer_params``, which HTTP can carry."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct
from vllm.v1.kv_offload.base import ReqContext

from kvoffd_client.vllm.log import logger
from kvoffd_proto.messages import MAX_HOST, MAX_PRIORITY, MAX_TTL_S, HintAction

FIELD = "kv_hints"
SOURCE_FIELD = "remote_kv_source"
"""Field of ``kv_transfer_params`` in which llm-d's router names the pod that has a prompt's blocks."""
FETCH = "kv.fetch"
MAX_ACTIONS = 16
"""Actions of a request that are read."""
MAX_SAID = 16
"""Kinds of unknown hints that are logged."""
ACTIONS = {"kv.retain": HintAction.RETAIN, "kv.release": HintAction.RELEASE, "kv.prefetch": HintAction.PREFETCH}


class RequestHint(NamedTuple):
    """A hint about the blocks of a request, from the token ``start`` on."""

    action: HintAction
    start: int = 0
    priority: int = 0
    ttl_s: float = 0.0


class _Envelope(Struct):
    """vLLM's ``KvHintsEnvelope``, whose actions are converted one by one."""

    actions: list[Any]
    protocol_version: str = "1"


class _Action(Struct):
    action_type: str
    action_version: str
    payload: dict[str, Any] = {}


class _Payload(Struct):
    start: Annotated[int, Meta(ge=0)] = 0
    """First token of what the action applies to, as behind a prefix that other prompts share."""


class _Retain(_Payload, kw_only=True):
    ttl_s: Annotated[float, Meta(gt=0)]
    priority: Annotated[int, Meta(ge=0, le=MAX_PRIORITY)] = 50


class _Source(Struct):
    remote_host: Annotated[str, Meta(max_length=MAX_HOST)]


class _Fetch(Struct):
    source_control_endpoint: Annotated[str, Meta(max_length=MAX_HOST)]


_said: set[str] = set()


def read_hints(context: ReqContext) -> tuple[list[RequestHint], int, str]:
    """Return a request's hints, the number of those that are not known or cannot be read, and the host of the peer that
    has its blocks, empty if none is named. What cannot be read is logged once."""
    params = context.kv_transfer_params if isinstance(context.kv_transfer_params, dict) else {}
    given, peer, unread = context.kv_hints or params.get(FIELD), "", 0
    if (source := params.get(SOURCE_FIELD)) is not None:
        try:
            peer = _sendable(msgspec.convert(source, _Source).remote_host)
        except ValueError as error:
            _say(SOURCE_FIELD, error)
            unread = 1
    if given is None:
        return [], unread, peer
    try:
        envelope = msgspec.convert(msgspec.to_builtins(given), _Envelope)
        if not _is_known(envelope.protocol_version):
            raise ValueError("its protocol_version is not known")
    except (ValueError, TypeError, RecursionError) as error:
        _say(FIELD, error)
        return [], 1 + unread, peer
    hints, unknown = list[RequestHint](), unread + max(0, len(envelope.actions) - MAX_ACTIONS)
    for given in envelope.actions[:MAX_ACTIONS]:
        kind = "an action"
        try:
            action = msgspec.convert(given, _Action)
            kind = action.action_type
            if kind == FETCH and _is_known(action.action_version):
                endpoint = msgspec.convert(action.payload, _Fetch).source_control_endpoint
                peer = urlsplit(_sendable(endpoint)).hostname or peer
            else:
                hints.append(_read(action))
        except ValueError as error:
            _say(kind, error)
            unknown += 1
    return hints, unknown, peer


def _sendable(host: str) -> str:
    """Return ``host``. Raises ValueError if it cannot be encoded: JSON may have half of a surrogate pair."""
    host.encode()
    return host


def _read(action: _Action) -> RequestHint:
    """Return the hint. Raises ValueError."""
    if (kind := ACTIONS.get(action.action_type)) is None:
        raise ValueError("kvoffd does not know it")
    if not _is_known(action.action_version):
        raise ValueError("its action_version is not known")
    if kind is not HintAction.RETAIN:
        return RequestHint(kind, msgspec.convert(action.payload, _Payload).start)
    payload = msgspec.convert(action.payload, _Retain)
    return RequestHint(kind, payload.start, payload.priority, min(payload.ttl_s, MAX_TTL_S))


def _is_known(version: str) -> bool:
    """Return whether this is a version of the first protocol, whose drafts have 0."""
    return version.split(".")[0] in ("0", "1")


def _say(kind: str, error: Exception) -> None:
    """Log the first unknown hint of each kind."""
    if kind not in _said and len(_said) < MAX_SAID:
        _said.add(kind)
        logger.warning("kvoffd: a request's hint (%r) is ignored: %s. Later ones are only counted.", kind[:64], error)

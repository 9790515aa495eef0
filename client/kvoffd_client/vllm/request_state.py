"""The state of one request: its lookups, what it waits for, and what is reported of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from vllm.v1.kv_offload.base import LookupResult, OffloadKey

from kvoffd_client.vllm.hints import RequestHint
from kvoffd_client.vllm.keyed_lookup import KeyedLookup
from kvoffd_client.vllm.prompt_report import PromptRecord
from kvoffd_client.vllm.waits import LONG_AGO, TierWait
from kvoffd_proto.messages import PENDING, SHARED

if TYPE_CHECKING:
    from vllm.v1.request import Request


class Scan(NamedTuple):
    """Facts on which the result of vLLM's scan of a request depends.

    Attributes:
        loads: number of loads that have begun or ended: while another request loads the same blocks, vLLM waits for it.
    """

    answer: KeyedLookup | None
    computed_tokens: int
    awaits_tier: bool
    loads: int


@dataclass(slots=True, eq=False)
class RequestState:
    """State of one request.

    Attributes:
        number: number of requests before it.
        request: vLLM's request, from ``arrived`` on; its block hashes grow.
        record: what is reported of the prompt.
        answer: the current answer, whose lease pins the blocks that it reports as ready.
        pending: a lookup without an answer yet. The current answer stays until it is replaced.
        last: the lookup sent last, even if its lease was released; it shows which blocks need not be stored.
        awaits_tier: the request waits for promotions in its answer.
        tier_wait: that wait.
        tiers: states of blocks that it may wait for: PENDING for those on disks, SHARED for those of shared stores.
        waits_since: time since which vLLM could not scan it for want of an answer, by the engine's clock; None while it
            can. All lookups in this time have one deadline.
        tails: hashes of the tails to look up with the chunks, by group on the wire; see ``KeyedLookup``.
        results: what vLLM's next scan finds of each group's chunks, a byte each, see ``keyed_lookup``.
        tail_results: the same of the tails looked up, by vLLM's keys.
        wanted_tails: keys of tails for which vLLM asked in this scan, and that were not looked up.
        asks_tails: lookup() adds to these.
        awaits_tail: it waits for an answer about tails, or for a tail that is being promoted.
        loaded_tokens: tokens that it was scheduled to load.
        adapter: content of the request's LoRA adapter; empty if it has none, and while unknown.
        adapter_asked_at: time when the workers were first asked for it.
        disabled: the request must not be looked up or stored.
        load_failed: a load failed; the request is recomputed and not looked up again.
        scan: what the last scan depended on, and the tokens that it found; None before.
        failed_at: time of its last failed lookup; for a while none is sent, so that the request is not deferred for
            ever.
        hints: the client's hints; those for its start are sent once, ``hints_sent``.
        peer: host of the peer that has its blocks, as a hint says; empty for none.
        giver: number of the hints' owner, or of the request alone.
    """

    number: int
    request: Request = cast(Any, None)  # noqa: RUF009
    record: PromptRecord = field(default_factory=PromptRecord)
    answer: KeyedLookup | None = None
    pending: KeyedLookup | None = None
    last: KeyedLookup | None = None
    awaits_tier: bool = False
    tier_wait: TierWait = field(default_factory=TierWait)
    tiers: frozenset[int] = frozenset((PENDING, SHARED))
    waits_since: float | None = None
    tails: Mapping[int, Sequence[bytes]] = field(default_factory=dict)
    results: Mapping[int, bytes] = field(default_factory=dict)
    tail_results: Mapping[OffloadKey, LookupResult] = field(default_factory=dict)
    wanted_tails: list[OffloadKey] = field(default_factory=list)
    asks_tails: bool = False
    awaits_tail: bool = False
    loaded_tokens: int = 0
    adapter: bytes = b""
    adapter_asked_at: float | None = None
    disabled: bool = False
    load_failed: bool = False
    scan: tuple[Scan, int] | None = None
    failed_at: float = LONG_AGO
    hints: Sequence[RequestHint] = ()
    hints_sent: bool = False
    peer: str = ""
    giver: int = 0

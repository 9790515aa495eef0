"""The state of one request: what several parts of the scheduler half share, and each part's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from kvoffd_client.vllm.adapters import RequestAdapter
from kvoffd_client.vllm.hints import NO_HINTS, RequestHints
from kvoffd_client.vllm.keyed_lookup import KeyedLookup
from kvoffd_client.vllm.prompt_report import PromptRecord
from kvoffd_client.vllm.scans import PreparedScan
from kvoffd_client.vllm.waits import LONG_AGO, TierWait
from kvoffd_proto.messages import PENDING, SHARED

if TYPE_CHECKING:
    from vllm.v1.request import Request


class ScanBasis(NamedTuple):
    """Facts on which the result of vLLM's scan of a request depends.

    Attributes:
        answer: the answer that the scan sees; None if it finds nothing of any.
        loads: number of loads that have begun or ended: while another request loads the same blocks, vLLM waits for it.
    """

    answer: KeyedLookup | None
    computed_tokens: int
    awaits_tier: bool
    loads: int


class FoundTokens(NamedTuple):
    """Result of a scan: tokens that can be loaded, as long as the basis is the same."""

    tokens: int
    basis: ScanBasis


@dataclass(slots=True, eq=False)
class Turn:
    """State of ``PromptTurns`` for one request.

    Attributes:
        waits_since: time since which vLLM could not scan it for want of an answer, by the engine's clock; None while it
            can. All lookups in this time have one deadline.
        awaits_tier: it waits for promotions in its answer.
        tier_wait: that wait.
        found: result of its last scan; None before.
    """

    waits_since: float | None = None
    awaits_tier: bool = False
    tier_wait: TierWait = field(default_factory=TierWait)
    found: FoundTokens | None = None


@dataclass(slots=True, eq=False)
class RequestState:
    """State of one request. An attribute is used by several parts, or is the own state of the part that it names.

    Attributes:
        number: number of requests before it.
        request: vLLM's request, from ``arrived`` on; its block hashes grow.
        hints: the client's hints.
        hints_sent: those for its start were sent (``HintSender``).
        tiers: states of blocks that it may wait for: PENDING for those on disks, SHARED for those of shared stores.
        adapter: its LoRA adapter (``AdapterContents``).
        disabled: it must not be looked up or stored.
        load_failed: a load failed; it is recomputed and not looked up again.
        answer: the current answer, whose lease pins the blocks that it reports as ready.
        pending: a lookup without an answer yet. The current answer stays until it is replaced.
        last: the lookup sent last, even if its lease was released; it shows which blocks need not be stored.
        failed_at: time of its last failed lookup; for a while none is sent, so that the request is not deferred for
            ever.
        tails: hashes of the tails to look up with the chunks, by group on the wire; see ``KeyedLookup``.
        scan: results of vLLM's next scan.
        turn: its waits (``PromptTurns``).
        record: facts for its report (``PromptOutcomes``).
        loaded_tokens: tokens that it was scheduled to load.
    """

    number: int
    request: Request = cast(Any, None)  # noqa: RUF009
    hints: RequestHints = NO_HINTS
    hints_sent: bool = False
    tiers: frozenset[int] = frozenset((PENDING, SHARED))
    adapter: RequestAdapter = field(default_factory=RequestAdapter)
    disabled: bool = False
    load_failed: bool = False
    answer: KeyedLookup | None = None
    pending: KeyedLookup | None = None
    last: KeyedLookup | None = None
    failed_at: float = LONG_AGO
    tails: Mapping[int, Sequence[bytes]] = field(default_factory=dict)
    scan: PreparedScan = field(default_factory=PreparedScan)
    turn: Turn = field(default_factory=Turn)
    record: PromptRecord = field(default_factory=PromptRecord)
    loaded_tokens: int = 0

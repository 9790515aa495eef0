"""The state of one request. What is replaced together is one object: see ``RequestState``.

A prompt that waits to be scheduled has a state of each of these kinds, independent of the others:

| kind | states | changed by |
|---|---|---|
| lookup | none; in flight; answered; answered, and in flight again; failed a moment ago | ``RequestLookups`` |
| use of kvoffd | all; no lookups (``load_failed``); none (``disabled``) | ``RequestLookups``, ``AdapterContents`` |
| wait for an answer | none; since a time; given up, for one lookup or for good | ``PromptWaits`` (``LookupWait``) |
| wait for a tier | not begun; awaited; interrupted; ended for good | ``PromptWaits`` (``TierWait``) |
| place in the queue | behind; ahead; waiting for a tier; none | ``PromptQueue`` |
| passed over | no; until one of the ends in ``ParkedPrompts`` | ``ParkedPrompts``, at the wish of ``PromptWaits`` |
| adapter | none; unknown; asked for; known | ``AdapterContents`` |

What happens to it changes several of them:

| event | lookup | waits | place |
|---|---|---|---|
| it arrives | none | not begun | behind |
| it is looked up | in flight | | ahead |
| its answer comes | answered, or failed | for a tier, if that is worth it | |
| vLLM comes to it before that | | for the answer; it is passed over | |
| the answer is late | | given up; the one for a tier ends | |
| it is passed over for a tier | | | waiting for a tier |
| it is scheduled to load | none; ``RequestLookups.loading`` has the answer | new ones | none |
| it is scheduled to compute | none, its leases end | new ones | none |
| its load fails | none, and no more | | |
| it is preempted | as after it arrived | as after it arrived | none, until it is looked up |
| the weights may have changed, or a reset | none, its leases end | the one for an answer ends; it is woken | |
| it is aborted, or ends | none, its leases end, with vLLM's next step | | none |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from kvoffd_client.scheduler_client import LookupFuture, SchedulerClient
from kvoffd_client.vllm.adapter_contents import RequestAdapter
from kvoffd_client.vllm.hints import NO_HINTS, RequestHints
from kvoffd_client.vllm.keyed_lookup import KeyedLookup
from kvoffd_client.vllm.promoted_blocks import PromotedBlocks
from kvoffd_client.vllm.scans import PreparedScan
from kvoffd_client.vllm.waits import LONG_AGO, LookupWait, TierWait
from kvoffd_proto.messages import PENDING, SHARED, PromptReport

if TYPE_CHECKING:
    from vllm.v1.request import Request


class ScanBasis(NamedTuple):
    """Facts on which the result of vLLM's scan of a request depends.

    Attributes:
        answer: the answer that the scan sees; None if it sees none.
        load_changes: ``RequestLookups.load_changes``: while another request loads the same blocks, vLLM waits for it.
    """

    answer: KeyedLookup | None
    own_tokens: int
    awaits_tier: bool
    load_changes: int


class FoundTokens(NamedTuple):
    """Result of a scan: tokens that can be loaded, as long as the basis is the same."""

    tokens: int
    basis: ScanBasis


@dataclass(slots=True, eq=False)
class PromptWait:
    """State of a request from its arrival, or its last scheduling, until it is scheduled. One that is loaded is
    scheduled twice: to load, then to compute.

    Attributes:
        lookup: its wait for answers to its lookups.
        tier: its wait for promotions in its answer.
        found: result of its last scan; None before.
        skipped: its load was skipped because computing is faster.
        refused: its blocks were not loaded because the KV cache had no space.
        counted: the lookup whose keys the daemon counts when the outcome is reported; None before.
        counted_by: client and session that sent it: only that session's daemon counts it.
        promoted: its blocks that came from tiers.
    """

    lookup: LookupWait = field(default_factory=LookupWait)
    tier: TierWait = field(default_factory=TierWait)
    found: FoundTokens | None = None
    skipped: bool = False
    refused: bool = False
    counted: LookupFuture | None = None
    counted_by: tuple[SchedulerClient, int] | None = None
    promoted: PromotedBlocks = field(default_factory=PromotedBlocks)


@dataclass(slots=True, eq=False)
class Scheduling:
    """State of a request from the time when it is scheduled until it is scheduled again.

    Attributes:
        loaded_tokens: tokens that it loads.
        promoted: its blocks that came from tiers while it waited.
        unsent_report: its report, until its load has ended; None once it is sent.
    """

    loaded_tokens: int = 0
    promoted: PromotedBlocks = field(default_factory=PromotedBlocks)
    unsent_report: PromptReport | None = None


@dataclass(slots=True, eq=False)
class RequestState:
    """State of one request, for the request's life but for three objects, each of which is replaced as a whole:

    * ``scan``, before each of vLLM's scans (``PromptWaits.prepare_scan``);
    * ``wait`` and ``scheduling``, when it is scheduled (``KvoffdManager.scheduled``).

    Attributes:
        number: number of requests before it.
        request: vLLM's request, from ``arrived`` on; its block hashes grow.
        hints: the client's hints.
        start_hints_sent: those for its start were sent (``HintSender``).
        hint_notes: what became of each of them, for its report, by what they are called.
        tiers: states of blocks that it may wait for: PENDING for those on disks, SHARED for those of shared stores.
        adapter: its LoRA adapter (``AdapterContents``).
        disabled: it must not be looked up or stored.
        load_failed: a load failed; it is recomputed and not looked up again.
        answer: the current answer, whose lease pins the blocks that it reports as ready.
        in_flight: a lookup without an answer yet. The current answer stays until it is replaced.
        last: the lookup sent last: the one in flight, else the answer, or one whose lease was released. It shows which
            blocks need not be stored.
        failed_at: time of its last failed lookup; for a while none is sent, so that the request is not deferred for
            ever.
        tails: hashes of the tails to look up with the chunks, by group on the wire; see ``ScannedTails``.
        was_reported: the outcome of a scheduling was decided; later reports have ``again``.
        scan: facts for vLLM's next scan, and its results.
        wait: its wait to be scheduled.
        scheduling: what it was scheduled to do last.
    """

    number: int
    request: Request = cast(Any, None)  # noqa: RUF009
    hints: RequestHints = NO_HINTS
    start_hints_sent: bool = False
    hint_notes: dict[str, str] = field(default_factory=dict)
    tiers: frozenset[int] = frozenset((PENDING, SHARED))
    adapter: RequestAdapter = field(default_factory=RequestAdapter)
    disabled: bool = False
    load_failed: bool = False
    answer: KeyedLookup | None = None
    in_flight: KeyedLookup | None = None
    last: KeyedLookup | None = None
    failed_at: float = LONG_AGO
    tails: Mapping[int, Sequence[bytes]] = field(default_factory=dict)
    was_reported: bool = False
    scan: PreparedScan = field(default_factory=PreparedScan)
    wait: PromptWait = field(default_factory=PromptWait)
    scheduling: Scheduling = field(default_factory=Scheduling)

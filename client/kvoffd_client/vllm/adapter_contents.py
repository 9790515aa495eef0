"""The scheduler half's knowledge of LoRA adapters: the contents that the workers report (``LiveAdapters``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvoffd_client.vllm.adapters import UNREADABLE
from kvoffd_client.vllm.log import logger

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

    from kvoffd_client.vllm.engine_namespace import EngineNamespace, MemoryState
    from kvoffd_client.vllm.request_state import RequestState

SEVERAL = b"several"
"""Replaces the digest of an adapter of which vLLM's own cache may have blocks of more than one content."""
MAX_CACHED = 100_000
"""Most adapters, by name and path, between two resets; requests of further ones do not use kvoffd."""
ANSWER_PATIENCE_S = 10.0
"""Time for which the workers are asked for an adapter that they do not report, before the request does without it."""
ASK_AGAIN_S = 1.0
"""Time after which the workers are asked again for an adapter that they have not reported."""


@dataclass(slots=True, eq=False)
class RequestAdapter:
    """A request's LoRA adapter, as far as it is known.

    Attributes:
        content: digest of its content; empty if the request has none, and while it is unknown.
        asked_at: time when the workers were first asked for it; None before.
        last_asked_at: time when they were last asked.
        reported: digest that they reported since. They may have dropped the adapter when vLLM comes to the request.
    """

    content: bytes = b""
    asked_at: float | None = None
    last_asked_at: float = 0.0
    reported: bytes | None = None


class AdapterContents:
    """The scheduler half's knowledge of adapters. vLLM's own cache distinguishes them by name and path.

    While it may have blocks of two contents for one of them, requests of that one do not use kvoffd.

    A step's message to the workers names adapters that they must have read in it (``want``). They report the contents
    of those that they have in memory, until they drop them.

    Args:
        clock: clock such as time.monotonic().
    """

    def __init__(self, namespace: EngineNamespace, clock: Callable[[], float]) -> None:
        self._namespace, self._clock = namespace, clock
        self._wanted: dict[int, LoRARequest] = {}
        """Adapters that workers must read in the next step, unless they are loaded, by number."""
        self._may_read = True
        """Whether the next step may read one more: at most one, as the step waits while it is read."""
        self._has_unasked = self._had_unasked = False
        """Whether a request had to leave its first question to a later step, in this step and in the last one."""
        self._cached: dict[tuple[str, str], bytes] = {}
        """Content of which vLLM's own cache may have blocks, or SEVERAL, by name and path."""
        self._digests: dict[tuple[int, int], bytes] = {}
        """Digests that workers reported last since a reset, by rank and number."""

    def identify(self, state: RequestState) -> bool:
        """Find the content of a request's adapter, or disable the request if it is unusable. False while unknown."""
        adapter = state.request.lora_request
        if adapter is None or state.adapter.content or state.disabled:
            return True
        content = self.record_content(adapter, state.adapter.reported)
        if content == UNREADABLE:
            state.disabled = True
        elif content is not None:
            state.adapter.content = content
        return content is not None

    def weights_changed(self, state: RequestState) -> None:
        """Disable a request with an adapter, which may have been replaced in place: vLLM continues the request. One
        whose adapter is unknown asks for it again."""
        if state.adapter.content:
            state.disabled = True
        else:
            state.adapter = RequestAdapter()

    def await_content(self, state: RequestState) -> bool:
        """Return whether a request waits for the workers to report its adapter; they are asked for it if needed. One
        for which they were asked for too long is disabled."""
        adapter = state.request.lora_request
        if adapter is None or self.identify(state):
            return False
        if self._namespace.current is None:
            if self._namespace.awaits_reports():
                return True
        elif not self._was_asked_enough(state.adapter):
            self._ask(state.adapter, adapter)
            return True
        self.record_unknown(adapter)
        state.disabled = True
        return False

    def _was_asked_enough(self, own: RequestAdapter) -> bool:
        """Return whether the workers had enough time, and a last question, to report a request's adapter.

        | last question, after the first | is it enough |
        |---|---|
        | less than ANSWER_PATIENCE_S | no: the step of the first question may take as long |
        | later | ASK_AGAIN_S after the last one |
        """
        if own.asked_at is None or own.last_asked_at - own.asked_at < ANSWER_PATIENCE_S:
            return False
        return self._clock() - own.last_asked_at >= ASK_AGAIN_S

    def _ask(self, own: RequestAdapter, adapter: LoRARequest) -> None:
        """Ask the workers for a request's adapter, if it is its turn: first come those that were never asked for, but
        not for longer than ANSWER_PATIENCE_S, as there may be new ones in every step."""
        now, is_first = self._clock(), own.asked_at is None
        if not is_first and now - own.last_asked_at < (ANSWER_PATIENCE_S if self._had_unasked else ASK_AGAIN_S):
            return
        if not self.may_want(adapter):
            self._has_unasked |= is_first
            return
        self.want(adapter)
        own.last_asked_at = now
        if is_first:
            own.asked_at = now

    def record_unknown(self, adapter: LoRARequest) -> None:
        """Record that vLLM computes with an adapter of unknown content."""
        self._record_cached(adapter, SEVERAL)

    def record_content(self, adapter: LoRARequest, earlier: bytes | None = None) -> bytes | None:
        """Record the content with which vLLM will compute for an adapter. Return its digest; None if it is not known
        yet, UNREADABLE if kvoffd must not be used. ``earlier``: its digest if the workers do not report it now."""
        content = self._digest_of(adapter)
        if content is None and (content := earlier) is None:
            return None
        cached = self._record_cached(adapter, content)
        if content == UNREADABLE:
            problem = "cannot be read in the workers' memory"
        elif cached is None:
            problem = f"exceeds the limit of {MAX_CACHED} adapters"
        elif cached == SEVERAL:
            problem = "was loaded again with another content"
        else:
            return content
        logger.warning_once(  # type: ignore[attr-defined]
            "kvoffd: the LoRA adapter %s %s, so its requests are computed without kvoffd until vLLM's own cache is "
            "reset: call reset_prefix_cache with reset_connector.",
            adapter.lora_name,
            problem,
        )
        return UNREADABLE

    def may_want(self, adapter: LoRARequest) -> bool:
        """Return whether the workers may be told to read an adapter in the next step: at most one is read in a step."""
        return self._may_read or not self._needs_reading(adapter)

    def want(self, adapter: LoRARequest) -> None:
        """Have the workers read an adapter in the next step, unless it is loaded: to report it, and before blocks of it
        are loaded, as its files may have changed."""
        self._may_read &= not self._needs_reading(adapter)
        self._wanted[adapter.lora_int_id] = adapter

    def _needs_reading(self, adapter: LoRARequest) -> bool:
        """Return whether the workers would read this adapter, in addition to those wanted by now."""
        return adapter.lora_int_id not in self._wanted and self._digest_of(adapter) is None

    def _digest_of(self, adapter: LoRARequest) -> bytes | None:
        return self._namespace.adapter_digest(adapter.lora_int_id, adapter.lora_path)

    def take_wanted(self) -> list[LoRARequest]:
        """Return the adapters that the workers must read in this step, unless they are loaded."""
        wanted, self._wanted, self._may_read = list(self._wanted.values()), {}, True
        self._had_unasked, self._has_unasked = self._has_unasked, False
        return wanted

    def update(self, memory: Mapping[int, MemoryState], requests: Iterable[RequestState]) -> None:
        """Record what workers' new memory states, by rank, say of the adapters of unfinished requests: of those with
        which vLLM computes, and of those for which the workers were asked."""
        if len(self._digests) > MAX_CACHED:
            self._digests.clear()
        changed = set[int]()
        for rank, worker in memory.items():
            for number, (_, digest) in (worker.adapters or {}).items():
                if self._digests.setdefault((rank, number), digest) != digest:
                    self._digests[rank, number] = digest
                    changed.add(number)
        for state in requests:
            adapter, own, is_computed = state.request.lora_request, state.adapter, state.request.num_computed_tokens > 0
            is_awaited = own.asked_at is not None and not own.content
            if adapter is None or not (is_awaited or is_computed):
                continue
            content = self._digest_of(adapter)
            if is_awaited and content not in (None, UNREADABLE):
                own.reported = content
            if is_computed and adapter.lora_int_id in changed:
                content = SEVERAL  # some of its blocks are of the digest before
            if is_computed and content is not None:
                self._record_cached(adapter, content)

    def _record_cached(self, adapter: LoRARequest, content: bytes) -> bytes | None:
        """Record a content, and return that of the adapter's blocks in vLLM's cache; None beyond MAX_CACHED."""
        name = adapter.lora_name, adapter.lora_path
        if name not in self._cached and len(self._cached) >= MAX_CACHED:
            return None
        if self._cached.setdefault(name, content) != content:
            self._cached[name] = SEVERAL
        return self._cached[name]

    def engine_cache_reset(self) -> None:
        """Record that vLLM's own cache is empty."""
        self._cached.clear()
        self._digests.clear()

"""LoRA adapters: identifies their contents, because vLLM's block hashes include only their names and paths.

Files at a path may be replaced, and vLLM may read them at any time: when a user loads an adapter, also in place, or for
a request whose adapter had been dropped. So workers take a digest of each adapter when vLLM has read it, and the
scheduler half relies on these digests only.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

import torch

from kvoffd_client.vllm.live_weights import joined, sample
from kvoffd_client.vllm.log import logger

if TYPE_CHECKING:
    from vllm.config import LoRAConfig
    from vllm.lora.request import LoRARequest

    from kvoffd_client.vllm.engine_namespace import EngineNamespace, MemoryState
    from kvoffd_client.vllm.request_state import RequestState

UNREADABLE = b""
"""Replaces the digest of an adapter that could not be read."""
SEVERAL = b"several"
"""Replaces the digest of an adapter of which vLLM's own cache may have blocks of more than one content."""
MAX_REMEMBERED = 10_000
"""Most adapters whose digests a worker remembers."""
MAX_CACHED = 100_000
"""Most adapters, by name and path, between two resets; requests of further ones do not use kvoffd."""
ANSWER_PATIENCE_S = 10.0
"""Time that a request waits for the workers to read its adapter, from when they were first asked."""
ASK_AGAIN_S = 1.0
"""Time after which the workers are asked again for an adapter that they have not reported. Others have their turn."""
AHEAD_S = 10.0
"""Age up to which vLLM gets an adapter that was read ahead, not its files. Then it counts as not loaded."""


class LiveAdapters:
    """The adapters of one worker.

    Args:
        manager: vLLM's WorkerLoRAManager; None, or any other object, if there is none.
        config: the engine's LoRAConfig: an engine may apply only a part of every adapter.
        changed: called when the content of an adapter with a known number has changed.
    """

    def __init__(self, manager: Any, config: LoRAConfig | None, changed: Callable[[], None]) -> None:
        self._manager, self._changed = manager, changed
        self._read = getattr(manager, "_load_adapter", None) if config is not None else None
        """vLLM's method; None if the adapters are unknown."""
        self._contents: dict[int, tuple[str, bytes]] = {}
        """Path and digest of the adapters read last, by number."""
        self._unreadable = set[int]()
        """Numbers of adapters whose contents are unknown."""
        self._ahead: dict[int, tuple[float, Any]] = {}
        """Adapters read ahead, with the time; at most as many as the GPU has slots."""
        if self._read is None or config is None:
            return
        self._most_ahead = config.max_loras
        names = ("lora_dtype", "enable_tower_connector_lora", "enable_mixed_moe_lora_format", "enable_moe_shared_loras")
        only = sorted(set(config.target_modules)) if config.target_modules is not None else None
        self._settings = f"{[str(getattr(config, name)) for name in names]} {only}"
        manager._load_adapter = self._load

    def contents(self) -> Mapping[int, tuple[str, bytes]] | None:
        """Return path and digest by number of the adapters that vLLM uses or will use; None if unknown.

        Adapters dropped from vLLM's cache are not included: vLLM will read their files again.
        """
        if self._read is None:
            return None
        self._drop_old()
        return self._loaded() | dict.fromkeys(self._unreadable, ("", UNREADABLE))

    def read_ahead(self, wanted: Iterable[LoRARequest]) -> None:
        """Read adapters that vLLM has not loaded. When it loads them, it gets these instead of their files."""
        if self._read is None:
            return
        self._drop_old()
        for lora in wanted:
            number = lora.lora_int_id
            if number in self._loaded_numbers():
                if number in self._contents:
                    # Its path does not matter: vLLM uses the adapter with this number.
                    self._contents[number] = lora.lora_path, self._contents[number][1]
                else:  # it was loaded in an unknown way
                    self._mark_unreadable(number)
                continue
            try:
                adapter = self._read(lora)
            except Exception as error:  # of the file system, the checkpoint or vLLM
                logger.warning("kvoffd: the LoRA adapter %s could not be read: %s", lora.lora_name, error)
                self._mark_unreadable(number)
                continue
            self._record_read(lora, adapter)
            while len(self._ahead) >= self._most_ahead:
                del self._ahead[next(iter(self._ahead))]
            self._ahead[number] = time.monotonic(), adapter

    def forget_absent(self) -> None:
        """Forget adapters that vLLM has not loaded: their contents may have changed when they are read again."""
        if self._read is not None:
            self._ahead.clear()
            self._unreadable.clear()
            self._contents = self._loaded()

    def _load(self, request: LoRARequest) -> Any:
        """Replacement of vLLM's ``_load_adapter``."""
        self._drop_old()
        _, adapter = self._ahead.pop(request.lora_int_id, (0.0, None))
        if adapter is None or request.load_inplace:
            adapter = self._read(request)  # type: ignore[misc]
            self._record_read(request, adapter)
        return adapter

    def _drop_old(self) -> None:
        """Drop the adapters read ahead that vLLM no longer gets: it will read their files, which may have changed."""
        oldest = time.monotonic() - AHEAD_S
        self._ahead = {number: read for number, read in self._ahead.items() if read[0] > oldest}

    def _loaded_numbers(self) -> set[int]:
        """Return the numbers of adapters in vLLM's memory, or read ahead for it."""
        return {*self._manager.list_adapters(), *self._ahead}

    def _loaded(self) -> dict[int, tuple[str, bytes]]:
        """Return path and digest of the adapters that vLLM has in memory or will get, where known."""
        return {each: self._contents[each] for each in self._loaded_numbers() if each in self._contents}

    def _record_read(self, request: LoRARequest, adapter: Any) -> None:
        """Record an adapter that was read. A failure must cost an engine no more than its shared blocks."""
        number = request.lora_int_id
        if len(self._contents) >= MAX_REMEMBERED and number not in self._contents:
            self.forget_absent()
            self._changed()  # changes of forgotten adapters would go unnoticed
        _, before = self._contents.pop(number, ("", UNREADABLE))
        try:
            content = self._digest(adapter)
        except Exception:
            logger.exception("kvoffd: a LoRA adapter in memory could not be read.")
            content = UNREADABLE
            self._mark_unreadable(number)
        else:
            self._contents[number] = request.lora_path, content
            self._unreadable.discard(number)
        if before not in (UNREADABLE, content):
            self._changed()

    def _mark_unreadable(self, number: int) -> None:
        if len(self._unreadable) >= MAX_REMEMBERED:
            self._unreadable.clear()
        self._unreadable.add(number)

    def _digest(self, adapter: Any) -> bytes:
        """Return a digest of an adapter as vLLM has read it: its values, and samples of its tensors."""
        total, samples = hashlib.sha256(self._settings.encode()), list[torch.Tensor]()
        for name, value in _parts("", {key: value for key, value in vars(adapter).items() if key != "id"}):
            if isinstance(value, torch.Tensor):
                total.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
                samples += sample(value)
            else:
                total.update(f"{name} {value}\n".encode())
        for piece in joined(samples):
            total.update(piece)
        return total.digest()


def _parts(name: str, value: Any) -> Iterator[tuple[str, object]]:
    """Yield the tensors, numbers and strings in an object of vLLM, each with its path."""
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _parts(f"{name}.{key}", value[key])
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _parts(f"{name}.{index}", item)
    elif isinstance(value, torch.Tensor) or not hasattr(value, "__dict__"):
        yield name, value
    else:
        yield from _parts(name, vars(value))


@dataclass(slots=True, eq=False)
class RequestAdapter:
    """A request's LoRA adapter, as far as it is known.

    Attributes:
        content: digest of its content; empty if the request has none, and while it is unknown.
        asked_at: time when the workers were first asked for it; None before.
        ask_again_at: time from which they may be asked again.
    """

    content: bytes = b""
    asked_at: float | None = None
    ask_again_at: float = -inf


class AdapterContents:
    """The scheduler half's knowledge of adapters. vLLM's own cache distinguishes them by name and path.

    While it may have blocks of two contents for one of them, requests of that one do not use kvoffd.

    Args:
        clock: clock such as time.monotonic().
    """

    def __init__(self, namespace: EngineNamespace, clock: Callable[[], float]) -> None:
        self._namespace, self._clock = namespace, clock
        self._wanted: dict[int, LoRARequest] = {}
        """Adapters that workers must read in the next step, unless they are loaded, by number."""
        self._may_read = True
        """Whether the next step may read one more: at most one, as the step waits while it is read."""
        self._cached: dict[tuple[str, str], bytes] = {}
        """Content of which vLLM's own cache may have blocks, or SEVERAL, by name and path."""
        self._digests: dict[tuple[int, int], bytes] = {}
        """Digests that workers reported last since a reset, by rank and number."""

    def identify(self, state: RequestState) -> bool:
        """Find the content of a request's adapter, or disable the request if it is unusable. False while unknown."""
        adapter = state.request.lora_request
        if adapter is None or state.adapter.content or state.disabled:
            return True
        content = self.record_content(adapter)
        state.adapter.content, state.disabled = content or b"", content == UNREADABLE
        return content is not None

    def ask_if_unknown(self, state: RequestState) -> bool:
        """Ask the workers for a request's adapter if it is unknown, in turns with others'; disable the request if they
        do not answer in time. Return whether it waits for them."""
        if state.request.lora_request is None or self.identify(state):
            return False
        own, now = state.adapter, self._clock()
        is_known = self._namespace.current is not None
        in_time = own.asked_at is None or now - own.asked_at < ANSWER_PATIENCE_S
        if in_time and (is_known or self._namespace.awaits_reports()):
            if is_known and now >= own.ask_again_at and self.ask(state.request.lora_request):
                own.asked_at = now if own.asked_at is None else own.asked_at
                own.ask_again_at = now + ASK_AGAIN_S
            return True
        self.record_unknown(state.request.lora_request)
        state.disabled = True
        return False

    def record_unknown(self, adapter: LoRARequest) -> None:
        """Record that vLLM computes with an adapter of unknown content."""
        self._record_cached(adapter, SEVERAL)

    def record_content(self, adapter: LoRARequest) -> bytes | None:
        """Record the content with which vLLM will compute for an adapter. Return its digest; None if it is not known
        yet, UNREADABLE if kvoffd must not be used."""
        content = self._namespace.adapter_digest(adapter.lora_int_id, adapter.lora_path)
        if content is None:
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

    def ask(self, adapter: LoRARequest) -> bool:
        """Request the workers to read an adapter in the next step. Return False if that reads another one."""
        if may_read := self._may_read or not self._needs_reading(adapter):
            self.will_load(adapter)
        return may_read

    def may_load(self, state: RequestState) -> bool:
        """Return whether blocks may be loaded for a request in this step, before which its adapter may be read."""
        adapter = state.request.lora_request
        return adapter is None or self._may_read or not self._needs_reading(adapter)

    def will_load(self, adapter: LoRARequest) -> None:
        """Request the workers to check an adapter before blocks of it are loaded: its files may have changed."""
        self._may_read &= not self._needs_reading(adapter)
        self._wanted[adapter.lora_int_id] = adapter

    def _needs_reading(self, adapter: LoRARequest) -> bool:
        """Return whether the workers would read one more adapter to check this one."""
        number = adapter.lora_int_id
        return number not in self._wanted and self._namespace.adapter_digest(number, adapter.lora_path) is None

    def take_wanted(self) -> list[LoRARequest]:
        """Return the adapters that the workers must read in this step, unless they are loaded."""
        wanted, self._wanted, self._may_read = list(self._wanted.values()), {}, True
        return wanted

    def update(self, states: Mapping[int, MemoryState], begun: Iterable[LoRARequest]) -> None:
        """Record the contents of ``begun``, adapters that vLLM computes with, by new memory states."""
        if len(self._digests) > MAX_CACHED:
            self._digests.clear()
        changed = set[int]()
        for rank, state in states.items():
            for number, (_, digest) in (state.adapters or {}).items():
                if self._digests.setdefault((rank, number), digest) != digest:
                    self._digests[rank, number] = digest
                    changed.add(number)
        for adapter in begun:
            content = self._namespace.adapter_digest(adapter.lora_int_id, adapter.lora_path)
            if adapter.lora_int_id in changed:
                content = SEVERAL
            if content is not None:
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

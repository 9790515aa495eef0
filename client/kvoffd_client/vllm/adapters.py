"""LoRA adapters: vLLM's block hashes have an adapter's name and path, so its content is named here.

Files at a path may be replaced, and vLLM reads them when it likes: for a load that a user asks for, in place too, or
for a request whose adapter was dropped for others. So workers take a digest of each adapter when vLLM has read it, and
the scheduler half believes nothing else.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from kvoffd_client.vllm.live_weights import joined, sample
from kvoffd_client.vllm.log import logger

if TYPE_CHECKING:
    from vllm.config import LoRAConfig
    from vllm.lora.request import LoRARequest

    from kvoffd_client.vllm.engine_namespace import EngineNamespace, MemoryReport

UNREADABLE = b""
"""In place of a digest: vLLM could not read the adapter."""
MAX_REMEMBERED = 10_000
"""Adapters whose digests a worker remembers."""
MAX_CACHED = 100_000
"""Most names and paths of adapters that are noted between two resets; requests of further ones use no kvoffd."""
ANSWER_PATIENCE_S = 10.0
"""How long a request waits for its workers to have read its adapter."""
AHEAD_S = 10.0
"""How long vLLM gets an adapter that was read ahead of it, and not its files."""


class LiveAdapters:
    """The adapters of one worker.

    Args:
        manager: vLLM's WorkerLoRAManager; None, or anything else, where there is none.
        config: the engine's LoRAConfig: an engine may apply only a part of every adapter.
        changed: called when the content of an adapter's number is not what it was before.
    """

    def __init__(self, manager: Any, config: LoRAConfig | None, changed: Callable[[], None]) -> None:
        self._manager, self._changed = manager, changed
        self._read = getattr(manager, "_load_adapter", None)
        self._contents: dict[int, tuple[str, bytes]] = {}
        """By number, path and digest of what was read last."""
        self._unreadable = set[int]()
        """Numbers of which nobody knows what vLLM has, or would have."""
        self._ahead: dict[int, tuple[float, Any]] = {}
        """Adapters that were read before vLLM asked for them, and when; at most as many as the GPU has slots."""
        self._reported: Mapping[int, tuple[str, bytes]] | None = None
        self._reported_held = set[int]()
        self._is_new = False
        if self._read is None or config is None:
            return
        self._most_ahead = config.max_loras
        names = ("lora_dtype", "enable_tower_connector_lora", "enable_mixed_moe_lora_format", "enable_moe_shared_loras")
        only = sorted(set(config.target_modules)) if config.target_modules is not None else None
        self._settings = f"{[str(getattr(config, name)) for name in names]} {only}"
        self._reported = {}
        manager._load_adapter = self._load

    def contents(self) -> Mapping[int, tuple[str, bytes]] | None:
        """Return, by number, path and digest of those that vLLM computes with or will; None where it cannot be seen.

        What fell out of vLLM's cache is not among them: vLLM will read its files anew.
        """
        if self._reported is None:
            return None
        held = self._held()
        if self._is_new or held != self._reported_held:
            self._is_new, self._reported_held = False, held
            known = {each: of for each, of in self._contents.items() if each in held}
            self._reported = known | dict.fromkeys(self._unreadable, ("", UNREADABLE))
        return self._reported

    def read_ahead(self, wanted: Iterable[LoRARequest]) -> None:
        """Read adapters that vLLM does not hold. It gets just these, in place of their files, when it wants them."""
        for lora in wanted:
            number = lora.lora_int_id
            if self._reported is None:
                return
            if number in self._held():
                if number in self._contents:
                    # Whatever its path was: vLLM computes with what it has under the number.
                    self._contents[number] = lora.lora_path, self._contents[number][1]
                    self._is_new = True
                else:  # it was loaded in a way that is not known here
                    self._note_unreadable(number)
                continue
            try:
                adapter = self._read(lora)  # type: ignore[misc]
            except Exception as error:  # any of the file system's, the checkpoint's or vLLM's own
                logger.warning("kvoffd: the LoRA adapter %s could not be read: %s", lora.lora_name, error)
                self._note_unreadable(number)
                continue
            self._note(lora, adapter)
            while len(self._ahead) >= self._most_ahead:
                del self._ahead[next(iter(self._ahead))]
            self._ahead[number] = time.monotonic(), adapter

    def forget_absent(self) -> None:
        """Nothing of before is used any more: what vLLM does not hold may have another content when it is read."""
        if self._reported is not None:
            self._ahead.clear()
            self._unreadable.clear()
            held = self._held()
            self._contents = {each: of for each, of in self._contents.items() if each in held}
            self._is_new = True

    def _load(self, request: LoRARequest) -> Any:
        """In place of vLLM's ``_load_adapter``."""
        read_at, adapter = self._ahead.pop(request.lora_int_id, (0.0, None))
        if adapter is None or request.load_inplace or time.monotonic() - read_at > AHEAD_S:
            adapter = self._read(request)  # type: ignore[misc]
            self._note(request, adapter)
        return adapter

    def _held(self) -> set[int]:
        """The adapters that vLLM has in memory, or will have as they were read ahead."""
        return {*self._manager.list_adapters(), *self._ahead}

    def _note(self, request: LoRARequest, adapter: Any) -> None:
        """Note what was read; that must cost an engine shared blocks at most."""
        number = request.lora_int_id
        if len(self._contents) >= MAX_REMEMBERED and number not in self._contents:
            self.forget_absent()
            self._changed()  # a change of what was forgotten would not be noticed
        _, before = self._contents.pop(number, ("", UNREADABLE))
        try:
            content = self._digest(adapter)
        except Exception:
            logger.exception("kvoffd: a LoRA adapter in memory could not be read.")
            content = UNREADABLE
            self._note_unreadable(number)
        else:
            self._contents[number] = request.lora_path, content
            self._unreadable.discard(number)
        self._is_new = True
        if before not in (UNREADABLE, content):
            self._changed()

    def _note_unreadable(self, number: int) -> None:
        if len(self._unreadable) >= MAX_REMEMBERED:
            self._unreadable.clear()
        self._unreadable.add(number)
        self._is_new = True

    def _digest(self, adapter: Any) -> bytes:
        """Return a digest of an adapter as vLLM has read it: of all its numbers, and of samples of its tensors."""
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
    """Return the tensors, numbers and strings of which an object of vLLM's is made, each by its way."""
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


class AdapterContents:
    """What the scheduler half knows of adapters. vLLM's own cache tells them apart by name and path.

    While it may have blocks of two contents under one of them, the requests of that one use no kvoffd.
    """

    def __init__(self, namespace: EngineNamespace) -> None:
        self._namespace = namespace
        self._wanted: dict[int, LoRARequest] = {}
        """By number, those that workers are to read in the next step, unless they hold them."""
        self._has_asked = False
        """Whether one of them is not known yet: one in each step, which waits while it is read."""
        self._cached: dict[tuple[str, str], set[bytes]] = {}
        """By name and path, the contents of which vLLM's own cache may have blocks."""
        self._digests: dict[tuple[int, int], bytes] = {}
        """By rank and number, what the worker reported last since a reset."""

    def content_of(self, adapter: LoRARequest) -> bytes | None:
        """Return the digest of what vLLM computes with; None where it is not known yet, UNREADABLE where it must not
        be used."""
        content = self._namespace.adapter(adapter.lora_int_id, adapter.lora_path)
        if content is None:
            return None
        cached = self._note(adapter, content)
        if content == UNREADABLE:
            problem = "cannot be read in the workers' memory"
        elif not cached:
            problem = f"is one of more than {MAX_CACHED}"
        elif cached != {content}:
            problem = "was loaded anew with another content"
        else:
            return content
        logger.warning_once(  # type: ignore[attr-defined]
            "kvoffd: the LoRA adapter %s %s, so its requests are computed without kvoffd until vLLM's own cache is "
            "reset: call reset_prefix_cache with reset_connector.",
            adapter.lora_name,
            problem,
        )
        return UNREADABLE

    def ask(self, adapter: LoRARequest) -> None:
        """Have the workers read an adapter that is not known, when it is its turn."""
        if not self._has_asked:
            self._has_asked = True
            self._wanted[adapter.lora_int_id] = adapter

    def will_load(self, adapter: LoRARequest) -> None:
        """Have the workers see that an adapter is what it was, before blocks of it are loaded."""
        self._wanted[adapter.lora_int_id] = adapter

    def take_wanted(self) -> list[LoRARequest]:
        """Return what the workers are to have read in this step."""
        wanted, self._wanted, self._has_asked = list(self._wanted.values()), {}, False
        return wanted

    def compute_unknown(self, adapter: LoRARequest) -> None:
        """vLLM computes with an adapter whose content nobody knows."""
        self._note(adapter, UNREADABLE)

    def note_reports(self, reports: Mapping[int, MemoryReport], begun: Iterable[LoRARequest]) -> None:
        """Note with what requests that have begun are computed from now on, whatever they began with."""
        if len(self._digests) > MAX_CACHED:
            self._digests.clear()
        changed = set[int]()
        for rank, report in reports.items():
            for number, (_, digest) in (report.adapters or {}).items():
                if self._digests.setdefault((rank, number), digest) != digest:
                    self._digests[rank, number] = digest
                    changed.add(number)
        for adapter in begun:
            content = self._namespace.adapter(adapter.lora_int_id, adapter.lora_path)
            if adapter.lora_int_id in changed:
                content = UNREADABLE
            if content is not None:
                self._note(adapter, content)

    def _note(self, adapter: LoRARequest, content: bytes) -> set[bytes]:
        """Note that vLLM computes with this, and return all that it may have in its cache; none where they are many."""
        name = adapter.lora_name, adapter.lora_path
        if name not in self._cached and len(self._cached) >= MAX_CACHED:
            return set()
        cached = self._cached.setdefault(name, set())
        cached.add(content)
        return cached

    def engine_cache_reset(self) -> None:
        """vLLM's own cache has no block of before any more."""
        self._cached.clear()
        self._digests.clear()

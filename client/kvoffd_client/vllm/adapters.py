"""The LoRA adapters of a worker: identifies their contents, as vLLM's block hashes include only their names and paths.

Files at a path may be replaced, and vLLM may read them at any time: when a user loads an adapter, also in place, or for
a request whose adapter had been dropped. So workers take a digest of each adapter when vLLM has read it, and the
scheduler half (``AdapterContents``) relies on these digests only.
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

UNREADABLE = b"unreadable"
"""Replaces the digest of an adapter that could not be read."""
MAX_REMEMBERED = 10_000
"""Most adapters whose digests a worker remembers."""
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
                    # vLLM uses the adapter of this number whatever the path of a request says, and the scheduler half
                    # looks it up by that path.
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
        _, before = self._contents.pop(number, ("", UNREADABLE))  # UNREADABLE too if it was not read before
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

"""Which LoRA adapter a request is computed with. vLLM's block hash has the adapter's name and path, not its content."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from huggingface_hub import try_to_load_from_cache

from kvoffd_client.vllm.factors import WEIGHT_SUFFIXES, digest_of_files
from kvoffd_client.vllm.log import logger

if TYPE_CHECKING:
    from kvoffd_client.vllm.vllm_types import LoRAConfig, LoRARequest

CONFIG_FILE = "adapter_config.json"
MAX_ADAPTERS = 100_000
"""Adapters of one engine that are told apart; requests with further ones use no kvoffd."""

Signature: TypeAlias = tuple[tuple[str, int, int, int], ...]


@dataclass
class _Adapter:
    """What an adapter's files were when its first request came. ``content`` is None once it is not known any more."""

    int_id: int
    signature: Signature
    content: bytes | None
    reset_since: bool = False


class LoraAdapters:
    """Identifies adapters by their files, when their first request comes.

    vLLM loads an adapter before or at its first request. When the files are others later, nobody knows which of them
    are in memory, nor what vLLM's own cache was computed with. Then the adapter's requests use no kvoffd until vLLM's
    cache was reset and the adapter was loaded anew (vLLM gives it another id).

    ``config`` is the engine's vllm.config.LoRAConfig: an engine may apply a part of every adapter only.
    """

    def __init__(self, config: LoRAConfig | None = None) -> None:
        self._settings = _settings_of(config)
        self._known: dict[tuple[str, str], _Adapter] = {}

    def content_of(self, lora_request: LoRARequest) -> bytes | None:
        """Return the digest of an adapter's content, None where it is not known."""
        name = (lora_request.lora_name, lora_request.lora_path)
        files = _files_of(lora_request.lora_path)
        signature = _signature(files)
        known = self._known.get(name)
        if known is not None and not (known.reset_since and known.int_id != lora_request.lora_int_id):
            if known.signature != signature and known.content is not None:
                known.content = None
                logger.warning(
                    "kvoffd: the files of the LoRA adapter %s changed after it was loaded, so its requests are "
                    "computed without kvoffd. Load it under another name, or load it anew and call "
                    "reset_prefix_cache with reset_connector.",
                    lora_request.lora_name,
                )
            return known.content
        if not files or len(self._known) >= MAX_ADAPTERS:
            logger.warning_once(  # type: ignore[attr-defined]
                "kvoffd: the LoRA adapter %s has no files in %s that can be read, so its requests are computed without "
                "kvoffd.",
                *name,
            )
            return None
        content = hashlib.sha256(f"{self._settings}{digest_of_files(files)}".encode()).digest()
        self._known[name] = _Adapter(lora_request.lora_int_id, signature, content)
        return content

    def engine_cache_reset(self) -> None:
        """vLLM's own cache has no block of before any more."""
        for adapter in self._known.values():
            adapter.reset_since = adapter.reset_since or adapter.content is None


def _settings_of(config: LoRAConfig | None) -> str:
    """Return what of an engine's configuration decides how it computes with any adapter."""
    if config is None:
        return ""
    names = ("lora_dtype", "enable_tower_connector_lora", "enable_mixed_moe_lora_format", "enable_moe_shared_loras")
    only = sorted(set(config.target_modules)) if config.target_modules is not None else None
    return f"{[str(getattr(config, name)) for name in names]} {only}"


def _files_of(path: str) -> list[Path]:
    """Return an adapter's files, in a directory or in Hugging Face's cache; none where there are none."""
    directory = Path(path).expanduser()
    if not directory.is_dir():
        try:
            found = try_to_load_from_cache(path, CONFIG_FILE)
        except ValueError:  # no name of a hub's repository
            return []
        if not isinstance(found, str):
            return []
        directory = Path(found).parent
    files = [item for item in directory.iterdir() if item.name == CONFIG_FILE or item.suffix in WEIGHT_SUFFIXES]
    return sorted(item for item in files if item.is_file())


def _signature(files: list[Path]) -> Signature:
    stats = [(item.name, item.stat()) for item in files]
    return tuple((name, one.st_size, one.st_mtime_ns, one.st_ino) for name, one in stats)

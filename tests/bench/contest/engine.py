"""The contest's engines: vLLM's OpenAI server with one side's cache behind it, what it counts, and CPU seconds."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tests.bench.contest.caches import Cache
from tests.bench.report_file import ROOT
from tests.kit.engine import BLOCK_TOKENS, ENGINE_ENVIRON
from tests.kit.openai_server import OpenAiServer

KV_TOKENS = 6_400
MAX_RUNNING = 4
MAX_TOKENS = 4_096
BY_SOURCE = re.compile(r'^vllm:prompt_tokens_by_source_total\{.*?source="(\w+)".*?\} (\S+)$', re.MULTILINE)
COUNTER = re.compile(r"^(vllm:\w+?)(?:_total)?(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
CREATED = "_created"
"""End of the names of when a counter began."""
CONNECTORS = ("vllm:kvoffd_", "vllm:lmcache_")
"""Beginnings of the names of what connectors count."""
COMPUTED, OWN, OUTSIDE = "local_compute", "local_cache_hit", "external_kv_transfer"
"""The sources by which vLLM counts prompts' tokens."""
SERVER = "vllm.entrypoints.openai.api_server"
"""What ``vllm serve`` starts, which the build for CPU cannot (FAQ.md)."""


class Engine(OpenAiServer):
    """An engine of a side, with a KV cache of ``KV_TOKENS``. It serves the model under the name of its directory."""

    def __init__(self, model: Path, cache: Cache, *, kv_tokens: int = KV_TOKENS) -> None:
        self.model, self.cache = model, cache
        flags = {
            "model": str(model),
            "dtype": "float32",
            "seed": "0",
            "block-size": str(BLOCK_TOKENS),
            "max-model-len": str(min(MAX_TOKENS, kv_tokens)),
            "num-gpu-blocks-override": str(1 + kv_tokens // BLOCK_TOKENS),
            "max-num-seqs": str(MAX_RUNNING),
            "override-generation-config": '{"temperature": 0.0}',  # of requests that do not say it
            "enforce-eager": "",
            "enable-prompt-tokens-details": "",
        }
        if cache.transfer_config:
            flags["kv-transfer-config"] = json.dumps(cache.transfer_config)
        environ = {
            **ENGINE_ENVIRON,
            "TORCH_COMPILE_DISABLE": "1",
            "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
            "PYTHONHASHSEED": "0",  # block hashes begin with it: equal in every engine
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "client"), str(ROOT / "proto"))),
            **cache.environ,
        }
        super().__init__([str(cache.python), "-m", SERVER], flags, environ)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def counts(self) -> Counts:
        """Return its counters, and the CPU seconds of its processes and its cache's."""
        status, body = self.ask("GET", "/metrics")
        assert status == 200, body
        text = body.decode()
        sources = Counter[str]()
        for source, value in BY_SOURCE.findall(text):
            sources[source] += int(float(value))
        counters = Counter[str]()
        for name, value in COUNTER.findall(text):
            with suppress(ValueError):
                counters[name] += int(float(value))
        cache_pid = self.cache.pid
        return Counts(
            prompt_tokens=counters["vllm:prompt_tokens"],
            by_source=dict(sources),
            preempted=counters["vllm:num_preemptions"],
            connector={
                name: count
                for name, count in counters.items()
                if name.startswith(CONNECTORS) and not name.endswith(CREATED)
            },
            requests=counters["vllm:num_requests_running"] + counters["vllm:num_requests_waiting"],
            engine_cpu_s=sum(map(cpu_seconds, self.pids)),
            cache_cpu_s=sum(map(cpu_seconds, with_children(cache_pid))) if cache_pid else 0.0,
        )


class Counts(NamedTuple):
    """What an engine has counted since its start."""

    prompt_tokens: int = 0
    by_source: dict[str, int] = {}  # noqa: RUF012 - nobody changes it
    preempted: int = 0
    connector: dict[str, int] = {}  # noqa: RUF012 - nobody changes it
    requests: int = 0
    """Requests that run or wait."""
    engine_cpu_s: float = 0.0
    cache_cpu_s: float = 0.0

    def since(self, before: Counts) -> Counts:
        return Counts(
            self.prompt_tokens - before.prompt_tokens,
            {source: count - before.by_source.get(source, 0) for source, count in self.by_source.items()},
            self.preempted - before.preempted,
            {name: count - before.connector.get(name, 0) for name, count in self.connector.items()},
            self.requests,
            self.engine_cpu_s - before.engine_cpu_s,
            self.cache_cpu_s - before.cache_cpu_s,
        )


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds that a process and its ended children have taken; 0 if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def with_children(pid: int) -> list[int]:
    """Return the ids of a process and all its descendants."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found

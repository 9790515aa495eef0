"""Programs of others that send the contest's requests: ``vllm bench serve``, cache-pressure and ``lmcache bench``."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.bench.contest.caches import CONTEST_PYTHON
from tests.bench.contest.client import Traffic
from tests.bench.contest.engine import KV_TOKENS, MAX_TOKENS, Engine
from tests.bench.contest.traces import Slice
from tests.bench.report_file import ROOT

BIN = CONTEST_PYTHON.parent
VERDICT = re.compile(r"FINALIZE|continuation turns|^retained|RESULT:|\[(PASS|FAIL)\]|runs passed")
VERDICT_LINES = 3
TAIL = 600
TOKENS_PER_GB = 65_536
"""Tokens of the demo model in a GiB of KV cache: 16 KiB each."""
SEED = 7


def vllm_bench(engine: Engine, place: Path, deadline_s: float, **flags: Any) -> Traffic:
    """Run ``vllm bench serve`` with these flags. Raises AssertionError when it fails or is late."""
    result = place / "vllm-bench.json"
    result.unlink(missing_ok=True)
    common = {
        "model": engine.model,
        "base_url": engine.url,
        "seed": SEED,
        "temperature": 0,
        "percentile_metrics": "ttft,itl,e2el",
        "result_dir": place,
        "result_filename": result.name,
    }
    command = [sys.executable, "-m", "tests.bench.contest.vllm_bench", "--save-result", "--save-detailed"]
    command += ["--ignore-eos", "--disable-tqdm", *_words({**common, **flags})]
    _run(command, deadline_s, place, {"PYTHONHASHSEED": "0"})  # timed_trace makes its prompts by hash()
    found = json.loads(result.read_text())
    return Traffic(
        ttft_s=[one for one, error in zip(found["ttfts"], found["errors"], strict=True) if not error],
        gaps_s=[gap for gaps in found["itls"] for gap in gaps],
        seconds=float(found["duration"]),
        answers=found["generated_texts"],
        failed=[error for error in found["errors"] if error],
    )


def prefix_repetition(engine: Engine, place: Path, deadline_s: float, prompts: int, prefixes: int) -> Traffic:
    lengths = {"prefix_len": 768, "suffix_len": 64, "output_len": 16, "num_prefixes": prefixes}
    flags = {f"prefix_repetition_{name}": value for name, value in lengths.items()}
    return vllm_bench(engine, place, deadline_s, dataset_name="prefix_repetition", num_prompts=prompts, **flags)


def timed_trace(engine: Engine, place: Path, deadline_s: float, trace: Slice) -> Traffic:
    return vllm_bench(
        engine,
        place,
        deadline_s,
        dataset_name="timed_trace",
        dataset_path=trace.file,
        num_prompts=trace.requests,
        timed_trace_chunk_hash_size=trace.block_tokens,
        timed_trace_sec_multiplier=trace.seconds_per_unit,
    )


CACHE_PRESSURE: Mapping[str, dict[str, Any]] = {
    "cache-pressure": {"kv_size": KV_TOKENS, "context_tokens": 1_000},
    "agent-sim": {
        "sessions": 3,
        "main_tokens": 1_200,
        "sub_tokens": 400,
        "sub_windows": 2,
        "step_tokens": 200,
        "finalize_tokens": 100,
        "max_tokens": 16,
        "max_context": MAX_TOKENS,
    },
    "abort-sim": {"context_tokens": 1_000, "thinking_tokens": 50, "max_tokens": 256, "max_context": MAX_TOKENS},
    "needle-test": {"lengths": "500,1000,2000", "max_tokens": 16},
}
"""cache-pressure's programs and their flags, scaled to the contest's KV cache.

agent-sim and abort-sim do not measure the tokenizer: with the contest's, their contexts have 2.4 times as many tokens.
"""
MODULES = {
    "cache-pressure": "core",
    "agent-sim": "agent_sim",
    "abort-sim": "abort_sim",
    "needle-test": "needle",
}
PLACE = "import sysconfig; print(sysconfig.get_path('purelib'))"
NEWER = (3, 12)
"""The Python whose syntax cache-pressure 0.6.3 has, other than its package says."""


def _newer_python() -> str:
    """Return a Python of at least this version; the contest's own if there is no such one."""
    if sys.version_info < NEWER:
        names = [f"python3.{minor}" for minor in range(NEWER[1], NEWER[1] + 3)]
        for python in [*names, *map(str, Path.home().glob(".pyenv/versions/3.1[2-4].*/bin/python"))]:
            with suppress(OSError):
                if not subprocess.run([python, "-c", ""], capture_output=True).returncode:
                    return python
    return str(CONTEST_PYTHON)


def cache_pressure(engine: Engine, place: Path, deadline_s: float, program: str) -> Traffic:
    """Run a program of cache-pressure; an exit status other than 0 is a verdict."""
    result = place / f"{program}.json"
    result.unlink(missing_ok=True)
    flags: dict[str, Any] = {"base_url": f"{engine.url}/v1", "output": result, **CACHE_PRESSURE[program]}
    if program != "cache-pressure":  # whose contexts are always the same
        flags["salt"] = SEED
    run = f"from cache_pressure.{MODULES[program]} import main; main()"
    command = [_newer_python(), "-c", run, *_words(flags), *(["--no-viz"] if program == "agent-sim" else [])]
    packages = [
        subprocess.check_output([CONTEST_PYTHON, "-c", PLACE], text=True).strip(),
        sysconfig.get_path("purelib"),
    ]
    began = time.perf_counter()
    said = _run(command, deadline_s, place, {"PYTHONPATH": os.pathsep.join(packages)}, statuses=(0, 1))
    lines = [line.strip() for line in said.splitlines() if VERDICT.search(line)]
    assert result.exists(), said[-TAIL:]
    ttft_s = list(_numbers(json.loads(result.read_text()), "ttft"))
    return Traffic(ttft_s=ttft_s, seconds=time.perf_counter() - began, verdict="; ".join(lines[-VERDICT_LINES:]))


LMCACHE_BENCH: Mapping[str, dict[str, Any]] = {
    "multi-round-chat": {
        "kv_cache_volume": 0.2,
        "mrc_shared_prompt_length": 200,
        "mrc_chat_history_length": 500,
        "mrc_user_input_length": 32,
        "mrc_output_length": 16,
        "mrc_qps": 1.5,
        "mrc_duration": 20,
    },
    "long-doc-permutator": {
        "kv_cache_volume": 0.3,
        "ldp_num_contexts": 5,
        "ldp_context_length": 512,
        "ldp_system_prompt_length": 256,
        "ldp_num_permutations": 10,
        "ldp_num_inflight_requests": 4,
        "ldp_max_output_length": 16,
    },
}
"""Workloads of ``lmcache bench engine`` and their flags, scaled to the contest's KV cache."""


def lmcache_bench(engine: Engine, place: Path, deadline_s: float, workload: str) -> Traffic:
    for old in place.glob("*.csv"):
        old.unlink()
    flags = {
        "engine_url": engine.url,
        "model": engine.model,
        "workload": workload,
        "tokens_per_gb_kvcache": TOKENS_PER_GB,
        "seed": SEED,
        "output_dir": place,
        **LMCACHE_BENCH[workload],
    }
    command = [str(BIN / "lmcache"), "bench", "engine", "--no-interactive", "--ignore-eos", "-q", *_words(flags)]
    said = _run(command, deadline_s, place, {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"})
    files = list(place.glob("*.csv"))
    assert files, said[-TAIL:]
    with files[0].open() as lines:
        requests = list(csv.DictReader(lines))
    good = [one for one in requests if one["successful"] == "True"]
    assert good, f"no request was answered: {said[-TAIL:]}"
    return Traffic(
        ttft_s=[float(one["ttft"]) for one in good],
        seconds=max(float(one["finish_time"]) for one in good) - min(float(one["submit_time"]) for one in good),
        failed=[one["error"] for one in requests if one["successful"] != "True"],
    )


def _words(flags: Mapping[str, Any]) -> list[str]:
    return [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def _run(
    command: list[str], deadline_s: float, place: Path, environ: Mapping[str, str], statuses: tuple[int, ...] = (0,)
) -> str:
    """Return what a program printed. Raises AssertionError when it ends otherwise, or not within ``deadline_s``."""
    log = place / "program.log"
    path = os.pathsep.join((str(ROOT), str(ROOT / "client"), str(ROOT / "proto")))
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            cwd=place,
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": path, **environ},
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    said = log.read_text(errors="replace")
    assert status is not None, f"{Path(command[0]).name} did not end within {deadline_s:g} s: {said[-TAIL:]}"
    assert status in statuses, f"{Path(command[0]).name} ended with {status}: {said[-TAIL:]}"
    return said


def _numbers(found: Any, name: str) -> Iterator[float]:
    """Yield all numbers of this name in a JSON document."""
    if isinstance(found, dict):
        if isinstance(found.get(name), (int, float)):
            yield float(found[name])
        for one in found.values():
            yield from _numbers(one, name)
    elif isinstance(found, list):
        for one in found:
            yield from _numbers(one, name)

"""Whether equal engines are in one namespace: ``python -m tests.tools.equal_engines --engines 200 --fork|--spawn``.

Starts equal engines, some at a time, against one daemon, and compares what each says of itself: the fields of its
namespace, and the digest of each tensor of its weights that it logs at DEBUG. Every difference is named by field or
tensor. The first engine is what the others are compared with.

An engine takes seconds. ``--tables N`` instead starts N processes that only compute a model's table of rotary positions
with several threads and take its digest by the connector's own code; a start takes milliseconds, so that what happens
once in thousands is seen. ``--unchosen`` leaves out what the connector does first (kvoffd_client/vllm/math_kernels.py).

``--load N`` keeps N processes busy beside it. Exit status: 0 all were equal, 1 some differed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Before anything imports vLLM, here and in the process from which engines are forked.
os.environ["VLLM_LOGGING_LEVEL"] = "DEBUG"

from kvoffd_client import AdminClient
from tests.kit.daemon import DaemonProcess
from tests.kit.engine import PATIENT_S, EngineProcess, wait_connected
from tests.kit.models import make_demo_llama, make_tiny_gemma3, make_tiny_llama

MODELS: dict[str, tuple[Callable[[Path], Path], dict[str, Any]]] = {
    "llama": (make_tiny_llama, {}),
    "gemma": (make_tiny_gemma3, {"num_blocks": 1600}),
    "demo": (make_demo_llama, {}),
    "tensor-parallel": (make_tiny_llama, {"tensor_parallel": 2}),
}
TENSOR = re.compile(r"kvoffd: weights (\S+ \S+): ([0-9a-f]+)")
NAMESPACE = re.compile(r"kvoffd: namespace ([0-9a-f]{16}) ")

# Of a small Llama's table; enough numbers for PyTorch to compute them in four threads.
POSITIONS, ROTARY_DIM, THREADS, AT_ONCE = 8192, 32, 4, 8


@dataclass
class Tally:
    """What was seen: for each field or tensor its values, and how many engines had each."""

    starts: int = 0
    failed: int = 0
    values: dict[str, Counter[str]] = field(default_factory=dict)

    def add(self, seen: dict[str, str]) -> None:
        self.starts += 1
        for name, value in seen.items():
            self.values.setdefault(name, Counter())[value] += 1

    @property
    def differences(self) -> dict[str, Counter[str]]:
        """Fields and tensors with several values, or that some engines lack."""
        return {name: counts for name, counts in self.values.items() if len(counts) > 1 or counts.total() < self.starts}

    def report(self, title: str, seconds: float) -> int:
        """Print what differed. Returns the exit status."""
        print(f"{title}: {self.starts} starts in {seconds:.0f} s, {len(self.values)} fields and tensors compared")
        if self.failed:
            print(f"  {self.failed} more did not come up")
        for name, counts in self.differences.items():
            shown = ", ".join(f"{count} x {value[:60]}" for value, count in counts.most_common())
            print(f"  {name}: {shown}")
        print("  some differed" if self.differences else "  all were equal", flush=True)
        return int(bool(self.differences))


def compare_engines(name: str, engines: int, at_once: int, fork: bool) -> int:
    """Start so many engines of one model, and report."""
    make, settings = MODELS[name]
    tally, began = Tally(), time.monotonic()
    with tempfile.TemporaryDirectory() as directory, DaemonProcess("64MiB") as daemon:
        model = make(Path(directory) / "model")
        with ThreadPoolExecutor(at_once) as pool:
            starts = [pool.submit(start, model, daemon.directory, fork, settings) for _ in range(engines)]
            for number, one in enumerate(starts, 1):
                try:
                    tally.add(one.result())
                except AssertionError as error:
                    tally.failed += 1
                    print(f"  {str(error)[-2000:]}", flush=True)
                if number % 10 == 0 or tally.differences:
                    print(f"  {number} of {engines}, {len(tally.differences)} differences", flush=True)
    return tally.report(f"{name}, {'forked' if fork else 'spawned'}, {at_once} at once", time.monotonic() - began)


def start(model: Path, directory: Path, fork: bool, settings: dict[str, Any]) -> dict[str, str]:
    """Start one engine, end it, and return what it said of itself."""
    engine = EngineProcess(model, directory, fork=fork, **settings)
    try:
        engine.start()
        wait_connected(directory, settings.get("tensor_parallel", 1), 100.0, lambda: engine.pids)
        found = NAMESPACE.findall(engine.log)
        assert found, f"the engine named no namespace:\n{engine.log[-4000:]}"
        seen = described(directory, found[-1])
        # Workers of tensor parallelism log the same names: which of them said it is not compared.
        tensors: dict[str, list[str]] = {}
        for tensor, digest in TENSOR.findall(engine.log):
            tensors.setdefault(tensor, []).append(digest)
        assert tensors, f"the engine logged no tensors:\n{engine.log[-4000:]}"
        return seen | {tensor: " ".join(sorted(digests)) for tensor, digests in tensors.items()}
    finally:
        engine.close()


def described(directory: Path, fingerprint: str) -> dict[str, str]:
    """The fields of the namespace that begins with these digits."""
    with AdminClient(directory, PATIENT_S) as admin:
        [one] = [item for item in admin.namespaces().namespaces if item.namespace.hex().startswith(fingerprint)]
    return {name: json.dumps(value) for name, value in json.loads(one.description).items()}


def compare_tables(count: int, choose: bool) -> int:
    """Have so many processes compute a table of rotary positions first thing, several at once, and report."""
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # threads that spin for each other would take all of the time
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    from kvoffd_client.vllm.live_weights import LiveWeights
    from kvoffd_client.vllm.math_kernels import choose_math_kernels

    def compute(config: VllmConfig) -> dict[str, str]:
        torch.set_num_threads(THREADS)
        if choose:
            choose_math_kernels()
        with set_current_vllm_config(config):
            table = RotaryEmbedding(ROTARY_DIM, ROTARY_DIM, POSITIONS, 10000.0, True, torch.float32)
        first = table.cos_sin_cache.clone()
        digest = LiveWeights(lambda: [table]).digest()
        again = table._compute_cos_sin_cache()
        wrong = int((first != again).sum())
        error = f"{float((first - again).abs().max()):.2g}"
        return {
            "digest": str(digest),
            "numbers that are others at the second call, and by how much": f"{wrong} {error}",
        }

    config = VllmConfig()
    tally, began = Tally(), time.monotonic()
    while tally.starts < count:
        for seen in forked(lambda: compute(config), min(AT_ONCE, count - tally.starts)):
            tally.add(seen)
    title = f"tables, kernels {'chosen first' if choose else 'not chosen'}, {THREADS} threads, {AT_ONCE} at once"
    return tally.report(title, time.monotonic() - began)


def forked(compute: Callable[[], dict[str, str]], count: int) -> Iterator[dict[str, str]]:
    """Call it in so many children at once. ``multiprocessing`` would import and call more in each."""
    children = []
    for _ in range(count):
        reading, writing = os.pipe()
        if (pid := os.fork()) == 0:
            status = 1
            try:
                os.write(writing, json.dumps(compute()).encode())
                status = 0
            finally:
                os._exit(status)
        os.close(writing)
        children.append((pid, reading))
    for pid, reading in children:
        with open(reading, "rb") as pipe:
            said = pipe.read()
        os.waitpid(pid, 0)
        yield json.loads(said)


@contextmanager
def busy_machine(processes: int) -> Iterator[None]:
    """Keep so many processes computing."""
    spinning = [multiprocessing.get_context("spawn").Process(target=spin, daemon=True) for _ in range(processes)]
    for one in spinning:
        one.start()
    try:
        yield
    finally:
        for one in spinning:
            one.kill()
            one.join()


def spin() -> None:
    parent = os.getppid()
    while os.getppid() == parent:
        sum(range(100_000))


def main() -> int:
    """Run the command line. Returns 0 where all were equal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=0, metavar="N", help="start N engines of each model")
    parser.add_argument("--model", choices=MODELS, action="append", help="may be repeated; llama unless given")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--fork", action="store_true", default=True, help="fork them from a process with vLLM (default)")
    how.add_argument("--spawn", action="store_false", dest="fork", help="start them as users' engines do on CPU")
    parser.add_argument("--at-once", type=int, default=2, metavar="N")
    parser.add_argument("--load", type=int, default=0, metavar="N", help="processes that compute beside it")
    parser.add_argument("--tables", type=int, default=0, metavar="N", help="compute N tables of rotary positions")
    parser.add_argument("--unchosen", action="store_true", help="do not have the kernels chosen before")
    options = parser.parse_args()
    differed = 0
    with busy_machine(options.load):
        if options.tables:
            differed |= compare_tables(options.tables, not options.unchosen)
        if options.engines:
            for model in options.model or ["llama"]:
                differed |= compare_engines(model, options.engines, options.at_once, options.fork)
    return differed


if __name__ == "__main__":
    raise SystemExit(main())

"""A real vLLM on a GPU, in parts: what only one can tell of kvoffd, beside what others do.

Each part starts its engines and daemons itself. What it found is kept after each step, and a step that fails costs
itself only. With ``double`` the same steps run in vLLM's build for CPU with a tiny model: they show that the programs
run, and leave out what needs a GPU.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvoffd_client import AdminClient
from tests.bench.gpu.carry import PEGAFLOW_VARIABLE
from tests.bench.gpu.setup import GIB, Found, Setup
from tests.bench.gpu.vllm_engine import TAIL_CHARACTERS, Answer, Asked, Engine
from tests.kit.daemon import DaemonProcess
from tests.kit.engine import connector_config, wait_connected
from tests.kit.models import make_tiny_llama
from tests.kit.ports import free_ports
from tests.kit.service_manager import ServiceManager
from tests.kit.shapes import make_tiny_qwen3_next
from tests.kit.waiting import wait_until

FACTS_S, MODEL_S, SERVER_S = 60.0, 40.0, 20.0
SETTLED_S, MAX_SETTLING_S = 0.5, 20.0
"""How long nothing must run or wait before all is taken to be stored, and the most that is waited for it."""
ANSWER_TOKENS = 16
HYBRID_LENGTHS = (1500, 2500)
"""Blocks of a model with states are large."""
MIN_SHM_BYTES = 20 * GIB
"""Of a model of 8B."""
CPU_POOL_BYTES = 256 << 20
KV_BYTES = 24 * GIB
KILLS, KILL_AFTER_S = 3, 0.05
AT_ONCE = 1000.0
"""Requests a second."""
FAILED_LOADS = "vllm:kvoffd_failed_loads"
PATIENCE = 4.0
"""Of engines on a small machine."""
NEEDS_GPU = "not tried: it needs a GPU"
SAID = ("kvoffd", "WARNING", "ERROR")
MAX_SAID = 12


@dataclass(frozen=True)
class Plan:
    """How much is asked of an engine.

    Attributes:
        block_tokens: tokens of an engine's block.
        kv_tokens: what the engine's KV cache holds; for ``pressure``, ``small_kv_tokens``.
        batched_tokens: the most tokens of a step.
        published: prompts, their tokens, and requests a second of the load that PegaFlow publishes.
        curve: lengths of the prompts that vLLM publishes times for, and how often each is asked.
        decoding, decoding_tokens: requests that decode beside others, and the length of their prompts.
        beside, beside_tokens: prompts that are computed and then loaded beside these, and their length.
        beside_s, rest_s: for how long, and the rest between two.
        pressing, pressing_answer: prompts at once that do not fit, and how many tokens each gets.
    """

    block_tokens: int = 16
    kv_tokens: int = 131_072
    small_kv_tokens: int = 49_152
    batched_tokens: int = 8192
    published: tuple[int, int, float] = (8, 10_000, 4.0)
    curve: tuple[int, ...] = (1024, 2048, 4096, 8192, 16_384, 32_768)
    curve_rounds: int = 3
    decoding: int = 8
    decoding_tokens: int = 512
    beside: int = 20
    beside_tokens: int = 8192
    beside_s: float = 6.0
    rest_s: float = 0.05
    pressing: int = 16
    pressing_answer: int = 200


ON_GPU = Plan()
ON_CPU = Plan(
    block_tokens=32,
    kv_tokens=8192,
    small_kv_tokens=2560,
    batched_tokens=512,
    published=(3, 320, 8.0),
    curve=(128, 512),
    curve_rounds=2,
    decoding=2,
    decoding_tokens=64,
    beside=8,
    beside_tokens=480,
    beside_s=3.0,
    pressing=6,
    pressing_answer=100,
)

GRAPHS = {
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 8, 16],
    },
    # Without the warm-up of kernels, of which some need packages that are not carried.
    "kernel_config": {"enable_jit_warmup": False, "enable_flashinfer_autotune": False},
}
EAGER = {"enforce_eager": True}
V1 = {"environ": {"VLLM_USE_V2_MODEL_RUNNER": "0"}}
Runner = Mapping[str, Any]
"""How vLLM runs the model: settings of the engine, and the environment of its processes."""
RUNNERS: Mapping[str, Runner] = {
    "V2, CUDA graphs": {"attention_backend": "FLASH_ATTN", **GRAPHS},
    "V2, eager": {"attention_backend": "FLASH_ATTN", **EAGER},
    "V1, CUDA graphs": {"attention_backend": "FLASH_ATTN", **GRAPHS, **V1},
    "V2, eager, Triton": {"attention_backend": "TRITON_ATTN", **EAGER},
    "V1, eager, Triton": {"attention_backend": "TRITON_ATTN", **EAGER, **V1},
}
"""The first ``vllm-start`` can start serves all parts; the most like production come first."""
CPU_RUNNERS: Mapping[str, Runner] = {"V1, CPU": EAGER}
EQUAL = ("V2, eager", "V1, CUDA graphs")
"""Those whose answers ``vllm-equal`` compares, beside the first."""


class Bench:
    """One part at work: what it found, and its engines.

    Attributes:
        found: what the part returns; kept on disk after each step.
        directory: where models are, and other files of this run.
        pool_bytes: the size of the daemon's pool, and of others'.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.plan = ON_CPU if setup.double else ON_GPU
        self.found: Found = {}
        self.pool_bytes = CPU_POOL_BYTES if setup.double else max(setup.pools)
        self.directory = setup.directory

    @contextmanager
    def step(self, name: str) -> Iterator[Found]:
        """A part of the part: what it puts into the yielded object is kept, and so is why it failed."""
        found: Found = {}
        self.found[name] = found
        began = time.monotonic()
        try:
            yield found
        except Exception as error:
            found["failed"] = f"{type(error).__name__}: {error}"
        finally:
            found["seconds"] = time.monotonic() - began
            self.setup.keep(self.found)

    # --- models and engines ---

    @property
    def runners(self) -> Mapping[str, Runner]:
        return CPU_RUNNERS if self.setup.double else RUNNERS

    @property
    def runner(self) -> Runner:
        """The first that started an engine, or else the first."""
        chosen = self.directory / "runner"
        name = chosen.read_text() if chosen.exists() else next(iter(self.runners))
        return self.runners[name]

    def choose(self, name: str) -> None:
        (self.directory / "runner").write_text(name)

    def model(self) -> Path:
        """The Llama, made where it is not there yet."""
        path = self.directory / self.setup.model
        if self.setup.double:
            return make_tiny_llama(path)
        if not (path / "config.json").exists():
            _run("tests.bench.gpu.vllm_models", self.setup.model, str(path), most_s=MODEL_S)
        return path

    def engine(self, connector: Mapping[str, Any] | None, runner: Runner | None = None, **settings: Any) -> Engine:
        """An engine, to be started. ``connector``: its ``kv_transfer_config``."""
        plan, runner = self.plan, dict(self.runner if runner is None else runner)
        environ = {**runner.pop("environ", {}), **settings.pop("environ", {})}
        kv_tokens = settings.pop("kv_tokens", plan.kv_tokens)
        common: dict[str, Any] = {
            "model": str(settings.pop("model", None) or self.model()),
            "dtype": "float32" if self.setup.double else "bfloat16",
            "block_size": plan.block_tokens,
            "num_gpu_blocks_override": kv_tokens // plan.block_tokens,
            "max_model_len": min(kv_tokens, max(plan.curve) + 1024),
            "max_num_batched_tokens": plan.batched_tokens,
            "max_num_seqs": 32,
            "skip_tokenizer_init": True,
            "enable_prefix_caching": True,
            "seed": 0,
        }
        if not self.setup.double:
            common["kv_cache_memory_bytes"] = KV_BYTES  # so that vLLM does not measure what is free
        if connector is not None:
            common["kv_transfer_config"] = {"kv_role": "kv_both", **connector}
        patience = PATIENCE if self.setup.double else 1.0
        return Engine({**common, **runner, **settings}, environ, self.directory, patience)

    @contextmanager
    def kvoffd(
        self, runner: Runner | None = None, extra: Mapping[str, Any] | None = None, **settings: Any
    ) -> Iterator[tuple[Engine, DaemonProcess]]:
        """An engine with a daemon of its own."""
        with ExitStack() as undo:
            daemon = undo.enter_context(DaemonProcess(str(self.pool_bytes)))
            engine = undo.enter_context(
                self.engine(connector_config(daemon.directory, extra or {}), runner, **settings)
            )
            wait_registered(engine, daemon)
            yield engine, daemon

    def uneven(self, tokens: int) -> int:
        """A length that ends inside a block: of a whole one vLLM computes all again, after a load its last token."""
        return tokens + self.plan.block_tokens // 2

    def compare(self, engine: Engine, daemon: DaemonProcess, lengths: Sequence[int] = ()) -> Found:
        """Answers after loads beside those of vLLM's own prefix cache: the same tokens and log probabilities."""
        lengths = lengths or [self.uneven(one) for one in (self.plan.published[1], *self.plan.curve[:2])]
        prompts = [(100 + number, length) for number, length in enumerate(lengths)]
        own = own_answers(engine, prompts)
        settle(engine, daemon)
        engine.call("reset")
        return {**difference(own, engine.ask(prompts, ANSWER_TOKENS, logprobs=True)), "said": said(engine)}

    def compared(self, name: str, lengths: Sequence[int] = (), **how: Any) -> None:
        """A step that compares answers with an engine of its own, which ``how`` tells ``kvoffd``."""
        with self.step(name) as found, self.kvoffd(**how) as (engine, daemon):
            found.update(self.compare(engine, daemon, lengths))


def _run(module: str, *arguments: str, most_s: float) -> str:
    """Run a module of this Python; what it printed. Raises CalledProcessError, TimeoutExpired."""
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=most_s)
    if done.returncode:
        raise AssertionError(f"{module} ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def place_of_models(setup: Setup) -> Path:
    """Where the directory of a run shall be."""
    least_bytes, shm = 0 if setup.double else MIN_SHM_BYTES, Path("/dev/shm")
    has_room = os.access(shm, os.W_OK) and shutil.disk_usage(shm).free > least_bytes
    return shm if has_room else Path("/var/tmp")


def take_left_logs(setup: Setup) -> str:
    """What the engines of a part that was killed said last; their directories are removed."""
    paths = sorted(setup.directory.glob("engine-*/log"))
    texts = [path.read_text(errors="replace")[-TAIL_CHARACTERS:] for path in paths]
    for path in paths:
        shutil.rmtree(path.parent)
    return "\n".join(texts)


def own_answers(engine: Engine, prompts: Sequence[Asked]) -> list[Answer]:
    """The answers that come from vLLM's own prefix cache."""
    engine.ask(prompts, ANSWER_TOKENS)
    return engine.ask(prompts, ANSWER_TOKENS, logprobs=True)


def wait_registered(engine: Engine, daemon: DaemonProcess) -> None:
    """Until the daemon has the engine's KV cache, for which it must make a step. Raises AssertionError."""
    engine.ask([(1, 40)], 2)
    wait_connected(daemon.directory, deadline_s=20.0)


def settle(engine: Engine, daemon: DaemonProcess | None) -> None:
    """Until what can be stored is stored: engines begin and notice it in steps, and make none without requests."""
    until, quiet_since = time.monotonic() + MAX_SETTLING_S, time.monotonic()
    stored = -1
    while time.monotonic() < min(until, quiet_since + SETTLED_S):
        engine.ask([(round(time.monotonic() * 1e6), 20)], 2)
        if daemon is not None:
            with AdminClient(daemon.directory) as admin:
                store = admin.stats().store
            if store.running_jobs or store.queued_jobs or store.bytes != stored:
                stored, quiet_since = store.bytes, time.monotonic()


def said(engine: Engine) -> list[str]:
    """Lines of an engine's log that say what it does with kvoffd, and what it warns of; the last of them."""
    return [line[:400] for line in engine.log.splitlines() if any(word in line for word in SAID)][-MAX_SAID:]


# --- figures ----------------------------------------------------------------------------------------


def summary(values: Sequence[float]) -> Found:
    """Number, mean, p50, p99 and largest. Of few values p99 is the largest."""
    if not values:
        return {"n": 0}
    ordered = sorted(values)
    p99 = ordered[math.ceil(0.99 * len(ordered)) - 1]
    mean, p50 = statistics.fmean(ordered), statistics.median(ordered)
    return {"n": len(ordered), "mean": mean, "p50": p50, "p99": p99, "most": ordered[-1]}


def ttft(answers: Sequence[Answer]) -> Found:
    return {"ttft_ms": summary([one.ttft_ms for one in answers]), "cached": [one.cached for one in answers]}


def difference(wanted: Sequence[Answer], given: Sequence[Answer]) -> Found:
    """Whether answers are the same: tokens, log probabilities to the last bit, and how much of it came from a cache."""
    pairs = list(zip(wanted, given, strict=True))
    far = [abs(a - b) for one, other in pairs for a, b in zip(one.logprobs, other.logprobs, strict=False)]
    return {
        "prompts": len(pairs),
        "same_tokens": sum(one.tokens == other.tokens for one, other in pairs),
        "same_logprobs": sum(one.logprobs == other.logprobs for one, other in pairs),
        "farthest_logprob": max(far, default=0.0),
        "cached": [[one.cached, other.cached] for one, other in pairs],
        "failed_requests": sum(other.finish != "length" for _, other in pairs),
        "equal": all((one.tokens, one.finish) == (other.tokens, other.finish) for one, other in pairs),
        "loaded": all(other.cached > 0 for _, other in pairs),
    }


def is_unequal(found: Mapping[str, Any]) -> bool:
    """Whether answers in a part's findings are not what they must be, or came from no load."""
    if found.get("equal") is False or found.get("loaded") is False or found.get("failed_requests"):
        return True
    return any(is_unequal(one) for one in found.values() if isinstance(one, Mapping))


def is_wrong(found: Mapping[str, Any]) -> bool:
    """Whether that, or a step failed; not one that runs another connector."""
    return is_unequal(found) or any("failed" in one for name, one in found.items() if name not in OTHERS)


# --- the parts --------------------------------------------------------------------------------------


def part(steps: Callable[[Bench], None]) -> Callable[[Setup], Found]:
    """A part of these steps: what they found."""

    def run(setup: Setup) -> Found:
        bench = Bench(setup)
        steps(bench)
        return bench.found

    return run


@part
def start(bench: Bench) -> None:
    """Whether an engine starts, on which of the runners, and whether its answers after loads are right."""
    with bench.step("facts") as found:
        for fact in [{"facts": NEEDS_GPU}] if bench.setup.double else _facts():
            found.update(fact)
    with bench.step("model"):
        bench.model()
    for name, runner in bench.runners.items():
        with bench.step(name) as found, bench.kvoffd(runner) as (engine, daemon):
            bench.choose(name)
            found["start_s"] = engine.start_s
            bench.setup.keep(bench.found)
            found.update(bench.compare(engine, daemon))
        if "start_s" in found:
            return
    raise AssertionError("no engine starts: " + "; ".join(str(bench.found[name]) for name in bench.runners))


def _facts() -> Iterator[Found]:
    """What ``vllm_facts`` says, as far as it comes in its time."""
    try:
        lines, problem = _run("tests.bench.gpu.vllm_facts", most_s=FACTS_S), ""
    except subprocess.TimeoutExpired as error:
        lines, problem = (error.stdout or b"").decode(), f"not done within {FACTS_S:g} s"
    yield from map(json.loads, lines.rpartition("\n")[0].splitlines())
    if problem:
        yield {"failed": problem}


@part
def equal(bench: Bench) -> None:
    """Answers after loads on the other runners."""
    for name in bench.runners if bench.setup.double else EQUAL:
        bench.compared(name, runner=bench.runners[name])


@part
def contest(bench: Bench) -> None:
    """Times to the first token with nothing, vLLM's own cache, kvoffd and others; and steps of eight that decode."""
    with bench.step("nothing and own cache") as found, bench.engine(None) as engine:
        found.update(_play(bench, engine, None))
        found["decoding"] = _decode(bench, engine, None)
        found["said"] = said(engine)
    with bench.step("kvoffd") as found, bench.kvoffd() as (engine, daemon):
        found.update(_play(bench, engine, daemon))
        found["decoding"] = _decode(bench, engine, daemon)
        with AdminClient(daemon.directory) as admin:
            stats = admin.stats()
        for name, copies in (("stores", stats.store), ("loads", stats.load)):
            found[name] = {
                "bytes": copies.bytes,
                "gb_per_s": copies.bytes / max(copies.busy_seconds, 1e-9) / 1e9,
                "failed_jobs": copies.failed_jobs,
            }
        found["said"] = said(engine)
    for name, competitor in OTHERS.items():
        with bench.step(name) as found:
            if bench.setup.double:
                found["result"] = NEEDS_GPU
                continue
            with competitor(bench) as engine:
                found.update(_play(bench, engine, None))
                found["said"] = said(engine)


def _play(bench: Bench, engine: Engine, daemon: DaemonProcess | None) -> Found:
    """Both published loads: new prompts, the same ones in vLLM's own cache, and the same ones after it was reset."""
    plan, found = bench.plan, dict[str, Any](start_s=engine.start_s)
    count, length, per_second = plan.published
    engine.ask([(10, length), (11, plan.curve[0])], 2)  # kernels are loaded, and compiled
    prompts = [(200 + number, length) for number in range(count)]
    for name in ("new", "own cache", "after a reset"):
        if name == "after a reset":
            engine.call("reset")
        found[f"{count} prompts, {name}"] = ttft(engine.ask(prompts, 1, per_second))
        settle(engine, daemon)
    for size in plan.curve:
        prompts = [(size + number, size - number) for number in range(plan.curve_rounds)]
        new = ttft(engine.ask(prompts, 1))
        settle(engine, daemon)
        engine.call("reset")
        found[f"{size} tokens"] = {"new": new, "after a reset": ttft(engine.ask(prompts, 1))}
    return found


def _decode(bench: Bench, engine: Engine, daemon: DaemonProcess | None) -> Found:
    """Steps of requests that decode: alone, beside and after new prompts, and beside prompts that are loaded.

    ``after`` a new prompt it is stored. Without a connector the second round is computed like the first.
    """
    plan = bench.plan
    decoding = [(400 + number, plan.decoding_tokens) for number in range(plan.decoding)]
    prompts = [(500 + number, plan.beside_tokens) for number in range(plan.beside)]
    found: Found = {}
    for name in ("new prompts", "the same again"):
        engine.call("fence_times")
        seen = engine.call("beside", decoding=decoding, prompts=prompts, rest_s=plan.rest_s, seconds=plan.beside_s)
        prompts = prompts[: len(seen["cached"])]
        found[name] = {
            "steps_ms": {state: summary(gaps) for state, gaps in seen["gaps_ms"].items()},
            "ttft_ms": summary(seen["ttft_ms"]),
            "cached": seen["cached"],
            "handle_preemptions_ms": summary(engine.call("fence_times")),
        }
        settle(engine, daemon)
        engine.call("reset")
    return found


@contextmanager
def _offloading(bench: Bench) -> Iterator[Engine]:
    options = {"cpu_bytes_to_use": bench.pool_bytes}
    connector = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": options}
    with bench.engine(connector) as engine:
        yield engine


PEGAFLOW_SERVER = """
import os, sys
from pegaflow._bin_utils import binary_env, find_binary
os.execve(program := find_binary("pegaflow-server-py"), [program, *sys.argv[1:]], binary_env())
"""


@contextmanager
def _pegaflow(bench: Bench) -> Iterator[Engine]:
    """PegaFlow's server and connector, from its wheel."""
    place = Path(os.environ.get(PEGAFLOW_VARIABLE, "/nowhere"))
    assert place.is_dir(), "PegaFlow is not here: `make gpu-files` brings it"
    environ = {"PYTHONPATH": os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(place))))}
    port, http_port = free_ports(2)
    command = [sys.executable, "-c", PEGAFLOW_SERVER, "--addr", f"127.0.0.1:{port}"]
    command += ["--http-addr", f"127.0.0.1:{http_port}", "--pool-size", f"{bench.pool_bytes // GIB}gb"]
    log_path = bench.directory / "pegaflow.log"
    with log_path.open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **environ})
    try:
        wait_until(
            lambda: server.poll() is not None or _listens(port), SERVER_S, explain=log_path.read_text, interval_s=0.1
        )
        assert server.poll() is None, f"PegaFlow's server ended: {log_path.read_text()[-1000:]}"
        options = {"pegaflow.host": "http://127.0.0.1", "pegaflow.port": port}
        connector = {
            "kv_connector": "PegaKVConnector",
            "kv_connector_module_path": "pegaflow.connector",
            "kv_connector_extra_config": options,
        }
        with bench.engine(connector, environ=environ) as engine:
            yield engine
    finally:
        server.kill()
        server.wait()


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@part
def restarts(bench: Bench) -> None:
    """Engine and daemon are restarted, and the daemon is killed while an engine loads: the same answers each time."""
    count, length, _ = bench.plan.published
    prompts = [(600 + number, bench.uneven(length)) for number in range(count)]
    with ExitStack() as undo:
        manager = undo.enter_context(closing(ServiceManager()))  # it keeps the pool
        daemon = undo.enter_context(DaemonProcess(str(bench.pool_bytes), manager=manager))
        engine = undo.enter_context(bench.engine(connector_config(daemon.directory, {})))

        def loaded() -> Found:
            return difference(own, engine.ask(prompts, ANSWER_TOKENS, logprobs=True))

        with bench.step("begin"):
            wait_registered(engine, daemon)
            own = own_answers(engine, prompts)
            settle(engine, daemon)
        with bench.step("the engine is restarted") as found:
            engine.kill()
            engine.start()
            wait_registered(engine, daemon)
            found.update(loaded())
        with bench.step("the daemon is restarted") as found:
            daemon.stop()
            daemon.start()
            engine.call("reset")
            wait_registered(engine, daemon)
            found.update(loaded())
        for number in range(KILLS + 1):
            # The first time without a death: in a batch, kernels may give other tokens than alone.
            name = f"the daemon is killed, {number}" if number else "the same traffic, nobody is killed"
            with bench.step(name) as found:
                settle(engine, daemon)
                engine.call("reset")
                if number:
                    # All come at once, loads and new prompts in turns, so that most likely one loads then.
                    killer = threading.Timer(KILL_AFTER_S * number, daemon.kill)
                    undo.callback(killer.join)
                    killer.start()
                others = [(700 + 10 * number + each, length) for each in range(count)]
                mixed = [prompt for pair in zip(prompts, others, strict=True) for prompt in pair]
                answers = engine.ask(mixed, ANSWER_TOKENS, AT_ONCE, logprobs=True)
                found.update(difference(own, answers[::2]))
                found.update(
                    equal=not found["failed_requests"],
                    loaded=True,
                    failed_loads=engine.call("metrics").get(FAILED_LOADS, 0),
                )
            if number:
                killer.join()
                daemon.start()
                wait_registered(engine, daemon)
        with bench.step("after that") as found:
            settle(engine, daemon)
            engine.call("reset")
            found.update(loaded(), said=said(engine))


@part
def pressure(bench: Bench) -> None:
    """More prompts at once than the KV cache holds: pre-emptions, and prefill steps that take long."""
    plan = bench.plan
    length = plan.small_kv_tokens // 4 - 2 * plan.block_tokens  # four have no space for what they generate
    prompts = [(800 + number, length) for number in range(plan.pressing)]
    with bench.step("pressure") as found, bench.kvoffd(kv_tokens=plan.small_kv_tokens) as (engine, _):
        engine.ask([(90, length)], 2)
        engine.call("fence_times")
        for name in ("new", "again"):
            found[name] = ttft(answers := engine.ask(prompts, plan.pressing_answer, AT_ONCE))
            found[name]["failed_requests"] = sum(one.finish != "length" for one in answers)
        found["handle_preemptions_ms"] = summary(engine.call("fence_times"))
        counts = engine.call("metrics")
        found["preemptions"] = counts.get("vllm:num_preemptions")
        found["counted"] = {name: value for name, value in counts.items() if "kvoffd" in name}
        if rate := counts.get("vllm:kvoffd_prefill_tokens_per_second"):
            found["step_ms"] = 1000 * plan.batched_tokens / rate
        found["said"] = said(engine)


@part
def layouts(bench: Bench) -> None:
    """All layers of a block together (``block_outermost``): the same answers, and how long they take."""
    count, length, per_second = bench.plan.published
    prompts = [(200 + number, length) for number in range(count)]
    with bench.step("block_outermost") as found, bench.kvoffd(extra={"kv_layout": "block_outermost"}) as each:
        engine, daemon = each
        found.update(bench.compare(engine, daemon))
        engine.ask(prompts, 1, per_second)
        settle(engine, daemon)
        engine.call("reset")
        found["after a reset"] = ttft(engine.ask(prompts, 1, per_second))


@part
def hybrid(bench: Bench) -> None:
    """A small model of Qwen3-Next's shape: states of linear attention beside full attention."""
    path = make_tiny_qwen3_next(bench.directory / "hybrid")
    settings = {"model": path, "dtype": "bfloat16", "max_model_len": 4096, "block_size": None}
    bench.compared("Qwen3-Next", HYBRID_LENGTHS, **settings)


@part
def fp8(bench: Bench) -> None:
    """A KV cache in fp8."""
    bench.compared("fp8", kv_cache_dtype="fp8")


OTHERS = {"vLLM's OffloadingConnector": _offloading, "PegaFlow": _pegaflow}
"""Other connectors, whose failing says nothing of kvoffd."""

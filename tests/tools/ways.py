"""Which functions a lookup that hits, its load and a store run through, in a real engine and a real daemon; and a write
to disk and a promotion, in a daemon.

``python -m tests.tools.ways`` prints each function of kvoffd once, in the order of its first call, by way and process.

* A lookup ends where vLLM has its answer and prepares the load. A store begins where vLLM prepares it.
* What a prompt without a full block calls too is left out: each step of an engine, the daemon's turns of the loop.
* So is what only counts or reports, and what a lookup leaves to be done when its reply is out (``LEFT_OUT``).
* ``python -m tests.tools.ways disk``: from the daemon's call that offers a block to be written to its bytes and record
  on the disk; and from a lookup's look below the pool, which has space, to the block READY there. How the loop and
  libzmq hand over, and what is published, is left out (``HANDED_OVER``).
* Each is done several times. The time with the fewest functions counts: on a busy machine threads wait for each other.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from collections import defaultdict
from math import inf
from pathlib import Path
from typing import Any

from tests.kit.checked import CheckedEngine, over_disk, put_on_disk, wait_disk
from tests.kit.daemon import DaemonProcess
from tests.kit.models import make_tiny_llama
from tests.kit.wire import keys

ROOT = str(Path(__file__).parents[2]) + "/"
ROOTS = tuple(ROOT + name for name in ("kvoffd", "client", "proto"))
CALLS = "calls.json"
Call = tuple[float, str, str]  # when (monotonic), file, function
Span = tuple[float, float]
SHORT = list(range(1, 20))
TIMES = 5
TRACED = [sys.executable, "-m", "tests.tools.ways"]
LEFT_OUT = {
    *("Service.tick", "Sockets.wake", "Cache.report_requests"),
    *("report_requests", "report_engine", "KvoffdManager.get_stats"),
}
"""With all that these functions call."""
HANDED_OVER = tuple(f"kvoffd/server/{name}.py" for name in ("sockets", "service", "requests", "events"))
COMPREHENSIONS = ("<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>", "<lambda>")


def record(calls: list[Call]) -> None:
    """Note each call of a function of kvoffd from now on, in all threads."""

    def note(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(ROOTS) or code.co_name in COMPREHENSIONS:
            return
        now, file, name = time.monotonic(), code.co_filename, code.co_qualname
        while frame is not None:
            if frame.f_code.co_qualname in LEFT_OUT:
                return
            frame = frame.f_back
        calls.append((now, file, name))

    threading.setprofile(note)
    sys.setprofile(note)


def daemon(arguments: list[str]) -> None:
    """``kvoffd`` with these arguments, whose calls are written to its directory at its end."""
    from kvoffd.cli import main
    from kvoffd.config import Limits

    calls: list[Call] = []
    record(calls)
    main(arguments, Limits(totals_every_s=1e9))  # what is saved now and then is on no way
    sys.setprofile(None)
    Path(arguments[arguments.index("--directory") + 1], CALLS).write_text(json.dumps(calls))


def between(calls: list[Call], begin: float, end: float) -> list[tuple[str, str]]:
    found = ((file, name) for when, file, name in calls if begin <= when < end)
    return list(dict.fromkeys((file.removeprefix(ROOT), name) for file, name in found))


def engine(directory: str) -> tuple[list[Call], Span, dict[str, list[Span]]]:
    """What an engine calls, when it has nothing to do with the daemon, and when it goes each way."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCH_COMPILE_DISABLE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    model = make_tiny_llama(Path(directory, "model"))
    calls: list[Call] = []
    llm = LLM(
        model=str(model), dtype="float32", block_size=32, enforce_eager=True, skip_tokenizer_init=True,
        max_model_len=1024, kv_cache_memory_bytes=64 << 20,
        kv_transfer_config=KVTransferConfig(
            kv_connector="KvoffdConnector", kv_role="kv_both", kv_connector_extra_config={"directory": directory}
        ),
    )  # fmt: skip

    def generate(prompt: list[int], tokens: int = 4) -> Span:
        begin = time.monotonic()
        llm.generate({"prompt_token_ids": prompt}, SamplingParams(max_tokens=tokens, detokenize=False), use_tqdm=False)
        time.sleep(0.5)  # until the daemon has published
        return begin, time.monotonic()

    for at in (400, 700):  # what is done once only
        generate(list(range(at, at + 300)))
        llm.reset_prefix_cache()
        generate(list(range(at, at + 300)))
    record(calls)
    nothing, ways = generate(SHORT), defaultdict[str, list[Span]](list)

    def prepared(begin: float, name: str) -> float | None:
        return next((when for when, _, function in calls if when >= begin and function.endswith(f".{name}")), None)

    for first in range(3, 3 + TIMES):
        prompt = list(range(first, first + 300))
        begin, _ = generate(prompt, 8)
        end = generate(SHORT, 8)[1]
        if (store_at := prepared(begin, "prepare_store")) is not None:
            ways["store"].append((store_at, end))
        llm.reset_prefix_cache()
        begin, end = generate(prompt, 1)
        if (load_at := prepared(begin, "prepare_load")) is not None:  # else to compute seemed faster
            ways["lookup"].append((begin, load_at))
            ways["load"].append((load_at, end))
    sys.setprofile(None)
    threading.setprofile(None)
    return calls, nothing, ways


def calls_of(traced: DaemonProcess) -> list[Call]:
    """Stop a daemon that was traced; what it has called."""
    traced.stop()
    return [tuple(call) for call in json.loads((traced.directory / CALLS).read_text())]


def show(title: str, functions: list[tuple[str, str]]) -> None:
    print(f"\n== {title}: {len(functions)} functions in {len({file for file, _ in functions})} files")
    for file, function in functions:
        print(f"{file:60} {function}")


def over_a_disk() -> None:
    """Print what a write to disk and a promotion call."""
    with tempfile.TemporaryDirectory() as place:
        with over_disk(Path(place)) as before, CheckedEngine(before) as fake:
            wait_disk(before)
            put_on_disk(before, fake, 16)
        with over_disk(Path(place), program=TRACED) as traced:
            wait_disk(traced)
            with CheckedEngine(traced, fake.truth) as fake:
                fake.put([100])  # what is done once only
                fake.get([0])
                time.sleep(1.0)
                spans = [(time.monotonic(), time.monotonic() + 1.0)]
                for number in range(1, 1 + TIMES):
                    time.sleep(1.0)
                    spans.append((time.monotonic(), inf))
                    fake.put([100 + number])
                    time.sleep(0.2)
                    fake.lookup(keys(number))
            calls = calls_of(traced)
    idle = set(between(calls, *spans[0]))
    for way, begin, end in (
        ("a write to disk", "Tiering.stored", "DiskTier._write_ended"),
        ("a promotion", "Tiering.find", "BlockTable.publish"),
    ):
        found = []
        for at, _ in spans[1:]:
            first = next(when for when, _, name in calls if when >= at and name == begin)
            last = next(when for when, _, name in calls if when > first and name == end)
            some = [call for call in between(calls, first, last + 1e-6) if call not in idle]
            found.append([call for call in some if call[0] not in HANDED_OVER])
        show(way, min(found, key=len))


def main() -> None:
    with DaemonProcess("256MiB", program=TRACED) as traced:
        calls, nothing, ways = engine(str(traced.directory))
        processes = {"engine": calls, "daemon": calls_of(traced)}
    idle = {where: set(between(all_calls, *nothing)) for where, all_calls in processes.items()}

    def way(begin: float, end: float) -> dict[str, list[tuple[str, str]]]:
        return {
            where: [call for call in between(all_calls, begin, end) if call not in idle[where]]
            for where, all_calls in processes.items()
        }

    for name in ("lookup", "load", "store"):
        shortest = min((way(*span) for span in ways[name]), key=lambda one: sum(map(len, one.values())))
        for where, functions in shortest.items():
            show(f"{name}, {where}", functions)
        everything = [call for functions in shortest.values() for call in functions]
        print(f"== {name}: {len(everything)} functions in {len({file for file, _ in everything})} files")


if __name__ == "__main__":
    if sys.argv[1:] == ["disk"]:
        over_a_disk()
    elif len(sys.argv) > 1:
        daemon(sys.argv[1:])
    else:
        main()

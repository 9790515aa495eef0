"""``kvoffd-cli doctor``: whether the daemon is healthy and pays off, and what would help most."""

from __future__ import annotations

import os
import shutil
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from math import inf, isfinite
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from prometheus_client.parser import text_string_to_metric_families

from kvoffd_client.admin_client import AdminClient, base_url, open_url, read_stats
from kvoffd_client.cli.format import Line, print_json, print_line, print_status, say
from kvoffd_client.cli.stats import UNTIMED
from kvoffd_client.cli.target import (
    CliError,
    Directory,
    Evict,
    Json,
    Url,
    announce,
    bench_engine,
    check_one_daemon,
    local_directory,
    open_admin,
)
from kvoffd_client.errors import HttpError, KvoffdClientError
from kvoffd_proto.findings import EngineMetrics, Facts, Finding, Value, find, judge_value
from kvoffd_proto.stats import DaemonStats
from kvoffd_proto.units import format_count, format_duration, format_rate, format_size, percent, plural, printable

MAX_SHOWN = 5
ENGINE_TIMEOUT_S = 2.0
MAX_METRICS_BYTES = 16 << 20
TEST_BLOCKS, TEST_LAYERS, TEST_PAGE_BYTES = 8, 4, 1 << 18
TEST_BYTES = TEST_BLOCKS * TEST_LAYERS * TEST_PAGE_BYTES
STYLES = {"error": "bold red", "warning": "yellow", "info": "cyan"}
LEVEL_STATUS = {"error": 2, "warning": 1, "info": 0}
NOUNS = {"error": "error", "warning": "warning", "info": "note"}


class SelfTest(msgspec.Struct, frozen=True):
    """Result of storing and loading blocks; ``problem`` is empty if the bytes matched."""

    problem: str
    bytes: int = 0
    store_seconds: float = 0.0
    load_seconds: float = 0.0


class Report(msgspec.Struct, frozen=True):
    """Output of doctor, with all findings, most important first."""

    healthy: bool
    paying_off: bool | None
    verdict: list[str]
    value: Value
    findings: list[Finding]
    self_test: SelfTest | None = None

    @property
    def status(self) -> int:
        failed = self.self_test is not None and self.self_test.problem
        return 2 if failed else max((LEVEL_STATUS[one.level] for one in self.findings), default=0)


def doctor(
    engine: Annotated[
        list[str] | None, typer.Option("--engine", metavar="URL", help="Read vLLM's /metrics too; may be repeated.")
    ] = None,
    self_test: Annotated[
        bool, typer.Option("--self-test", help="Store and load eight blocks, and compare them.")
    ] = False,
    evict: Evict = False,
    gpu_hour: Annotated[
        float, typer.Option("--gpu-hour", metavar="PRICE", show_default=False, help="Say what it saved, at this price.")
    ] = 0.0,
    every: Annotated[bool, typer.Option("--all", help=f"Show all findings, not only {MAX_SHOWN}.")] = False,
    directory: Directory = None,
    url: Url = "",
    json: Json = False,
) -> int:
    """Check whether the daemon is healthy and pays off.

    Shows what would help most. Checks the daemon, the engines of --engine and, without --url, clients and machine.

    Exit status: 0 no warning, 1 a warning, 2 an error, or no answer.
    """
    check_one_daemon(directory, url)
    if not 0 <= gpu_hour < inf:
        raise CliError(f"--gpu-hour {gpu_hour} is not a price.")
    if url and self_test:
        raise CliError("--self-test needs the sockets of this node; leave out --url.")
    engines = {}
    for address in [base_url(one) for one in engine or ()]:
        where = address if address.endswith("/metrics") else f"{address}/metrics"
        print_status(f"Asking {where} ...")
        engines[where] = read_engine(where)
    print_status()
    if url:
        facts = Facts(read_stats(url), engines=engines)
    else:
        with open_admin(directory) as admin:
            facts = gather_facts(admin, engines)
    test = None
    if self_test:
        try:
            announce("self-test", TEST_BYTES, facts.stats.pool.of("free"), evicts=evict)
            test = run_self_test(local_directory(directory), evict)
        except CliError as error:  # a full pool is no reason to say nothing else
            test = SelfTest(str(error))
    report = report_of(facts, test, gpu_hour)
    if json:
        print_json(msgspec.to_builtins(report))
    else:
        show(report, len(report.findings) if every else MAX_SHOWN)
    return report.status


def gather_facts(admin: AdminClient, engines: Mapping[str, EngineMetrics]) -> Facts:
    """Gather facts on the daemon, its clients and its machine. Raises KvoffdClientError."""
    stats = admin.stats()
    sessions = [one for one in admin.sessions().sessions if one.session_id != admin.session_id]
    return Facts(
        stats,
        admin.namespaces().namespaces,
        sessions,
        engines,
        swapped_bytes(Path(f"/proc/{admin.pid}")) if admin.pid else 0,
        # The selected word is in brackets.
        _text(Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")).partition("[")[2].partition("]")[0],
        {one.directory: free for one in stats.disks if (free := _free_bytes(one.directory)) is not None},
    )


def swapped_bytes(process: Path) -> int:
    """Return a process's swapped bytes. The kernel walks the whole pool for that, so skip it if no swap is used."""
    memory = dict(line.split(":") for line in _text(process.parent / "meminfo").splitlines())
    if memory.get("SwapTotal", "").split() == memory.get("SwapFree", "").split():
        return 0
    swapped = _text(process / "smaps_rollup").partition("\nSwap:")[2].split()
    return int(swapped[0]) * 1024 if swapped else 0


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _free_bytes(directory: str) -> int | None:
    try:
        return shutil.disk_usage(directory).free
    except OSError:
        return None


def read_engine(where: str) -> EngineMetrics:
    """Return vLLM's counters, or a ``problem``."""
    metrics: dict[str, float] = defaultdict(float)
    age_seconds = None
    try:
        with open_url(where, ENGINE_TIMEOUT_S) as answer:
            for family in text_string_to_metric_families(answer.read(MAX_METRICS_BYTES).decode(errors="replace")):
                for sample in family.samples:
                    if not isfinite(sample.value):
                        continue
                    if sample.name == "process_start_time_seconds":
                        age_seconds = time.time() - sample.value
                    if sample.name.startswith("vllm:") and not sample.name.endswith(("_bucket", "_created")):
                        metrics[sample.name] += sample.value
    except HttpError as error:
        return EngineMetrics(problem=str(error))
    return EngineMetrics(metrics, age_seconds=age_seconds)


def run_self_test(place: Path, evict: bool) -> SelfTest:
    """Store blocks in a namespace of their own, load them into other memory, and compare the bytes."""
    keys = [os.urandom(32) for _ in range(TEST_BLOCKS)]
    blocks, others = range(TEST_BLOCKS), range(TEST_BLOCKS, 2 * TEST_BLOCKS)
    try:
        with bench_engine(place, "doctor --self-test", evict, TEST_LAYERS, 2 * TEST_BLOCKS, TEST_PAGE_BYTES) as engine:
            engine.fill(blocks, seed=int.from_bytes(keys[0][:8], "big"))
            stored = engine.store(keys, blocks)
            found = engine.lookup(keys)
            loaded = engine.load(keys[:found], others[:found])
            for result, what in ((stored, "stored"), (loaded, "loaded")):
                if result.error is not None:
                    lost = f"{len(result.failed_keys)} of {TEST_BLOCKS} blocks were not {what}"
                    return SelfTest(f"{lost}: {result.error.sentence}")
            if found < TEST_BLOCKS:
                return SelfTest(f"Only {found} of the {TEST_BLOCKS} stored blocks were found.")
            if engine.checksums(blocks) != engine.checksums(others):
                return SelfTest("The loaded bytes differ from those stored.")
    except KvoffdClientError as error:
        return SelfTest(str(error))
    return SelfTest("", loaded.bytes, stored.seconds, loaded.seconds)


def report_of(facts: Facts, test: SelfTest | None = None, gpu_hour: float = 0.0) -> Report:
    """Return the report. ``gpu_hour``: a GPU hour's price, or 0."""
    found, value = find(facts), judge_value(facts)
    healthy = not any(one.level == "error" for one in found) and not (test is not None and test.problem)
    return Report(healthy, value.paying_off, _verdict(facts, found, value, healthy, test, gpu_hour), value, found, test)


def _verdict(
    facts: Facts, found: Sequence[Finding], value: Value, healthy: bool, test: SelfTest | None, gpu_hour: float
) -> list[str]:
    """Return the lines above the findings."""
    engine_count, up = facts.engine_count, format_duration(facts.stats.uptime_seconds)
    engines = "" if engine_count is None else f", with {engine_count or 'no'} engine{plural(engine_count)}"
    counts = {noun: sum(one.level == level for one in found) for level, noun in NOUNS.items()}
    state = ("It works" if counts["warning"] else "Healthy") if healthy else "Not healthy"
    state += "".join(f", {count} {noun}{plural(count)}" for noun, count in counts.items() if count)
    first = f"{state}. kvoffd {printable(facts.stats.version)}, up for {up}{engines}."
    lines = [first, _payoff(facts.stats, value, gpu_hour)]
    if end := facts.stats.pool.at_the_end:
        lines.append(f"The pool's memory {printable(end)}.")
    if engine_count is None:
        lines.append("Its clients and machine were not checked; run doctor there without --url for that.")
    if test is not None:
        if test.problem:
            lines.append(f"Self-test failed: {printable(test.problem)}")
        else:
            stored, loaded = (format_rate(test.bytes / max(1e-9, s)) for s in (test.store_seconds, test.load_seconds))
            done = f"{format_size(test.bytes)} were stored and loaded correctly"
            lines.append(f"Self-test: {done} (stored at {stored}, loaded at {loaded}).")
    return lines


def _payoff(stats: DaemonStats, value: Value, gpu_hour: float) -> str:
    total, text = stats.since_start, value.sentence
    if value.paying_off is None:
        return text
    if total.loaded_prompt_tokens:
        loaded, own, computed = (
            percent(count, total.all_prompt_tokens)
            for count in (
                total.loaded_prompt_tokens,
                total.prompt_tokens.get("engine", 0),
                total.prompt_tokens.get("computed", 0),
            )
        )
        text += f" Of the prompts' tokens {loaded} were loaded, the engines' own caches had {own}, and {computed} were "
        text += "computed."
    if value.saved_seconds:
        text += f" That saved {format_duration(value.saved_seconds)} of prefill"
        text += f", worth {_price(value.gpu_seconds / 3600 * gpu_hour)} so far." if gpu_hour else "."
        if value.gpu_seconds_a_day is not None:
            hours = value.gpu_seconds_a_day / 3600
            text += f" At this rate it saves {hours:,.1f} GPU hours a day"
            text += f", worth {_price(hours * gpu_hour)} a day." if gpu_hour else "."
        elif gpu_hour:
            up = format_duration(stats.uptime_seconds)
            text += f" A figure for a day takes an hour: the daemon is up for {up}."
    elif value.loaded_tokens:
        text += f" The prefill time saved is unknown: {UNTIMED}."
    life = stats.lifetime
    if life.loaded_tokens > value.loaded_tokens and life.since:
        since = datetime.fromtimestamp(life.since, UTC).date().isoformat()
        saved = f" and {format_duration(life.saved_seconds)}" if life.saved_seconds else ""
        text += f" Since {since}: {format_count(life.loaded_tokens)} tokens{saved}."
    return text


def _price(price: float) -> str:
    return f"{price:,.2f}" if price >= 0.01 else "less than 0.01"


def show(report: Report, most: int) -> None:
    say(*((line, "bold") for line in report.verdict))
    for number, one in enumerate(report.findings[:most], 1):
        head: Line = f"{number}. {one.level} {one.check}", STYLES[one.level]
        say("", head, f"{one.evidence} {one.meaning}".rstrip())
        if one.fix:
            print_line(f"   > {one.fix}")
    if (more := len(report.findings) - most) > 0:
        say("", f"{more} more finding{plural(more)}: kvoffd-cli doctor --all")
    elif not report.findings:
        say("No findings.")

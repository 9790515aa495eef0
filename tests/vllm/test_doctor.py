"""``kvoffd-cli doctor`` over a real daemon's traffic: its numbers are counted apart, findings are brought about."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from hashlib import sha256
from http.server import BaseHTTPRequestHandler
from math import inf, nan
from pathlib import Path

import pytest

from kvoffd_client import AdminClient, NamespaceSpec, SchedulerClient
from kvoffd_client.cli import main
from kvoffd_client.cli.doctor import read_engine, swapped_bytes
from kvoffd_client.testing import EngineResult, FakeEngine
from kvoffd_client.vllm.fingerprint import namespace_of
from kvoffd_proto.errors import ErrorCode
from tests.kit.closing import ServerThread, ThreadsServer
from tests.kit.command import run_cli
from tests.kit.daemon import DaemonProcess
from tests.kit.factors import FACTS, GROUP
from tests.kit.waiting import wait_until

LAYERS, PAGE_BYTES, TOKENS = 2, 4096, 64
BLOCK_BYTES = LAYERS * PAGE_BYTES
POOL_BLOCKS = 2048
POOL = f"{POOL_BLOCKS * BLOCK_BYTES >> 20}MiB"


class Engine(FakeEngine):
    """Asks, loads and stores as the connector does, says how many tokens a block has, and counts for itself."""

    def __init__(self, daemon: DaemonProcess, model: str = "llama", tokens: int = TOKENS, **facts: object) -> None:
        alone = {"world_size": 1, "tensor_parallel": 1, "blocks_per_chunk": 1, "tokens_per_hash": tokens}
        group = {**GROUP, "tokens_per_block": tokens}
        factors = {**FACTS, **alone, "model": model, "groups": [group], **facts}
        super().__init__(daemon.directory, namespace_of(factors, model), 1, LAYERS, 128, PAGE_BYTES)
        self.asked = self.loaded = self.stored = 0

    def serve(self, keys: Sequence[bytes]) -> int:
        """One request. Returns how many of its blocks were loaded."""
        ready = self.lookup(keys)
        assert self.load(keys[:ready], range(ready)).ok
        assert self.store(keys[ready:], range(ready, len(keys))).ok
        self.asked += len(keys)
        self.loaded += ready
        self.stored += len(keys) - ready
        return ready


def chain(name: object, length: int) -> list[bytes]:
    return [sha256(f"{name} {at}".encode()).digest() for at in range(length)]


class Doctor:
    """Runs the command in this process; what of its report is looked at in most tests."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.status = -1

    def __call__(self, daemon: DaemonProcess, *options: str) -> dict[str, str]:
        """The evidence by check."""
        report = json.loads(self.said(daemon, "--json", *options))
        self.report = report
        return {one["check"]: one["evidence"] for one in report["findings"]}

    def said(self, daemon: DaemonProcess, *options: str) -> str:
        self._capsys.readouterr()
        self.status = main(["doctor", *options, "--directory", str(daemon.directory)])
        return self._capsys.readouterr().out

    def fix(self, check: str) -> str:
        return str(next(one["fix"] for one in self.report["findings"] if one["check"] == check))


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str]) -> Doctor:
    return Doctor(capsys)


def test_a_healthy_busy_daemon_pays_off_and_has_no_findings(doctor: Doctor) -> None:
    with DaemonProcess(POOL, eviction_policy="lru") as daemon, Engine(daemon) as engine:
        for number in range(400):
            if number == 99:
                assert doctor(daemon) == {}
                assert "99 lookups so far, 100 are needed" in doctor.report["verdict"][1]
            engine.serve(chain(number % 20, 30))
        engine.scheduler.report(2000.0, 0, 0)
        wait_until(lambda: not doctor(daemon) and doctor.report["value"]["saved_seconds"] > 0)
        assert (doctor.status, doctor.report["healthy"], doctor.report["paying_off"]) == (0, True, True)
        value = doctor.report["value"]
        assert value["loaded_tokens"] == engine.loaded * TOKENS
        assert value["needed_tokens"] == engine.asked * TOKENS
        assert value["saved_seconds"] == pytest.approx(engine.loaded * TOKENS / 2000)
        text = doctor.said(daemon)
        assert text.startswith("Healthy. kvoffd ")
        assert f"Paying off: engines loaded {engine.loaded * TOKENS:,} tokens" in text
        assert text.endswith("No findings.\n")


def test_engines_that_do_not_share_and_what_a_rollout_left_behind(doctor: Doctor) -> None:
    with DaemonProcess(POOL) as daemon, Engine(daemon) as usual:
        ids = [usual.namespace.fingerprint.hex()[:12]]
        with Engine(daemon, hash_probe="ab" * 32) as seeded:
            ids.append(seeded.namespace.fingerprint.hex()[:12])
            found = doctor(daemon)
            assert set(found) == {"not_shared"}
            assert found["not_shared"].endswith("differ: PYTHONHASHSEED differs.")
            assert sorted(doctor.fix("not_shared").split()[-2:]) == sorted(ids)
            seeded.serve(chain("x", 8))
        wait_until(lambda: set(doctor(daemon)) == {"left_behind"})
        assert doctor.fix("left_behind") == f"kvoffd-cli clear {ids[1]}"
        with AdminClient(daemon.directory) as admin:
            admin.clear(seeded.namespace.fingerprint)
        assert doctor(daemon) == {}
        with Engine(daemon, tokens=128) as larger:
            assert "tokens per block 64 and 128 (--block-size)" in doctor(daemon)["not_shared"]
            larger.serve(chain("y", 8))
            usual.close()
            wait_until(lambda: doctor(daemon) == {})
            assert larger.serve(chain("y", 8)) == 8


def test_the_self_test_compares_bytes_and_leaves_nothing(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    with DaemonProcess("64MiB") as daemon, Engine(daemon), AdminClient(daemon.directory) as admin:
        assert doctor(daemon, "--self-test") == {}
        test = doctor.report["self_test"]
        assert (test["problem"], test["bytes"], doctor.status) == ("", 8 << 20, 0)
        said = " ".join(doctor.report["verdict"])
        assert "Self-test: 8.00 MiB were stored and loaded correctly" in said
        assert admin.stats().since_start.lookups == 0, "it is in no sum"
        wait_until(lambda: admin.stats().pool.of("free") == admin.stats().pool.size_bytes)
        assert re.search("kvoffd-cli doctor --self-test .* opens the namespace 'bench self-test'", daemon.log)
        monkeypatch.setattr(FakeEngine, "checksums", lambda self, blocks: list(blocks))
        doctor(daemon, "--self-test")
        assert doctor.report["self_test"]["problem"] == "The loaded bytes differ from those stored."
        assert (doctor.status, doctor.report["healthy"]) == (2, False)
        lost = EngineResult(False, 0, 0.0, [bytes(32)], ErrorCode.NO_SPACE)
        monkeypatch.setattr(FakeEngine, "store", lambda self, keys, blocks: lost)
        doctor(daemon, "--self-test")
        assert doctor.report["self_test"]["problem"] == f"1 of 8 blocks were not stored: {ErrorCode.NO_SPACE.sentence}"
    with DaemonProcess("4MiB") as daemon:
        doctor(daemon, "--self-test")
        assert doctor.report["self_test"]["problem"].startswith(
            "The self-test was not run: it needs 8.00 MiB of the pool"
        )
        assert (doctor.status, len(doctor.report["verdict"])) == (2, 4), "the rest is said too"
        doctor(daemon, "--self-test", "--evict")
        assert "set pool_size to 12MiB or more" in doctor.report["self_test"]["problem"]


class Metrics(BaseHTTPRequestHandler):
    """What vLLM's /metrics say."""

    text: Mapping[str, str] = {}

    def do_GET(self) -> None:
        body = self.text.get(self.path)
        self.send_response(200 if body is not None else 404)
        self.end_headers()
        self.wfile.write((body or "").encode())

    def log_message(self, *_: object) -> None:
        pass


def metrics(**values: float) -> str:
    lines = []
    for name, value in values.items():
        lines += [f"# TYPE vllm:{name} {'counter' if name.endswith('_total') else 'gauge'}"]
        number = {"inf": "+Inf", "nan": "NaN"}.get(str(value), value / 2)
        lines += [f'vllm:{name}{{model_name="llama",engine="{rank}"}} {number}' for rank in (0, 1)]
    return "\n".join(lines) + "\n"


def test_engines(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    with DaemonProcess(POOL) as daemon, Engine(daemon) as engine, ServerThread(ThreadsServer(Metrics)) as server:
        for number in range(40):
            engine.serve(chain(number % 4, 8))
        url = f"http://127.0.0.1:{server.port}"
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # an engine is asked without it
        hits, nbytes = engine.loaded * TOKENS, engine.loaded * BLOCK_BYTES

        def checks(text: str) -> set[str]:
            monkeypatch.setattr(Metrics, "text", {"/metrics": text})
            return set(doctor(daemon, "--engine", url))

        assert checks("") == {"engine_without"}
        assert checks(metrics(kvoffd_connected=0, prompt_tokens_total=9)) == {"engine_away"}
        counted = {"kvoffd_connected": 2, "external_prefix_cache_queries_total": 9 * hits, "kvoffd_lookups_total": 300}
        counted["external_prefix_cache_hits_total"] = 9 * hits  # below a MultiConnector: NIXL's too
        assert checks(metrics(**counted, kv_offload_load_bytes_total=nbytes)) == set()
        assert checks(metrics(**counted, kv_offload_load_bytes_total=0)) == {"hits_disagree"}
        more = metrics(**counted, kv_offload_load_bytes_total=2 * nbytes)
        assert checks(more) == {"hits_disagree"}
        began = "# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds "
        assert checks(f"{more}{began}{time.time()}\n") == {"hits_disagree"}
        assert checks(f"{more}{began}{time.time() - 3600}\n") == set(), "it may have counted them with another daemon"
        late = metrics(**counted, kv_offload_load_bytes_total=nbytes, kvoffd_late_lookups_total=30)
        assert checks(late) == {"engine_late"}
        numbers = {**counted, "kvoffd_late_lookups_total": inf, "kv_offload_load_bytes_total": nan}
        assert checks(metrics(**numbers)) == {"hits_disagree"}, "what is no number does not count"
        assert checks("this is {no metric") == {"engine_unreachable"}
        monkeypatch.setattr(Metrics, "text", {})
        assert "answers 404" in doctor(daemon, "--engine", f"{url}/metrics")["engine_unreachable"]
    assert "does not answer" in read_engine(url).problem
    monkeypatch.setattr("kvoffd_client.cli.doctor.open_admin", None)
    assert main(["doctor", "--engine", "file:///etc/passwd"]) == 2


def test_an_engine_that_the_daemon_refuses_says_why_until_it_is_served(doctor: Doctor) -> None:
    problem = "worker 0: The engine's GPU memory cannot be shared. No CUDA here."
    with DaemonProcess(POOL) as daemon, SchedulerClient(daemon.directory, NamespaceSpec.named("llama")) as engine:
        assert engine.wait_ready(30.0)
        engine.report(0.0, 0, 0, problem=problem * 20)
        wait_until(lambda: "engine_refused" in doctor(daemon))
        evidence = doctor(daemon)["engine_refused"]
        assert problem in evidence
        assert len(evidence) < 700, "one line"
        assert doctor.status == 2
        engine.report(1000.0, 0, 0)
        wait_until(lambda: "engine_refused" not in doctor(daemon))


def test_a_scheduler_whose_workers_are_elsewhere_is_found(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    namespace, name = NamespaceSpec.named("llama"), "vllm:01234567 llama"
    with (
        DaemonProcess(POOL) as daemon,
        SchedulerClient(daemon.directory, namespace, name=f"{name} scheduler") as engine,
    ):
        assert engine.wait_ready(30.0)
        assert doctor(daemon) == {}, "it may be starting"
        monkeypatch.setattr("kvoffd_proto.findings.CONNECTING_S", 0.0)
        assert doctor(daemon) == {"halves_apart": f"Of the engine {name} only its scheduler is connected."}
        with FakeEngine(daemon.directory, namespace, name=name):
            assert doctor(daemon) == {}


def test_what_is_swapped_is_looked_at_where_anything_is(tmp_path: Path) -> None:
    """The kernel walks all of a pool to count what of it is swapped."""
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "smaps_rollup").write_text("00400000-7ffc [rollup]\nRss: 9000 kB\nSwap: 512 kB\n")
    for free, swapped in (("1024 kB", 512 << 10), ("2048 kB", 0)):
        (tmp_path / "meminfo").write_text(f"MemTotal: 67108864 kB\nSwapTotal: 2048 kB\nSwapFree: {free}\n")
        assert swapped_bytes(tmp_path / "7") == swapped
    assert swapped_bytes(tmp_path / "8" / "8") == 0


def test_as_a_command() -> None:
    with DaemonProcess(POOL) as daemon:
        done = run_cli("doctor", "--directory", str(daemon.directory))
    assert (done.returncode, done.stderr) == (0, "")
    assert "1. info no_engine" in done.stdout
    assert max(len(line) for line in done.stdout.splitlines() if not line.startswith("   > ")) <= 80

"""Real engines' own streams of KV events, read by routers that others wrote: their cache and the daemon's in one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kvoffd_client import AdminClient
from tests.kit.daemon import DaemonProcess
from tests.kit.engine import BLOCK_TOKENS, EngineProcess, prompt, wait_connected, wait_stored
from tests.kit.models import make_tiny_llama
from tests.kit.ports import free_ports
from tests.kit.waiting import wait_until
from tests.routers.consumers import DYNAMO, VLLM_ROUTER, DynamoIndexer, VllmRouter, Worker

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(400), pytest.mark.xdist_group("routers")]

LENGTH = 10 * BLOCK_TOKENS
HOST_CREDIT = 0.8
DEADLINE_S = 60.0
fresh = count(1000)


@dataclass
class Node:
    """A daemon and two engines, with the ports of their events and replays."""

    daemon: DaemonProcess
    engines: list[EngineProcess]
    ports: list[tuple[int, int]]

    def step(self) -> None:
        """Events leave an engine with its steps."""
        for engine in self.engines:
            engine.generate([prompt(next(fresh), 8)], max_tokens=2)

    def eventually(self, found: Callable[[], Any], wanted: Any) -> None:
        last: list[Any] = []

        def same() -> bool:
            self.step()
            last[:] = [found()]
            return bool(last[0] == wanted)

        wait_until(same, DEADLINE_S, explain=lambda: f"{last[0]} and not {wanted}")

    def compute(self, engine: int, wanted: list[int]) -> None:
        self.engines[engine].generate([wanted], max_tokens=2)
        wait_stored(self.daemon.directory)


def engine_of(model: Path, daemon: DaemonProcess, ports: tuple[int, int]) -> EngineProcess:
    events = {"endpoint": f"tcp://*:{ports[0]}", "replay_endpoint": f"tcp://*:{ports[1]}"}
    return EngineProcess(
        model, daemon.directory, patient=True, events={"enable_kv_cache_events": True, "publisher": "zmq", **events}
    )


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """The second engine comes when the daemon has the prompt 1 already."""
    model = make_tiny_llama(tmp_path_factory.mktemp("router-models") / "model")
    numbers = free_ports(4)
    ports = [(numbers[0], numbers[1]), (numbers[2], numbers[3])]
    with ExitStack() as stack:
        disk = f"{tmp_path_factory.mktemp('router-disk')}=64MiB"
        daemon = stack.enter_context(DaemonProcess("64MiB", disk=disk, disk_write="always"))
        node = Node(daemon, [], ports)
        for number in range(2):
            engine = engine_of(model, daemon, ports[number])
            stack.callback(engine.close)
            node.engines.append(engine.start())
            wait_connected(daemon.directory, number + 1)
            node.compute(0, prompt(1, LENGTH))
        yield node


@pytest.mark.skipif(not DYNAMO.exists(), reason="ai-dynamo-runtime is not installed (`make routers`)")
def test_dynamo_credits_an_engine_with_what_the_daemon_has(node: Node, tmp_path: Path) -> None:
    old, new = prompt(1, LENGTH), prompt(2, LENGTH)
    with DynamoIndexer(tmp_path / "dynamo.log") as dynamo:
        for number, ports in enumerate(node.ports, 1):
            dynamo.register(number, *ports, BLOCK_TOKENS)

        def host(wanted: list[int]) -> dict[int, int]:
            return {worker: one["cpu"] for worker, one in dynamo.query(wanted).items()}

        def in_host_memory() -> dict[int, set[int]]:
            found: dict[int, set[int]] = {}
            for worker, tier, block, _ in dynamo.blocks():
                if tier == "host_pinned":
                    found.setdefault(worker, set()).add(block)
            return found

        node.compute(0, new)
        node.eventually(lambda: host(new), {1: LENGTH, 2: LENGTH})
        node.eventually(lambda: {tier for _, tier, _, _ in dynamo.blocks()}, {"device", "host_pinned", "disk"})
        assert dynamo.query(new)[2]["gpu"] == 0, "the second engine never computed it"
        assert host(old).get(2, 0) == 0, "it was stored before the second engine came"
        node.engines[1].generate([old], max_tokens=2)
        node.eventually(lambda: host(old).get(2), LENGTH)
        with AdminClient(node.daemon.directory) as admin:
            admin.clear()
        node.eventually(in_host_memory, {})
        assert dynamo.query(new)[1]["gpu"] == LENGTH, "the first engine's own cache is still there"


@pytest.mark.skipif(not VLLM_ROUTER.exists(), reason="vllm-router is not installed (`make routers`)")
def test_vllm_router_sends_a_prompt_to_an_engine_that_never_computed_it(node: Node, tmp_path: Path) -> None:
    wanted = prompt(3, LENGTH)
    with Worker() as first, Worker() as second:
        at = [(worker, *ports) for worker, ports in zip((first, second), node.ports, strict=True)]
        with VllmRouter(tmp_path / "router.log", at, BLOCK_TOKENS) as router:

            def chosen() -> tuple[int, str]:
                """The engine, and for which cache: the steps of the test may take the last blocks of its own."""
                engine, tokens = router.ask(wanted)
                return engine, "own" if tokens > in_host else "host" if tokens == in_host else str(tokens)

            in_host = int(HOST_CREDIT * LENGTH)
            node.compute(0, wanted)
            node.eventually(chosen, (0, "own"))
            node.engines[0].forget()  # after its AllBlocksCleared the router knows nothing of it, host memory included
            node.eventually(chosen, (1, "host"))
            node.engines[0].generate([wanted], max_tokens=2)
            node.eventually(chosen, (0, "own"))
            with AdminClient(node.daemon.directory) as admin:
                admin.clear()
            node.engines[0].forget()
            node.eventually(lambda: router.ask(wanted)[1], 0)

"""Where prompts differ although what follows is the same."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256
from random import Random
from typing import Any

import pytest

from kvoffd.cache import branch_points
from kvoffd.cache.branch_points import HALVED_EVERY_S, BranchPoints
from kvoffd_client import SharedMemory
from kvoffd_client.cli import main
from tests.kit.daemon import DaemonProcess
from tests.kit.waiting import wait_until
from tests.kit.wire import PAGE_BYTES, WireClient

BLOCK = 16


def blocks_of(tokens: Sequence[int]) -> tuple[list[bytes], bytes, bytes]:
    """The keys of a prompt's whole blocks, and the parents and tokens of all."""
    keys, parents, found = [], [], []
    parent = bytes(32)
    for at in range(0, len(tokens) - BLOCK + 1, BLOCK):
        own = array("I", tokens[at : at + BLOCK]).tobytes()
        parents.append(parent)
        parent = sha256(parent + own).digest()
        keys.append(parent)
        found.append(own)
    return keys, b"".join(parents), b"".join(found)


class Prompts:
    """A namespace whose engines store prompts, each of which is known before the next."""

    def __init__(self) -> None:
        self.now = 0.0
        self.points, self.namespace = BranchPoints(lambda: self.now), object()
        self.random = Random(1)

    def text(self, blocks: int) -> list[int]:
        return [self.random.randrange(1000) for _ in range(blocks * BLOCK)]

    def store(self, *parts: Sequence[int]) -> None:
        keys, parents, tokens = blocks_of([token for part in parts for token in part])
        namespace: Any = self.namespace
        self.points.offered(namespace, keys, parents, tokens)
        while self.points._queue:
            self.points.tick()

    @property
    def found(self) -> tuple[int, list[tuple[int, int, int]]]:
        namespace: Any = self.namespace
        seen, points = self.points.of(namespace)
        return seen, [(one.at_tokens, round(one.prompts), round(one.repeated_tokens)) for one in points]


def test_a_date_in_the_beginning_costs_all_that_follows() -> None:
    prompts = Prompts()
    system, manual = prompts.text(4), prompts.text(50)
    for _ in range(10):
        prompts.store(system, prompts.text(1), manual, prompts.text(3))
    new = BLOCK * (4 + 10 * (1 + 50 + 3))
    assert prompts.found == (new, [(4 * BLOCK, 9, 9 * 50 * BLOCK)])


def test_what_is_new_in_each_prompt_costs_nothing() -> None:
    """Questions behind a common beginning, conversations that grow, and prompts that come again."""
    prompts = Prompts()
    system = prompts.text(8)
    for _ in range(20):
        talk = [*system, *prompts.text(2)]
        for _ in range(3):
            prompts.store(talk)
            talk += prompts.text(2)
        prompts.store(talk)
    assert prompts.found[1] == []


@pytest.mark.parametrize("at_first", [0, 5])
def test_two_beginnings_of_one_text_are_seen(at_first: int) -> None:
    prompts = Prompts()
    common, document = prompts.text(at_first), prompts.text(40)
    prompts.store(common, prompts.text(1), document)
    prompts.store(common, prompts.text(1), document)
    assert prompts.found[1] == [(at_first * BLOCK, 1, 40 * BLOCK)]


def test_a_difference_of_another_length_moves_the_blocks_and_is_not_seen() -> None:
    prompts = Prompts()
    system, manual = prompts.text(4), prompts.text(50)
    for length in (3, 4, 5, 6):
        prompts.store(system, prompts.text(1)[:length], manual)
    assert prompts.found[1] == []


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is forgotten has no place any more, and is left out."""
    monkeypatch.setattr(branch_points, "MAX_KNOWN", 100)
    monkeypatch.setattr(branch_points, "MAX_POINTS", 3)
    prompts = Prompts()
    for _ in range(30):
        system, text = prompts.text(2), prompts.text(10)
        for _ in range(3):
            prompts.store(system, prompts.text(1), text)
    (held,) = prompts.points._of.values()
    assert max(len(held.places), len(held.contents)) <= 100
    assert len(held.points) <= 3
    namespace: Any = prompts.namespace
    keys, parents, tokens = blocks_of(prompts.text(branch_points.MAX_QUEUED + 1))
    prompts.points.offered(namespace, keys, parents, tokens)
    assert not prompts.points._queue, "more than is read in four seconds is left out"


def test_old_prompts_weigh_less_and_forgotten_namespaces_nothing() -> None:
    prompts = Prompts()
    system, manual = prompts.text(4), prompts.text(50)
    for _ in range(9):
        prompts.store(system, prompts.text(1), manual)
    (_, (before,)) = prompts.found
    prompts.now = HALVED_EVERY_S
    prompts.points.tick()
    assert prompts.found[1] == [(before[0], before[1] // 2, before[2] // 2)]
    namespace: Any = prompts.namespace
    prompts.points.offered(namespace, *blocks_of(system))
    prompts.points.namespace_forgotten(namespace)
    prompts.points.tick()
    assert prompts.found == (0, []), "what waited is forgotten too"


def test_examples_are_short_and_those_of_points_that_are_forgotten_go() -> None:
    """However large a block is."""
    prompts = Prompts()
    namespace: Any = prompts.namespace
    parent, first, made = bytes(32), b"", dict[int, branch_points.Branch]()
    for number in range(4 * branch_points.MAX_POINTS):
        for other in range(3):  # each block of a chain has two that differ
            key = sha256(b"%d %d" % (number, other)).digest()
            tokens = array("I", [number, other, *range(10_000)]).tobytes()
            prompts.points.offered(namespace, [key], parent, tokens)
            prompts.points.tick()
            first = first if other else key
        made |= {id(one): one for one in prompts.points._of[namespace].points.values()}
        parent = first
    assert len(made) > 2 * branch_points.MAX_POINTS
    examples = [example for point in made.values() for example in point.examples]
    assert 0 < len(examples) <= 2 * branch_points.MAX_POINTS
    assert max(map(len, examples)) <= branch_points.MAX_EXAMPLE_BYTES


def test_the_command_names_the_place(capsys: pytest.CaptureFixture[str]) -> None:
    prompts = Prompts()
    system, manual = prompts.text(2), prompts.text(6)
    with (
        DaemonProcess("16MiB") as daemon,
        SharedMemory(16 * PAGE_BYTES, "test") as memory,
        WireClient(daemon.directory, "worker") as worker,
    ):
        where = "--directory", str(daemon.directory)
        assert main(["namespaces", "reuse", *where]) == 1
        assert "with KV cache events" in capsys.readouterr().out
        worker.open_namespace()
        cache = worker.register(memory)
        for _ in range(3):
            keys, parents, tokens = blocks_of([*system, *prompts.text(1), *manual])
            split = [parents[at : at + 32] for at in range(0, len(parents), 32)]
            assert worker.store(cache, keys, range(len(keys)), parents=split, tokens=tokens).ok

        def says(what: str) -> bool:
            status = main(["namespaces", "reuse", *where])
            return not status and what in capsys.readouterr().out

        # Blocks are looked at four times a second: those of the last prompt perhaps later than the others.
        wait_until(lambda: says("2 prompts differ after 32 tokens and continue with 96 tokens each"))

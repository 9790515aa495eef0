"""The table of generations against a model of the promises, over random sequences of its verbs."""

from __future__ import annotations

import random
from copy import deepcopy

import pytest
from msgspec import json

from kvoffd.tiers import generations
from kvoffd.tiers.generations import AHEAD_S, Generations, Resets
from kvoffd.tiers.header import MAX_GENERATION
from tests.kit.amount import TIMES

NAMES = [bytes([number]) * 32 for number in range(3)]
NOW = 1_700_000_000


class Model:
    """What each verb promises. It knows numbers by order only."""

    def __init__(self) -> None:
        self.here = dict.fromkeys(NAMES, 0)
        self.fleet = dict.fromkeys(NAMES, 0)
        self.unfollowed: set[bytes] = set()
        self.stopped = dict.fromkeys(NAMES, 0)
        """Fleet generation that a clear of all nodes must exceed."""


@pytest.mark.parametrize("seed", range(20 * TIMES**2))
def test_each_verb_keeps_its_promise_and_restarts_lose_nothing_that_was_saved(seed: int) -> None:
    rng, model, now = random.Random(seed), Model(), [NOW]
    saved = [json.encode(Resets())]

    def start() -> Generations:
        table = Generations(json.decode(saved[0], type=Resets), lambda: keep(), lambda: now[0])

        def keep() -> None:
            saved[0] = json.encode(table.resets)

        return table

    table = start()
    for _ in range(60):
        now[0] += rng.choice([-5, 0, 1, 1, 60])
        one = rng.choice(NAMES)
        verb = rng.choice(["void_here", "void all here", "hear", "followed", "stop_sharing", "restart"])
        if verb == "void_here":
            table.void_here(one)
            assert table.of(one) > model.here[one]
        elif verb == "void all here":
            table.void_here(None)
            assert all(table.of(name) > model.here[name] for name in NAMES)
        elif verb == "hear":
            number = rng.choice([table.next_of_all(one), model.fleet[one], rng.randrange(NOW + 100)])
            assert table.hear(one, number) is (number > model.fleet[one])
            if number > model.fleet[one]:
                model.fleet[one] = number
                model.unfollowed.add(one)
        elif verb == "followed" and one in model.unfollowed:
            table.followed(one)
            model.unfollowed.discard(one)
            if model.fleet[one] > model.stopped[one]:
                model.stopped[one] = 0
        elif verb == "stop_sharing":
            assert table.stop_sharing(one) == table.of(one) > model.here[one]
            model.stopped[one] = max(now[0] + AHEAD_S, model.fleet[one], model.stopped[one])
        elif verb == "restart":
            table = start()
            for name in model.unfollowed:
                assert table.fleet(name) < model.fleet[name]
                model.fleet[name] = table.fleet(name)
            model.unfollowed.clear()
        for name in NAMES:
            assert table.of(name) >= model.here[name]
            model.here[name] = table.of(name)
            assert table.fleet(name) == model.fleet[name]
            assert table.is_unshared(name) is (model.stopped[name] > 0)
            assert table.is_valid(name, model.fleet[name]) is (name not in model.unfollowed)
            assert not table.is_valid(name, model.fleet[name] + 1)
            assert table.next_of_all(name) > max(model.fleet[name], model.stopped[name])
        assert table.voided == model.unfollowed


def test_an_engines_reset_is_saved_as_a_whole() -> None:
    """A daemon that is killed after one of two writes would know only the half of it."""
    saved = list[Resets]()
    table = Generations(save=lambda: saved.append(deepcopy(table.resets)), wall_clock=lambda: NOW)
    generation = table.stop_sharing(NAMES[0])
    assert [one.generations for one in saved] == [{NAMES[0]: generation}]
    assert [one.unshared for one in saved] == [{NAMES[0]: NOW + AHEAD_S}]


def test_a_generation_that_no_clock_has_shown_is_not_followed() -> None:
    """As in a damaged header: one above it could not be kept in ``kvoffd.state``."""
    table = Generations(Resets(generations={NAMES[0]: 7}), wall_clock=lambda: NOW)
    for number in (MAX_GENERATION, 2**63 - 1, 2**64 - 1):
        assert not table.accept(NAMES[0], number)
    assert table.of(NAMES[0]) == 7
    assert not table.accept(NAMES[0], 10**6 * (NOW + 1)), "the clock was set back"
    assert table.of(NAMES[0]) == 10**6 * (NOW + 1) + 1


def test_tables_are_bounded_though_others_are_known_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are known stay as they are; one that was, and is not any more, is void and not shared."""
    monkeypatch.setattr(generations, "MAX_NAMES", 10)
    table, known = Generations(wall_clock=lambda: NOW), list[bytes]()
    for number in range(0, 300, 5):
        reset, *known = (bytes([(number + some) % 256, number // 256]) * 16 for some in range(5))
        table.known = known
        for _ in range(3):
            table.void_here(reset)
            table.stop_sharing(reset)
        before = [(table.of(one), table.is_unshared(one)) for one in known]
        for other in range(12):
            table.void_here(bytes([other]) * 31 + b"o")
            table.stop_sharing(bytes([other]) * 31 + b"o")
        assert [(table.of(one), table.is_unshared(one)) for one in known] == before
        assert len(table.resets.generations) <= 14
        assert len(table.resets.unshared) <= 14
    assert table.of(b"never") == table.resets.floor > 0
    assert table.is_unshared(b"never")


def test_the_second_void_of_a_second_is_no_later_than_a_reset_in_it() -> None:
    """Its number is ahead of the clock. A node that hears of it only after its engine's reset stays unshared."""
    other, own = Generations(wall_clock=lambda: NOW), Generations(wall_clock=lambda: NOW)
    for _ in range(2):
        other.hear(NAMES[0], other.next_of_all(NAMES[0]))
    own.stop_sharing(NAMES[0])
    assert own.hear(NAMES[0], other.fleet(NAMES[0]))
    own.followed(NAMES[0])
    assert own.is_unshared(NAMES[0])

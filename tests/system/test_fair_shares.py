"""The order of owners that share a queue by bytes."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvoffd.system.fair_shares import MAX_OWNERS, FairShares


def serve(shares: FairShares[str], waiting: dict[str, list[int]]) -> str:
    """Have the first one begin its next piece."""
    owner = shares.order(waiting)[0]
    shares.use(owner, waiting[owner].pop(0))
    if not waiting[owner]:
        del waiting[owner]
    return owner


@pytest.mark.parametrize("seed", range(5))
def test_owners_that_always_wait_get_equal_bytes(seed: int) -> None:
    rng, shares, had = random.Random(seed), FairShares[str](), Counter[str]()
    largest = {owner: rng.choice((1, 10, 1000)) for owner in "abcde"}
    for _ in range(2000):
        owner = shares.order(largest)[0]
        nbytes = rng.randint(1, largest[owner])
        shares.use(owner, nbytes)
        had[owner] += nbytes
        assert max(had.values()) - min(had[one] for one in largest) <= max(largest.values())


def test_equal_owners_go_in_the_given_order() -> None:
    shares, waiting = FairShares[str](), {one: [1, 1, 1] for one in "bca"}
    assert "".join(serve(shares, waiting) for _ in range(9)) == "bcabcabca"


def test_what_was_used_alone_is_not_held_against_an_owner_but_its_last_piece() -> None:
    shares, waiting = FairShares[str](), {"a": [10] * 100}
    for _ in range(50):
        serve(shares, waiting)
    waiting["b"] = [10] * 100
    assert "".join(serve(shares, waiting) for _ in range(6)) == "bababa"


def test_an_owner_that_waited_for_nothing_or_could_not_begin_has_saved_up_nothing() -> None:
    shares, waiting = FairShares[str](), {"a": [10] * 100, "b": [10] * 100}
    for _ in range(50):
        serve(shares, waiting)
    waiting["new"] = [10] * 100
    assert "".join(serve(shares, waiting) for _ in range(2)).count("new") == 1
    assert Counter(serve(shares, waiting) for _ in range(30)) == {"a": 10, "b": 10, "new": 10}
    for _ in range(50):  # the others are passed over, as if they had no space
        shares.use("new", 10)
    assert Counter(serve(shares, waiting) for _ in range(30)).keys() == {"a", "b", "new"}


def test_only_so_many_owners_are_remembered() -> None:
    shares = FairShares[int]()
    for owner in range(2 * MAX_OWNERS):
        shares.use(owner, 10)
    assert len(shares._used) == MAX_OWNERS
    assert shares.order([0, 2 * MAX_OWNERS - 1]) == [0, 2 * MAX_OWNERS - 1]

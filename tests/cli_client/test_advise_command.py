"""``kvoffd-cli advise``: each sentence against statistics of which it is true, and of which it is not."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from msgspec import structs

from kvoffd_client.cli import main
from kvoffd_client.cli.advise_command import advice_of
from kvoffd_client.testing import FakeEngine
from kvoffd_proto.admin import NamespaceInfo
from kvoffd_proto.messages import GroupSpec
from kvoffd_proto.stats import DaemonStats, HitCurve, NamespaceStats, Window, namespace_id
from tests.kit.daemon import DaemonProcess

GIB = 2**30
SIZES = (0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 7.0, 10.0)
RISING = (4, 5, 6, 8, 17, 20, 26, 30, 33, 34, 35.5, 36, 36)


def curve(*percents: float, asked: int = 1_000_000, found: float = 0.28) -> HitCurve:
    ratios = {f"{size:g}": at / 100 for size, at in zip(SIZES, percents or RISING, strict=True)}
    return HitCurve(asked, round(asked * found), ratios)


def info(name: int, model: str = "llama", shard_bytes: int = 2**21, **fields: object) -> NamespaceInfo:
    described = json.dumps({"model": model, **fields})
    return NamespaceInfo(
        bytes([name]) * 32, model, 1, 32, [GroupSpec("full", 16)], [[shard_bytes]], 5, 5, 0, 2, described
    )


def counted(name: int, model: str = "llama", **fields: object) -> NamespaceStats:
    fingerprint = bytes([name]) * 32
    made = NamespaceStats(
        id=namespace_id(fingerprint), model=model, fingerprint=fingerprint.hex(), of_bench=model.startswith("bench "),
        ready_blocks=5, ready_bytes=10 * GIB, lookups=1000, asked_keys=50_000, loaded_keys=10_240,
        found_keys={"pool": 20_000}, asked_tokens=800_000, loaded_tokens=163_840, stored_bytes=40 * GIB,
        loaded_bytes=20 * GIB, curve=curve(),
    )  # fmt: skip
    return structs.replace(made, **fields)


def told(stats: DaemonStats, *namespaces: NamespaceInfo) -> dict[str, str]:
    """What is advised, by topic. The sums are those of the namespaces."""
    names = ("lookups", "asked_tokens", "loaded_tokens", "saved_seconds", "stored_bytes", "loaded_bytes")
    spaces = [one for one in stats.namespaces if not one.of_bench]
    sums = {name: sum(getattr(one, name) for one in spaces) for name in names}
    maps = {
        name: dict(sum((Counter(getattr(one, name)) for one in spaces), Counter())) for name in ("misses", "found_keys")
    }
    stats = structs.replace(stats, since_start=Window(**sums, **maps))
    return {one.topic: one.text for one in advice_of(stats, namespaces).advice}


@pytest.fixture
def served(fresh: DaemonStats) -> DaemonStats:
    """A daemon with a pool of 20 GiB that one namespace has used for an hour."""
    return structs.replace(
        fresh,
        uptime_seconds=3600.0,
        policy="learned",
        namespaces=[counted(1)],
        curve=curve(),
        curve_seen_bytes=200 * GIB,
        store=structs.replace(fresh.store, bytes=90 * GIB),  # benches have a part in these
        load=structs.replace(fresh.load, bytes=70 * GIB),
    )


def test_what_was_saved(served: DaemonStats, busy: DaemonStats) -> None:
    # 20 GiB of blocks of 2 MiB and 16 tokens, and 50,000 keys of 16 tokens.
    text = told(served, info(1))["saved"]
    assert text.startswith("In 1 h engines loaded 163,840 tokens instead of computing them, 20.5 % of those")
    assert "How fast they compute prompts no engine has told" in text
    assert "came from" not in text
    timed = structs.replace(served, namespaces=[counted(1, saved_seconds=40.0)])
    assert told(timed, info(1))["saved"].endswith("At the speed that the engines measured, that is 40.0 s of prefill.")
    below = structs.replace(
        served, namespaces=[counted(1, found_keys={"pool": 20_000, "disk": 10_000}, misses={"tier_late": 2_000})]
    )
    # 20,000 keys were in the pool and 10,000 of those that disks have came up.
    text = told(structs.replace(below, tiers=busy.tiers, shared=busy.shared), info(1))["saved"]
    assert "Of these 33.3 % came from disks and 0 % came from shared stores." in text
    assert "16.7 % of what the disks have came too late" in told(below, info(1))["disks_late"]


def test_of_disks_that_are_not_there_nothing_is_said(served: DaemonStats, busy: DaemonStats) -> None:
    counted_so = counted(1, found_keys={"pool": 20_000, "shared": 10_000}, misses={"tier_late": 2_000})
    alone = structs.replace(served, namespaces=[counted_so], tiers=busy.tiers, shared=busy.shared, disks=[])
    assert "Of these 33.3 % came from shared stores." in told(alone, info(1))["saved"]
    assert told(alone, info(1))["disks_late"].startswith("16.7 % of what the shared stores have came too late")
    both = told(structs.replace(alone, disks=busy.disks), info(1))
    assert "0 % came from disks and 33.3 % came from shared stores" in both["saved"]
    assert "of what the disks and shared stores have came too late" in both["disks_late"]


def test_what_engines_left_out(served: DaemonStats) -> None:
    assert "slow_copies" not in told(served)
    slow = counted(1, skipped_loads=7, prefill_tokens_per_second=9000.0, load_tokens_per_second=800.0)
    text = told(structs.replace(served, namespaces=[slow]))["slow_copies"]
    assert "left out 7 loads" in text
    assert "compute 9,000 tokens a second and load 800." in text


def test_what_other_sizes_would_bring(served: DaemonStats) -> None:
    text = told(served, info(1))["size"]
    assert "find 28.0 % of their tokens in the pool of 20.0 GiB; with lru it would be 26.0 %" in text
    assert "Twice the memory would find 33.0 %, ten times as much, such as a disk of 180 GiB, 36.0 %." in text
    assert "Beyond 100 GiB there is little more. Half the memory would find 17.0 %." in text
    assert text.endswith("What learned would find with more or less, kvoffd-cli record and simulate tell.")
    flat = structs.replace(served, curve=curve(*[25.5] * 4, *[26] * 9))
    text = told(flat, info(1))["size"]
    assert "With ten times the memory it would find 26.0 %, less than is found now." in text
    assert "With 2.00 GiB it would find nearly as much. What learned" in text
    text = told(structs.replace(flat, policy="lru"), info(1))["size"]
    assert "More memory brings nothing: with ten times as much it would be 26.0 %." in text
    assert "2.00 GiB would find nearly as much as the pool does." in text
    ahead = told(structs.replace(served, curve=curve(found=0.36)), info(1))["size"]
    assert "36.0 % of their tokens in the pool of 20.0 GiB; with lru it would be 26.0 %" in ahead
    assert "More memory brings nothing: with ten times as much it would be 36.0 %." in ahead
    cold = told(structs.replace(served, curve=curve(*[0] * 10, 9, 36, 36)), info(1))["size"]
    assert "Twice the memory would find 0.0 %, ten times as much, such as a disk of 180 GiB, 36.0 %." in cold
    assert "there is little more. What learned would find with more" in cold


def test_where_all_fits_no_policy_is_named(served: DaemonStats) -> None:
    fits = structs.replace(served, curve_seen_bytes=GIB)
    text = told(structs.replace(fits, curve=curve(found=0.24)), info(1))["size"]
    assert "GiB; 26.0 % were asked for before, but not all of that was stored by then. All different blocks" in text
    assert "fit into it: more memory brings nothing yet" in text
    assert "20.0 GiB. All" in told(structs.replace(fits, curve=curve(found=0.26)), info(1))["size"]
    declined = structs.replace(fits, namespaces=[counted(1, rejected_keys=9)])
    assert "with lru it would be 26.0 %" in told(structs.replace(declined, curve=curve(found=0.24)), info(1))["size"]


def test_what_the_estimates_leave_out_is_said(served: DaemonStats) -> None:
    capped = structs.replace(served, namespaces=[counted(1, quota_bytes=GIB)])
    with_lru = "; with lru, without quotas of namespaces, it would be 26.0 %, and what follows is for that."
    assert with_lru in told(capped, info(1))["size"]
    own = "; the estimate for this size, without quotas of namespaces, is 26.0 %, and what follows is by the estimate."
    assert own in told(structs.replace(capped, policy="lru"), info(1))["size"]
    assert "20.0 GiB. Twice" in told(structs.replace(served, policy="lru", curve=curve(found=0.255)), info(1))["size"]


def test_a_full_index_is_named_with_the_size_that_it_needs(served: DaemonStats) -> None:
    def filled(ready_bytes: int, counted_bytes: int) -> dict[str, str]:
        pool = structs.replace(
            served.pool, size_bytes=20 * GIB, bytes={"ready": ready_bytes}, index_counted_bytes=counted_bytes,
            index_limit_bytes=GIB,
        )  # fmt: skip
        return told(structs.replace(served, pool=pool), info(1))

    assert "full_index" not in filled(5 * GIB, GIB // 2) | filled(20 * GIB, GIB)
    full = filled(5 * GIB, GIB)
    assert full["full_index"].startswith("The index is full with 5.00 GiB of blocks in a pool of 20.0 GiB: blocks are")
    assert "the whole pool needs 4.00 GiB" in full["full_index"]
    assert "with lru, without a full index, it would be 26.0 %" in full["size"]


def test_whether_storing_pays(served: DaemonStats) -> None:
    assert told(served)["stores"] == "Engines stored 2.0 bytes for each byte that they loaded."
    dear = structs.replace(served, policy="lru", namespaces=[counted(1, loaded_bytes=GIB)])
    assert "hardly pays. The policies learned and gate store less" in told(dear)["stores"]
    never = structs.replace(served, namespaces=[counted(1, loaded_bytes=0)])
    assert "loaded nothing" in told(never)["stores"]


def test_which_namespace_starves(served: DaemonStats) -> None:
    assert "starving" not in told(served)
    poor = counted(2, "qwen", ready_bytes=GIB, curve=curve(found=0.05))
    both = structs.replace(served, namespaces=[counted(1), poor], curve=curve(asked=2_000_000))
    text = told(both)["starving"]
    assert text.startswith("qwen (02020202) starves: it asks for 50.0 % of all tokens and has 9.1 % of the pool's")
    assert "finds 5.0 % of its tokens, and would find 36.0 %" in text
    assert text.endswith("kvoffd-cli namespaces quota 010101010101 --max SIZE leaves it more of the pool.")
    capped = structs.replace(both, namespaces=[counted(1), structs.replace(poor, quota_bytes=GIB)])
    assert told(capped)["starving"].endswith(
        "namespaces quota 020202020202 --max SIZE lets it have more than its quota, 1.00 GiB."
    )
    content = structs.replace(both, namespaces=[counted(1), structs.replace(poor, curve=curve(found=0.3))])
    assert "starving" not in told(content)


def test_which_namespace_never_found_anything(served: DaemonStats) -> None:
    assert "no_hits" not in told(served)
    never = counted(2, "qwen", found_keys={}, misses={"unknown": 49_000, "evicted": 1_000}, curve=curve(*[0] * 13))
    text = told(structs.replace(served, namespaces=[counted(1), never]))["no_hits"]
    assert text.startswith("qwen (02020202) never found anything, in 1,000 requests; of 98.0 % of its keys the reason")
    assert text.endswith("is: unknown. What it asks for does not come back, with ten times the memory either.")
    silent = structs.replace(never, stored_bytes=0, curve=curve())
    text = told(structs.replace(served, namespaces=[silent]))["no_hits"]
    assert text.endswith("Ten times the memory would find 36.0 % of its tokens. Its engines stored nothing.")


def test_nothing_is_advised_of_what_benches_do(fresh: DaemonStats) -> None:
    benched = structs.replace(fresh, namespaces=[counted(3, "bench lookup", found_keys={})])
    assert told(benched, info(3, "bench lookup", shard_bytes=4096)) == {
        "too_little_traffic": "No request so far: too few to tell; ask again after 100 of them."
    }


def test_blocks_that_are_too_large_or_too_small(served: DaemonStats) -> None:
    assert not {"block_size", "small_shards"} & told(served, info(1)).keys()
    short = structs.replace(served, namespaces=[counted(1, asked_keys=1500)])
    assert "1.5 whole blocks of 16 tokens" in told(short, info(1))["block_size"]
    assert (
        "shards of 4.00 KiB in slots of 8.00 KiB: 50.0 % of each"
        in told(served, info(1, shard_bytes=4096))["small_shards"]
    )


def test_why_engines_of_one_model_do_not_share(served: DaemonStats) -> None:
    assert "apart" not in told(served, info(1), info(2, "qwen"))
    given = advice_of(served, [info(1, hash_probe="aa", salt="x"), info(2, hash_probe="bb", salt="x")])
    (one,) = (one for one in given.advice if one.topic == "apart")
    assert one.fields == ["hash_probe"]
    assert (
        "differ in hash_probe (aa and bb). If they should share, give both engines the same PYTHONHASHSEED" in one.text
    )
    closed = structs.replace(info(2, hash_probe="bb"), sessions=0)
    assert "apart" not in told(served, info(1, hash_probe="aa"), closed)


def test_too_little_traffic_is_said_and_what_is_misconfigured_too(capsys: pytest.CaptureFixture[str]) -> None:
    with (
        DaemonProcess("32MiB") as daemon,
        FakeEngine(daemon.directory, "tiny"),
        FakeEngine(daemon.directory, "tiny", layers=2),
    ):
        assert main(["advise", "--json", "--directory", str(daemon.directory)]) == 0
        found = json.loads(capsys.readouterr().out)
        assert not found["enough_traffic"]
        assert [one["topic"] for one in found["advice"]] == ["too_little_traffic", "apart"]
        assert main(["advise", "--directory", str(daemon.directory)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == "No request so far: too few to tell; ask again after 100 of them."
        assert max(map(len, lines)) <= 80

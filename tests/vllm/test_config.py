"""kv_connector_extra_config."""

from __future__ import annotations

import pytest

from kvoffd_client.vllm.config import OWN_KEYS, ConnectorOptions, parse_options


def test_nothing_given_is_the_defaults() -> None:
    assert parse_options({}) == (ConnectorOptions(), [])


def test_our_options_are_read_and_vllms_pass() -> None:
    options, unknown = parse_options(
        {
            "directory": "/run/other",
            "salt": "blue",
            "lookup_deadline_ms": 50,
            "disk_wait_ms": 250,
            "store_fence_timeout_s": 0.5,
            "kv_layout": "block_outermost",
            "strict_version": True,
            "blocks_per_chunk": 4,
            "offload_prompt_only": False,
            "self_describing_kv_events": True,
        }
    )
    assert options == ConnectorOptions(
        directory="/run/other",
        salt="blue",
        lookup_deadline_ms=50.0,
        disk_wait_ms=250.0,
        store_fence_timeout_s=0.5,
        kv_layout="block_outermost",
        strict_version=True,
    )
    assert unknown == []


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("dirctory", "directory"),
        ("lookup_deadline", "lookup_deadline_ms"),
        ("store_fence_timeout", "store_fence_timeout_s"),
    ],
)
def test_a_slip_of_the_pen_is_refused_with_what_was_meant(key: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"{key}.*did you mean '{meant}'"):
        parse_options({key: 1})


def test_a_key_in_our_name_that_is_none_lists_those_there_are() -> None:
    with pytest.raises(ValueError, match=", ".join(OWN_KEYS)):
        parse_options({"kvoffd_pool": "1GiB"})


@pytest.mark.parametrize(
    ("deadline_ms", "waits_s", "silent_s"), [(200.0, 2.0, 5.0), (3000.0, 3.0, 5.0), (9e4, 90.0, 90.0)]
)
def test_the_client_gives_no_lookup_up_before_its_deadline(deadline_ms: float, waits_s: float, silent_s: float) -> None:
    options = ConnectorOptions(lookup_deadline_ms=deadline_ms).client_options
    assert (options.request_timeout_s, options.unresponsive_after_s) == (waits_s, silent_s)


def test_what_is_ready_may_be_taken_without_waiting_for_the_disk() -> None:
    assert parse_options({"disk_wait_ms": 0})[0].disk_wait_ms == 0.0


@pytest.mark.parametrize("key", ["disk_wait", "respect_load_failure_policy"])
def test_an_option_that_is_no_more_is_told_or_refused(key: str) -> None:
    if key == "disk_wait":
        with pytest.raises(ValueError, match="did you mean 'disk_wait_ms'"):
            parse_options({key: "limit"})
    else:
        assert parse_options({key: True})[1] == [key]


def test_a_strangers_key_is_reported_and_no_error() -> None:
    assert parse_options({"zeta": 1})[1] == ["zeta"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("directory", 7),
        ("salt", None),
        ("lookup_deadline_ms", "fast"),
        ("lookup_deadline_ms", 0),
        ("disk_wait_ms", -1),
        ("lookup_deadline_ms", True),
        ("store_fence_timeout_s", float("nan")),
        ("strict_version", "yes"),
        ("kv_layout", "BLHNC"),
        ("kv_layout", True),
    ],
)
def test_a_wrong_value_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=key):
        parse_options({key: value})


@pytest.mark.parametrize("option", ["canonical_layout", "sync_load_budget_bytes"])
def test_options_of_vllms_offloading_that_cannot_be_followed_are_refused_unless_they_are_off(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option} cannot be used with KvoffdConnector, since "):
        parse_options({option: 1})
    assert parse_options({option: 0})[1] == []


def test_the_directory_comes_from_the_environment_when_it_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVOFFD_DIRECTORY", "/from/environment")
    assert ConnectorOptions().socket_directory == "/from/environment"
    assert ConnectorOptions(directory="/given").socket_directory == "/given"

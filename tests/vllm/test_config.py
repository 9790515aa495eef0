"""kv_connector_extra_config."""

from __future__ import annotations

import pytest

from kvoffd_client.vllm.config import OWN_KEYS, ConnectorOptions, parse_options


def test_options_are_read_and_vllms_pass() -> None:
    given = {"directory": "/run/other", "lookup_deadline_ms": 50, "disk_wait_ms": 0, "strict_version": True}
    options, unknown = parse_options({**given, "blocks_per_chunk": 4, "zeta": 1})
    assert options == ConnectorOptions("/run/other", lookup_deadline_ms=50.0, disk_wait_ms=0.0, strict_version=True)
    assert unknown == ["zeta"]
    assert parse_options({}) == (ConnectorOptions(), [])


def test_options_misspelt_are_refused_with_what_was_meant() -> None:
    for key, meant in (("dirctory", "directory"), ("lookup_deadline", "lookup_deadline_ms")):
        with pytest.raises(ValueError, match=f"{key}.*did you mean '{meant}'"):
            parse_options({key: 1})
    with pytest.raises(ValueError, match=", ".join(OWN_KEYS)):
        parse_options({"kvoffd_pool": "1GiB"})


def test_options_with_wrong_values_are_refused_by_name() -> None:
    wrong = [
        ("directory", 7),
        ("salt", None),
        ("lookup_deadline_ms", "fast"),
        ("lookup_deadline_ms", 0),
        ("lookup_deadline_ms", True),
        ("disk_wait_ms", -1),
        ("store_fence_timeout_s", float("nan")),
        ("strict_version", "yes"),
        ("kv_layout", "BLHNC"),
        ("kv_layout", True),
    ]
    for key, value in wrong:
        with pytest.raises(ValueError, match=key):
            parse_options({key: value})


def test_options_of_vllm_that_cannot_be_followed_are_refused() -> None:
    for option in ("canonical_layout", "sync_load_budget_bytes"):
        with pytest.raises(ValueError, match=f"{option} cannot be used with KvoffdConnector, since "):
            parse_options({option: 1})
        assert parse_options({option: 0})[1] == []


def test_client_gives_no_lookup_up_before_its_deadline() -> None:
    for deadline_ms, waits_s, silent_s in ((200.0, 2.0, 5.0), (3000.0, 3.0, 5.0), (9e4, 90.0, 90.0)):
        options = ConnectorOptions(lookup_deadline_ms=deadline_ms).client_options
        assert (options.request_timeout_s, options.unresponsive_after_s) == (waits_s, silent_s)

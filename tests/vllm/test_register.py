"""The plugin hook."""

from __future__ import annotations

import logging
from importlib.metadata import entry_points

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

import kvoffd_client.vllm


def test_vllm_finds_the_hook_by_its_entry_point() -> None:
    [hook] = [item for item in entry_points(group="vllm.general_plugins") if item.name == "kvoffd"]
    assert hook.load() is kvoffd_client.vllm.register


def test_a_hook_that_fails_says_so_and_breaks_no_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("another vLLM")

    monkeypatch.setattr(KVConnectorFactory, "register_connector", refuse)
    monkeypatch.setattr(KVConnectorFactory, "_registry", {})
    # The connector's other tests have the client's log go through vLLM's logger.
    monkeypatch.setattr(logging.getLogger("kvoffd_client"), "parent", logging.getLogger())
    kvoffd_client.vllm.register()
    [warning] = [record for record in caplog.records if "KvoffdConnector" in record.getMessage()]
    assert warning.levelno == logging.WARNING
    assert "another vLLM" in warning.getMessage()

"""The vLLM connector: the only package that imports vLLM. This module imports it only in register()."""

from __future__ import annotations

import logging

CONNECTOR_NAME = "KvoffdConnector"
CONNECTOR_MODULE = "kvoffd_client.vllm.connector"

_log = logging.getLogger(__name__)


def register() -> None:
    """Register the connector, so that ``{"kv_connector": "KvoffdConnector", "kv_role": "kv_both"}`` works in vLLM.

    vLLM calls this in each of its processes (entry point group ``vllm.general_plugins``). It is repeatable, imports no
    connector code and never raises: engines that do not use kvoffd must not be affected.
    """
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        try:
            KVConnectorFactory.register_connector(CONNECTOR_NAME, CONNECTOR_MODULE, CONNECTOR_NAME)
        except ValueError:
            pass  # already registered
    except Exception as error:
        _log.warning("kvoffd could not register %s, which this vLLM will not find by name: %r", CONNECTOR_NAME, error)
    try:
        from kvoffd_client.vllm.math_kernels import choose_math_kernels

        choose_math_kernels()  # vLLM calls this before it builds a model
    except Exception as error:
        _log.warning("kvoffd could not choose the CPU's math kernels (%r): equal engines may not share blocks.", error)

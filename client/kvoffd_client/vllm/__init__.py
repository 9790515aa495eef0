"""The vLLM connector: the only place that imports vLLM. This module itself does not, until vLLM calls register()."""

from __future__ import annotations

import logging

CONNECTOR_NAME = "KvoffdConnector"
CONNECTOR_MODULE = "kvoffd_client.vllm.connector"

_log = logging.getLogger(__name__)


def register() -> None:
    """Make ``{"kv_connector": "KvoffdConnector", "kv_role": "kv_both"}`` known to vLLM.

    vLLM calls this in each of its processes (entry point group ``vllm.general_plugins``). It may be called again,
    imports no connector code, and never raises: an engine that does not use kvoffd must not notice it.
    """
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        try:
            KVConnectorFactory.register_connector(CONNECTOR_NAME, CONNECTOR_MODULE, CONNECTOR_NAME)
        except ValueError:
            pass  # it is registered already
    except Exception as error:
        _log.warning(
            "kvoffd could not make %s known to this vLLM, which will not find it by its name: %r", CONNECTOR_NAME, error
        )
    try:
        from kvoffd_client.vllm.math_kernels import choose_math_kernels

        choose_math_kernels()  # vLLM calls this before it builds a model
    except Exception as error:
        _log.warning("kvoffd cannot choose the CPU's math kernels (%r): equal engines may share no blocks.", error)

"""The vLLM connector: the only place that imports vLLM. This module itself does not, until vLLM calls register().

The supported releases of vLLM are named here, so that another one is refused before anything of it is imported.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

CONNECTOR_NAME = "KvoffdConnector"
CONNECTOR_MODULE = "kvoffd_client.vllm.connector"

SUPPORTED = ((0, 32), (0, 33))
"""The vLLM releases that this connector was tested with: major and minor number."""

_log = logging.getLogger(__name__)


def register() -> None:
    """Make ``{"kv_connector": "KvoffdConnector", "kv_role": "kv_both"}`` known to vLLM.

    vLLM calls this in each of its processes (entry point group ``vllm.general_plugins``). It may be called again,
    imports no connector code, and never raises: an engine that does not use kvoffd must not notice it.
    """
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        if CONNECTOR_NAME not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(CONNECTOR_NAME, CONNECTOR_MODULE, CONNECTOR_NAME)
            from vllm.config import VllmConfig

            _require_images(VllmConfig)
    except Exception as error:
        _log.debug("This vLLM takes no %s: %r", CONNECTOR_NAME, error)
    try:
        from kvoffd_client.vllm.math_kernels import choose_math_kernels

        choose_math_kernels()  # vLLM calls this before it builds a model
    except Exception as error:
        _log.warning("kvoffd cannot choose the CPU's math kernels (%r): equal engines may share no blocks.", error)


def _require_images(config_class: Any) -> None:
    """Have engines of this connector refuse images, and the like, that come without their pixels.

    vLLM takes each engine with ``kv_role`` kv_both for one that gets the blocks of such images from elsewhere: it lets
    clients send embeddings, or nothing but their sizes, by which one request ends the engine. That is left to engines
    in which another connector loads too.
    """
    resolve = config_class._resolve_mm_embedding_inputs

    def resolve_for_others(config: Any) -> None:
        transfer, encoder = config.kv_transfer_config, config.ec_transfer_config
        if transfer is None or _others_load(vars(transfer)) or (encoder and encoder.is_ec_consumer):
            resolve(config)

    config_class._resolve_mm_embedding_inputs = resolve_for_others


def _others_load(transfer: Mapping[str, Any]) -> bool:
    """Return whether an engine of this kv_transfer_config has a connector that loads and is not this one."""
    children = (transfer.get("kv_connector_extra_config") or {}).get("connectors")
    if children:  # MultiConnector's, whose own role says nothing of theirs
        return any(map(_others_load, children))
    return transfer["kv_connector"] != CONNECTOR_NAME and transfer.get("kv_role") != "kv_producer"


def release_of(version: str) -> tuple[int, int] | None:
    """Return major and minor number of a version string, None when it has none."""
    parts = version.split(".")
    if len(parts) < 2 or not (parts[0].isdecimal() and parts[1].isdecimal()):
        return None
    return int(parts[0]), int(parts[1])


def require_supported(version: str) -> None:
    """Raise ImportError with a sentence when this vLLM is none of the supported releases."""
    if release_of(version) in SUPPORTED:
        return
    works = " and ".join(f"{major}.{minor}.x" for major, minor in SUPPORTED)
    raise ImportError(
        f"kvoffd's vLLM connector works with vLLM {works}, and this is vLLM {version}: "
        "install one of those, or a kvoffd release that names this one."
    )

"""The plugin hook and the version gate."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from types import SimpleNamespace

import pytest
from vllm.config import KVTransferConfig, MultiModalConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

import kvoffd_client.vllm
from kvoffd_client.vllm import require_supported


def test_vllm_finds_the_hook_by_its_entry_point() -> None:
    [hook] = [item for item in entry_points(group="vllm.general_plugins") if item.name == "kvoffd"]
    assert hook.load() is kvoffd_client.vllm.register


def test_registering_twice_is_harmless_and_the_connector_is_found_by_name() -> None:
    kvoffd_client.vllm.register()
    kvoffd_client.vllm.register()
    connector = KVConnectorFactory.get_connector_class_by_name("KvoffdConnector")
    assert connector.__name__ == "KvoffdConnector"


OURS, ANOTHER = ("KvoffdConnector", "kv_both"), ("NixlConnector", "kv_consumer")


def transfer_config(*connectors: tuple[str, str]) -> KVTransferConfig:
    """These connectors, names and roles, below MultiConnector where there are several."""
    several = [{"kv_connector": name, "kv_role": role} for name, role in connectors]
    if len(several) == 1:
        return KVTransferConfig(**several[0])
    return KVTransferConfig("MultiConnector", kv_role="kv_both", kv_connector_extra_config={"connectors": several})


@pytest.mark.parametrize(
    ("connectors", "taken"),
    [
        ([OURS], False),
        ([("OffloadingConnector", "kv_both")], True),
        ([OURS, ("NixlConnector", "kv_producer")], False),
        ([ANOTHER, OURS], True),
    ],
)
def test_images_without_pixels_are_taken_where_another_connector_loads(
    connectors: list[tuple[str, str]], taken: bool
) -> None:
    kvoffd_client.vllm.register()
    multimodal = MultiModalConfig()
    config = SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=multimodal),
        kv_transfer_config=transfer_config(*connectors),
        ec_transfer_config=None,
    )
    VllmConfig._resolve_mm_embedding_inputs(config)
    assert multimodal.enable_mm_embeds == multimodal.allow_missing_mm_embeddings == taken


def test_the_hook_never_breaks_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("another vLLM")

    monkeypatch.setattr(KVConnectorFactory, "register_connector", refuse)
    monkeypatch.setattr(KVConnectorFactory, "_registry", {})
    kvoffd_client.vllm.register()


def test_the_hook_itself_imports_no_vllm() -> None:
    code = (
        "import kvoffd_client.vllm, sys; sys.exit(any(name.split('.')[0] in ('vllm', 'torch') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1.dev3+cpu", "0.33.2"])
def test_tested_versions_are_accepted(version: str) -> None:
    require_supported(version)


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "1.0.0", "dev"])
def test_another_version_is_refused_with_those_that_work(version: str) -> None:
    with pytest.raises(ImportError, match=r"0\.32\.x and 0\.33\.x.*" + version.replace(".", r"\.")):
        require_supported(version)


def test_importing_the_connector_under_another_vllm_is_refused_before_anything_else() -> None:
    code = (
        "import sys, types\n"
        "fake = types.ModuleType('vllm'); fake.__version__ = '0.99.0'; sys.modules['vllm'] = fake\n"
        "import kvoffd_client.vllm; kvoffd_client.vllm.register()\n"
        "try:\n    import kvoffd_client.vllm.connector\n"
        "except ImportError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "works with vLLM 0.32.x and 0.33.x, and this is vLLM 0.99.0" in done.stdout

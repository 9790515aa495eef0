"""The overlay of a release's Python over installed binaries, of made-up packages."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from tests.tools.next_vllm import changes, overlay


def test_a_release_runs_over_the_binaries_of_another(tmp_path: Path) -> None:
    installed = tmp_path / "installed" / "vllm"
    (installed / "kernels").mkdir(parents=True)
    (installed / "__init__.py").write_text("which = 'installed'")
    (installed / "kernels" / "fast.so").write_bytes(b"binary")
    wheel = tmp_path / "vllm-9.9.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm/__init__.py", "which = 'new'")
        archive.writestr("vllm/kernels/other.so", b"cuda")
        archive.writestr("vllm-9.9.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: vllm\nVersion: 9.9.0\n")
    for _ in range(2):  # it can be made again
        tree = overlay(wheel, installed, tmp_path / "next")
    assert (tree / "vllm" / "kernels" / "fast.so").read_bytes() == b"binary"
    assert not (tree / "vllm" / "kernels" / "other.so").exists()
    code = "import vllm, importlib.metadata as m; print(vllm.which, m.version('vllm'))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(tree)})
    assert found.stdout.split() == ["new", "9.9.0+cpu"], found.stderr


def test_what_changed_in_modules_that_the_connector_imports_is_shown_and_nothing_else(tmp_path: Path) -> None:
    trees = tmp_path / "before", tmp_path / "now"
    for tree in trees:
        (tree / "v1" / "core").mkdir(parents=True)
        (tree / "v1" / "request.py").write_text(f"def arrive(): {tree.name}\n")
        (tree / "v1" / "core" / "nobody_imports_it.py").write_text(tree.name)
    found = list(changes(*trees))
    assert found[0].split()[1] == "vllm.v1.request"
    assert [line for line in found if "arrive" in line] == ["-def arrive(): before", "+def arrive(): now"]
    assert len(found) == 5

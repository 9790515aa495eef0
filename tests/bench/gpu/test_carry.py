"""What travels to a GPU machine: made small, and put together again."""

from __future__ import annotations

import struct
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.bench.gpu import carry
from tests.bench.gpu.fatbin import HEADER_BYTES, MACHINE_CODE, MAGIC, PTX, fat_binaries, slim

CODE = {(PTX, 80): b"p" * 40, (MACHINE_CODE, 80): b"a" * 64, (MACHINE_CODE, 90): b"h" * 72}


def fat_binary(code: Mapping[tuple[int, int], bytes]) -> bytes:
    entries = b"".join(
        struct.pack("<HHIQ12xI32x", kind, 1, 64, len(payload), architecture) + payload
        for (kind, architecture), payload in code.items()
    )
    return MAGIC + struct.pack("<HHQ", 1, HEADER_BYTES, len(entries)) + entries


def test_a_slim_library_has_the_same_places_and_code_for_the_meant_gpus_alone() -> None:
    old = {key: payload for key, payload in CODE.items() if key != (MACHINE_CODE, 90)}
    # A magic number in the middle of something else is no fat binary.
    library = b"\x7fELF" + bytes(4) + fat_binary(CODE) + MAGIC + bytes(20) + fat_binary(old) + b"the end."
    slimmed = slim(library, {90})
    assert len(slimmed) == len(library)
    assert list(fat_binaries(slimmed)) == list(fat_binaries(library))
    assert [len(one) for one in fat_binaries(library)] == [3, 2]
    kept = {one: slimmed[one.start : one.start + one.size] for each in fat_binaries(slimmed) for one in each}
    assert [payload.strip(b"\0")[:1] for payload in kept.values()] == [b"", b"", b"h", b"p", b""]
    assert slim(library, {80, 90}) == library.replace(b"p" * 40, bytes(40))
    assert b"pp" not in slim(library, {90}, keep_ptx=False)


def make_wheel(directory: Path, name: str, files: Mapping[str, str]) -> Path:
    path, metadata = directory / f"{name}-1.0-py3-none-any.whl", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
    with ZipFile(path, "w") as wheel:
        for inside, text in (files | {f"{name}-1.0.dist-info/METADATA": metadata}).items():
            wheel.writestr(inside, text)
    return path


@pytest.fixture
def carried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small .gpu/vllm with an archive, and a package that this machine lacks; what is there is compiled."""
    files, packed = tmp_path / "files", tmp_path / "packed"
    for each in (files / "beside", packed):
        each.mkdir(parents=True)
    carry.unpack(make_wheel(tmp_path, "kvoffd_always", {"kvoffd_always.py": "TEXT = 'always'\n"}), packed)
    with tarfile.open(files / f"vllm-{carry.HERE}.tar.xz", "w:xz") as tar:
        tar.add(packed, "")
    make_wheel(files, "kvoffd", {})
    make_wheel(files / "beside", "kvoffd_Absent.One", {"kvoffd_absent_one.py": "THERE = True\n"})
    make_wheel(files / "beside", "kvoffd_unasked", {"kvoffd_unasked.py": ""})
    needs = {"least_torch": "2.11", "beside": ["kvoffd-absent-one==1.0", "numpy==1.0"]}
    of_machine = carry.installed
    for name, value in {
        "VLLM": files,
        "SITES": tmp_path / "sites",
        "NEEDS": needs,
        "installed": lambda name: "2.11.0+cu130" if name == "torch" else of_machine(name),
    }.items():
        monkeypatch.setattr(carry, name, value)
    return files


def test_files_become_packages_once_and_only_what_the_machine_lacks(carried: Path) -> None:
    place = carry.unpacked("vllm", carry.files_of_vllm())
    program = "import kvoffd_always, kvoffd_absent_one; print(kvoffd_always.TEXT, kvoffd_absent_one.THERE)"
    environ = {"PYTHONPATH": str(place)}
    said = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
    assert said.stdout == "always True\n"
    assert not list(place.glob("kvoffd_unasked*"))
    assert list(place.glob("__pycache__/kvoffd_always*")), "compiled once for all processes"
    (place / "mark").touch()
    assert carry.unpacked("vllm", carry.files_of_vllm()) == place
    assert (place / "mark").exists()

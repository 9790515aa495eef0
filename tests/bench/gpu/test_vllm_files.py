"""What travels to a GPU machine: made small, cut into pieces, and put together again."""

from __future__ import annotations

import io
import lzma
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.bench.gpu import vllm_files, wheels
from tests.bench.gpu.fatbin import HEADER_BYTES, MACHINE_CODE, MAGIC, PTX, fat_binaries, slim

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
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


def make_wheel(directory: Path, name: str, files: Mapping[str, str], version: str = "1.0") -> Path:
    path = directory / f"{name}-{version}-py3-none-any.whl"
    with ZipFile(path, "w") as wheel:
        for inside, text in files.items():
            wheel.writestr(inside, text)
        wheel.writestr(
            f"{name}-{version}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
    return path


class Carried:
    """A small .gpu/vllm with a package that is always needed, and one that this machine lacks."""

    def __init__(self, directory: Path) -> None:
        self.files, self.sites = directory / "files", directory / "sites"
        packed, beside = directory / "packed", directory / "beside"
        for each in (self.files, packed, beside):
            each.mkdir()
        wheel = make_wheel(directory, "kvoffd_always", {"kvoffd_always.py": f"TEXT = {'x' * 5000!r}\n"})
        wheels.unpack(wheel, packed / vllm_files.SITE)
        make_wheel(beside, "kvoffd_Absent.One", {"kvoffd_absent_one.py": "THERE = True\n"})
        make_wheel(beside, "kvoffd_unasked", {"kvoffd_unasked.py": ""})
        archives = {vllm_files.ALWAYS: lzma.compress(written(packed)), vllm_files.BESIDE: written(beside)}
        vllm_files.write_pieces(self.files, PYTHON, archives, piece_bytes=1000)

    def install(self) -> Path:
        return vllm_files.install(self.files, self.sites)

    def problem(self) -> str:
        with pytest.raises(vllm_files.Lacking) as raised:
            self.install()
        assert not list(self.sites.glob("*")), "nothing is unpacked where something is missing"
        return str(raised.value)


def written(directory: Path) -> bytes:
    with io.BytesIO() as file:
        vllm_files.write_tar(file, directory)
        return file.getvalue()


@pytest.fixture
def carried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Carried:
    needs = {"least_torch": "2.11", "beside": ["kvoffd-absent-one==1.0", "numpy==1.0"], "pegaflow": "p==1"}
    monkeypatch.setattr(vllm_files, "needs", lambda: needs)
    of_machine = vllm_files._installed
    monkeypatch.setattr(vllm_files, "_installed", lambda name: "2.11.0+cu130" if name == "torch" else of_machine(name))
    return Carried(tmp_path)


def test_pieces_become_packages_once_and_only_what_the_machine_lacks(carried: Carried) -> None:
    assert len(list(carried.files.glob("beside.tar.*"))) > 1
    place = carried.install()
    program = "import kvoffd_always, kvoffd_absent_one; print(len(kvoffd_always.TEXT), kvoffd_absent_one.THERE)"
    environ = {"PYTHONPATH": str(place / vllm_files.SITE)}
    said = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
    assert said.stdout == "5000 True\n"
    assert not list(place.glob(f"{vllm_files.SITE}/kvoffd_unasked*"))
    assert list(place.glob(f"{vllm_files.SITE}/__pycache__/kvoffd_always*")), "compiled once for all processes"
    (place / "mark").touch()
    assert carried.install() == place
    assert (place / "mark").exists()


def test_what_is_missing_is_said_before_anything_is_unpacked(carried: Carried, monkeypatch: pytest.MonkeyPatch) -> None:
    piece = carried.files / "beside.tar.01"
    kept = piece.read_bytes()
    piece.unlink()
    assert "of which this machine lacks kvoffd-absent-one==1.0: bring its other pieces too" in carried.problem()
    piece.write_bytes(bytes(len(kept)))
    assert "do not belong together" in carried.problem()
    piece.write_bytes(kept)
    (carried.files / "vllm.tar.xz.00").unlink()
    assert "of vllm.tar.xz: bring its other pieces too" in carried.problem()
    monkeypatch.setattr(vllm_files, "_installed", lambda name: {"torch": "2.9.1"}.get(name))
    assert carried.problem() == "vLLM needs torch 2.11 for CUDA or newer; this Python has 2.9.1."


def test_other_pythons_are_refused(carried: Carried) -> None:
    vllm_files.write_pieces(carried.files, "3.99", {})
    assert f"is for Python 3.99, and this is {PYTHON}" in carried.problem()


def test_a_wheel_is_unpacked_as_pip_does(tmp_path: Path) -> None:
    files = {"one.py": "1", "one-1.0.data/purelib/two.py": "2", "left/out.so": "3"}
    wheels.unpack(make_wheel(tmp_path, "one", files), tmp_path / "site", ["left/*"])
    there = sorted(
        str(path.relative_to(tmp_path / "site")) for path in (tmp_path / "site").rglob("*") if path.is_file()
    )
    assert there == ["one-1.0.dist-info/METADATA", "one.py", "two.py"]


def test_every_need_is_pinned_and_named_once() -> None:
    wanted = vllm_files.needs()
    needs = [*wanted["packed"], *wanted["beside"], wanted["pegaflow"]]
    assert all(one.count("==") == 1 for one in needs)
    assert len({wheels.normal(one).partition("==")[0] for one in needs}) == len(needs)

"""The table of keys that the index of blocks, the policies and the disks share."""

from __future__ import annotations

import subprocess
from pathlib import Path

import kvoffd
from tests.kit.cuda_abi import compiler

CHECK = Path(__file__).with_name("slot_index_check.c")


def test_a_table_that_grows_and_shrinks_keeps_its_keys(tmp_path: Path) -> None:
    for words in (1, 2):
        program = tmp_path / f"check-{words}"
        flags = ["-std=gnu11", "-O1", f"-DWORDS={words}", f"-I{Path(kvoffd.__file__).parent / 'system'}"]
        subprocess.run([compiler(), *flags, "-o", program, CHECK], check=True)
        subprocess.run([program], check=True)

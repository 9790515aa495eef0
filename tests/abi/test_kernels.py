"""The benches' kernel is what NVIDIA's assembler takes, for every GPU that it may run on."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.bench.gpu.driver import SWEEP
from tests.kit.cuda_files import assembler

# The oldest driver assembles what it is given for the GPUs of its time.
CARDS = {
    "12.0": ("75", "80", "86", "89", "90"),
    "newest": ("75", "80", "86", "87", "89", "90", "100", "103", "120", "121"),
}


def assemble(version: str, card: str, kernel: Path, into: Path) -> str:
    """What the assembler says; nothing where it is content."""
    command = [assembler(version), "--warning-as-error", f"--gpu-name=sm_{card}", kernel, "-o", into / "out"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == (into / "out").exists()
    return done.stdout + done.stderr


def test_the_kernel_is_assembled_for_every_card(tmp_path: Path) -> None:
    for version, cards in CARDS.items():
        for card in cards:
            assert assemble(version, card, SWEEP, tmp_path) == ""
            (tmp_path / "out").unlink()
    kernel = tmp_path / "wrong.ptx"
    kernel.write_text(SWEEP.read_text().replace("bra NEXT", "bra BEGIN"))
    assert "error" in assemble("newest", "90", kernel, tmp_path)

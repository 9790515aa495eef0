"""What systemd says of a unit's hardening: `python -m tests.tools.exposure [UNIT]`, which is `make exposure`.

Prints the overall exposure (10 is a service without any hardening) and what remains, each with the reason that
deploy/README.md gives for it. 1 where something remains that it does not explain.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

DEPLOY = Path(__file__).parents[2] / "deploy"
UNIT = DEPLOY / "systemd" / "kvoffd.service"
EXECUTABLE = "/opt/kvoffd/bin/kvoffd"


class Judgement(NamedTuple):
    """What systemd reports about a unit."""

    overall: float
    remaining: dict[str, float]
    """Exposure by name of the setting, the largest first."""


def judge(unit: str) -> Judgement:
    """``unit`` is the text of a unit. Nothing is started."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "kvoffd.service"
        # The daemon is not under /opt on the machine that judges.
        file.write_text(unit.replace(EXECUTABLE, sys.executable))
        words, listed = (_security(str(file), *options) for options in ([], ["--json=short"]))
    found = re.search(r"Overall exposure level for kvoffd.service: ([0-9.]+)", words)
    assert found is not None, words
    remaining = {item["name"]: float(item["exposure"]) for item in json.loads(listed) if item["exposure"]}
    return Judgement(float(found[1]), dict(sorted(remaining.items(), key=lambda item: -item[1])))


def _security(file: str, *options: str) -> str:
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", *options, file]
    return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout


def explained() -> dict[str, str]:
    """Why deploy/README.md leaves something open, by name of the setting."""
    rows = re.findall(r"^\| `([^`]+)` \| (.+) \|$", (DEPLOY / "README.md").read_text(), re.MULTILINE)
    return {name.replace("\\|", "|"): reason for name, reason in rows if "=" in name}


def main() -> int:
    """Run the command line. Returns 0 when the README explains all that remains."""
    if shutil.which("systemd-analyze") is None:
        print("systemd-analyze is not installed; on Debian and Ubuntu it comes with the package systemd.")
        return 1
    judgement, reasons = judge((Path(sys.argv[1]) if len(sys.argv) > 1 else UNIT).read_text()), explained()
    print(f"Overall exposure: {judgement.overall} of 10. What remains:")
    for name, exposure in judgement.remaining.items():
        print(f"  {exposure:.1f}  {name:<42} {reasons.get(name, 'NOT EXPLAINED in deploy/README.md')}")
    return int(not judgement.remaining.keys() <= reasons.keys())


if __name__ == "__main__":
    sys.exit(main())

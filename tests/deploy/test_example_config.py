"""deploy/kvoffd.toml: every setting explained, and what it says of defaults is true."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from pathlib import Path

from kvoffd.config import SETTINGS, Config, load_config

EXAMPLE = Path(__file__).parents[2] / "deploy" / "kvoffd.toml"
SETTING_LINE = re.compile(r"^# ([a-z_]+ = .*)$", re.MULTILINE)


def test_it_names_every_setting_once_and_no_other() -> None:
    names = re.findall(r"^(?:# )?([a-z_]+) = ", EXAMPLE.read_text(), re.MULTILINE)
    assert sorted(names) == sorted(setting.name for setting in SETTINGS)


def test_every_value_it_shows_is_the_default(tmp_path: Path) -> None:
    everything = tmp_path / "kvoffd.toml"
    everything.write_text(SETTING_LINE.sub(r"\1", EXAMPLE.read_text()))
    assert len(tomllib.loads(everything.read_text())) == len(SETTINGS)
    config = load_config({}, {}, everything)
    # The directory's default is another for users who are not root.
    assert config == dataclasses.replace(Config(), directory=Path("/run/kvoffd"))


def test_every_setting_is_explained() -> None:
    lines = EXAMPLE.read_text().splitlines()
    for number, line in enumerate(lines):
        if re.match(r"(?:# )?[a-z_]+ = ", line):
            assert re.match(r"# .{15,}", lines[number - 1]), f"no explanation above: {line}"

"""How ``kvoffd config`` prints a configuration."""

from __future__ import annotations

import json

from kvoffd.config import SETTINGS, LoadedConfig


def config_as_toml(loaded: LoadedConfig) -> str:
    """A TOML file that gives the same configuration, with each value's source as a comment."""
    pairs: list[tuple[str, str]] = []
    for setting in SETTINGS:
        value = getattr(loaded.config, setting.field_name)
        text = str(value) if setting.kind.metavar == "N" else _quoted(setting.kind.show(value))
        pairs.append((f"{setting.name} = {text}", loaded.sources[setting.field_name]))
    width = max(len(left) for left, _ in pairs)
    return "".join(f"{left:<{width}}  # {source}\n" for left, source in pairs)


def _quoted(text: str) -> str:
    """``text`` as a TOML basic string. JSON's escapes are TOML's, but for DEL, which TOML wants escaped too."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def config_as_json(loaded: LoadedConfig) -> str:
    """One JSON object: by setting, the value (bytes and seconds as numbers), the text that gives it and its source."""
    shown = {}
    for setting in SETTINGS:
        value = getattr(loaded.config, setting.field_name)
        shown[setting.name] = {
            "value": value if isinstance(value, (int, float, str, tuple)) else str(value),
            "text": setting.kind.show(value),
            "source": loaded.sources[setting.field_name],
        }
    return json.dumps(shown, indent=2) + "\n"

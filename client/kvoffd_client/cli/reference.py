"""What each command prints with ``--json``, key by key: at the end of its help, and as the page client/JSON.md.

``python -m kvoffd_client.cli.reference > client/JSON.md``
"""

from __future__ import annotations

from msgspec import Struct

from kvoffd_client.cli import json_objects as objects
from kvoffd_client.cli.json_output import describe
from kvoffd_proto.admin import HealthReply, NamespaceInfo, PolicyDescribed, ScrubReply
from kvoffd_proto.stats import StatsReply

JSON: dict[str, type[Struct]] = {
    "export": objects.ExportDone,
    "import": objects.ImportDone,
    "import --list": objects.FileContent,
    "stats": StatsReply,
    "health": HealthReply,
    "sessions": objects.Sessions,
    "sessions --engines": objects.Engines,
    "namespaces": objects.Namespaces,
    "namespaces diff": objects.Differences,
    "namespace set": NamespaceInfo,
    "clear": objects.Cleared,
    "reset": objects.FleetReset,
    "scrub": ScrubReply,
    "events": objects.Events,
    "bench lookup": objects.BenchReport,
    "bench copy": objects.BenchReport,
    "disk": objects.Disks,
    "shared": objects.SharedTiers,
    "policy": PolicyDescribed,
    "advise": objects.AdviceGiven,
    "curve": objects.HitCurves,
    "record": objects.RecordDone,
    "simulate": objects.Simulation,
    "block ls": objects.Blocks,
    "block show": objects.BlockParts,
}
"""The object that a command prints, by its words."""

HEAD = """# JSON of kvoffd-cli

What each command prints with `--json`, on one line: bytes and seconds as numbers, fingerprints and keys in hex, `null`
where something is not known. `kvoffd-cli COMMAND --help` ends with the same. Later releases may have more keys; these
keep their names and meanings. `python -m kvoffd_client.cli.reference > client/JSON.md` writes this page.
"""


def epilog_of(words: str) -> str:
    """The end of a command's help; empty where it prints no JSON."""
    parts = []
    for command, struct in JSON.items():
        name, _, option = command.partition(" --")
        if name == words:
            keys = "".join(f"\n  {key}: {text}" for key, text in describe(struct))
            # \b keeps the lines as they are.
            parts.append(f"\b\nKeys of {f'--{option} ' if option else ''}--json:{keys}")
    return "\n\n".join(parts)


def page() -> str:
    """client/JSON.md."""
    commands: dict[type[Struct], list[str]] = {}
    for command, struct in JSON.items():
        commands.setdefault(struct, []).append(f"kvoffd-cli {command}")
    sections = (
        f"\n## {', '.join(f'`{words} --json`' for words in names)}\n\n| key | what it is |\n|---|---|\n"
        + "".join(f"| `{key}` | {text.replace('|', chr(92) + '|')} |\n" for key, text in describe(struct))
        for struct, names in commands.items()
    )
    return HEAD + "".join(sections)


if __name__ == "__main__":
    print(page(), end="")

"""``kvoffd-cli simulate``: runs ``kvoffd simulate``, since the cache that it replays traces through is the daemon's."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from kvoffd_client.cli.target import CliError, Json


def simulate(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Trace of record, or in Mooncake's format.")],
    policy: Annotated[str, typer.Option(metavar="NAMES", help="Policies, separated by commas, or all.")] = "all",
    blocks: Annotated[str, typer.Option(metavar="N,...", help="Sizes of the pool, in blocks of the trace.")] = "",
    size: Annotated[str, typer.Option(metavar="SIZE,...", help="Sizes of the pool, as in 10GiB,20GiB.")] = "",
    block_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Bytes of a block of all ranks, where FILE does not say.")
    ] = "",
    json: Json = False,
    plot: Annotated[bool, typer.Option("--plot", help="Draw the hit ratios, with --json on stderr.")] = False,
) -> int:
    """Replay a trace with several policies and pool sizes.

    Needs no daemon. Goes through the daemon's cache, without memory, on all cores, and prints the token hit ratio,
    the share of the blocks that is written, and the most hits that were possible. Give --blocks, --size or both.
    """
    if find_spec("kvoffd") is None:
        raise CliError("simulate runs the daemon's cache, and the package kvoffd is not installed here.")
    words = [sys.executable, "-m", "kvoffd", "simulate", f"--policy={policy}"]
    named = {"--blocks": blocks, "--size": size, "--block-size": block_size}
    words += [f"{option}={value}" for option, value in named.items() if value]
    words += [option for option, wanted in {"--json": json, "--plot": plot}.items() if wanted]
    return subprocess.run([*words, "--", str(file)], check=False).returncode

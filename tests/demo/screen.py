"""What the demo shows: one line per step with a spinner and the elapsed time, and the table at the end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from tests.demo.scenario import PROMPT_LENGTHS, Outcome, loadable_tokens


class Screen:
    """Prints to the terminal; without one, a plain line per finished step."""

    def __init__(self) -> None:
        self.console = Console(highlight=False)

    @contextmanager
    def step(self, title: str) -> Iterator[None]:
        """Show what is being waited for, and how long already; leave a line with the time it took."""
        started = time.monotonic()
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        with Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal) as progress:
            progress.add_task(title, total=None)
            yield
        self.console.print(f"{time.monotonic() - started:6.1f} s  {title}", markup=False, soft_wrap=True)

    def show(self, outcome: Outcome) -> None:
        """Print the table."""
        table = Table(title=f"{len(PROMPT_LENGTHS)} prompts, {sum(PROMPT_LENGTHS):,} tokens, one after the other")
        table.add_column("run")
        table.add_column("TTFT", justify="right")
        table.add_column("of cold", justify="right")
        table.add_column("tokens loaded", justify="right")
        table.add_column("same tokens")
        for row in outcome.passes:
            table.add_row(
                row.title,
                f"{row.ttft_ms:,.0f} ms",
                f"{100 * row.ttft_ms / outcome.cold.ttft_ms:.0f} %",
                f"{row.loaded_tokens:,}",
                "-" if row is outcome.cold else "yes" if row.same_tokens(outcome.cold) else "NO",
            )
        self.console.print()
        self.console.print(table)
        if outcome.another_node is None:
            self.console.print(
                "Another node was not tried: there is no valkey-server or redis-server (`make servers` installs one).\n"
            )
        self.console.print(
            "Every run after the cold one has to get the prompts from kvoffd.\n"
            "  cache cleared: the same engine, after its own prefix cache was cleared\n"
            "  second engine: one that has not computed them\n"
            "  engine restarted: a new process\n"
            "  another node: an engine of a second kvoffd, whose pool was empty, through a shared store\n"
            "TTFT: time to first token as vLLM measures it, from a request's arrival to its first token; the mean.\n"
            f"Tokens loaded: from kvoffd, of {loadable_tokens():,} in whole blocks; the engine computes the rest.\n"
            "Same tokens: whether the answers are those of the cold run.\n",
            soft_wrap=True,
        )

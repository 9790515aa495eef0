"""Writes the man pages and bash completions of both programs, from what their parsers know: `pages.py DIRECTORY`.

The directory gets man/kvoffd.1, man/kvoffd-cli.1, completions/kvoffd and completions/kvoffd-cli.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvoffd import __version__
from kvoffd.cli import make_parser
from kvoffd_client.cli.app import command_tree


@dataclass
class Option:
    flags: list[str]
    metavar: str
    text: str


@dataclass
class Command:
    """One program or subcommand."""

    words: str
    summary: str
    text: str
    options: list[Option] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)


def of_argparse(words: str, parser: argparse.ArgumentParser, summary: str) -> Command:
    found = Command(words, summary, "\n\n".join(filter(None, (parser.description, parser.epilog))))
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            summaries = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, inner in action.choices.items():
                found.commands.append(of_argparse(f"{words} {name}", inner, summaries[name]))
        elif action.option_strings:
            metavar = action.metavar if isinstance(action.metavar, str) else ""
            found.options.append(Option(list(action.option_strings), metavar, (action.help or "").replace("%%", "%")))
    return found


def of_click(words: str, command: Any, summary: str) -> Command:
    # \b keeps click from joining the lines of a list: here all lines stay.
    text = "\n\n".join(filter(None, (command.help, command.epilog))).replace("\b\n", "")
    found = Command(words, summary, text)
    for parameter in command.params:
        if parameter.param_type_name == "option":
            metavar = "" if parameter.is_flag else parameter.metavar or parameter.name.upper()
            found.options.append(Option([*parameter.opts, *parameter.secondary_opts], metavar, parameter.help or ""))
    for name, inner in getattr(command, "commands", {}).items():
        found.commands.append(of_click(f"{words} {name}", inner, (inner.help or "").split("\n")[0]))
    return found


def man_page(program: Command) -> str:
    """The program's page in section 1, in man(7)'s macros."""
    other = "kvoffd\\-cli" if program.words == "kvoffd" else "kvoffd"
    lines = [
        f'.TH "{program.words.upper()}" 1 "" "kvoffd {__version__}"',
        ".SH NAME",
        f"{escaped(program.words)} \\- {escaped(program.summary)}",
        ".SH SYNOPSIS",
        f".B {escaped(program.words)}",
        "COMMAND [OPTION]...",
        ".SH DESCRIPTION",
        *paragraphs(program.text),
        *option_list(program.options),
        ".SH COMMANDS",
    ]
    for command in leaves(program):
        lines += [f".SS {escaped(command.words)}", *paragraphs(command.text), *option_list(command.options)]
    lines += [".SH FILES", "/etc/kvoffd/kvoffd.toml explains every setting.", ".SH SEE ALSO", f".BR {other} (1)"]
    return "\n".join(lines) + "\n"


def leaves(program: Command) -> list[Command]:
    return [leaf for command in program.commands for leaf in (leaves(command) if command.commands else [command])]


def paragraphs(text: str) -> list[str]:
    """As they are: lists in the help texts are aligned by spaces."""
    found: list[str] = []
    for part in re.split(r"\n\s*\n", text.strip()):
        indented = any(line.startswith("  ") for line in part.splitlines())
        body = [escaped(line) for line in part.splitlines()]
        found += [".PP", *([".nf", *body, ".fi"] if indented else body)]
    return found


def option_list(options: list[Option]) -> list[str]:
    lines: list[str] = []
    for option in options:
        flags = ", ".join(f"\\fB{escaped(flag)}\\fR" for flag in option.flags)
        metavar = f" \\fI{escaped(option.metavar)}\\fR" if option.metavar else ""
        lines += [".TP", f"{flags}{metavar}", *(escaped(line) for line in option.text.splitlines())]
    return lines


def escaped(text: str) -> str:
    """Text that troff takes for text, hyphens for those one can copy."""
    text = text.strip("\n").replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{text}" if text.startswith((".", "'")) else text


def completion(program: Command) -> str:
    """A bash function that offers the subcommands and options of the words before the cursor, and files."""
    cases: list[str] = []

    def add(command: Command) -> None:
        words = [name for option in command.options for name in option.flags]
        words += [inner.words.rsplit(" ", 1)[1] for inner in command.commands]
        cases.append(f'        "{command.words}") words="{" ".join(words)}" ;;')
        for inner in command.commands:
            add(inner)

    add(program)
    function = "_" + program.words.replace("-", "_")
    return f"""# bash completion for {program.words}
{function}() {{
    local path="{program.words}" words="" word
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        case "$path $word" in
            {"|".join(f'"{command.words}"' for command in below(program))}) path="$path $word" ;;
        esac
    done
    case "$path" in
{chr(10).join(cases)}
    esac
    COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F {function} {program.words}
"""


def below(program: Command) -> list[Command]:
    return [found for command in program.commands for found in (command, *below(command))]


def main(directory: Path) -> int:
    daemon = of_argparse("kvoffd", make_parser(), "keeps the KV cache blocks of LLM engines in host memory")
    console = of_click("kvoffd-cli", command_tree(), "shows and administers the kvoffd daemon")
    for name in ("man", "completions"):
        (directory / name).mkdir(parents=True)
    for program in (daemon, console):
        (directory / "man" / f"{program.words}.1").write_text(man_page(program))
        (directory / "completions" / program.words).write_text(completion(program))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

"""``kvoffd-cli namespaces reuse``: where prompts differ that could share more."""

from __future__ import annotations

import json as jsonlib
from array import array
from typing import Annotated

import msgspec
import typer

from kvoffd_client.admin_client import base_url, open_url
from kvoffd_client.cli.format import print_json, say
from kvoffd_client.cli.target import CliError, Directory, PlainJson, open_admin
from kvoffd_client.errors import HttpError
from kvoffd_proto.findings import sentence_of
from kvoffd_proto.stats import ListBranchPoints, namespace_id
from kvoffd_proto.units import printable

ANSWER_S = 10.0
MAX_BYTES = 1 << 20
NOTHING = (
    "No prompts are known that differ in one place and continue with the same blocks. Engines send tokens of blocks "
    "only with KV cache events (--kv-events-config '{\"enable_kv_cache_events\": true}')."
)


class Detokenized(msgspec.Struct):
    """Answer of vLLM's ``/detokenize``."""

    prompt: str


def reuse(
    engine: Annotated[
        str | None,
        typer.Option("--engine", metavar="URL", help="Show the text of these places, by vLLM's /detokenize."),
    ] = None,
    directory: Directory = None,
    json: PlainJson = False,
) -> int:
    """Show where prompts differ although what follows is the same.

    A date or an id near the beginning keeps all that follows from being shared. Finds only places where the part that
    differs has as many tokens in each prompt. The texts are of the last two prompts.

    Exit status: 0 such places are shown, 1 there are none, 2 an error.
    """
    with open_admin(directory) as admin:
        points = admin.ask(ListBranchPoints).points
        names = {one.namespace: one.label for one in admin.namespaces().namespaces}
    if json:
        print_json({"points": points})
    elif not points:
        say(NOTHING)
    for point in () if json else points:
        say(f"{printable(names.get(point.namespace, ''))} {namespace_id(point.namespace)}: {sentence_of(point)}")
        for example in point.examples if engine is not None else ():
            say(f"  {_text_of(engine or '', example)!r}")
    return int(not points)


def _text_of(engine: str, token_ids: bytes) -> str:
    """Return the text of tokens. Raises CliError."""
    where = base_url(engine)
    body = jsonlib.dumps({"tokens": array("I", token_ids).tolist()}).encode()
    try:
        with open_url(f"{where}/detokenize", ANSWER_S, body, {"Content-Type": "application/json"}) as answer:
            return msgspec.json.decode(answer.read(MAX_BYTES), type=Detokenized).prompt
    except HttpError as error:
        raise CliError(f"{where} {error}; --engine is the URL of a vLLM server of this model.") from error

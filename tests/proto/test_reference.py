"""The wire's reference page says everything, and is the one that is checked in."""

from __future__ import annotations

import hashlib
import re
import typing
from pathlib import Path

import pytest
from msgspec import Struct

from kvoffd_proto import codec, events, lifeline
from kvoffd_proto import messages as m
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import fields_of
from tests.tools.protocol_page import MODULES, _docstring, reference, structs_in

PAGE = Path(__file__).parents[2] / "proto" / "PROTOCOL.md"


@pytest.fixture(scope="module")
def documented() -> list[type[Struct]]:
    """The messages and their parts that the page describes."""
    return [
        kind
        for name in re.findall("^#### (\\w+)$", reference(), re.MULTILINE)
        for kind in {getattr(module, name, None) for module in MODULES}
        if isinstance(kind, type) and issubclass(kind, Struct)
    ]


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == reference(), "run: python -m tests.tools.protocol_page > proto/PROTOCOL.md"


def test_a_wire_of_another_shape_has_another_version() -> None:
    """Two ends of one version that differ could not read each other's frames, and loads would never be answered."""
    kept = [line for line in reference().splitlines() if line.startswith(("|", "####", "Encoded as"))]
    shape = "\n".join(line.rsplit(" | ", 1)[0] for line in kept)  # without what the fields mean
    found = m.PROTOCOL_VERSION, hashlib.sha256(shape.encode()).hexdigest()[:16]
    assert found == (26, "315901c713dce0ca"), (
        "raise PROTOCOL_VERSION where more of the wire has changed than statistics, and put both here"
    )


def test_every_message_and_every_field_is_described(documented: list[type[Struct]]) -> None:
    for struct in documented:
        assert _docstring(struct).endswith("."), f"{struct.__name__} needs a sentence"
        for field, _, description in fields_of(struct):
            assert description.endswith("."), f"{struct.__name__}.{field.name} needs a doc(...) with a sentence"


def test_every_message_of_the_wire_is_on_the_page(documented: list[type[Struct]]) -> None:
    on_page = set(documented)
    assert set(m.EXCHANGES) <= on_page
    assert set(codec.REPLIES) <= on_page
    assert {m.Completions, events.EventBatch} <= on_page
    for union in (lifeline.FromDaemon, lifeline.FromClient, m.Handle, events.KvEvent):
        assert set(typing.get_args(union)) <= on_page
    for struct in on_page:
        for _, hint, _ in fields_of(struct):
            assert set(structs_in(hint)) <= on_page, f"a part of {struct.__name__} is missing"


def test_every_request_is_declared_with_one_answer_and_a_role() -> None:
    requests = {one for kind in m.Request.__subclasses__() for one in kind.__subclasses__() or [kind]}
    assert set(m.EXCHANGES) == requests
    assert all(exchange.roles for exchange in m.EXCHANGES.values())
    assert all(issubclass(exchange.answer, (m.Reply, m.Completions)) for exchange in m.EXCHANGES.values())


def test_every_error_code_has_a_sentence_of_its_own_on_the_page() -> None:
    page = reference()
    sentences = {code.sentence for code in ErrorCode}
    assert len(sentences) == len(ErrorCode)
    for code in ErrorCode:
        assert f"| {code.value} | `{code.name}` | {code.sentence} |" in page


def test_links_lead_to_headings() -> None:
    page = reference()
    headings = {line.lstrip("# ").lower() for line in page.splitlines() if line.startswith("#")}
    targets = {part.split(")")[0] for part in page.split("](#")[1:]}
    assert targets <= headings

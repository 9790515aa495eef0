"""Percentages that do not lie, and locales that have no µ."""

from __future__ import annotations

import json
from io import BytesIO, TextIOWrapper
from typing import cast

import pytest

from kvoffd_client.cli import write_any_locale
from kvoffd_client.cli.format import percent, print_json


def test_zero_and_hundred_mean_exactly_that() -> None:
    shares = ((0, 0), (0, 5), (1, 10**6), (1, 3), (99_999, 100_000), (5, 5), (3, 2))
    words = ["-", "0 %", "<0.1 %", "33.3 %", "99.9 %", "100 %", "150.0 %"]
    assert [percent(*share) for share in shares] == words


@pytest.mark.parametrize(("locale", "written"), [("C", b"85 us ?\n"), ("C.UTF-8", "85 µs 模\n".encode())])
def test_the_locale_c_gets_ascii_and_json_loses_nothing(locale: str, written: bytes) -> None:
    stream = TextIOWrapper(BytesIO(), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LC_ALL", locale)
        patch.setattr("sys.stdout", stream)
        write_any_locale()
        print("85 µs 模", flush=True)
        print_json({"name": "模"})
    output = cast(BytesIO, stream.buffer).getvalue()
    assert output.startswith(written)
    assert json.loads(output[len(written) :]) == {"name": "模"}

"""The contest's S3 answers requests for a part of an object, as LMCache's client sends them."""

from __future__ import annotations

import urllib.request

from tests.tiers.faulty_bucket import FaultyBucket


def test_a_part_of_an_object_says_which_it_is() -> None:
    with FaultyBucket() as bucket:
        bucket.values["/key"] = b"0123456789"
        request = urllib.request.Request(f"http://127.0.0.1:{bucket.port}/key", headers={"Range": "bytes=2-99"})
        with urllib.request.urlopen(request, timeout=10.0) as answer:
            assert answer.status == 206
            assert answer.headers["Content-Range"] == "bytes 2-9/10"
            assert answer.read() == b"23456789"

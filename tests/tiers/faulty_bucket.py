"""A server that speaks as much of S3's protocol as a shared tier needs, and lies, hangs and cuts on purpose."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from math import inf
from random import Random
from urllib.parse import parse_qs

from tests.kit.closing import ServerThread

MAX_LATE_S = 10.0
RANGE = re.compile(r"bytes=(\d+)-(\d*)")


class Server(ThreadingHTTPServer):
    request_queue_size = 128
    """A store connects 64 times at once; a SYN that finds the queue full is sent again a second later."""


class FaultyBucket(ServerThread):
    """Has the objects of one bucket, until a test sets a fault.

    Attributes:
        values: the objects, by path.
        delay_s: time that it takes before each answer.
        spoil: changes an object on its way to a client.
        cut_after: bytes of an object after which it closes the connection; ``cuts`` times.
        chunks: what is sent of an object, in chunks; its length is sent beside, as no server should.
        errors: status and code that requests of a method get.
        refused_part: part of the requests that are told to come more slowly, in an order that is always the same.
        busy_paths: objects of which all requests are.
        late_paths: objects of which all requests wait until it is empty.
        refused: how many of each method were told to come more slowly.
        kept: the code with which each object stays that one request is to remove with others.
        requests: how many of each method it was given; those that list are LIST.
        authorization: by which the last was signed.
    """

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.delay_s = 0.0
        self.spoil: Callable[[bytes], bytes] = bytes
        self.cut_after: int | None = None
        self.cuts = inf
        self.chunks: Callable[[bytes], Iterable[bytes]] | None = None
        self.errors: dict[str, tuple[int, str]] = {}
        self.refused_part, self._random = 0.0, Random(0)
        self.busy_paths: set[str] = set()
        self.late_paths: set[str] = set()
        self.refused: Counter[str] = Counter()
        self.kept = ""
        self.requests: Counter[str] = Counter()
        self.authorization = ""
        bucket = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def log_message(self, *_: object) -> None: ...

            def answer(self, status: int, body: bytes = b"", part: str = "") -> None:
                self.send_response(status)
                if part:
                    self.send_header("Content-Range", part)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("ETag", f'"{md5(body).hexdigest()}"')
                self.send_header("Last-Modified", "Sat, 21 Nov 2026 12:00:00 GMT")
                chunks = bucket.chunks if self.command == "GET" and status == 200 else None
                if chunks is not None:
                    self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                if self.command == "HEAD":
                    return
                if chunks is not None:
                    for chunk in chain(chunks(body), [b""]):
                        self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
                    return
                if self.command == "GET" and status == 200 and bucket.cut_after is not None and bucket.cuts:
                    bucket.cuts -= 1
                    self.wfile.write(body[: bucket.cut_after])
                    self.close_connection = True
                    return
                self.wfile.write(body)

            def answer_list(self, prefix: str) -> None:
                entry = "<Contents><Key>{}</Key><LastModified>2026-11-21T12:00:00.000Z</LastModified>"
                entry += '<ETag>"{}"</ETag><Size>{}</Size></Contents>'
                listed = [
                    entry.format(path.removeprefix("/bucket/"), md5(body).hexdigest(), len(body))
                    for path, body in sorted(bucket.values.items())
                    if path.startswith(f"/bucket/{prefix}")
                ]
                whole = "<IsTruncated>false</IsTruncated>"
                self.answer(200, f"<ListBucketResult>{whole}{''.join(listed)}</ListBucketResult>".encode())

            def answer_object(self, body: bytes) -> None:
                wanted = RANGE.fullmatch(self.headers.get("Range", ""))
                if wanted is None or self.command == "HEAD":
                    return self.answer(200, body)
                first, last = int(wanted[1]), min(int(wanted[2] or len(body)), len(body) - 1)
                self.answer(206, body[first : last + 1], f"bytes {first}-{last}/{len(body)}")

            def refuse(self, status: int, code: str) -> None:
                self.answer(status, b"<Error><Code>%s</Code></Error>" % code.encode())

            def handle_one_request(self) -> None:
                try:
                    super().handle_one_request()
                except OSError:
                    self.close_connection = True

            def serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                query = parse_qs(self.path.partition("?")[2])
                lists = self.command == "GET" and "list-type" in query
                bucket.requests["LIST" if lists else self.command] += 1
                bucket.authorization = self.headers.get("Authorization", "")
                time.sleep(bucket.delay_s)
                path = self.path.partition("?")[0]
                until = time.monotonic() + MAX_LATE_S
                while path in bucket.late_paths and time.monotonic() < until:
                    time.sleep(0.01)
                if path in bucket.busy_paths or bucket._random.random() < bucket.refused_part:
                    bucket.refused[self.command] += 1
                    self.refuse(503, "SlowDown")
                elif self.command in bucket.errors:
                    self.refuse(*bucket.errors[self.command])
                elif self.command == "PUT":
                    bucket.values[path] = body
                    self.answer(200)
                elif self.command == "POST":
                    gone = re.findall(rb"<Key>(.*?)</Key>", body)
                    if bucket.kept:
                        kept = b"<Error><Key>%s</Key><Code>%s</Code><Message>No.</Message></Error>"
                        answers = b"".join(kept % (key, bucket.kept.encode()) for key in gone)
                        return self.answer(200, b"<DeleteResult>%s</DeleteResult>" % answers)
                    for key in gone:
                        bucket.values.pop(f"{path.rstrip('/')}/{key.decode()}", None)
                    deleted = b"".join(b"<Deleted><Key>%s</Key></Deleted>" % key for key in gone)
                    self.answer(200, b"<DeleteResult>%s</DeleteResult>" % deleted)
                elif lists:
                    self.answer_list(query.get("prefix", [""])[0])
                elif path not in bucket.values:
                    self.refuse(404, "NoSuchKey")
                else:
                    self.answer_object(bucket.spoil(bucket.values[path]))

            do_GET = do_HEAD = do_PUT = do_POST = serve

        super().__init__(Server(("127.0.0.1", 0), Handler))

    def refuse_writes(self, answer: tuple[int, str]) -> None:
        self.errors["PUT"] = answer

    @property
    def url(self) -> str:
        return f"s3://bucket?endpoint=http://127.0.0.1:{self.port}&region=us-east-1"

"""An S3 bucket as a store, over obstore: each block is an object, found by HEAD.

An object is ``PREFIX/HH/KEY``: ``HH`` are the first digits of the block's hash, by which a bucket can spread its load.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from math import inf
from typing import Any, NamedTuple, TypeVar
from urllib.parse import parse_qs, urlsplit

import numpy as np
import obstore
import uvloop
from obstore.store import S3Store

from kvoffd.errors import KvoffdError
from kvoffd.tiers.header import HEADER_BYTES, Block, BlockGroup, decode_header, encode_header
from kvoffd.tiers.names import block_name, block_names, decode_generation, generation_name
from kvoffd.tiers.store import (
    Credentials,
    GetRequest,
    PutRequest,
    Received,
    Store,
    StoreError,
    StoreFault,
)
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.units import printable

CONNECT_S = 1.0
"""Limit for TCP and TLS."""
REQUEST_S = 30.0
"""Limit for any request without an earlier deadline."""
GENERATION_S = 5.0
"""Time for which a generation is cached: a fleet-wide reset takes effect within it."""
MAX_GENERATIONS = 1024
"""Generations that are cached, and ETags of their objects; with one more, the others are forgotten."""
LISTED_FROM = 13
"""Namespaces from which on their generations are listed in one request: AWS charges a LIST as 12.5 GETs."""
MAX_LISTED = 1000
"""Generations that are listed, what one answer has; further ones are asked for."""
MAX_VALUE_BYTES = 20
"""Size of a stored generation, a number of up to 18 digits."""
RECEIVE_BYTES = 64 << 10
"""Bytes of an object that are received before they are copied to the pool. Each part takes a turn of the event loop,
which costs up to a fifth of the speed of a local server (measured); on a slow line, parts show progress."""
MAX_QUOTED_CHARACTERS = 4096
"""Limit for an exception's text, which has all that a server sends with an error."""
PROBES = 12
"""Concurrent HEADs that search for a prefix's end."""
REQUESTS_AT_ONCE = 64
"""Concurrent HEADs and DELETEs otherwise."""
RETRIES, RETRY_S, RETRIED_SHARE = 4, 0.05, 0.6
"""Retries of a request that an overloaded bucket refuses, the mean pause before the first, which doubles each time, and
the part of a call's time in which they begin: the rest is for the answer."""
LATE_S, LATE_SHARE = 0.1, 0.2
"""Time before a call's deadline from when on it does not wait for single requests that have not been answered, so that
the other answers come in time; at most this part of the call's time."""
UNANSWERED = StoreFault.BUSY, StoreFault.TIMEOUT
"""Kinds of errors that concern one request alone if others were answered."""
ERRORS = (
    (
        StoreFault.FULL,
        "507|Quota|StorageFull|InsufficientStorage|InsufficientCapacity|EntityTooLarge",
        "it accepts no more",
    ),
    (StoreFault.CLOCK, "RequestTimeTooSkewed|RequestExpired", "set this machine's clock"),
    (StoreFault.BUCKET, "NoSuchBucket", "make the bucket, or check its name and endpoint"),
    (
        StoreFault.REGION,
        "AuthorizationHeaderMalformed|PermanentRedirect|redirects",
        "check its region, which the URL names as region=NAME",
    ),
    (
        StoreFault.CREDENTIALS,
        "401|403|AccessDenied|ExpiredToken|InvalidToken|TokenRefreshRequired",
        "check the credentials, which are read at the start; they need s3:GetObject, s3:PutObject, s3:DeleteObject and "
        "s3:ListBucket",
    ),
    (StoreFault.BUSY, "429|503|SlowDown", "it is overloaded"),
)
"""Kinds of errors, a pattern of an answer's status and code, and the hint; the first match counts."""
KEY_VARIABLES = {"AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE"}
_CODE = re.compile(r"(?:<Code>|\(code: )([A-Za-z0-9]+)(?:</Code>|\))")
"""Code of an error, also of one object of a removal, whose request succeeds even if it removes none."""
_CAUSE = re.compile(r'(?:message|error): "([^"]{1,200})"')
"""The system's message in obstore's text of an unexpected error."""
NO_KEYS = " The role of the container or machine is used: no keys are in shared_password_file or AWS's variables."

T = TypeVar("T")
F = TypeVar("F")


class Bucket(NamedTuple):
    """State that all connections to a bucket share."""

    client: S3Store
    name: str
    prefix: str
    no_keys: str
    """Hint if no keys were found, so that the machine's role is used; otherwise empty."""


def open_bucket(url: str, credentials: Credentials) -> Bucket:
    """Open the bucket at ``s3://BUCKET/PREFIX?endpoint=URL&region=NAME``. Raises KvoffdError.

    Without credentials, obstore finds them: in the environment, by the web identity, or by the role of the container or
    machine.
    """
    parts = urlsplit(url)
    asked = parse_qs(parts.query)
    config: dict[str, Any] = {"unsigned_payload": True}  # TLS protects the bytes; hashing them doubles the CPU time
    config |= {name: asked[name][-1] for name in ("endpoint", "region") if name in asked}
    if bool(credentials.user) != bool(credentials.password):
        why = f"The line of {url} in shared_password_file must be ACCESS KEY:SECRET KEY; one of them is missing."
        raise KvoffdError(why, ErrorCode.BAD_ARGUMENT)
    if credentials.user:
        config |= {"access_key_id": credentials.user, "secret_access_key": credentials.password}
    try:
        client = S3Store(
            parts.netloc,
            config=config,
            client_options={
                "allow_http": str(config.get("endpoint", "")).startswith("http://"),
                "connect_timeout": f"{CONNECT_S:.0f}s",
                "timeout": f"{REQUEST_S:.0f}s",
            },
            retry_config={"max_retries": 0},
        )
    except Exception as error:
        why = f"{url} cannot be used: {_first_line(error)}."
        raise KvoffdError(why, ErrorCode.BAD_ARGUMENT) from error
    prefix = parts.path.strip("/")
    no_keys = "" if credentials.user or KEY_VARIABLES & os.environ.keys() else NO_KEYS
    return Bucket(client, f"s3://{parts.netloc}", f"{prefix}/" if prefix else "", no_keys)


class S3(Store):
    """Requests run on an event loop of the thread's own, which waits only for them."""

    poll_s, believed_s = 15.0, 600.0  # each is a request that costs money
    most_window_keys = 256
    keys_at_once = 4096
    blocks_at_once, bytes_at_once = 8, 16 << 20
    writers = 2

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        """The running call, for ``interrupt``."""
        self._generations: dict[bytes, tuple[int, float]] = {}
        """Generations by name, and the time when each was learned: see GENERATION_S."""
        self._etags: dict[bytes, tuple[str, int]] = {}
        """ETags of the generations' objects that were read last, and their numbers."""
        self._came_at = 0.0
        """Time when a part of an object last came, or the wait began."""
        self._retry_until = self._answer_until = 0.0
        """Times until which the running call sends a refused request again, and waits for single answers: see
        RETRIED_SHARE and LATE_SHARE. ``get`` has only the first, which the requests of all its blocks share; it is set
        again for each block that ``get`` waits for."""

    def connect(self) -> None:
        if self._loop is None:
            try:
                self._loop = uvloop.new_event_loop()
            except OSError as error:  # out of descriptors
                raise self._error(error) from error

    def close(self) -> None:
        if (loop := self._loop) is not None:
            self._loop = None
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.run_until_complete(asyncio.sleep(0))
            loop.close()

    def interrupt(self) -> None:
        loop, task = self._loop, self._task
        if loop is not None and task is not None:
            try:
                loop.call_soon_threadsafe(task.cancel)
            except RuntimeError:
                pass  # it is already closed

    def ping(self, deadline: float) -> None:
        # An answer to GET has a body that names the problem; HEAD's has none.
        self._run(self._value(b"kvoffd/2/probe"), deadline)

    def generation(self, fingerprint: bytes, deadline: float) -> int:
        return self._run(self._generation(generation_name(fingerprint)), deadline)

    def generations(self, fingerprints: Sequence[bytes], deadline: float) -> list[int | StoreError]:
        return self._run(self._numbers(list(map(generation_name, fingerprints))), deadline)

    async def _numbers(self, names: Sequence[bytes]) -> list[int | StoreError]:
        """Return the generations of these names; for each without a valid one, or an answer, the error."""
        if len(names) >= LISTED_FROM:
            await self._list_generations(names)
        unanswered = StoreError(StoreFault.TIMEOUT, f"{self._bucket.name} did not answer about a generation in time.")
        found = list[int | StoreError]()
        for at in range(0, len(names), REQUESTS_AT_ONCE):
            asked = [self._number(name) for name in names[at : at + REQUESTS_AT_ONCE]]
            found += await self._all(asked, unanswered=unanswered)
        return found

    async def _number(self, name: bytes) -> int | StoreError:
        """Return a generation; the error if its object has no valid one."""
        try:
            return await self._generation(name)
        except StoreError as error:
            if error.kind is not StoreFault.GENERATION:
                raise
            return error

    async def _list_generations(self, names: Sequence[bytes]) -> None:
        """Remember those of these generations that are as they were when they were read last, or do not exist, by one
        request: ``_generation`` asks for the others."""
        place = self._path(names[0]).rsplit("/", 2)[0]  # without NAMESPACE/generation
        listed = await self._request(lambda: self._first_listed(place))
        now = time.monotonic()
        has_all = len(listed) < MAX_LISTED
        for name in names:  # an object without an ETag, or that was never read, is asked for
            etag, number = self._etags.get(name, ("", 0))
            listed_etag = listed.get(_place_of(name.decode()))
            if listed_etag is None and has_all:
                self._remember(name, 0, now)
            elif listed_etag and listed_etag == etag:
                self._remember(name, number, now)

    async def _first_listed(self, place: str) -> dict[str, str]:
        """Return the ETags of the first objects below a path, by the ends of their paths: see ``_place_of``."""
        async for part in obstore.list(self._bucket.client, place, chunk_size=MAX_LISTED):
            return {_place_of(one["path"]): _etag_of(one) for one in part}
        return {}

    def ask(self, group: BlockGroup, keys: Sequence[bytes], deadline: float, *, prefix: bool) -> tuple[int, list[bool]]:
        return self._run(self._ask(generation_name(group.fingerprint), block_names(group, keys), prefix), deadline)

    async def _ask(self, own_name: bytes, names: Sequence[bytes], prefix: bool) -> tuple[int, list[bool]]:
        """Return the generation of a name, and which names of blocks exist, asked for concurrently."""
        generation = asyncio.ensure_future(self._generation(own_name))
        try:
            found = await (self._prefix(names) if prefix else self._heads(names))
            return await generation, found
        finally:
            generation.cancel()

    def touch(self, blocks: Sequence[Block], deadline: float) -> list[bool]:
        """See ``Store``; a bucket's lifecycle rules depend on age only, so nothing counts as used.

        Blocks are mostly of one chain. If both ends are absent, the others count as absent: writing a block again that
        another node wrote is harmless, and a HEAD takes half the time of writing 1 MiB.
        """
        return self._run(self._there([block_name(block.group, block.key) for block in blocks]), deadline)

    async def _there(self, names: Sequence[bytes]) -> list[bool]:
        """Return which of a chain's names exist: see ``touch``."""
        if len(names) < 3:
            return await self._heads(names)
        first, last = await self._heads([names[0], names[-1]])
        if not (first or last):
            return [False] * len(names)
        return [first, *await self._heads(names[1:-1]), last]

    def get(self, requests: Sequence[GetRequest], patience_s: float) -> Iterator[Received | StoreError | None]:
        assert self._loop is not None
        running = [self._loop.create_task(self._get(request)) for request in requests]
        try:
            for task in running:
                yield self._received(task, patience_s)
        finally:
            for task in running:
                task.cancel()

    def _received(self, task: asyncio.Task[Received | None], patience_s: float) -> Received | StoreError | None:
        """Return what a task received, or the error if the bucket refused this request. Raises StoreError."""
        try:
            if not task.done():
                return self._run(self._patiently(task, patience_s), inf)
            if (failure := task.exception()) is not None:
                raise self._error(failure) from failure
            return task.result()
        except StoreError as error:
            if error.kind is not StoreFault.BUSY:
                raise
            return error

    async def _patiently(self, task: asyncio.Task[T], patience_s: float) -> T:
        """Wait for a task as long as parts of it or of others keep coming."""
        self._came_at = time.monotonic()
        self._retry_until = self._came_at + RETRIED_SHARE * patience_s
        while not task.done() and (left := self._came_at + patience_s - time.monotonic()) > 0:
            await asyncio.wait([task], timeout=left)
        if not task.done():
            raise TimeoutError
        return task.result()

    async def _get(self, request: GetRequest) -> Received | None:
        """Fill the views; return None if the object does not exist."""
        header, path = bytearray(HEADER_BYTES), self._path(block_name(request.group, request.key))
        try:
            answer = await self._request(lambda: obstore.get_async(self._bucket.client, path))
            whole = await self._receive(answer, [header, *request.views])
            return Received(decode_header(bytes(header)) if whole else None)
        except FileNotFoundError:
            return None

    def put(self, requests: Sequence[PutRequest], deadline: float) -> list[bool | None]:
        puts = [
            self._put(block_name(block.group, block.key), [encode_header(block), *views]) for block, views in requests
        ]
        return self._run(self._all(puts, unanswered=None), deadline)

    async def _put(self, name: bytes, parts: Sequence[bytes | memoryview]) -> bool:
        """Write an object; return False if the bucket has no space."""
        try:
            whole = [part for part in parts if len(part)]
            path = self._path(name)
            await self._request(lambda: obstore.put_async(self._bucket.client, path, whole, use_multipart=False))
        except Exception as error:
            if self._error(error).kind is StoreFault.FULL:
                return False
            raise
        return True

    def remove(self, group: BlockGroup, keys: Sequence[bytes], deadline: float) -> None:
        self._run(self._remove(block_names(group, keys)), deadline)

    async def _remove(self, names: Sequence[bytes]) -> None:
        paths = list(map(self._path, names))
        await self._request(lambda: obstore.delete_async(self._bucket.client, paths))

    def raise_generation(self, fingerprint: bytes, seen: int, generation: int, deadline: float) -> int:
        name = generation_name(fingerprint)
        self._generations.pop(name, None)
        if (found := self._run(self._generation(name), deadline)) >= generation:
            return found  # the number that was seen may be some seconds old
        self._generations.pop(name, None)
        if not self._run(self._put(name, [b"%d" % generation]), deadline):
            raise StoreError(StoreFault.FULL, f"{self._bucket.name} accepts no more.")
        return generation

    def _path(self, name: bytes) -> str:
        """Return an object's path: see the top of this file. Those of generations have ``ge`` for a hash."""
        text = name.decode()
        start = text.rpartition("/")[2][:2]
        return f"{self._bucket.prefix}{start}/{text}"

    async def _generation(self, name: bytes) -> int:
        known, at = self._generations.get(name, (0, 0.0))
        if at and time.monotonic() - at < GENERATION_S:
            return known
        value, etag = await self._value(name)
        number = decode_generation(value, f"The object {self._path(name)}")
        if len(self._etags) >= MAX_GENERATIONS:
            self._etags.clear()
        self._etags[name] = etag, number
        self._remember(name, number, time.monotonic())
        return number

    def _remember(self, name: bytes, number: int, at: float) -> None:
        if len(self._generations) >= MAX_GENERATIONS:
            self._generations.clear()
        self._generations[name] = number, at

    async def _value(self, name: bytes) -> tuple[bytes, str]:
        """Return the first bytes of a small object, and its ETag; both empty if there is none."""
        try:
            answer = await self._request(lambda: obstore.get_async(self._bucket.client, self._path(name)))
            value = bytearray(min(answer.meta["size"], MAX_VALUE_BYTES))
            whole = await self._receive(answer, [value])  # else it is longer than any generation
            return bytes(value) if whole else b"?", _etag_of(answer.meta)
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                raise
            return b"", ""

    async def _receive(self, answer: obstore.GetResult, into: Sequence[bytearray | memoryview]) -> bool:
        """Receive exactly as many bytes as ``into`` takes; return False if the answer has more or fewer.

        Both are possible, with a length and in chunks. Further bytes are not received.
        """
        size = sum(map(len, into))
        if answer.meta["size"] != size:
            return False
        rests = [np.frombuffer(one, np.uint8) for one in into if len(one)]
        # Only the last part is shorter than this, which ends the loop: the first one, if all bytes fit into it.
        part_bytes = min(size + 1, RECEIVE_BYTES)
        async for part in answer.stream(part_bytes):
            self._came_at = time.monotonic()
            data = np.frombuffer(part, np.uint8)
            while len(data):
                if not rests:
                    return False
                count = min(len(data), len(rests[0]))
                # As arrays, because copying a memoryview holds the GIL.
                np.copyto(rests[0][:count], data[:count])
                data, rests[0] = data[count:], rests[0][count:]
                if not len(rests[0]):
                    del rests[0]
            if len(part) < part_bytes:
                break
        return not rests

    async def _head(self, name: bytes) -> bool:
        try:
            await self._request(lambda: obstore.head_async(self._bucket.client, self._path(name)))
        except FileNotFoundError:
            return False
        return True

    async def _heads(self, names: Sequence[bytes]) -> list[bool]:
        found: list[bool] = []
        for at in range(0, len(names), REQUESTS_AT_ONCE):
            found += await self._all([self._head(name) for name in names[at : at + REQUESTS_AT_ONCE]], unanswered=False)
        return found

    async def _prefix(self, names: Sequence[bytes]) -> list[bool]:
        """Return which names exist, assuming that those are the first ones: a search with ``PROBES`` concurrent HEADs.

        The first step has two, since most prefixes do not exist at all.
        """
        there, absent = 0, len(names)  # the first `there` names exist; those from `absent` on do not
        places = sorted({0, absent - 1}) if names else []
        while there < absent:
            try:
                answers = await self._all([self._head(names[place]) for place in places], unanswered=False)
            except Exception as error:
                if not there or self._error(error).kind not in UNANSWERED:
                    raise
                break  # what was found counts
            gap = answers.index(False) if False in answers else len(answers)
            if gap:
                there = places[gap - 1] + 1
            if gap < len(places):
                absent = places[gap]
            left = absent - there
            places = sorted({there + left * part // (PROBES + 1) for part in range(1, PROBES + 1)}) if left else []
        return [True] * there + [False] * (len(names) - there)

    async def _request(self, send: Callable[[], Awaitable[T]]) -> T:
        """Send a request. While the bucket answers that it is overloaded, send it again, less and less often."""
        for number in range(RETRIES):
            pause_s = RETRY_S * 2**number * random.uniform(0.5, 1.5)
            try:
                return await send()
            except FileNotFoundError:
                raise
            except Exception as error:
                late = time.monotonic() + pause_s > self._retry_until
                if late or self._error(error).kind is not StoreFault.BUSY:
                    raise
            await asyncio.sleep(pause_s)
        return await send()

    async def _all(self, works: Sequence[Coroutine[Any, Any, T]], *, unanswered: F) -> list[T | F]:
        """Run all concurrently. If all are ``unanswered``, or another one fails, raise an exception.

        ``unanswered``: result of those that an overloaded bucket did not serve, or did not answer in time.
        """
        tasks = [asyncio.ensure_future(work) for work in works]
        try:
            if tasks:
                await asyncio.wait(tasks, timeout=max(0.0, self._answer_until - time.monotonic()))
            failed = [task.exception() if task.done() else TimeoutError() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
        errors = [error for error in failed if error is not None]
        others = [error for error in errors if self._error(error).kind not in UNANSWERED]
        if others or (errors and len(errors) == len(tasks)):
            raise (others or errors)[0]
        return [task.result() if error is None else unanswered for task, error in zip(tasks, failed, strict=True)]

    def _run(self, work: Awaitable[T], deadline: float) -> T:
        """Run a call on the event loop. Raises StoreError. A deadline of inf: the work has its own limits."""
        assert self._loop is not None
        left = deadline - time.monotonic()
        if left < inf:
            self._retry_until = time.monotonic() + RETRIED_SHARE * left
            self._answer_until = deadline - min(LATE_S, LATE_SHARE * left)

        async def bounded() -> T:
            async with asyncio.timeout(left if left < inf else None):
                return await work

        self._task = task = self._loop.create_task(bounded())
        try:
            return self._loop.run_until_complete(task)
        except (Exception, asyncio.CancelledError) as error:
            raise self._error(error) from error
        finally:
            self._task = None

    def _error(self, error: BaseException) -> StoreError:
        """Translate an exception of obstore: its type says little, S3's code and status say everything."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, StoreError):
            return error
        name, text = self._bucket.name, str(error)[:MAX_QUOTED_CHARACTERS]
        if isinstance(error, TimeoutError) or "TimedOut" in text:
            return StoreError(StoreFault.TIMEOUT, f"{name} does not answer in time.{self._bucket.no_keys}")
        if isinstance(error, asyncio.CancelledError):
            return StoreError(StoreFault.DISCONNECTED, f"A request to {name} was interrupted.")
        if "://169.254." in text:
            why = f"{name} has no credentials: {_first_line(error)}.{self._bucket.no_keys}"
            return StoreError(StoreFault.CREDENTIALS, why)
        code = found[1] if (found := _CODE.search(text)) else ""
        if "redirect without LOCATION" in text:
            code = "PermanentRedirect"
        elif "error following redirect" in text:  # as in a circle
            code = "redirects without end"
        status = found[1] if (found := re.search("status code: ([0-9]{3})", text)) else ""
        if answer := " ".join(filter(None, (status, code))):
            for kind, pattern, hint in ERRORS:
                if re.search(pattern, answer):
                    return StoreError(kind, f"{name} answers {answer}: {hint}.")
            return StoreError(StoreFault.PROTOCOL, f"{name} answers {answer}.")
        if "certificate" in text.lower():
            why = f"The certificate of {name} is not accepted: {_first_line(error)}. Name its CA in SSL_CERT_FILE."
            return StoreError(StoreFault.TLS, why)
        cause = f" ({printable(found[1])})" if (found := _CAUSE.search(text)) else ""
        hint = " If it has no TLS, name its endpoint http://." if "InvalidContentType" in text else ""
        why = f"{_first_line(error)}{cause}.{hint}"
        if "Connect" in text:
            return StoreError(StoreFault.UNREACHABLE, f"{name} cannot be reached: {why}")
        return StoreError(StoreFault.DISCONNECTED, f"The connection to {name} is lost: {why}")


def _place_of(path: str) -> str:
    """Return the end of a generation's path, NAMESPACE/generation, however the server wrote what is before it."""
    return "/".join(path.rsplit("/", 2)[1:])


def _etag_of(meta: obstore.ObjectMeta) -> str:
    """Return an object's ETag; empty for none, as of a server that has no hashes."""
    return (meta["e_tag"] or "").strip('"')


def _first_line(error: BaseException) -> str:
    return printable(str(error)[:MAX_QUOTED_CHARACTERS].partition("\n")[0])


def open_s3(url: str, credentials: Credentials) -> Callable[[], Store]:
    """Return a function that makes connections to the bucket at a URL. Raises KvoffdError."""
    bucket = open_bucket(url, credentials)
    return lambda: S3(bucket)

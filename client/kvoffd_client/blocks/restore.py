"""Puts the blocks of a file into a daemon. Done again it goes on: what is there already is passed over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvoffd_client.blocks.client import STAGING_BYTES, BlockClient, put_shard
from kvoffd_client.blocks.file import BlockFile, BlockFileError
from kvoffd_client.blocks.geometry import Geometry, differing_facts
from kvoffd_proto.blocks import PUT_NO_ROOM, PUT_STORED, PutShard
from kvoffd_proto.messages import READY

BATCH_OF_POOL = 8
"""One part in so many is put at a time; the daemon allows twice that."""

Progress = Callable[[int, int], None]
"""Told the bytes that are done, and all there are to do."""


@dataclass
class Imported:
    """What an import did.

    Attributes:
        blocks: that were put.
        nbytes: of these blocks.
        present: blocks that were in the pool already.
        no_room: blocks that found no room.
        created: the namespace was not open before.
    """

    blocks: int = 0
    nbytes: int = 0
    present: int = 0
    no_room: int = 0
    created: bool = False


def import_blocks(
    client: BlockClient,
    file: BlockFile,
    namespace: str | bytes | None = None,
    *,
    beside: bool = False,
    progress: Progress = lambda done, total: None,
) -> Imported:
    """Put all blocks of ``file`` into the pool. The namespace is opened where no engine has done so.

    Args:
        namespace: that the blocks must be of; None for whichever the file says.
        beside: open the file's namespace although one of the same label and another fingerprint is open.

    Raises:
        BlockFileError: the file is damaged, or of another namespace than is meant.
        DaemonUnavailable, RequestRefused: the daemon went away or says no; called again it goes on.
    """
    geometry = file.geometry
    _check_meant(client, geometry, namespace, beside)
    done = Imported(created=client.restore_namespace(geometry))
    there = {
        (group, info.key)
        for group in {entry.group for entry in file.entries}
        for info in client.list_blocks(geometry.fingerprint, group)
        if info.state == READY
    }
    passed = 0
    progress(0, file.data_bytes)
    most_bytes = min(STAGING_BYTES, client.stats().pool.pool_bytes // BATCH_OF_POOL)
    for batch in _batches(file, there, most_bytes):
        group, first_block = file.entries[batch[0]].group, file.entries[batch[0]].first_block
        states = _put(client, file, batch, group, first_block)
        stored = states.count(PUT_STORED)
        done.blocks += stored
        done.nbytes += stored * geometry.block_bytes(group)
        done.no_room += states.count(PUT_NO_ROOM)
        passed += len(batch) * geometry.block_bytes(group)
        progress(passed, file.data_bytes)
    done.present = len(file.entries) - done.blocks - done.no_room
    progress(file.data_bytes, file.data_bytes)
    return done


def _check_meant(client: BlockClient, geometry: Geometry, namespace: str | bytes | None, beside: bool) -> None:
    """Raise BlockFileError where the file's blocks would serve nobody whom the operator means."""
    open_ones = client.namespaces().namespaces
    if namespace is not None:
        try:
            meant = client.find_namespace(namespace)
        except ValueError as error:
            raise BlockFileError(str(error)) from error
        others = [info for info in open_ones if info.namespace == meant and meant != geometry.fingerprint]
    else:
        fingerprints = {info.namespace for info in open_ones}
        same_label = [info for info in open_ones if info.label == geometry.label]
        others = same_label if geometry.fingerprint not in fingerprints and not beside else []
    if others:
        why = differing_facts(geometry.description, others[0].description)
        advice = "" if namespace is not None else " Add --beside to import them all the same."
        raise BlockFileError(
            f"The blocks of the file are of namespace {geometry.fingerprint.hex()[:12]}, and {others[0].label!r} is "
            f"open here as {others[0].namespace.hex()[:12]}: the engines differ {why}, so none would read them.{advice}"
        )


def _batches(file: BlockFile, there: set[tuple[int, bytes]], most_bytes: int) -> Iterator[list[int]]:
    """Numbers of the blocks to put, as many at a time as ``most_bytes`` hold, all of one group."""
    batch: list[int] = []
    for number, entry in enumerate(file.entries):
        if (entry.group, entry.key) in there:
            continue
        nbytes = file.geometry.block_bytes(entry.group)
        # Only the first key of a request may begin with a hole.
        other = bool(batch) and (file.entries[batch[0]].group != entry.group or entry.first_block > 0)
        if batch and (other or (len(batch) + 1) * nbytes > most_bytes):
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


def _put(client: BlockClient, file: BlockFile, batch: Sequence[int], group: int, first_block: int) -> bytes:
    geometry = file.geometry
    nbytes = geometry.block_bytes(group)
    memory = client.staging(len(batch) * nbytes)
    keys = [file.entries[number].key for number in batch]
    shards: list[list[PutShard]] = []
    for place, number in enumerate(batch):
        at = place * nbytes
        try:
            file.read(number, memory.view[at : at + nbytes])
        except BlockFileError:
            if shards:  # what comes before the damage is good
                client.put_staged(geometry, group, keys[:place], shards, first_block)
            raise
        of_key: list[PutShard] = []
        for rank, checksum in enumerate(file.entries[number].checksums):
            of_key.append(put_shard(at, checksum))
            at += geometry.shard_bytes(rank, group)
        shards.append(of_key)
    return client.put_staged(geometry, group, keys, shards, first_block)

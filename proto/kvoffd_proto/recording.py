"""What engines ask for, told to an administrator who records it."""

from __future__ import annotations

from typing import Annotated

from kvoffd_proto.wire import ADMIN, ByteCount, Count, GroupIndex, Reply, Request, Section, Wire, doc, exchange


class RecordedChain(Wire, frozen=True):
    """What one request asked for of one group: its keys, told once however often the engine looked them up."""

    milliseconds: Annotated[Count, doc("Since the recording began.")]
    namespace: Annotated[Count, doc("Number of the namespace in this recording, in the order in which they came.")]
    group: GroupIndex
    tokens_per_block: Annotated[Count, doc("Tokens that a key covers; 0 if unknown.")]
    block_bytes: Annotated[ByteCount, doc("Pool bytes of a block of all ranks; 0 before a worker registered.")]
    key_bytes: Annotated[Count, doc("Bytes of a key.")]
    keys: Annotated[bytes, doc("Its keys, end to end, the root of the prefix first.")]


class Recorded(Reply, frozen=True):
    recording: Annotated[Count, doc("Number of the recording, for the next Record.")]
    chains: Annotated[list[RecordedChain], doc("In the order in which they were asked for, about a MiB at most.")]
    dropped: Annotated[Count, doc("Chains that found no room behind these, since nobody had fetched what was there.")]


@exchange(Section.ADMINISTRATION, ADMIN)
class Record(Request[Recorded], frozen=True):
    """Begins to record what engines ask for, or fetches what was recorded since the last time. Admin only.

    There is one recording at a time. It ends with its session, and where nobody fetches it for 30 s. Benches are left
    out.
    """

    recording: Annotated[Count, doc("Number of the recording; 0 to begin one.")] = 0
    end: Annotated[bool, doc("End the recording with this answer; what it has no room for counts as dropped.")] = False

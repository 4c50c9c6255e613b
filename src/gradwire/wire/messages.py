"""Messages: a kind, the id of the call they belong to, optional tags, and an encoded value.

Kinds carry the names torch gives them, because people know them and fault injection addresses
them. Where torch nests wrapper messages (autograd around profiling around a call), a message here
carries tags instead: small values under a room's name, attached and read by that room alone. They
are plain: numbers, strings and bytes, and tuples, lists and dictionaries of such.

    head   = header (16 bytes) | tags, marshalled, when there are any | payload
    header = kind u8 | flags u8 | 0 u16 | length of tags u32 | call id u64

The only flag says that the value carries references: it must be decoded even when nobody waits for
it any more, so that the references are dropped in good order.
"""

from __future__ import annotations

import enum
import marshal
import struct
from collections.abc import Callable
from typing import Any

Tags = dict[str, Any]

_HEADER = struct.Struct("<BBxxIQ")
_REFERENCES = 1
#: What every Python 3 can read. (For so little it takes half the time of pickle.)
MARSHAL_VERSION = 2


class Kind(enum.IntEnum):
    """What a message is. The numbers are the wire format: append only."""

    # answers
    PYTHON_RET = 1
    EXCEPTION = 2
    # user calls
    PYTHON_CALL = 10
    # remote references
    PYTHON_REMOTE_CALL = 20
    PYTHON_RREF_FETCH_CALL = 21
    RREF_USER_DELETE = 22
    RREF_FORK_REQUEST = 23
    RREF_CHILD_ACCEPT = 24
    # gradients
    BACKWARD_AUTOGRAD_REQ = 30
    BACKWARD_AUTOGRAD_OUTCOME = 31
    CLEANUP_AUTOGRAD_CONTEXT_REQ = 32
    JOIN_AUTOGRAD_CONTEXT_REQ = 33
    AUTOGRAD_CHART_REQ = 34
    # the group
    HEARTBEAT = 40
    BARRIER = 41
    FAREWELL = 42


def kind_name(kind: int) -> str:
    """The name of a kind, also of one that this version does not know."""
    try:
        return Kind(kind).name
    except ValueError:
        return f"message kind {kind}"


#: Call ids from here on are left out when two workers compare how many calls they exchanged.
UNCOUNTED = 1 << 63

#: Idempotent, so sent again after a failure. User functions never are.
RETRIED = frozenset(
    {
        Kind.RREF_USER_DELETE,
        Kind.RREF_FORK_REQUEST,
        Kind.RREF_CHILD_ACCEPT,
        Kind.BACKWARD_AUTOGRAD_OUTCOME,
        Kind.CLEANUP_AUTOGRAD_CONTEXT_REQ,
        Kind.JOIN_AUTOGRAD_CONTEXT_REQ,
    }
)


def pack(
    kind: int,
    call_id: int,
    payload: bytes | memoryview,
    tags: Tags | None = None,
    references: bool = False,
) -> bytes:
    """One message as the head of a frame."""
    flags = _REFERENCES if references else 0
    if tags:
        packed = marshal.dumps(tags, MARSHAL_VERSION)
        return b"".join((_HEADER.pack(kind, flags, len(packed), call_id), packed, payload))
    return b"".join((_HEADER.pack(kind, flags, 0, call_id), payload))


def carries_references(head: bytes | bytearray | memoryview) -> bool:
    return bool(_HEADER.unpack_from(head)[1] & _REFERENCES)


def unpack(head: bytes | bytearray | memoryview) -> tuple[int, int, Tags | None, memoryview]:
    """(kind, call id, tags, payload) of a frame's head."""
    kind, _, tags_length, call_id = _HEADER.unpack_from(head)
    start = _HEADER.size + tags_length
    view = memoryview(head)
    tags = marshal.loads(view[_HEADER.size : start]) if tags_length else None
    return kind, call_id, tags, view[start:]


#: (kind, call id) of a frame's head, alone.
peek: Callable[[bytes | bytearray | memoryview], tuple[int, int]]
peek = struct.Struct("<B7xQ").unpack_from

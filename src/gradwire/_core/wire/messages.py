"""Messages: a kind, the id of a call, optional tags, and an encoded value.

The kinds have the names that torch gives to its messages. Users know these names, and fault
injection selects messages by them.

Torch nests messages: an autograd message contains a profiling message, which contains the call. A
message here has tags instead. A tag is a small value that one layer attaches on one worker and
reads on the other, under a name of its own. It consists of numbers, strings and bytes, and of
tuples, lists and dictionaries of these.

    head   = header (16 bytes) | marshalled tags, if there are any | payload
    header = kind u8 | flags u8 | 0 u16 | length of the tags u32 | call id u64

The payload is the encoded value without its large tensors, which follow the head as buffers.

There is one flag. It says that the value contains RRefs (remote references). The receiver must
decode such a value even if it no longer needs the value. The worker to whose object an
RRef refers keeps the object until every RRef to it is deleted, and an RRef that is never decoded is
never deleted.
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
#: The version of the marshal format, which every Python 3 can read.
MARSHAL_VERSION = 2


class Kind(enum.IntEnum):
    """The kinds of messages. Their numbers are part of the wire format and must never change."""

    # These kinds are replies.
    PYTHON_RET = 1
    EXCEPTION = 2
    # This kind is a call of a user function.
    PYTHON_CALL = 10
    # These kinds create, use and delete RRefs (remote references).
    PYTHON_REMOTE_CALL = 20
    PYTHON_RREF_FETCH_CALL = 21
    RREF_USER_DELETE = 22
    RREF_FORK_REQUEST = 23
    RREF_CHILD_ACCEPT = 24
    # These kinds serve distributed autograd.
    BACKWARD_AUTOGRAD_REQ = 30
    BACKWARD_AUTOGRAD_OUTCOME = 31
    CLEANUP_AUTOGRAD_CONTEXT_REQ = 32
    JOIN_AUTOGRAD_CONTEXT_REQ = 33
    AUTOGRAD_PATHS_REQ = 34
    # With these kinds, the workers of a group tell that they are alive, ready to stop, or leaving.
    HEARTBEAT = 40
    BARRIER = 41
    FAREWELL = 42
    ACTIVITY = 43


def kind_name(kind: int) -> str:
    """Return the name of a message kind, or a text with its number if the kind is unknown."""
    try:
        return Kind(kind).name
    except ValueError:
        return f"message kind {kind}"


#: The smallest call id of a message that is not counted. At a graceful shutdown the workers compare
#: how many calls were sent with how many were received. Heartbeats and the messages of the shutdown
#: itself must not change these counts, so they get call ids from this number on.
UNCOUNTED = 1 << 63

#: The kinds of messages that may be sent again after a failure, because it does no harm if such a
#: message arrives twice. A call of a user function is never sent twice.
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
    """Return a message as the head of a frame. `references` tells whether its value contains
    RRefs."""
    flags = _REFERENCES if references else 0
    if tags:
        packed = marshal.dumps(tags, MARSHAL_VERSION)
        return b"".join((_HEADER.pack(kind, flags, len(packed), call_id), packed, payload))
    return b"".join((_HEADER.pack(kind, flags, 0, call_id), payload))


def carries_references(head: bytes | bytearray | memoryview) -> bool:
    """Whether the value in a message contains RRefs."""
    return bool(_HEADER.unpack_from(head)[1] & _REFERENCES)


def unpack(head: bytes | bytearray | memoryview) -> tuple[int, int, Tags | None, memoryview]:
    """Return the kind, call id, tags and payload of a message from the head of its frame."""
    kind, _, tags_length, call_id = _HEADER.unpack_from(head)
    start = _HEADER.size + tags_length
    view = memoryview(head)
    tags = marshal.loads(view[_HEADER.size : start]) if tags_length else None
    return kind, call_id, tags, view[start:]


#: Returns the kind and call id of a message from the head of its frame. It is faster than `unpack`.
peek: Callable[[bytes | bytearray | memoryview], tuple[int, int]]
peek = struct.Struct("<B7xQ").unpack_from

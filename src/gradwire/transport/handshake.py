"""Proof, in both directions, that the other end knows the group's token.

Nothing is decoded before it: every message until then has a fixed size or a small bound.

    client                                              server
    MAGIC | nonce c                            ->
                                               <-       MAGIC | nonce s | proof(s)
    proof(c) | length u16 | greeting           ->
                                               <-       WELCOME

    proof(s) = HMAC(token, "server" | c | s | incarnation of the server)
    proof(c) = HMAC(token, "client" | c | s | greeting)

The server's proof covers its incarnation, so a client that reaches another worker at a recycled
address notices; the client's covers its greeting, so it can be believed.
"""

from __future__ import annotations

import hmac
import json
import secrets
import struct

from gradwire.errors import AuthenticationError
from gradwire.transport.base import Greeting

MAGIC = b"gradwire"
NONCE = 32
PROOF = 32
WELCOME = b"\x01"

FIRST = len(MAGIC) + NONCE
SECOND = len(MAGIC) + NONCE + PROOF
_LENGTH = struct.Struct("<H")
THIRD_FIXED = PROOF + _LENGTH.size
MAX_GREETING = 1024


def _proof(token: bytes, *parts: bytes) -> bytes:
    return hmac.digest(token, b"\0".join(parts), "sha256")


class ClientHandshake:
    """The side that connects."""

    def __init__(self, token: bytes, me: Greeting, them: str):
        self._token = token
        self._nonce = secrets.token_bytes(NONCE)
        self._me = json.dumps(me).encode()
        self._them = them.encode()
        if len(self._me) > MAX_GREETING:
            raise ValueError(f"the worker's name is too long: {me.name!r}")

    def first(self) -> bytes:
        return MAGIC + self._nonce

    def third(self, second: bytes) -> bytes:
        """Check the server's proof and give ours."""
        nonce = second[len(MAGIC) : len(MAGIC) + NONCE]
        expected = _proof(self._token, b"server", self._nonce, nonce, self._them)
        if second[: len(MAGIC)] != MAGIC or not hmac.compare_digest(second[-PROOF:], expected):
            raise AuthenticationError(
                "whoever listens there is not the worker that was called: it has another token, "
                "or it is another process at the same address"
            )
        proof = _proof(self._token, b"client", self._nonce, nonce, self._me)
        return proof + _LENGTH.pack(len(self._me)) + self._me


class ServerHandshake:
    """The side that accepts. `needed` is how many bytes it wants next; `feed` takes them and
    gives what to send back; `greeting` is there when the client has proven itself."""

    def __init__(self, token: bytes, incarnation: str):
        self._token = token
        self._incarnation = incarnation.encode()
        self._nonce = secrets.token_bytes(NONCE)
        self._client_nonce = b""
        self._proof = b""
        self.needed = FIRST
        self.greeting: Greeting | None = None

    def feed(self, data: bytes) -> bytes:
        if not self._client_nonce:
            if data[: len(MAGIC)] != MAGIC:
                raise AuthenticationError("this is not a gradwire worker calling")
            self._client_nonce = data[len(MAGIC) :]
            self.needed = THIRD_FIXED
            return (
                MAGIC
                + self._nonce
                + _proof(self._token, b"server", self._client_nonce, self._nonce, self._incarnation)
            )
        if not self._proof:
            self._proof = data[:PROOF]
            (self.needed,) = _LENGTH.unpack(data[PROOF:])
            if not 0 < self.needed <= MAX_GREETING:
                raise AuthenticationError("the greeting has an impossible length")
            return b""
        expected = _proof(self._token, b"client", self._client_nonce, self._nonce, data)
        if not hmac.compare_digest(self._proof, expected):
            raise AuthenticationError("the caller does not know this group's token")
        self.greeting = Greeting(*json.loads(data))
        return WELCOME

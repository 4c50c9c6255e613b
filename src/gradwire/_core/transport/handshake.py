"""Mutual authentication: each side proves that it knows the group's token.

This is a challenge-response protocol with HMAC (Bellare, Canetti and Krawczyk 1996; RFC 2104):
each side sends a random nonce, and the other side answers with a keyed hash of both nonces. The
token itself is never sent, and a recorded proof is useless for any other connection. Each proof
also covers a direction and an identity:

    client                                              server
    MAGIC | nonce c                            ->
                                               <-       MAGIC | nonce s | proof(s) | proof(m)
    proof(c) | length u16 | greeting           ->
                                               <-       WELCOME

Over the transport `unix`, the client then sends READY with file descriptors, and the server
answers READY. So no side takes descriptors before both sides have proven themselves.

    proof(s) = HMAC(token, "server" | c | s | incarnation of the server)
    proof(m) = HMAC(token, "member" | c | s)
    proof(c) = HMAC(token, "client" | c | s | greeting)

The server's proof covers its incarnation, so a client notices when another process now listens at
the address. The second proof of the server shows whether that process is a worker of the group. If
it is, the worker that the client looks for has ended. The client's proof covers its greeting, so
the server can trust the greeting.

Until the client has proven that it knows the token, the server decodes nothing that the client
sends, and each message has a fixed size or a small limit.
"""

from __future__ import annotations

import hmac
import json
import secrets
import struct

from gradwire._core.transport.base import Greeting
from gradwire.errors import AuthenticationError

MAGIC = b"gradwire"
NONCE_SIZE = 32
PROOF_SIZE = 32
WELCOME = b"\x01"
#: The last message of each side, if the client sends file descriptors after the server's WELCOME.
READY = b"\x02"

_LENGTH = struct.Struct("<H")
#: The size of the client's first message.
HELLO_SIZE = len(MAGIC) + NONCE_SIZE
#: The size of the server's answer to the client's first message.
CHALLENGE_SIZE = len(MAGIC) + NONCE_SIZE + 2 * PROOF_SIZE
#: The size of the client's second message, without its greeting.
RESPONSE_SIZE = PROOF_SIZE + _LENGTH.size
#: The longest greeting that is accepted, in bytes.
MAX_GREETING = 1024


def _proof(token: bytes, *parts: bytes) -> bytes:
    return hmac.digest(token, b"\0".join(parts), "sha256")


class ClientHandshake:
    """The connecting side: send `hello`, then the `response` to the server's challenge."""

    def __init__(self, token: bytes, me: Greeting, server_incarnation: str):
        self._token = token
        self._nonce = secrets.token_bytes(NONCE_SIZE)
        self._greeting = json.dumps(me).encode()
        self._server_incarnation = server_incarnation.encode()
        if len(self._greeting) > MAX_GREETING:
            raise ValueError(f"the worker's name is too long: {me.name!r}")

    def hello(self) -> bytes:
        """Return the first message."""
        return MAGIC + self._nonce

    def response(self, challenge: bytes) -> bytes:
        """Check the server's proof, and return the message with the client's proof. Raise
        ConnectionRefusedError if the server is certainly another worker of the group, and
        AuthenticationError if its proof is wrong."""
        start = len(MAGIC) + NONCE_SIZE
        nonce, proofs = challenge[len(MAGIC) : start], challenge[start:]
        expected = _proof(self._token, b"server", self._nonce, nonce, self._server_incarnation)
        is_gradwire = challenge[: len(MAGIC)] == MAGIC
        if not is_gradwire or not hmac.compare_digest(proofs[:PROOF_SIZE], expected):
            expected = _proof(self._token, b"member", self._nonce, nonce)
            if is_gradwire and hmac.compare_digest(proofs[PROOF_SIZE:], expected):
                raise ConnectionRefusedError(
                    "the worker to be called has ended: another worker of the group listens there"
                )
            raise AuthenticationError(
                "the process that listens there is not the worker to be called: it has another "
                "token, or it is another process at the same address"
            )
        proof = _proof(self._token, b"client", self._nonce, nonce, self._greeting)
        return proof + _LENGTH.pack(len(self._greeting)) + self._greeting


class ServerHandshake:
    """The accepting side, for a caller that reads without blocking. The caller reads `needed`
    bytes, passes them to `feed`, sends the bytes that `feed` returns, and repeats this until
    `greeting` is set."""

    def __init__(self, token: bytes, incarnation: str):
        self._token = token
        self._incarnation = incarnation.encode()
        self._nonce = secrets.token_bytes(NONCE_SIZE)
        self._client_nonce = b""
        self._client_proof = b""
        self.needed = HELLO_SIZE
        #: The client's identity, once the client has proven that it knows the token.
        self.greeting: Greeting | None = None

    def feed(self, data: bytes) -> bytes:
        """Process the next `needed` bytes from the client. Return the bytes to send back, perhaps
        none."""
        if not self._client_nonce:
            if data[: len(MAGIC)] != MAGIC:
                raise AuthenticationError("the client is not a gradwire worker")
            self._client_nonce = data[len(MAGIC) :]
            self.needed = RESPONSE_SIZE
            return (
                MAGIC
                + self._nonce
                + _proof(self._token, b"server", self._client_nonce, self._nonce, self._incarnation)
                + _proof(self._token, b"member", self._client_nonce, self._nonce)
            )
        if not self._client_proof:
            self._client_proof = data[:PROOF_SIZE]
            (self.needed,) = _LENGTH.unpack(data[PROOF_SIZE:])
            if not 0 < self.needed <= MAX_GREETING:
                raise AuthenticationError(
                    f"the client announced a greeting of {self.needed} bytes; the limit is "
                    f"{MAX_GREETING}"
                )
            return b""
        expected = _proof(self._token, b"client", self._client_nonce, self._nonce, data)
        if not hmac.compare_digest(self._client_proof, expected):
            raise AuthenticationError("the client does not know this group's token")
        self.greeting = Greeting(*json.loads(data))
        return WELCOME

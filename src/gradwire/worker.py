"""`Worker`: one member of a group, with everything that belongs to it.

This is where the rooms are put together. Several workers fit in one process; what a worker owns is
reached through it and ends with it.
"""

from __future__ import annotations

import contextvars
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any

from torch import Tensor

from gradwire import current
from gradwire.agent.agent import Agent
from gradwire.agent.calls import Calls
from gradwire.agent.farewell import Farewell
from gradwire.agent.futures import Future
from gradwire.agent.meeting import meet
from gradwire.agent.roster import Roster, StoreRoster, is_gone
from gradwire.config import UNSET_TIMEOUT, Options
from gradwire.errors import SetupError
from gradwire.gradients.context import Contexts
from gradwire.gradients.engine import Engine
from gradwire.gradients.graph import make_roots
from gradwire.gradients.ledger import How
from gradwire.gradients.recorder import Recorder
from gradwire.gradients.versions import Versions
from gradwire.ids import WorkerInfo
from gradwire.refs.protocol import Refs
from gradwire.refs.rref import RRef
from gradwire.transport.base import Transport
from gradwire.transport.tcp import TcpTransport, is_loopback
from gradwire.wire.values import Codec

To = str | int | WorkerInfo
#: How long a shutdown without a timeout of its own may take.
SHUTDOWN_SECONDS = 3600.0
#: How long running functions are waited for when a worker ends.
_END_SECONDS = 5.0


class Worker:
    """A member of a group of workers that call functions on each other.

        >>> with Worker("trainer", rank=0, world_size=2) as worker:   # doctest: +SKIP
        ...     worker.rpc_sync("server", torch.add, args=(x, y))

    Leaving the ``with`` block waits for the work of the whole group, then leaves it (or leaves at
    once when the block failed). Module-level functions such as `gradwire.rpc.rpc_sync` mean this
    worker inside the block.

    Where the group meets and all else is said by `options`. `transports` and `roster` replace what
    the options would give; `gradwire.testing.cluster` uses them to put many workers in a process.
    """

    #: What references on this worker are instances of.
    rref_type: type[RRef[Any]] = RRef

    def __init__(
        self,
        name: str,
        rank: int = -1,
        world_size: int | None = None,
        options: Any = None,
        *,
        roster: Roster | None = None,
        transports: Sequence[Transport] | None = None,
    ):
        WorkerInfo(name, rank)  # a name that will not do is refused before anybody is met
        self.options = Options.of(options)
        token = self.options.resolved_token()
        host = self.options.resolved_host()
        if host is not None and token is None and not is_loopback(host):
            raise SetupError(
                f"listening on {host!r}, which other machines can reach, needs a token: everybody "
                "who connects can run code here. Give all workers the same secret with the option "
                "token or the variable GRADWIRE_TOKEN"
            )
        if host in ("0.0.0.0", "::"):
            raise SetupError(
                f"host {host!r} is every address of this machine, and none that others could call: "
                "name the one they reach"
            )
        if roster is None:
            roster, rank, world_size = meet(
                self.options.init_method, rank, world_size, self.options.init_timeout
            )
        if transports is None:
            if isinstance(roster, StoreRoster):
                token = roster.agree_on_token(token, rank)
            if token is None:
                raise SetupError("a worker with a roster of its own needs a token in its options")
            transports = self._make_transports(token, host)
        id = roster.choose_id(name, rank, partial(is_gone, transports=transports))
        self.info = WorkerInfo(name, id)
        self._token: contextvars.Token[Any] | None = None
        self._ending = threading.Lock()
        self._ended = False
        self.agent = Agent(
            self.info,
            self.options,
            Codec(closures=self.options.closures),
            roster,
            transports,
            current.context_of(self),
        )
        self.calls = Calls(self.agent)
        self.refs = Refs(self.agent, self.calls, self.rref_type)
        self.contexts = Contexts(self.info.id)
        self.versions = Versions()
        self.engine = Engine(self.agent, self.contexts, self.versions)
        self.refs.differentiate = self._differentiate
        self.agent.interceptors.append(Recorder(self.contexts, self.engine))
        self._farewell = Farewell(self.agent)
        self._get_ready()
        try:
            self.agent.start()
        except BaseException:
            self.agent.close(time.monotonic() + _END_SECONDS)
            raise

    def _get_ready(self) -> None:
        """Called before anybody can call this worker: what a subclass adds to the rooms below."""

    def _make_transports(self, token: str, host: str | None) -> list[Transport]:
        """What the options ask for and this system has, best first."""
        options, secret = self.options, token.encode()
        size, patience = options.max_message_bytes, options.heartbeat_limit
        found: list[Transport] = []
        for name in options.transports:
            if name == "tcp":
                found.append(TcpTransport(secret, host or "127.0.0.1", size, patience))
            elif sys.platform == "linux":
                # Imported here: it needs what only Linux has.
                from gradwire.transport.unix import UnixTransport

                found.append(UnixTransport(secret, size, patience))
        if not found:
            raise SetupError(f"this system has none of the transports {list(options.transports)}")
        return found

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def id(self) -> int:
        return self.info.id

    def __repr__(self) -> str:
        state = "ended" if self._ended else "running"
        return f"<gradwire.Worker {self.info.name!r} (id {self.info.id}), {state}>"

    # -- calls

    def rpc_sync(
        self,
        to: To,
        func: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        timeout: float = UNSET_TIMEOUT,
    ) -> Any:
        """Run a function on a worker and return its result."""
        peer = self.agent.peers.find(to)
        return self.calls.sync(peer, func, tuple(args), kwargs or {}, self.agent.timeout(timeout))

    def rpc_async(
        self,
        to: To,
        func: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        timeout: float = UNSET_TIMEOUT,
    ) -> Future[Any]:
        """Run a function on a worker; its result comes in a future."""
        peer = self.agent.peers.find(to)
        return self.calls.begin(peer, func, tuple(args), kwargs or {}, self.agent.timeout(timeout))

    def remote(
        self,
        to: To,
        func: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        timeout: float = UNSET_TIMEOUT,
    ) -> RRef[Any]:
        """Run a function on a worker, leave its result there and return a reference to it."""
        peer = self.agent.peers.find(to)
        return self.refs.remote(peer, func, tuple(args), kwargs or {}, self.agent.timeout(timeout))

    def rref(self, value: Any) -> RRef[Any]:
        """A reference to a value of this worker, to be given to others."""
        return self.agent.run_in_context(lambda: RRef(value))

    def _differentiate(self, root: Tensor, context_id: int, retain_graph: bool) -> None:
        how = How(retain_graph, seconds=self.agent.timeout(UNSET_TIMEOUT))
        self.engine.run(self.contexts.get(context_id), make_roots([root]), how)

    # -- the group

    def worker_info(self, name: str | None = None) -> WorkerInfo:
        """Who a worker is; without a name, this one."""
        return self.info if name is None else self.agent.peers.find(name).info

    def worker_infos(self) -> list[WorkerInfo]:
        """Everybody in the group."""
        return [peer.info for peer in self.agent.peers.all()]

    # -- the end

    def wait_for_everybody(self, timeout: float = 0) -> bool:
        """Wait until the work of the whole group is done, or for `timeout` seconds; tells which. In
        an open group nobody is waited for. Only to be called before `shutdown`, by everybody."""
        if not self.agent.roster.fixed:
            return True
        return self._farewell.wait_for_everybody(time.monotonic() + (timeout or SHUTDOWN_SECONDS))

    def shutdown(self, graceful: bool = True, timeout: float = 0) -> None:
        """End this worker. Gracefully, in a group of fixed size, means: when the work of all its
        members is done. `timeout` limits that wait in seconds; 0 means an hour.

        It ends in any case, and leaves no thread, connection or shared memory behind. In a forked
        child it does nothing: the worker is the parent's.
        """
        if self.agent.abandoned:
            return
        with self._ending:
            if self._ended:
                return
            timeout = timeout or SHUTDOWN_SECONDS
            waited = True
            try:
                if graceful:
                    waited = self.wait_for_everybody(timeout)
            finally:
                self._ended = True
                self.refs.close()
                self.agent.close(time.monotonic() + _END_SECONDS)
                if current.process_default() is self:
                    current.set_process_default(None)
        if not waited:
            raise SetupError(
                f"worker {self.info.name!r} has shut down, but the others were not done after "
                f"{timeout:g} s; what they had still open has failed"
            )

    def __enter__(self) -> Worker:
        self._token = current.enter(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.shutdown(graceful=kind is None)
        finally:
            if self._token is not None:
                current.exit(self._token)
                self._token = None

"""`Runtime`: creates the internal parts of one worker and connects them.

A process may have several runtimes. `gradwire.Worker` is the public class for one worker and uses
one runtime.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from gradwire._core import current, log
from gradwire._core.autograd.context import ContextContainer
from gradwire._core.autograd.context_release import ContextReleases
from gradwire._core.autograd.copy_on_write import ParameterVersions
from gradwire._core.autograd.dist_engine import DistEngine
from gradwire._core.autograd.pass_messages import PassOptions
from gradwire._core.autograd.plan import make_roots
from gradwire._core.autograd.recorder import Recorder
from gradwire._core.group.membership import Membership, StoreMembership, is_gone
from gradwire._core.group.rendezvous import meet
from gradwire._core.ids import WorkerInfo
from gradwire._core.rpc.agent import Agent
from gradwire._core.rpc.deadlines import FOREVER
from gradwire._core.rpc.function_calls import FunctionCalls
from gradwire._core.rpc.shutdown_barrier import ShutdownBarrier
from gradwire._core.rref.protocol import RRefs
from gradwire._core.rref.rref import RRef
from gradwire._core.transport import registry
from gradwire._core.transport.base import Transport
from gradwire._core.transport.tcp import is_loopback
from gradwire._core.wire.codec import Codec
from gradwire.errors import SetupError
from gradwire.options import UNSET_TIMEOUT, Options

logger = logging.getLogger("gradwire")

#: If no timeout is given, a shutdown waits for the other workers as long as they work. It gives up
#: when they have done nothing for this long.
IDLE_SECONDS = 300.0
#: A shutdown waits at most this long for functions that are still running on this worker.
_END_SECONDS = 5.0
#: After Ctrl-C, a shutdown waits at most this long for functions that are still running, because
#: the user waits for the end of the program.
_INTERRUPTED_END_SECONDS = 0.2


class Runtime:
    """One worker with all its internal parts. Creating a `Runtime` makes the worker join its
    group."""

    #: The class of the remote references (RRefs) that this worker creates.
    rref_type: type[RRef[Any]] = RRef
    #: What a backward pass does at a result that requires gradients, if the call was made outside
    #: of any autograd context. True: the pass raises an error. False: the result is a leaf.
    refuses_unrecorded = True

    def __init__(
        self,
        name: str,
        rank: int = -1,
        world_size: int | None = None,
        options: Any = None,
        *,
        membership: Membership | None = None,
        transports: Sequence[Transport] | None = None,
    ):
        log.set_up(name)
        # `WorkerInfo` raises an error if the name is not allowed. Check the name here, before the
        # worker joins the group.
        WorkerInfo(name, rank)
        self.options = Options.of(options)
        token = self.options.resolved_token()
        host = self.options.resolved_host()
        if host is not None and token is None and not is_loopback(host):
            raise SetupError(
                f"listening on {host!r}, which other machines can reach, needs a token: every "
                "process that connects can run code on this worker. Give all workers the same "
                "secret with the option token or token_file, or the variable GRADWIRE_TOKEN or "
                "GRADWIRE_TOKEN_FILE"
            )
        if host in ("0.0.0.0", "::"):
            raise SetupError(
                f"host {host!r} stands for all addresses of this machine, so other workers cannot "
                "connect to it: give the address that they can reach"
            )
        if transports is None:
            registry.check_names(self.options.transports)
        if membership is None:
            membership, rank, world_size = meet(
                self.options.init_method, rank, world_size, self.options.init_timeout
            )
        if isinstance(membership, StoreMembership):
            token = membership.agree_on_token(token, rank)
        if transports is None:
            if token is None:
                raise SetupError("a worker with a given membership needs a token in its options")
            transports = self._make_transports(token, host)
        worker_id = membership.choose_id(name, rank, partial(is_gone, transports=transports))
        self.info = WorkerInfo(name, worker_id)
        self._ending = threading.Lock()
        self.ended = False
        self.agent = Agent(
            self.info,
            self.options,
            Codec(closures=self.options.closures),
            membership,
            transports,
            current.context_of(self),
        )
        self.calls = FunctionCalls(self.agent)
        self.rrefs = RRefs(self.agent, self.calls, self._differentiate, self.rref_type)
        self.contexts = ContextContainer(self.info.id)
        self.versions = ParameterVersions()
        self.releases = ContextReleases(self.agent, self.contexts)
        self.engine = DistEngine(self.agent, self.contexts, self.versions, self.releases)
        self.agent.interceptors.append(
            Recorder(
                self.contexts,
                self.engine,
                self.releases,
                refuses_unrecorded=self.refuses_unrecorded,
            )
        )
        self._barrier = ShutdownBarrier(self.agent)
        self._get_ready()
        try:
            self.agent.start()
        except BaseException:
            self.agent.close(time.monotonic() + _END_SECONDS)
            raise

    def _get_ready(self) -> None:
        """Do nothing. A subclass may override this method to change the parts of the worker before
        other workers can call it."""

    def _wrap_transport(self, transport: Transport) -> Transport:
        """Return `transport`, which was made from the options. A subclass may return an object that
        wraps `transport`, and the worker then uses that object."""
        return transport

    def _make_transports(self, token: str, host: str | None) -> list[Transport]:
        """Make the transports that the options name and this system supports, best first."""
        settings = registry.TransportSettings(
            token.encode(),
            host or "127.0.0.1",
            self.options.max_message_bytes,
            self.options.heartbeat_limit,
            self.options.allow_other_users,
        )
        made = registry.make_transports(self.options.transports, settings)
        return [self._wrap_transport(transport) for transport in made]

    def _differentiate(self, root: Tensor, context_id: int, retain_graph: bool) -> None:
        """Run a backward pass from `root`, in the autograd context with this id."""
        options = PassOptions(retain_graph, seconds=self.agent.timeout(UNSET_TIMEOUT))
        self.engine.run(self.contexts.get(context_id), make_roots([root]), options)

    # -- the group

    def worker_info(self, name: str | None = None) -> WorkerInfo:
        """Return the name and id of the worker called `name`, or of this worker if `name` is
        None."""
        return self.info if name is None else self.agent.peers.find(name).info

    def worker_infos(self) -> list[WorkerInfo]:
        """Return the workers of the group."""
        return [peer.info for peer in self.agent.peers.all()]

    # -- the end

    def wait_for_group(self, timeout: float = 0) -> bool:
        """Wait until all calls in the group are answered, and return True. Return False if that
        takes more than `timeout` seconds or, without a timeout, if the workers that are not done
        have stopped working. All workers must call this right before `shutdown`. In an open group
        this returns True at once."""
        if not self.agent.membership.fixed:
            return True
        if not timeout:
            return self._barrier.wait(FOREVER, IDLE_SECONDS)
        return self._barrier.wait(time.monotonic() + timeout)

    def shutdown(self, graceful: bool = True, timeout: float = 0) -> None:
        """End this worker; see `Worker.shutdown`."""
        if self.agent.abandoned:
            return
        with self._ending:
            if self.ended:
                return
            waited = True
            try:
                if graceful:
                    waited = self.wait_for_group(timeout)
            finally:
                # Either Ctrl-C has interrupted `wait_for_group`, or the program calls `shutdown`
                # while it handles Ctrl-C.
                interrupted = isinstance(sys.exc_info()[1], KeyboardInterrupt)
                self.ended = True
                self.rrefs.close()
                patience = _INTERRUPTED_END_SECONDS if interrupted else _END_SECONDS
                running = self.agent.close(time.monotonic() + patience)
                if running and not interrupted:
                    logger.warning(
                        "worker %s has shut down while functions were still running on its "
                        "threads %s",
                        self.info.name,
                        ", ".join(running),
                    )
                if current.process_default() is self:
                    current.set_process_default(None)
        if not waited:
            late = self._barrier.waits_for
            raise SetupError(
                f"worker {self.info.name!r} has shut down, but the others were not done after "
                + (f"{timeout:g} s" if timeout else f"{IDLE_SECONDS:g} s without any work")
                + "; calls that were still open have failed"
                + (f". It waited for {', '.join(late)}" if late else "")
            )


#: This is the function `current.runtime`, annotated with the type that it returns.
current_runtime: Callable[[], Runtime] = current.runtime

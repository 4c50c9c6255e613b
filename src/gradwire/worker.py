"""`Worker`: one member of a group, as a program sees it."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from gradwire._core import current
from gradwire._core.group.membership import Membership
from gradwire._core.ids import To, WorkerInfo
from gradwire._core.rpc.futures import Future
from gradwire._core.rref.rref import RRef
from gradwire._core.runtime import Runtime
from gradwire._core.transport.base import Transport
from gradwire.options import UNSET_TIMEOUT

#: The open ``with`` blocks of this thread or task, the innermost block last. Each block has a token
#: of `contextvars` here. When the block ends, `current.leave` uses this token to make the former
#: worker the current one again.
_open_blocks: contextvars.ContextVar[tuple[contextvars.Token[Any], ...]]
_open_blocks = contextvars.ContextVar("gradwire_blocks", default=())


class Worker:
    """A member of a group of workers that call functions on each other.

        >>> with Worker("trainer", rank=0, world_size=2) as worker:   # doctest: +SKIP
        ...     worker.rpc_sync("server", torch.add, args=(x, y))

    Inside the ``with`` block, module-level functions such as `gradwire.rpc.rpc_sync` use this
    worker. At the end of the block, the worker waits until the whole group has finished its work,
    and then shuts down. If the block raised an exception, the worker shuts down at once. Blocks of
    one worker can be nested, also in different threads. Then the end of the last open block shuts
    the worker down.

    `options` is a `gradwire.Options`. A worker makes `membership` (the list of the group's workers)
    and `transports` from the options if they are not given. `gradwire.testing.cluster` gives both,
    to run many workers in one process.
    """

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
        self._runtime = Runtime(
            name, rank, world_size, options, membership=membership, transports=transports
        )
        self._blocks_lock = threading.Lock()
        #: How many ``with`` blocks of this worker are open. When the number falls to 0, the worker
        #: shuts down. `gradwire.testing.cluster` adds 1, because it shuts down its workers itself.
        self._blocks = 0

    @property
    def name(self) -> str:
        """The name of this worker.

        >>> worker.name                                  # doctest: +SKIP
        'trainer'
        """
        return self._runtime.info.name

    @property
    def id(self) -> int:
        """The id of this worker in its group. In a group of fixed size, it is the worker's rank.

        >>> worker.id                                    # doctest: +SKIP
        0
        """
        return self._runtime.info.id

    def __repr__(self) -> str:
        state = "ended" if self._runtime.ended else "running"
        return (
            f"<gradwire.Worker {self._runtime.info.name!r} (id {self._runtime.info.id}), {state}>"
        )

    # -- calls

    def rpc_sync(
        self,
        to: To,
        func: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        timeout: float = UNSET_TIMEOUT,
    ) -> Any:
        """Run a function on a worker and return its result.

        >>> worker.rpc_sync("server", torch.add, args=(torch.ones(2), 1))     # doctest: +SKIP
        tensor([2., 2.])
        """
        return self._runtime.calls.rpc_sync(to, func, args, kwargs, timeout)

    def rpc_async(
        self,
        to: To,
        func: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        timeout: float = UNSET_TIMEOUT,
    ) -> Future[Any]:
        """Run a function on a worker and return a future of its result.

        >>> worker.rpc_async("server", torch.add, args=(x, 1)).wait()         # doctest: +SKIP
        tensor([2., 2.])
        """
        return self._runtime.calls.rpc_async(to, func, args, kwargs, timeout)

    def remote(
        self,
        to: To,
        func: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        timeout: float = UNSET_TIMEOUT,
    ) -> RRef[Any]:
        """Run a function on a worker, keep the result there and return a reference to the result.

        >>> rref = worker.remote("server", torch.nn.Linear, args=(4, 2))      # doctest: +SKIP
        """
        return self._runtime.rrefs.remote(to, func, args, kwargs, timeout)

    def rref(self, value: Any) -> RRef[Any]:
        """Return a reference to a value of this worker, which other workers can use.

        >>> worker.rpc_sync("server", register, args=(worker.rref(model),))   # doctest: +SKIP
        """
        return self._runtime.agent.run_in_context(lambda: RRef(value))

    # -- the group

    @property
    def info(self) -> WorkerInfo:
        """The name and the id of this worker.

        >>> worker.info                                  # doctest: +SKIP
        WorkerInfo(id=0, name=trainer)
        """
        return self._runtime.info

    def worker_info(self, name: str | None = None) -> WorkerInfo:
        """Return the name and the id of the worker called `name`, or of this worker if `name` is
        None.

        >>> worker.worker_info("server")                 # doctest: +SKIP
        WorkerInfo(id=1, name=server)
        """
        return self._runtime.worker_info(name)

    def worker_infos(self) -> list[WorkerInfo]:
        """Return the workers of the group, this one included.

        >>> [info.name for info in worker.worker_infos()]                     # doctest: +SKIP
        ['trainer', 'server']
        """
        return self._runtime.worker_infos()

    # -- the end

    def shutdown(self, graceful: bool = True, timeout: float = 0) -> None:
        """End this worker. In a group of fixed size, a graceful shutdown first waits until the
        work of all workers is done, for at most `timeout` seconds. With a timeout of 0, the wait
        has no fixed limit, but it ends if the workers that are not done yet have done nothing for
        five minutes.

        The worker ends even if that wait fails, and leaves no thread, connection or shared memory
        behind. In a forked child process, `shutdown` does nothing, because the worker belongs to
        the parent process.

        >>> worker.shutdown(graceful=False)              # doctest: +SKIP
        """
        self._runtime.shutdown(graceful, timeout)

    def __enter__(self) -> Worker:
        with self._blocks_lock:
            self._blocks += 1
        _open_blocks.set((*_open_blocks.get(), current.enter(self._runtime)))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._blocks_lock:
            self._blocks -= 1
            is_last = not self._blocks
        try:
            if is_last:
                self.shutdown(graceful=kind is None)
        finally:
            *outer, token = _open_blocks.get()
            _open_blocks.set(tuple(outer))
            current.leave(token)

"""One place to wait for everything a worker reads.

One thread at a time waits here (the leader of the worker's executor); any thread may arm, disarm
or post. Arming is for one event: the callback is handed out once, then the descriptor rests until
it is armed again. That is what lets a caller read its own answer: it leaves the descriptor at
rest, reads, and arms it again when other answers are outstanding.
"""

from __future__ import annotations

import select
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from gradwire.transport.eager import Eager

Callback = Callable[[], None]


class Poller(Protocol):
    """Where connections register and the leader waits."""

    def add(self, fd: int, callback: Callback) -> None:
        """Know a descriptor; at rest, only its hang-up is reported (where the system can)."""

    def arm(self, fd: int) -> None:
        """Report the next readability, once."""

    def disarm(self, fd: int) -> None:
        """Let the descriptor rest."""

    def remove(self, fd: int) -> None: ...

    def expect_more(self) -> None:
        """What was just served is likely to be followed by more of the same, soon."""

    def post(self, callback: Callback) -> None:
        """Hand out `callback` as soon as possible."""

    def next(self) -> Callback | None:
        """Wait for the next callback. None when woken without one."""

    def wake(self) -> None:
        """Make `next` return."""

    def close(self) -> None: ...


class _Posts:
    """Callbacks from other threads, and the flag that says whether the leader must be woken.

    The leader raises `asleep` *before* it looks into the queue a last time, and a poster appends
    *before* it looks at `asleep`: one of the two sees the other.
    """

    def __init__(self) -> None:
        self._ready: deque[Callback] = deque()
        self._asleep = False

    def post(self, callback: Callback) -> None:
        self._ready.append(callback)
        if self._asleep:
            self.wake()

    def next(self) -> Callback | None:
        ready = self._ready
        if not ready:
            self._asleep = True
            try:
                if not ready:
                    self._poll()
            finally:
                self._asleep = False
            if not ready:
                return None
        return ready.popleft()

    def wake(self) -> None:
        raise NotImplementedError

    def _poll(self) -> None:
        raise NotImplementedError


class EpollPoller(_Posts):
    """The poller on Linux."""

    def __init__(self) -> None:
        super().__init__()
        self._epoll = select.epoll()
        self._armed = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLONESHOT
        self._resting = select.EPOLLRDHUP | select.EPOLLONESHOT
        self._callbacks: dict[int, Callback] = {}
        self._eager = Eager()
        self._served = False
        self._bell, self._bell_rope = socket.socketpair()
        self._bell.setblocking(False)
        self._bell_rope.setblocking(False)
        self._epoll.register(self._bell.fileno(), select.EPOLLIN)

    def add(self, fd: int, callback: Callback) -> None:
        self._callbacks[fd] = callback
        self._epoll.register(fd, self._resting)

    def arm(self, fd: int) -> None:
        try:
            self._epoll.modify(fd, self._armed)
        except (OSError, ValueError):
            pass  # closed meanwhile: whoever closed it tells those concerned

    def disarm(self, fd: int) -> None:
        try:
            self._epoll.modify(fd, self._resting)
        except (OSError, ValueError):
            pass

    def expect_more(self) -> None:
        self._served = True

    def remove(self, fd: int) -> None:
        if self._callbacks.pop(fd, None) is not None:
            try:
                self._epoll.unregister(fd)
            except (OSError, ValueError):
                pass

    def wake(self) -> None:
        try:
            self._bell_rope.send(b"\0")
        except OSError:
            pass  # it rings already, or there is nobody left to hear it

    def _poll(self) -> None:
        # Only callers of ours are waited for eagerly: looking for answers to our own calls would
        # take the interpreter from the threads that make them.
        served, self._served = self._served, False
        events = self._eager.wait(self._epoll.poll, None) if served else self._epoll.poll()
        for fd, _events in events:
            callback = self._callbacks.get(fd)
            if callback is not None:
                self._ready.append(callback)
            elif fd == self._bell.fileno():
                try:
                    self._bell.recv(4096)
                except BlockingIOError:
                    pass

    def close(self) -> None:
        self._epoll.close()
        self._bell.close()
        self._bell_rope.close()


class SelectorPoller(_Posts):
    """The poller where there is no epoll. Changes made by other threads wake the leader."""

    def __init__(self, selector: selectors.BaseSelector | None = None) -> None:
        super().__init__()
        self._selector = selector or selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._callbacks: dict[int, Callback] = {}
        self._wanted: set[int] = set()
        # Their numbers may be those of new descriptors by the time the leader looks.
        self._removed: set[int] = set()
        self._bell, self._bell_rope = socket.socketpair()
        self._bell.setblocking(False)
        self._bell_rope.setblocking(False)
        self._selector.register(self._bell, selectors.EVENT_READ)

    def add(self, fd: int, callback: Callback) -> None:
        with self._lock:
            self._callbacks[fd] = callback

    def arm(self, fd: int) -> None:
        with self._lock:
            if fd not in self._callbacks or fd in self._wanted:
                return
            self._wanted.add(fd)
        self.wake()

    def disarm(self, fd: int) -> None:
        with self._lock:
            self._wanted.discard(fd)

    def expect_more(self) -> None:
        pass

    def remove(self, fd: int) -> None:
        with self._lock:
            self._callbacks.pop(fd, None)
            self._wanted.discard(fd)
            self._removed.add(fd)
        self.wake()

    def wake(self) -> None:
        try:
            self._bell_rope.send(b"\0")
        except OSError:
            pass

    def _poll(self) -> None:
        registered = self._selector.get_map()
        with self._lock:
            wanted = set(self._wanted)
            keep = wanted - self._removed | {self._bell.fileno()}
            self._removed.clear()
        for fd in [fd for fd in registered if fd not in keep]:
            self._selector.unregister(fd)
        try:
            for fd in wanted:
                if fd not in registered:
                    self._selector.register(fd, selectors.EVENT_READ)
            events = self._selector.select()
        except (OSError, ValueError):
            return  # one was closed meanwhile: it is no longer wanted at the next look
        for key, _events in events:
            if key.fd == self._bell.fileno():
                try:
                    self._bell.recv(4096)
                except BlockingIOError:
                    pass
                continue
            with self._lock:
                if key.fd in self._wanted:
                    self._wanted.discard(key.fd)
                    self._ready.append(self._callbacks[key.fd])

    def close(self) -> None:
        self._selector.close()
        self._bell.close()
        self._bell_rope.close()


def new_poller() -> Poller:
    """The best poller this system has."""
    return EpollPoller() if hasattr(select, "epoll") else SelectorPoller()

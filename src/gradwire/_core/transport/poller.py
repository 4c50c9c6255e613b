"""The poller: one thread waits here for all events of a worker (the Reactor pattern, Schmidt 1995).

One thread at a time, the worker's *leader*, waits in `next`. Any thread may arm, disarm and post.
Unlike in a textbook reactor, a file descriptor is *armed* for one event only: the poller returns
its callback once, and ignores its further events until a thread arms it again. So a thread that
made a call can read the answer itself without waking the leader: it leaves the descriptor disarmed,
reads the answer, and arms the descriptor again only if other answers are outstanding.
"""

from __future__ import annotations

import select
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from gradwire._core.transport.spin import SpinThenSleep

Callback = Callable[[], None]


class Poller(Protocol):
    """Connections register file descriptors here, and one thread of the worker, the leader, waits
    for the events of all these descriptors."""

    def add(self, fd: int, callback: Callback) -> None:
        """Register a file descriptor, which is not armed yet. Until `arm` is called, the poller
        reports only that the peer closed the connection, and only on systems that have epoll."""

    def arm(self, fd: int) -> None:
        """Have `next` return the descriptor's callback once, as soon as there is data to read."""

    def disarm(self, fd: int) -> None:
        """Undo `arm`: do not report that the descriptor has data to read."""

    def remove(self, fd: int) -> None: ...

    def expect_more(self) -> None:
        """Tell the poller that the next event will probably come soon, so that the next wait may
        spin before it sleeps."""

    def post(self, callback: Callback) -> None:
        """Have `next` return `callback` as soon as possible."""

    def next(self) -> Callback | None:
        """Wait for the next callback and return it. Return None when `wake` ended the wait."""

    def wake(self) -> None:
        """Make `next` return."""

    def close(self) -> None: ...


class _CallbackQueue:
    """The callbacks to be returned by `next`, posted by any thread.

    The flag `_asleep` tells a posting thread whether it must wake the leader, the thread that waits
    in `next`. The leader sets the flag *before* it checks the queue a last time, and a posting
    thread appends a callback *before* it checks the flag. So either the leader sees the callback,
    or the posting thread sees the flag (as in Dekker's algorithm).
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


class _WakeupSocket:
    """Lets any thread wake the thread that waits in a poll. This is the self-pipe trick (D. J.
    Bernstein), but with a pair of sockets, because Windows cannot poll pipes."""

    def __init__(self) -> None:
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)

    def fileno(self) -> int:
        """Return the file descriptor to poll."""
        return self._receiver.fileno()

    def wake(self) -> None:
        try:
            self._sender.send(b"\0")
        except OSError:
            # If the socket is full, the bytes of earlier calls wake the polling thread, so no
            # further byte is needed. Any other error means that the poller is closed.
            pass

    def clear(self) -> None:
        """Discard the bytes that `wake` sent."""
        try:
            self._receiver.recv(4096)
        except BlockingIOError:
            pass

    def close(self) -> None:
        self._receiver.close()
        self._sender.close()


class EpollPoller(_CallbackQueue):
    """The poller on Linux."""

    def __init__(self) -> None:
        super().__init__()
        self._epoll = select.epoll()
        self._armed = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLONESHOT
        self._disarmed = select.EPOLLRDHUP | select.EPOLLONESHOT
        self._callbacks: dict[int, Callback] = {}
        self._spin = SpinThenSleep()
        self._expects_more = False
        self._wakeup = _WakeupSocket()
        self._epoll.register(self._wakeup.fileno(), select.EPOLLIN)

    def add(self, fd: int, callback: Callback) -> None:
        self._callbacks[fd] = callback
        self._epoll.register(fd, self._disarmed)

    def arm(self, fd: int) -> None:
        try:
            self._epoll.modify(fd, self._armed)
        except (OSError, ValueError):
            # Another thread has just closed the descriptor, so there is nothing to arm.
            pass

    def disarm(self, fd: int) -> None:
        try:
            self._epoll.modify(fd, self._disarmed)
        except (OSError, ValueError):
            pass

    def expect_more(self) -> None:
        self._expects_more = True

    def remove(self, fd: int) -> None:
        if self._callbacks.pop(fd, None) is not None:
            try:
                self._epoll.unregister(fd)
            except (OSError, ValueError):
                pass

    def wake(self) -> None:
        self._wakeup.wake()

    def _poll(self) -> None:
        # Spin (poll in a loop instead of sleeping) only if another worker's call is expected. When
        # this worker waits for answers to its own calls, the threads that made the calls need the
        # interpreter lock, and a spinning leader would take it from them.
        expects_more, self._expects_more = self._expects_more, False
        poll = self._epoll.poll
        events = self._spin.wait(poll, None) if expects_more else poll()
        for fd, _events in events:
            callback = self._callbacks.get(fd)
            if callback is not None:
                self._ready.append(callback)
            elif fd == self._wakeup.fileno():
                self._wakeup.clear()

    def close(self) -> None:
        self._epoll.close()
        self._wakeup.close()


class SelectorPoller(_CallbackQueue):
    """The poller on systems without epoll.

    A selector must not be changed while a thread waits in it. So other threads only record their
    changes in `_wanted` (the armed descriptors) and `_removed`, and wake the leader, the thread
    that waits. The leader applies the changes.
    """

    def __init__(self, selector: selectors.BaseSelector | None = None) -> None:
        super().__init__()
        self._selector = selector or selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._callbacks: dict[int, Callback] = {}
        self._wanted: set[int] = set()
        # The descriptors that were removed since the leader last applied the changes. Before the
        # leader applies the next changes, the system may give the number of a removed descriptor to
        # a new one. The leader must then remove the old descriptor from the selector and register
        # the new one, although both have the same number.
        self._removed: set[int] = set()
        self._wakeup = _WakeupSocket()
        self._selector.register(self._wakeup.fileno(), selectors.EVENT_READ)

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
        self._wakeup.wake()

    def _poll(self) -> None:
        registered = self._selector.get_map()
        with self._lock:
            wanted = set(self._wanted)
            keep = wanted - self._removed | {self._wakeup.fileno()}
            self._removed.clear()
        for fd in [fd for fd in registered if fd not in keep]:
            self._selector.unregister(fd)
        try:
            for fd in wanted:
                if fd not in registered:
                    self._selector.register(fd, selectors.EVENT_READ)
            events = self._selector.select()
        except (OSError, ValueError):
            # Another thread has just closed a descriptor. The next poll leaves that descriptor out.
            return
        for key, _events in events:
            if key.fd == self._wakeup.fileno():
                self._wakeup.clear()
                continue
            with self._lock:
                if key.fd in self._wanted:
                    self._wanted.discard(key.fd)
                    self._ready.append(self._callbacks[key.fd])

    def close(self) -> None:
        self._selector.close()
        self._wakeup.close()


def new_poller() -> Poller:
    """Return the fastest poller that this system supports."""
    return EpollPoller() if hasattr(select, "epoll") else SelectorPoller()

"""Shows the output of all workers of a launcher in one place.

Each shown line begins with the name of its worker. A finished line is shown at once and always
whole. An unfinished line, such as a progress bar or a prompt, is shown after a twentieth of a
second, so that a line that arrives in pieces is not shown in pieces:

- On a terminal, the unfinished lines of all workers stay at the bottom, one below the other. The
  finished lines move up above them.
- In a pipe or a file, the unfinished line that changed last is the last line of the output. When
  it grows, only the new part is written. When its text is replaced, the new text follows after a
  carriage return. If another worker writes first, a newline ends the unfinished line, and its new
  text is written as a new line.

The threads that read the output of the workers pass it to this module with `feed`. This module
writes it on threads of its own, one for each pipe, file or terminal. So a reading thread waits only
when too much output is unwritten, and the main thread never waits for a slow terminal.
"""

from __future__ import annotations

import os
import re
import select
import sys
import sysconfig
import threading
import time
import unicodedata
from collections.abc import Callable, Iterable
from pathlib import Path

#: An unfinished line is shown when this many seconds have passed and it is still unfinished.
_UNFINISHED_SECONDS = 0.05
#: A longer line is cut into pieces of about this size.
_LONGEST_LINE = 1 << 20
#: While more bytes than this are unwritten, the threads that feed have to wait.
_MAX_UNWRITTEN = 1 << 20
#: An output that nobody needs any more is given up after this many seconds without progress.
_GIVE_UP_SECONDS = 2.0

#: These sequences move the cursor, erase, or set modes of a terminal. They are left out, because a
#: worker does not know where its line is shown. Colors (sequences that end with m) stay.
_CURSOR_SEQUENCES = re.compile(rb"\x1b\[[0-9;?]*[@-ln-~]")
_COLOR_SEQUENCES = re.compile(r"(\x1b\[[0-9;]*m)")
#: All control characters except ESC, which begins a color sequence. They are removed from the lines
#: at the bottom of a terminal, because some of them move the cursor.
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x1a\x1c-\x1f\x7f]")


class WorkerStream:
    """What one worker writes to its standard output or its standard error."""

    def __init__(self, prefix: str, writer: _Writer):
        self.prefix = prefix.encode()
        self.writer = writer
        #: The present text of the unfinished line.
        self.text = bytearray()
        #: Whether a part of `text` has arrived since the last time it was shown.
        self.changed = False
        self._returned = False
        self._shortener: InterruptShortener | None = None

    def shorten_interrupts(self) -> None:
        """From now on, shorten the traceback of a KeyboardInterrupt to one line."""
        if self._shortener is None:
            self._shortener = InterruptShortener()

    @property
    def has_news(self) -> bool:
        """Whether the unfinished line has to be shown. A line in the middle of a traceback that may
        be shortened is not shown."""
        return self.changed and not (self._shortener and self._shortener.is_holding)

    def feed(self, data: bytes) -> bool:
        """Show `data`, which the worker has written. Empty `data` means that the worker has closed
        the stream. Wait while too much output is unwritten. Return False if no more output can be
        shown."""
        self.writer.add(self, data)
        return self.writer.wait_for_room()

    def take(self, data: bytes) -> list[bytes]:
        """Add `data`, which the worker has written, and return the lines that are finished now."""
        finished = []
        for piece in re.split(rb"([\r\n])", data):
            if piece == b"\n" or len(self.text) > _LONGEST_LINE:
                finished.append(bytes(self.text))
                self.text.clear()
                self._returned = self.changed = False
            if piece == b"\r":
                # Text after a carriage return replaces the present text of the line. But "\r\n"
                # only ends the line.
                self._returned = True
            elif piece != b"\n" and piece:
                if self._returned:
                    self.text.clear()
                self._returned, self.changed = False, True
                self.text += piece
        return self._shown(finished)

    def news(self) -> bytes:
        """Return the present text of the unfinished line."""
        self.changed = False
        return _CURSOR_SEQUENCES.sub(b"", self.text)

    def end(self) -> list[bytes]:
        """Return the last lines, after the worker has ended."""
        finished = [bytes(self.text)] if self.text.strip() else []
        self.text.clear()
        self.changed = False
        lines = self._shown(finished)
        return lines + self._shortener.end() if self._shortener else lines

    def _shown(self, lines: list[bytes]) -> list[bytes]:
        lines = [_CURSOR_SEQUENCES.sub(b"", line) for line in lines]
        if self._shortener is None:
            return lines
        return [line for given in lines for line in self._shortener.feed(given)]


class Output:
    """The standard output and the standard error of this process, shared by all workers."""

    def __init__(self) -> None:
        self._writers = _writers(1, 2)
        self._own = self.stream("gradwire: ", 2)

    def stream(self, prefix: str, descriptor: int) -> WorkerStream:
        """Return a new stream whose lines begin with `prefix`. `descriptor` is 1 or 2."""
        stream = WorkerStream(prefix, self._writers[descriptor])
        stream.writer.streams.append(stream)
        return stream

    def start(self) -> None:
        """Start the threads that write."""
        for writer in self._writers.values():
            writer.start()

    def say(self, text: str) -> None:
        """Show a line of the launcher itself. This never waits."""
        self._own.writer.add(self._own, text.encode() + b"\n")

    def shorten_interrupts(self) -> None:
        """From now on, shorten the tracebacks of KeyboardInterrupt to one line."""
        for writer in self._writers.values():
            writer.shorten_interrupts()

    def give_up(self) -> None:
        """From now on, drop output that cannot be written."""
        for writer in self._writers.values():
            writer.give_up()

    def close(self, hurry: Callable[[], bool]) -> None:
        """Write all that is left and end the threads that write. Drop what cannot be written as
        soon as `hurry` returns True."""
        for writer in self._writers.values():
            writer.close(hurry)


class _Writer:
    """Writes to one screen, on a thread of its own."""

    def __init__(self, screen: Screen):
        self.streams: list[WorkerStream] = []
        self._screen = screen
        self._changed = threading.Condition()
        self._finished: list[tuple[WorkerStream, bytes]] = []
        self._unwritten = 0
        #: When the unfinished lines have to be shown. None if none of them has changed.
        self._due: float | None = None
        self._closing = False
        self._last_write = time.monotonic()
        self._given_up = False
        self._thread = threading.Thread(target=self._run, name="gradwire-output", daemon=True)

    def start(self) -> None:
        if not self._thread.is_alive():
            self._thread.start()

    def add(self, stream: WorkerStream, data: bytes) -> None:
        """Show `data`, which a worker has written. Empty `data` means that the stream has ended."""
        with self._changed:
            if self._closing:
                return
            finished = stream.take(data) if data else stream.end()
            self._finished += [(stream, line) for line in finished]
            self._unwritten += sum(map(len, finished))
            if stream.changed and self._due is None:
                self._due = time.monotonic() + _UNFINISHED_SECONDS
            self._changed.notify_all()

    def wait_for_room(self) -> bool:
        """Wait while too much is unwritten. Return False if nothing more can be shown."""
        with self._changed:
            while self._unwritten > _MAX_UNWRITTEN and not self._screen.closed:
                if self._is_stuck():
                    return False
                self._changed.wait(_GIVE_UP_SECONDS)
            return not self._screen.closed and not self._closing

    def shorten_interrupts(self) -> None:
        with self._changed:
            for stream in self.streams:
                stream.shorten_interrupts()

    def give_up(self) -> None:
        with self._changed:
            self._given_up = True
            self._changed.notify_all()

    def close(self, hurry: Callable[[], bool]) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        while self._thread.is_alive() and not self._is_stuck():
            self._thread.join(0.1)
            if hurry():
                self.give_up()

    def _is_stuck(self) -> bool:
        return self._given_up and time.monotonic() > self._last_write + _GIVE_UP_SECONDS

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._finished and not self._closing:
                    self._changed.wait(self._time_left())
                finished, self._finished = self._finished, []
                unfinished = []
                if self._due is not None and (self._closing or time.monotonic() >= self._due):
                    unfinished = [(s, s.news()) for s in self.streams if s.has_news]
                    self._due = None
                if self._closing and not finished and not unfinished:
                    return
            self._screen.show(finished, unfinished)
            with self._changed:
                self._last_write = time.monotonic()
                self._unwritten -= sum(len(line) for _, line in finished)
                self._changed.notify_all()

    def _time_left(self) -> float | None:
        return None if self._due is None else max(0.0, self._due - time.monotonic())


class Screen:
    """One place where output appears: a pipe or a file."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        #: Whether output can no longer be written here, for example because nobody reads the pipe.
        self.closed = (sys.__stdout__, sys.__stderr__)[descriptor - 1] is None
        #: The unfinished line that the output ends with.
        self._open: WorkerStream | None = None
        #: For each unfinished line, the text that was shown last. The line of `_open` can still be
        #: extended in the output. The other lines cannot, because another worker wrote after them.
        self._shown: dict[WorkerStream, bytes] = {}

    def show(
        self,
        finished: list[tuple[WorkerStream, bytes]],
        unfinished: list[tuple[WorkerStream, bytes]],
    ) -> None:
        """Write finished lines, then the new states of unfinished lines."""
        output = bytearray()
        for stream, line in finished:
            output += self._line(stream, line)
            if self._open is stream:
                output += b"\n"
                self._open = None
            self._shown.pop(stream, None)
        for stream, text in unfinished:
            output += self._line(stream, text)
            self._shown[stream] = text
        self.write(output)

    def _line(self, stream: WorkerStream, text: bytes) -> bytes:
        """Return the bytes to write so that the line of `stream` shows `text`."""
        shown = self._shown.get(stream)
        if self._open is stream and shown is not None:
            if text.startswith(shown):
                return text[len(shown) :]
            # Spaces cover what is left of a longer text.
            rest = _width(shown.decode(errors="replace")) - _width(text.decode(errors="replace"))
            return b"\r" + stream.prefix + text + b" " * rest
        if shown == text:
            return b""  # An earlier line of the output already shows this text.
        before = b"\n" if self._open else b""
        self._open = stream
        return before + stream.prefix + text

    def write(self, data: bytes | bytearray) -> None:
        view = memoryview(data)
        while view and not self.closed:
            try:
                view = view[os.write(self._descriptor, view) :]
            except BlockingIOError:
                select.select([], [self._descriptor], [])
            except OSError:
                # The process that reads the output has ended, or the disk is full. The launcher
                # closes its ends of the workers' pipes, so they get the same error.
                self.closed = True


class _Terminal(Screen):
    """A terminal. The unfinished lines of all workers stay at its bottom."""

    def __init__(self, descriptor: int):
        super().__init__(descriptor)
        self._drawn = 0

    def show(
        self,
        finished: list[tuple[WorkerStream, bytes]],
        unfinished: list[tuple[WorkerStream, bytes]],
    ) -> None:
        if not finished and not unfinished:
            return
        # The cursor goes to the first of the lines at the bottom, and all of them are erased.
        output = [b"\r", b"\x1b[%dA" % (self._drawn - 1) if self._drawn > 1 else b"", b"\x1b[J"]
        for stream, line in finished:
            output.append(stream.prefix + line + b"\n")
            self._shown.pop(stream, None)
        for stream, text in unfinished:
            self._shown[stream] = text
        columns, rows = _size(self._descriptor)
        streams = sorted(
            (stream for stream, text in self._shown.items() if text.strip()),
            key=lambda stream: (len(stream.prefix), stream.prefix),
        )
        lines = [stream.prefix + self._shown[stream] for stream in streams[: max(1, rows - 1)]]
        output.append(b"\n".join(_cut(line, columns - 1) for line in lines))
        self._drawn = len(lines)
        self.write(b"".join(output))


def _writers(out: int, err: int) -> dict[int, _Writer]:
    """Return the writers of two descriptors. It is one writer if both lead to the same place."""
    # `_Terminal` is used only if both descriptors lead to the same terminal. If one of them leads
    # elsewhere, for example to `tee`, another process may write to the terminal too. Then the
    # unfinished lines would no longer be at the bottom, where `_Terminal` erases them.
    if _place(out) != _place(err):
        return {out: _Writer(Screen(out)), err: _Writer(Screen(err))}
    writer = _Writer(_Terminal(err) if _can_move_cursor(err) else Screen(out))
    return {out: writer, err: writer}


def _place(descriptor: int) -> tuple[int, int]:
    try:
        status = os.fstat(descriptor)
    except OSError:  # The descriptor is closed.
        return -1, descriptor
    # On Windows, `st_ino` is 0 for all pipes, so it does not tell one pipe from another.
    return (status.st_dev, status.st_ino) if status.st_ino else (-1, descriptor)


def _can_move_cursor(descriptor: int) -> bool:
    return (
        os.isatty(descriptor)
        and sys.platform != "win32"
        and os.environ.get("TERM", "dumb") not in ("", "dumb")
    )


def _size(descriptor: int) -> tuple[int, int]:
    """Return the columns and rows of a terminal. If the terminal does not know its size, return 80
    and 24."""
    try:
        columns, rows = os.get_terminal_size(descriptor)
    except OSError:
        columns, rows = 0, 0
    return columns or 80, rows or 24


def _cut(line: bytes, columns: int) -> bytes:
    """Return the beginning of a line that fits into `columns`."""
    text = _CONTROL_CHARACTERS.sub("", line.decode(errors="replace").expandtabs())
    kept, used = [], 0
    for part in _COLOR_SEQUENCES.split(text):
        if part.startswith("\x1b"):
            kept.append(part)
            continue
        for character in part:
            used += _width(character)
            if used <= columns:
                kept.append(character)
    return "".join(kept).encode() + (b"\x1b[m" if "\x1b" in text else b"")


def _width(text: str) -> int:
    """Return how many columns of a terminal a text takes.

    >>> _width("12% ✓"), _width("進")
    (5, 2)
    """
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


class InterruptShortener:
    """Shortens the tracebacks of KeyboardInterrupt to one line each. All other lines stay.

    An interrupted worker prints a traceback of some dozen lines, and all workers of a group are
    interrupted together. A worker that has not imported gradwire yet cannot shorten its traceback
    itself. So the launcher does it, and finds the traceback in the text that the worker prints.

        >>> shortener = InterruptShortener()
        >>> lines = [b"Traceback (most recent call last):", b'  File "a.py", line 3, in f',
        ...          b"KeyboardInterrupt", b"bye"]
        >>> [line for given in lines for line in shortener.feed(given)]
        [b'interrupted at a.py:3', b'bye']
    """

    _FIRST = b"Traceback (most recent call last):"
    #: These lines join the tracebacks of one chain of exceptions.
    _BETWEEN = (
        b"",
        b"During handling of the above exception, another exception occurred:",
        b"The above exception was the direct cause of the following exception:",
    )
    _FRAME = re.compile(rb'  File "(.+)", line (\d+)')
    _LIBRARIES = tuple(
        os.fsencode(folder)
        for folder in (
            *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
            str(Path(__file__).parents[1]),
            "<",  # Some modules have no file but a name such as <frozen importlib._bootstrap>.
        )
    )

    def __init__(self) -> None:
        self._held: list[bytes] = []

    @property
    def is_holding(self) -> bool:
        return bool(self._held)

    def feed(self, line: bytes) -> Iterable[bytes]:
        """Take in a line, and return the lines that can be shown now. The lines of a traceback are
        held until its end shows whether it is the traceback of a KeyboardInterrupt."""
        if not self._held:
            if line != self._FIRST:
                return [line]
            self._held = [line]
        elif line.startswith(b"KeyboardInterrupt"):
            shortened, self._held = [b"interrupted at " + self._place()], []
            return shortened
        elif (
            line in (self._FIRST, *self._BETWEEN)
            or line.startswith(b" ")
            or self._held[-1].startswith(b" ")  # The line after the frames names the exception.
        ):
            self._held.append(line)
        else:
            return [*self.end(), line]
        return []

    def end(self) -> list[bytes]:
        """Return the lines that are held."""
        held, self._held = self._held, []
        return held

    def _place(self) -> bytes:
        """Return the file and line of the innermost frame that belongs to the program itself."""
        places = [match.groups() for line in self._held if (match := self._FRAME.match(line))]
        own = [place for place in places if not place[0].startswith(self._LIBRARIES)]
        return b":".join([*places, *own][-1]) if places else b"an unknown place"

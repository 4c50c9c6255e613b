"""Values of parameters that backward passes still need when the parameters change.

Operations save tensors for their backward, and the parameters of a server that many trainers use
are among them. A step of one trainer must not change what the forward of another has saved.

    forward of A      saves w      ──>  record ── version 1 of w ── memory 1 <── w
    step of B         copies w     ──>  record ── version 1 of w ── memory 1
                                                                    memory 2 <── w, changed by B
    backward of A     unpacks      ──>  memory 1, as A's forward saw it

The parameter moves, not what was saved: a backward that runs on another thread at that moment goes
on reading what it reads. A version is held by its records alone and they by the graph, so a step
that meets no record changes the parameter in place, as ever.

Recording goes through torch's default hooks for saved tensors. Torch leaves it to such hooks to
notice that a tensor was changed in place, so all other tensors are checked here too. And torch
fails when it counts a change of a tensor that is just being saved, on whatever thread. So changes
of parameters are not counted while they happen, but when nobody can be saving: at the end, or else
at the next occasion. Until then the count is owed.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
from torch import Tensor, UntypedStorage
from torch._C import _autograd
from torch.autograd.graph import increment_version, saved_tensors_hooks

from gradwire.gradients.memory import Memory, address, in_memory, memory_of, must_stay, trim

# What has torch count changes in place.
_COUNTING = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)

#: Where there are parameters with a change that torch has not counted yet. (One is counted for all
#: of them: what was saved in between is told apart by its version.)
_owed: set[Memory] = set()
#: Held while torch counts. Whoever begins to record waits for the end of that.
_counting = threading.RLock()


def _is_owed(tensor: Tensor) -> bool:
    return bool(_owed) and memory_of(tensor) in _owed


class Version:
    """A value of a parameter, while something refers to it."""

    __slots__ = ("__weakref__", "elements")

    def __init__(self) -> None:
        #: Where the value is, once the parameter has another one.
        self.elements: UntypedStorage | None = None


#: What the graph has in place of a tensor: an alias, how often it had been changed in place,
#: whether a count was owed, and the version if it is a parameter or a part of one.
Saved = tuple[Tensor, int, bool, "Version | None"]


class _Tracked:
    """A parameter that is looked after."""

    __slots__ = ("left", "memory", "parameter", "stays")

    def __init__(self, parameter: weakref.ref[Tensor]):
        self.parameter = parameter
        self.memory: Memory = 0
        #: Whether it must not move.
        self.stays = False
        #: Memory that it was in before.
        self.left: list[UntypedStorage] = []


class Versions:
    """The parameters of a worker that change while others use them, and their old values."""

    def __init__(self) -> None:
        #: Held while parameters are changed. Who is about to save one waits for the new value.
        self.lock = threading.RLock()
        #: How many times a parameter had to be copied.
        self.copies = 0
        #: By identity of the parameter.
        self._tracked: dict[int, _Tracked] = {}
        #: The parameters in a memory, by identity.
        self._residents: dict[Memory, set[int]] = {}
        #: What is in the memory of parameters, and in that of past versions: the version, if
        #: anything refers to it.
        self._versions: dict[Memory, weakref.ref[Version] | None] = {}
        #: The code that may be saving, and its threads.
        self._recordings: dict[_Recording, int] = {}
        #: Looked at before every run of a pass: whether anything is owed.
        self.owed = _owed
        self._paying = False

    # -- changing

    def track(self, parameters: Iterable[Tensor]) -> None:
        """Look after these parameters from now on, as long as they live."""
        with self.lock:
            for parameter in parameters:
                self._entry_of(parameter)

    @contextmanager
    def changing(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        """Around a change of these parameters and of nothing else. Present values are put aside
        where something refers to them."""
        with self.lock:
            for parameter in parameters:
                entry = self._entry_of(parameter)
                if entry is not None:
                    self._put_aside(parameter, entry)
            try:
                with torch._C._ExcludeDispatchKeyGuard(_COUNTING):
                    yield
            finally:
                self.track(parameters)  # where they are now
                self._count_change(parameters)

    def _entry_of(self, parameter: Tensor) -> _Tracked | None:
        memory = memory_of(parameter)
        if memory is None:
            return None
        entry = self._tracked.get(id(parameter))
        if entry is None:
            forget = partial(self._forget, id(parameter))
            entry = self._tracked[id(parameter)] = _Tracked(weakref.ref(parameter, forget))
        if entry.memory != memory:  # it is new, or was given other memory
            entry.stays = memory in self._versions or must_stay(parameter)
            entry.left.clear()
            owed = entry.memory in _owed
            self._leave(entry.memory, id(parameter))
            entry.memory = memory
            self._residents.setdefault(memory, set()).add(id(parameter))
            self._versions.setdefault(memory)
            if owed:
                _owed.add(memory)
        return entry

    def _forget(self, id: int, _parameter: weakref.ref[Tensor]) -> None:
        self._leave(self._tracked.pop(id).memory, id)

    def _leave(self, memory: Memory, id: int) -> None:
        """A parameter is not in that memory any more; another one may be."""
        residents = self._residents.get(memory, set())
        residents.discard(id)
        if not residents:
            self._residents.pop(memory, None)
            self._versions.pop(memory, None)
            _owed.discard(memory)

    def _put_aside(self, parameter: Tensor, entry: _Tracked) -> None:
        free = trim(entry.left)
        version = self._version_in(entry.memory)
        if version is None:
            # Whoever looked at the memory when that was decided may have been only passing by.
            entry.stays = entry.stays and must_stay(parameter)
            return
        self.copies += 1
        present = parameter.untyped_storage()
        if entry.stays:
            version.elements = present.clone()  # type: ignore[no-untyped-call]
            self._versions[entry.memory] = None
            return
        # Memory that was in use before is faster than new memory. And an operation that saves
        # nothing may be reading the parameter right now: its memory must not go away.
        if free is None:
            copy = parameter.detach().clone()
        else:
            entry.left.remove(free)
            copy = in_memory(free, parameter).copy_(parameter.detach())
        entry.left.append(present)
        version.elements = present
        # It stays known: views of the parameter that are saved later are of this version.
        forget = partial(self._versions.pop, entry.memory)
        self._versions[entry.memory] = weakref.ref(version, forget)
        self._residents[entry.memory].discard(id(parameter))
        owed = entry.memory in _owed
        _owed.discard(entry.memory)
        entry.memory = address(copy)
        self._residents[entry.memory] = {id(parameter)}
        self._versions[entry.memory] = None
        if owed:
            _owed.add(entry.memory)
        parameter.data = copy

    def _count_change(self, parameters: Sequence[Tensor]) -> None:
        """Let torch count, for the sake of what was saved where nobody records; now, or when it
        can. The lock is held."""
        _owed.update(entry.memory for p in parameters if (entry := self._tracked.get(id(p))))
        self.pay()

    def pay(self, *, wait: bool = True) -> None:
        """Let torch count what it could not count before, if nobody can be saving now but this very
        thread. Unless it may `wait`, only if nobody is changing parameters: who does pays then."""
        if not self.lock.acquire(blocking=wait):
            return
        try:
            with _counting:
                me = threading.get_ident()
                others = any(thread != me for thread in list(self._recordings.values()))
                if not others and not self._paying:
                    self._paying = True
                    for entry in list(self._tracked.values()):
                        if entry.memory in _owed and (parameter := entry.parameter()) is not None:
                            increment_version(parameter)
                    _owed.difference_update(list(self._residents))
                    self._paying = False
        finally:
            self.lock.release()

    def _version_in(self, memory: Memory | None) -> Version | None:
        known = self._versions.get(memory)  # type: ignore[arg-type]
        return None if known is None else known()

    # -- saving

    def recording(self) -> AbstractContextManager[object] | None:
        """To be around code that uses parameters; None when there is nothing to look after."""
        if self._tracked and _autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
            return _Recording(self)
        return None

    def pack(self, tensor: Tensor) -> Saved:
        """Called by torch for every tensor that an operation saves."""
        # The result of an operation leads to it: saved as it is, they would keep each other alive.
        alias = tensor.detach() if tensor.requires_grad else tensor
        memory = memory_of(alias)
        if memory not in self._versions:
            return alias, alias._version, _is_owed(alias), None
        with self.lock:
            if tensor.is_leaf:
                alias = tensor.detach()  # a parameter may have moved before we had the lock
                memory = address(alias)
            version = self._version_in(memory)
            if version is None and memory in self._versions:
                version = Version()
                self._versions[memory] = weakref.ref(version)
            return alias, alias._version, _is_owed(alias), version


class _Recording(saved_tensors_hooks):
    """Around code that may save parameters."""

    def __init__(self, versions: Versions):
        super().__init__(versions.pack, unpack)
        self._versions = versions

    def __enter__(self) -> None:
        with _counting:
            self._versions._recordings[self] = threading.get_ident()
        super().__enter__()

    def __exit__(self, *error: object) -> None:
        if self._versions._recordings.pop(self) == threading.get_ident():
            super().__exit__(*error)  # else it ends elsewhere: those are hooks of somebody else
        if _owed:
            # (The garbage collector may come by here, whatever lock this thread holds.)
            self._versions.pay(wait=False)


def _count_changes(tensor: Tensor, was_owed: bool) -> list[int]:
    """How often a tensor may have been changed in place when it was saved, if it has not been
    changed since; first of all how often it was changed by now. `was_owed`: a count was owed then.
    It is not told which tensors that are in the memory of a parameter have its count."""
    is_owed = _is_owed(tensor)  # first: a count is paid, then owed no more
    changes = tensor._version
    if was_owed:
        return [changes] if is_owed else [changes, changes - 1]
    return [changes + is_owed]


def unpack(saved: Saved) -> Tensor:
    """Called by torch when a backward needs a tensor that was saved."""
    tensor, number, owed, version = saved
    changes = _count_changes(tensor, owed)  # first: a change begins with putting aside
    if version is not None and version.elements is not None:
        if version.elements._cdata == address(tensor):
            return tensor
        return in_memory(version.elements, tensor)
    if number not in changes:
        with _counting:  # it may just have been paid
            changes = _count_changes(tensor, owed)
    if number not in changes:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: [{tensor.type()} {list(tensor.shape)}] is at version {changes[0]}; "
            f"expected version {number} instead. If it is a parameter that several trainers use, "
            "change it inside `with gradwire.optim.changing([parameter]):`"
        )
    return tensor


@contextmanager
def untracked() -> Iterator[None]:
    """Leave saved tensors to torch inside the block. The transforms of ``torch.func`` ask for that:
    most refuse to run where anybody looks at what is saved. What is saved here for a later backward
    is not protected against steps: that backward fails. (Unless other functions that use parameters
    run on the worker all the time from the step on: then nobody notices.)

        >>> with untracked():                              # doctest: +SKIP
        ...     slope = torch.func.grad(loss)(weight)
    """
    taken = []
    while (hooks := _autograd._top_saved_tensors_default_hooks(True)) and hooks[1] is unpack:
        _autograd._pop_saved_tensors_default_hooks()
        taken.append(hooks)
    try:
        yield
    finally:
        for hooks in reversed(taken):
            _autograd._push_saved_tensors_default_hooks(*hooks)

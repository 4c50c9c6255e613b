"""Copy-on-write for parameters: a backward pass uses the values that its forward pass has seen.

Operations save tensors for their backward, and among them may be parameters that several trainers
use. A step of one trainer must not change what the forward pass of another trainer has saved.

    forward of A     saves w       ──>  saved ── version 1 of w ── storage 1 <── w
    step of B        copies w      ──>  saved ── version 1 of w ── storage 1
                                                                   storage 2 <── w, changed by B
    backward of A    unpacks       ──>  storage 1, as A's forward saw it

This is copy-on-write, as an operating system does it with the pages of a forked process. An old
version lives as long as a reader refers to it, as in multiversion concurrency control (D. P. Reed,
1978). But here the versions have no numbers or timestamps, only a count of references: the saved
tensors hold the version, and the autograd graph holds the saved tensors. If nothing refers to
the present value, a step changes the parameter in place and copies nothing.

The parameter moves to the storage of the copy. The old value stays where it is, because a backward
pass on another thread may be reading it. If other tensors share the storage of the parameter, they
must see its changes, so in this case the parameter stays and the old value moves.

Torch's default hooks for saved tensors tell this module which tensors are saved. With such hooks,
torch's own protection of saved tensors works differently in two ways:

- Torch does not check that a saved tensor was not changed in place. So `unpack` checks the version
  counter of every saved tensor, in which torch counts in-place changes.
- Torch raises an error if a version counter changes while the tensor is being saved, on any thread.
  So torch's counting is off while parameters are changed. The change is counted later, when no
  other thread can be saving tensors. Until then the change is *uncounted*.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
from torch import Tensor, UntypedStorage
from torch.autograd.graph import increment_version, saved_tensors_hooks

from gradwire._core.autograd.storage import (
    StorageId,
    find_storage_id,
    is_shared,
    keep_one_free,
    storage_id,
    tensor_in,
)
from gradwire._core.torch_internals import (
    COUNTING_KEYS,
    ExcludeDispatchKeys,
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    saved_tensors_hooks_are_enabled,
)

#: The storages of changed parameters, while torch's version counters do not show the change yet.
#: Several changes of a parameter are later counted as one. That is enough, because a tensor that
#: `pack` saved between two changes refers to a `Version`, which holds the value at that time.
_uncounted: set[StorageId] = set()
#: Held while changes are added to torch's version counters. A thread that is about to save tensors
#: waits for this lock.
_count_lock = threading.RLock()


def _is_uncounted(tensor: Tensor) -> bool:
    return bool(_uncounted) and find_storage_id(tensor) in _uncounted


class Version:
    """One value of a parameter. It exists while saved tensors refer to it."""

    __slots__ = ("__weakref__", "storage")

    def __init__(self) -> None:
        #: The storage of this value. None as long as it is the parameter's present value.
        self.storage: UntypedStorage | None = None


#: What an autograd graph keeps instead of a saved tensor. The items are: an alias of the tensor;
#: its version counter; whether a change of the tensor was not in the counter yet; and the `Version`
#: that holds the saved value, if the tensor is a parameter or a view of one.
Saved = tuple[Tensor, int, bool, "Version | None"]


class _Tracked:
    """A parameter whose old values are kept while saved tensors refer to them."""

    __slots__ = ("former_storages", "is_fixed", "parameter", "storage_id")

    def __init__(self, parameter: weakref.ref[Tensor]):
        self.parameter = parameter
        self.storage_id: StorageId = 0
        #: Whether the parameter must stay in its storage, because other tensors share it.
        self.is_fixed = False
        #: The storages that the parameter was in before. They are used again for later copies.
        self.former_storages: list[UntypedStorage] = []


class ParameterVersions:
    """For one worker: the parameters that may change while other code uses them, and the old values
    of these parameters."""

    def __init__(self) -> None:
        #: Held while parameters are changed. A thread that saves a parameter for a backward pass
        #: waits for the lock, and so saves the new value.
        self.lock = threading.RLock()
        #: How many times the value of a parameter had to be copied.
        self.copies = 0
        #: The tracked parameters, by their id().
        self._tracked: dict[int, _Tracked] = {}
        #: By storage: the id() of each tracked parameter in it.
        self._parameters_in: dict[StorageId, set[int]] = {}
        #: For each storage that holds the present value or an old value of a parameter: a weak
        #: reference to the `Version` for this value. None if no saved tensor has referred to the
        #: value.
        self._versions: dict[StorageId, weakref.ref[Version] | None] = {}
        #: The blocks of code that are running with the hooks for saved tensors, and the thread on
        #: which each block began.
        self._recordings: dict[_Recording, int] = {}
        #: The storages with changes that are not in torch's version counters yet. Each time before
        #: a backward pass runs torch's engine, it calls `count_changes` if this set is not empty.
        self.uncounted = _uncounted
        self._is_counting = False

    # -- changing

    def track(self, parameters: Iterable[Tensor]) -> None:
        """Track these parameters. From now on `changing` keeps their old values for saved tensors
        that refer to them. A parameter is tracked as long as it exists."""
        with self.lock:
            for parameter in parameters:
                self._track(parameter)

    @contextmanager
    def changing(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        """Return a context manager. Inside its block, these parameters and no other tensors may be
        changed in place. Saved tensors that refer to the present values keep them."""
        with self.lock:
            for parameter in parameters:
                tracked = self._track(parameter)
                if tracked is not None:
                    self._keep_value(parameter, tracked)
            try:
                with ExcludeDispatchKeys(COUNTING_KEYS):
                    yield
            finally:
                # The block may have moved the parameters to other storages. If so, `track` notes
                # the new storages.
                self.track(parameters)
                self._note_change(parameters)

    def _track(self, parameter: Tensor) -> _Tracked | None:
        """Note which storage a parameter is in, and return the record of the parameter. Return None
        for a parameter without a single storage, for example a sparse tensor."""
        storage = find_storage_id(parameter)
        if storage is None:
            return None
        tracked = self._tracked.get(id(parameter))
        if tracked is None:
            forget = partial(self._forget, id(parameter))
            tracked = self._tracked[id(parameter)] = _Tracked(weakref.ref(parameter, forget))
        # The recorded storage id differs from the present one if the parameter was not tracked
        # before, or was given another storage.
        if tracked.storage_id != storage:
            tracked.is_fixed = storage in self._versions or is_shared(parameter)
            tracked.former_storages.clear()
            was_uncounted = tracked.storage_id in _uncounted
            self._leave_storage(tracked.storage_id, id(parameter))
            tracked.storage_id = storage
            self._parameters_in.setdefault(storage, set()).add(id(parameter))
            self._versions.setdefault(storage)
            if was_uncounted:
                _uncounted.add(storage)
        return tracked

    def _forget(self, parameter_id: int, _parameter: weakref.ref[Tensor]) -> None:
        self._leave_storage(self._tracked.pop(parameter_id).storage_id, parameter_id)

    def _leave_storage(self, storage: StorageId, parameter_id: int) -> None:
        """Note that a parameter has left a storage. Forget the storage if the parameter was the
        last one there."""
        parameters = self._parameters_in.get(storage, set())
        parameters.discard(parameter_id)
        if not parameters:
            self._parameters_in.pop(storage, None)
            self._versions.pop(storage, None)
            _uncounted.discard(storage)

    def _keep_value(self, parameter: Tensor, tracked: _Tracked) -> None:
        """Before a parameter is changed, copy its value if saved tensors refer to that value."""
        free = keep_one_free(tracked.former_storages)
        version = self._version_in(tracked.storage_id)
        if version is None:
            # No saved tensor refers to the value, so nothing is copied. But the tensors that shared
            # the parameter's storage may no longer exist. Then the parameter need not stay in the
            # storage when a later change copies the value.
            tracked.is_fixed = tracked.is_fixed and is_shared(parameter)
            return
        self.copies += 1
        present = parameter.untyped_storage()
        if tracked.is_fixed:
            version.storage = present.clone()  # type: ignore[no-untyped-call]
            self._versions[tracked.storage_id] = None
            return
        # It is faster to use an old storage again than to allocate one.
        if free is None:
            copy = parameter.detach().clone()
        else:
            tracked.former_storages.remove(free)
            copy = tensor_in(free, parameter).copy_(parameter.detach())
        # An operation on another thread may be reading the parameter without saving it, so no
        # version keeps the storage for that operation. This list keeps the storage until no tensor
        # uses it.
        tracked.former_storages.append(present)
        version.storage = present
        # The old storage stays in `_versions`, because a view of the parameter that was made before
        # the change may be saved after the change. Such a view belongs to this version.
        forget = partial(self._versions.pop, tracked.storage_id)
        self._versions[tracked.storage_id] = weakref.ref(version, forget)
        self._parameters_in[tracked.storage_id].discard(id(parameter))
        was_uncounted = tracked.storage_id in _uncounted
        _uncounted.discard(tracked.storage_id)
        tracked.storage_id = storage_id(copy)
        self._parameters_in[tracked.storage_id] = {id(parameter)}
        self._versions[tracked.storage_id] = None
        if was_uncounted:
            _uncounted.add(tracked.storage_id)
        parameter.data = copy

    def _note_change(self, parameters: Sequence[Tensor]) -> None:
        """Note that these parameters have changed, and raise torch's version counters now or
        later. The caller holds the lock.

        The counters must rise for tensors that were saved without the hooks of this module. Torch
        compares the counter of such a tensor to detect that the tensor has changed.
        """
        _uncounted.update(
            tracked.storage_id for p in parameters if (tracked := self._tracked.get(id(p)))
        )
        self.count_changes()

    def count_changes(self, *, wait: bool = True) -> None:
        """Raise torch's version counters for the uncounted changes: the changes of parameters that
        the counters do not show yet. Do nothing if other threads may be saving tensors now.

        Without `wait`, also do nothing if another thread is changing parameters, because that
        thread will count the changes when it is done.
        """
        if not self.lock.acquire(blocking=wait):
            return
        try:
            with _count_lock:
                me = threading.get_ident()
                others = any(thread != me for thread in list(self._recordings.values()))
                if not others and not self._is_counting:
                    self._is_counting = True
                    for tracked in list(self._tracked.values()):
                        parameter = tracked.parameter()
                        if tracked.storage_id in _uncounted and parameter is not None:
                            increment_version(parameter)
                    _uncounted.difference_update(list(self._parameters_in))
                    self._is_counting = False
        finally:
            self.lock.release()

    def _version_in(self, storage: StorageId | None) -> Version | None:
        reference = self._versions.get(storage)  # type: ignore[arg-type]
        return None if reference is None else reference()

    # -- saving

    def recording(self) -> AbstractContextManager[object] | None:
        """Return a context manager for a block of code that may save parameters for a backward
        pass.

        Return None if no parameters are tracked, or if torch allows no hooks for saved tensors now.
        """
        if self._tracked and saved_tensors_hooks_are_enabled():
            return _Recording(self)
        return None

    def pack(self, tensor: Tensor) -> Saved:
        """Return the record that the graph keeps instead of a tensor that an operation saves. Torch
        calls this for each saved tensor."""
        # An operation may save its own result. The result refers to the operation's node. If the
        # node also referred to the result, that would be a reference cycle. So the node gets an
        # alias that has no history, and therefore does not refer to the node.
        alias = tensor.detach() if tensor.requires_grad else tensor
        storage = find_storage_id(alias)
        if storage not in self._versions:
            return alias, alias._version, _is_uncounted(alias), None
        with self.lock:
            if tensor.is_leaf:
                # While this thread waited for the lock, the parameter may have moved to another
                # storage. So a new alias is made.
                alias = tensor.detach()
                storage = storage_id(alias)
            version = self._version_in(storage)
            if version is None and storage in self._versions:
                version = Version()
                self._versions[storage] = weakref.ref(version)
            return alias, alias._version, _is_uncounted(alias), version


class _Recording(saved_tensors_hooks):
    """A block of code that may save parameters for a backward pass. The block runs with hooks for
    saved tensors."""

    def __init__(self, versions: ParameterVersions):
        super().__init__(versions.pack, unpack)
        self._versions = versions

    def __enter__(self) -> None:
        with _count_lock:
            self._versions._recordings[self] = threading.get_ident()
        _this_thread.recordings.append(self)
        super().__enter__()

    def __exit__(self, *error: object) -> None:
        # A block in a generator may end on another thread than it began on. The hooks that are
        # active on that thread do not belong to the block, so they must stay.
        if self._versions._recordings.pop(self) == threading.get_ident():
            super().__exit__(*error)
            _this_thread.recordings.remove(self)
        if _uncounted:
            # The garbage collector may end a block in an unfinished generator at any moment, even
            # while this thread holds locks. So this call must not wait for a lock.
            self._versions.count_changes(wait=False)

    def has_active_hooks(self) -> bool:
        """Return whether the hooks of this block are those that torch calls now. They are not if
        the program has entered a block with other hooks since.

        Not every version of torch tells which hooks are active. So this method lets an operation
        save a tensor, and looks whether `pack` has made a `Version` for the tensor's storage.
        """
        versions = self._versions
        with torch.inference_mode(False), torch.enable_grad():
            probe = torch.zeros((), device="cpu", requires_grad=True)
            storage = storage_id(probe)
            with versions.lock:
                versions._versions[storage] = None
            try:
                # The variable keeps the result alive until this method has looked for the
                # `Version`, because the autograd node of the result keeps the `Version` alive.
                _result = probe.square()
                return versions._version_in(storage) is not None
            finally:
                with versions.lock:
                    del versions._versions[storage]


class _ThisThread(threading.local):
    """State that each thread has for itself. `untracked` uses the state of the current thread."""

    def __init__(self) -> None:
        #: The blocks with hooks that the thread has entered, the innermost last.
        self.recordings: list[_Recording] = []


_this_thread = _ThisThread()


def _counters_if_unchanged(tensor: Tensor, was_uncounted: bool) -> list[int]:
    """Return the values that the version counter of a saved tensor can have had when the tensor was
    saved, assuming that it was not changed since.

    `was_uncounted`: whether the tensor had a change that the counter did not show yet when the
    tensor was saved. If that change has been counted in the meantime, two values are possible.
    Counting raises the version counter of a parameter. A saved tensor that shares the parameter's
    storage may share this counter or have its own, and torch does not say which.

    The first value serves in the text of an error, as the present version of the tensor.
    """
    # The set `_uncounted` holds the storages with changes that are not in their version counters
    # yet. Another thread may run `count_changes` now, which raises the counter first and then
    # removes the storage from the set. So the set is checked before the counter is read: if the
    # storage is no longer in the set, the counter includes the change.
    is_uncounted = _is_uncounted(tensor)
    counter = tensor._version
    if was_uncounted:
        return [counter] if is_uncounted else [counter, counter - 1]
    return [counter + is_uncounted]


def unpack(saved: Saved) -> Tensor:
    """Return a saved tensor as it was when it was saved. Torch calls this in a backward pass."""
    tensor, counter, was_uncounted, version = saved
    # The counter is read before `version.storage`. A change on another thread sets
    # `version.storage` before the counter rises. So if the counter shows the change, the code below
    # also sees the new `version.storage`.
    possible = _counters_if_unchanged(tensor, was_uncounted)
    if version is not None and version.storage is not None:
        if version.storage._cdata == storage_id(tensor):
            return tensor
        return tensor_in(version.storage, tensor)
    if counter not in possible:
        # Another thread may have counted a change while this thread was reading the counter. So the
        # counter is read again, under the lock that a thread must hold to count changes.
        with _count_lock:
            possible = _counters_if_unchanged(tensor, was_uncounted)
    if counter not in possible:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: [{tensor.type()} {list(tensor.shape)}] is at version {possible[0]}; "
            f"expected version {counter} instead. If it is a parameter that several trainers use, "
            "change it inside `with gradwire.optim.changing([parameter]):`"
        )
    return tensor


@contextmanager
def untracked() -> Iterator[None]:
    """Leave saved tensors to torch inside the block.

    Most transforms of ``torch.func`` need this, because they refuse to run with hooks for saved
    tensors. A tensor that is saved inside the block is not protected against optimizer steps: after
    a step, the backward that needs the tensor fails. (There is one exception. Torch can learn of a
    step only at a moment when no other function that uses parameters is running on the worker. If
    there is no such moment between the step and the backward, the backward does not fail, but uses
    the new values.)

        >>> with untracked():                              # doctest: +SKIP
        ...     slope = torch.func.grad(loss)(weight)
    """
    removed: list[_Recording] = []
    own = list(_this_thread.recordings)
    while own and own[-1].has_active_hooks():
        pop_saved_tensors_hooks()
        removed.append(own.pop())
    try:
        yield
    finally:
        for recording in reversed(removed):
            push_saved_tensors_hooks(recording.pack_hook, recording.unpack_hook)

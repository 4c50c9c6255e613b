"""RRefs: a value lives exactly as long as there are RRefs to it."""

from __future__ import annotations

import copy
import gc
import inspect
import operator
import pickle
import random
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
import torch

from gradwire import rpc
from gradwire.compat.rpc import internal
from gradwire.errors import CallTimeout, EncodingError, GradwireError
from gradwire.testing import acting_as, cluster, runtime_of
from gradwire.testing.cluster import transports_named
from gradwire.worker import Worker
from tests.processes import until

TIMEOUT = 30.0


@pytest.fixture(params=["in_process", "unix"])
def trio(request: pytest.FixtureRequest) -> Iterator[list[Worker]]:
    with cluster(3, transports=transports_named(request.param)) as workers:
        yield workers


class Thing:
    """A value whose living instances are known to the tests."""

    alive: ClassVar[weakref.WeakSet[Thing]] = weakref.WeakSet()

    def __init__(self, name: str):
        self.name = name
        Thing.alive.add(self)

    def greet(self, whom: str, *, mark: str = "!") -> str:
        return f"{self.name} greets {whom}{mark}"

    def fail(self) -> None:
        raise LookupError(self.name)

    def __call__(self, x: int) -> int:
        return x + 1


def names_alive() -> list[str]:
    return sorted(thing.name for thing in Thing.alive)


def hold(rref: rpc.RRef[Any]) -> rpc.RRef[Any]:
    HELD.append(rref)
    return rref


def give_held() -> rpc.RRef[Any]:
    return HELD[-1]


def release_held() -> None:
    HELD.clear()


HELD: list[rpc.RRef[Any]] = []


def name_of(rref: rpc.RRef[Thing]) -> str:
    return rref.rpc_sync().greet("you") if not rref.is_owner() else rref.local_value().name


def nothing_held(workers: list[Worker]) -> bool:
    gc.collect()
    return all(not any(runtime_of(worker).rrefs.debug_info().values()) for worker in workers)


def no_thing_alive() -> bool:
    gc.collect()
    return not names_alive()


def test_a_remote_value_is_created_fetched_and_called(trio: list[Worker]) -> None:
    rref = trio[0].remote("worker1", Thing, ("bob",))
    assert rref.owner() == trio[1].info
    assert rref.owner_name() == "worker1"
    assert not rref.is_owner()
    assert rref.to_here().name == "bob"
    assert rref.confirmed_by_owner()
    assert rref.rpc_sync().greet("eve", mark="?") == "bob greets eve?"
    assert rref.rpc_async(timeout=5).greet("eve").wait() == "bob greets eve!"
    assert rref.remote().greet("ann").to_here() == "bob greets ann!"
    assert rref.rpc_sync()(41) == 42
    with pytest.raises(LookupError, match="bob"):
        rref.rpc_sync().fail()
    with pytest.raises(AttributeError, match="dance"):
        rref.rpc_sync().dance()
    with pytest.raises(GradwireError, match=r"only on its owner, worker 'worker1'.*to_here"):
        rref.local_value()
    del rref
    until(lambda: nothing_held(trio) and no_thing_alive(), "the value is freed")


def test_operators_and_containers_are_reached_through_proxies(trio: list[Worker]) -> None:
    table = trio[0].remote("worker1", dict, ({"a": 1},))
    table.rpc_sync().__setitem__("b", 2)
    assert table.rpc_sync().__getitem__("b") == 2
    assert table.rpc_async().__len__().wait() == 2
    assert table.remote().__contains__("c").to_here() is False
    assert table.remote().__iter__().rpc_sync().__next__() == "a"
    assert table.rpc_sync().__or__({"c": 3}) == {"a": 1, "b": 2, "c": 3}
    tensor = trio[0].remote("worker1", torch.ones, (2,))
    assert tensor.rpc_sync().__rsub__(3).tolist() == [2.0, 2.0]
    assert tensor.rpc_sync().__matmul__(torch.ones(2)) == 2.0
    with pytest.raises(AttributeError, match="__getitem__"):
        trio[0].remote("worker1", int).rpc_sync().__getitem__(0)


def test_a_proxy_is_an_ordinary_object_itself(trio: list[Worker]) -> None:
    """Special methods that libraries ask every object for are not forwarded to the value."""
    numpy = pytest.importorskip("numpy")
    proxy = trio[0].remote("worker1", torch.ones, (2,)).rpc_sync()
    for same in (copy.copy(proxy), inspect.unwrap(proxy), numpy.array(proxy).item()):
        assert same.sum() == 2.0
    assert [*inspect.signature(proxy).parameters] == ["args", "kwargs"]
    with pytest.raises(TypeError, match="unsupported operand"):
        operator.add(torch.ones(2), proxy)
    for name in ("__deepcopy__", "__setstate__", "__array__", "__torch_function__", "__name__"):
        assert not hasattr(proxy, name)


def test_a_worker_can_refer_to_its_own_values(trio: list[Worker]) -> None:
    thing = Thing("mine")
    rref = trio[0].rref(thing)
    assert rref.is_owner()
    assert rref.local_value() is thing
    assert rref.to_here() is thing
    assert rref.rpc_sync().greet("me") == "mine greets me!"
    assert runtime_of(trio[0]).rrefs.debug_info()["num_owner_rrefs"] == 0, (
        "an owner alone keeps no entry in the table"
    )
    assert trio[1].rpc_sync("worker2", name_of, (trio[1].rref(Thing("other")),)) == (
        "other greets you!"
    )
    del rref, thing
    until(lambda: nothing_held(trio) and no_thing_alive(), "the values are freed")


def test_remote_to_oneself_gives_the_owners_reference(trio: list[Worker]) -> None:
    rref = trio[0].remote("worker0", Thing, ("home",))
    assert rref.is_owner()
    assert rref.to_here().name == "home"
    assert rref.local_value() is rref.to_here()
    del rref
    until(lambda: nothing_held(trio) and no_thing_alive(), "the value is freed")


def test_a_failed_creation_is_raised_where_the_value_is_used(trio: list[Worker]) -> None:
    rref = trio[0].remote("worker1", int, ("not a number",))
    for ask in (rref.to_here, rref.rpc_sync().bit_length, lambda: rref.remote().x().to_here()):
        with pytest.raises(ValueError, match="not a number"):
            ask()


def test_a_creation_that_takes_too_long_is_named_as_the_reason(trio: list[Worker]) -> None:
    STARTED.clear()
    try:
        rref = trio[0].remote("worker1", wait_for_start, timeout=0.05)
        with pytest.raises(CallTimeout, match=r"creation via rpc.remote\(\) timed out"):
            rref.to_here(timeout=0.2)
        other = trio[0].remote("worker1", wait_for_start)
        with pytest.raises(CallTimeout, match="to_here"):
            other.to_here(timeout=0.05)
    finally:
        STARTED.set()
    assert other.to_here() is True


STARTED = threading.Event()


def wait_for_start() -> bool:
    return STARTED.wait(TIMEOUT)


def test_waiting_for_a_value_does_not_block_other_calls() -> None:
    STARTED.clear()
    with cluster(2, options=rpc.Options(num_worker_threads=2)) as (a, _):
        slow = a.remote("worker1", wait_for_start)
        asked = [slow.rpc_async().bit_length() for _ in range(8)]
        assert a.rpc_sync("worker1", max, (1, 2)) == 2
        STARTED.set()
        assert [future.wait() for future in asked] == [1] * 8


def test_references_travel_through_third_workers(trio: list[Worker]) -> None:
    a = trio[0]
    rref = a.remote("worker1", Thing, ("traveller",))
    assert a.rpc_sync("worker2", name_of, (rref,)) == "traveller greets you!"
    assert a.rpc_sync("worker1", name_of, (rref,)) == "traveller"
    a.rpc_sync("worker2", hold, (rref,))
    del rref
    gc.collect()
    assert names_alive() == ["traveller"]
    again = a.rpc_sync("worker2", give_held)
    assert again.rpc_sync().greet("a") == "traveller greets a!"
    a.rpc_sync("worker2", release_held)
    assert again.to_here().name == "traveller"
    del again
    until(lambda: nothing_held(trio) and no_thing_alive(), "the value is freed")


def test_a_reference_is_sent_back_to_its_owner(trio: list[Worker]) -> None:
    a = trio[0]
    mine = a.rref(Thing("home"))
    back = a.rpc_sync("worker1", hold, (mine,))
    assert runtime_of(a).rrefs.debug_info()["num_owner_rrefs"] == 1
    assert back.is_owner()
    assert back.local_value() is mine.local_value()
    a.rpc_sync("worker1", release_held)
    del mine, back
    until(lambda: nothing_held(trio) and no_thing_alive(), "the value is freed")


def test_references_inside_values_and_results(trio: list[Worker]) -> None:
    a = trio[0]
    rrefs = [a.remote(n % 3, torch.full, ((3,), float(n))) for n in range(6)]
    got = a.rpc_sync("worker2", fetch_all, ({"rrefs": rrefs},))
    assert [t[0].item() for t in got] == [float(n) for n in range(6)]
    nested = a.remote("worker1", make_reference, ("worker2",))
    assert nested.to_here().to_here().name == "nested"
    del rrefs, nested
    until(lambda: nothing_held(trio) and no_thing_alive(), "the values are freed")


def fetch_all(box: dict[str, list[rpc.RRef[torch.Tensor]]]) -> list[torch.Tensor]:
    return [rref.to_here() for rref in box["rrefs"]]


def make_reference(owner: str) -> rpc.RRef[Thing]:
    return rpc.remote(owner, Thing, args=("nested",))


def test_a_reference_that_could_not_be_sent_is_not_counted(trio: list[Worker]) -> None:
    rref = trio[0].rref(Thing("stays"))
    with pytest.raises(EncodingError, match="argument 1"):
        trio[0].rpc_sync("worker1", hold, (rref, threading.Lock()))
    assert runtime_of(trio[0]).rrefs.debug_info()["num_forks"] == 0


def name_when_started(rref: rpc.RRef[Thing]) -> str:
    wait_for_start()
    return name_of(rref)


def test_a_call_that_timed_out_keeps_its_references_until_it_is_answered(
    trio: list[Worker],
) -> None:
    a, b, _ = trio
    STARTED.clear()
    rref = a.remote("worker1", Thing, ("late",))
    rref.rpc_sync().greet("you")
    with pytest.raises(CallTimeout):
        a.rpc_sync("worker1", name_when_started, (rref,), timeout=0.05)
    del rref
    gc.collect()
    assert runtime_of(a).rrefs.debug_info()["num_pending_children"] == 1
    assert runtime_of(b).rrefs.debug_info()["num_forks"] == 1
    STARTED.set()
    until(lambda: nothing_held(trio), "the reference is dropped")


class Letter:
    """Pickled as bytes that contain an RRef."""

    def __init__(self, rref: rpc.RRef[Any]):
        self.rref = rref

    def __reduce__(self) -> Any:
        return keep_letter, internal.serialize(self.rref)


def keep_letter(*letter: Any) -> None:
    LETTERS.append(letter)


def open_letter() -> str:
    rref: rpc.RRef[Thing] = internal.deserialize(*LETTERS.pop())
    return rref.local_value().name


LETTERS: list[Any] = []


def test_a_reference_in_bytes_is_held_until_they_are_read(trio: list[Worker]) -> None:
    a = trio[0]
    rref = a.remote("worker1", Thing, ("letter",))
    with acting_as(a):
        a.rpc_sync("worker1", repr, (Letter(rref),))
    del rref
    gc.collect()
    a.rpc_sync("worker1", int)  # an earlier message about the RRef would arrive before this call
    assert a.rpc_sync("worker1", open_letter) == "letter"
    until(lambda: nothing_held(trio), "the value is freed")


def test_references_cannot_be_pickled_outside_of_calls(trio: list[Worker]) -> None:
    rref = trio[0].rref(1)
    with pytest.raises(EncodingError, match="Can not pickle rref in python pickler"):
        pickle.dumps(rref)


def test_fetching_a_value_that_the_owner_has_dropped_raises(trio: list[Worker]) -> None:
    rref = trio[0].remote("worker1", Thing, ("gone",))
    assert rref.to_here().name == "gone"
    runtime_of(trio[1]).agent.liveness.declare_gone(trio[0].info)
    with pytest.raises(GradwireError, match="'worker1' has dropped the value"):
        rref.to_here()


# -- random programs


def keep(slot: int, rref: rpc.RRef[Thing]) -> None:
    SLOTS[rpc.get_worker_info().id][slot] = rref


def drop(slot: int) -> None:
    SLOTS[rpc.get_worker_info().id].pop(slot, None)


def pass_on(slot: int, to: int, to_slot: int) -> None:
    rref = SLOTS[rpc.get_worker_info().id].get(slot)
    if rref is not None:
        rpc.rpc_sync(to, keep, args=(to_slot, rref))


def read(slot: int) -> str | None:
    rref = SLOTS[rpc.get_worker_info().id].get(slot)
    return None if rref is None else str(rref.to_here().name)


SLOTS: dict[int, dict[int, rpc.RRef[Thing]]] = {}


@pytest.mark.parametrize("seed", range(25))
def test_random_programs_lose_no_value_and_leak_none(seed: int) -> None:
    """Several threads make workers exchange RRefs at random. While an RRef exists its value can be
    read, and afterwards the value is gone."""
    dice = random.Random(seed)
    size = dice.choice([2, 3, 4])
    SLOTS.clear()
    SLOTS.update({worker_id: {} for worker_id in range(size)})
    with cluster(size, transports=transports_named(dice.choice(["in_process", "unix"]))) as workers:

        def play(dice: random.Random) -> None:
            for step in range(30):
                me, at = workers[dice.randrange(size)], dice.randrange(size)
                slot = dice.randrange(4)
                action = dice.random()
                if action < 0.3:
                    rref = me.remote(dice.randrange(size), Thing, (f"{step}",))
                    me.rpc_sync(at, keep, (slot, rref))
                elif action < 0.7:
                    me.rpc_sync(at, pass_on, (slot, dice.randrange(size), dice.randrange(4)))
                elif action < 0.85:
                    me.rpc_sync(at, drop, (slot,))
                else:
                    me.rpc_sync(at, read, (slot,))

        errors: list[BaseException] = []

        def guarded(dice: random.Random) -> None:
            try:
                play(dice)
            except BaseException as error:
                errors.append(error)

        threads = [
            threading.Thread(target=guarded, args=(random.Random(dice.random()),)) for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT)
        assert not errors
        for worker_id in range(size):
            for slot in range(4):
                workers[0].rpc_sync(worker_id, read, (slot,))
        for held in SLOTS.values():
            held.clear()
        until(lambda: nothing_held(workers) and no_thing_alive(), "all values are freed")


_go_on = threading.Event()


def name_when_allowed(rref: rpc.RRef[Any]) -> str:
    assert _go_on.wait(TIMEOUT)
    return str(rref.local_value().name)


def test_a_call_that_two_threads_time_out_releases_its_references(
    trio: list[Worker],
) -> None:
    """The waiting thread and the timers notice the timeout at the same time."""
    user, owner, _ = trio
    rref = user.remote(owner.info, Thing, args=("shared",))
    rref.to_here()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    _go_on.clear()
    try:

        def call_in_vain() -> None:
            for _ in range(10):
                with pytest.raises(CallTimeout):
                    user.rpc_sync(owner.info, name_when_allowed, args=(rref,), timeout=0.002)

        with ThreadPoolExecutor(4) as threads:
            for ending in [threads.submit(call_in_vain) for _ in range(4)]:
                ending.result()
    finally:
        sys.setswitchinterval(interval)
        _go_on.set()
    until(
        lambda: runtime_of(user).rrefs.debug_info()["num_pending_children"] == 0,
        "the calls that timed out have released the reference",
    )

"""Programs written for torch's RPC run on gradwire unchanged."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.processes import processes

SECONDS = 60
Run = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run `python ARGUMENTS program.py AFTER` and return its output."""

    def run(text: str, *arguments: str, after: tuple[str, ...] = ()) -> str:
        (tmp_path / "program.py").write_text(textwrap.dedent(text))
        done = subprocess.run(
            [sys.executable, "-W", "ignore", *arguments, "program.py", *after],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.fixture
def run_here(tmp_path: Path) -> Run:
    """Do the same in a fork of this process, which saves the import of torch."""

    def run(text: str) -> str:
        def program() -> str:
            os.chdir(tmp_path)
            warnings.simplefilter("ignore")
            with contextlib.redirect_stdout(io.StringIO()) as output:
                runpy.run_path("program.py", run_name="__main__")
            return output.getvalue()

        (tmp_path / "program.py").write_text(textwrap.dedent(text))
        with processes(program) as (child,):
            output: str = child.result()
            return output

    return run


LAUNCH = ("-m", "gradwire", "run", "-n", "2")
INSTALL = "import gradwire.compat\ngradwire.compat.install()\n"

#: A program whose last line of output names the library it runs on.
PROGRAM = """
import os
import sys
import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef

def make_weight():
    return torch.ones(2, requires_grad=True)

def scale(x, factor):
    return x * factor

if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    if rank == 0:
        x = torch.ones(2, requires_grad=True)
        weight = rpc.remote("worker1", make_weight)
        with dist_autograd.context() as context_id:
            y = rpc.rpc_sync("worker1", scale, args=(x, 3.0)) * weight.to_here()
            dist_autograd.backward(context_id, [y.sum()])
            print("gradient", dist_autograd.get_gradients(context_id)[x].tolist())
            DistributedOptimizer(torch.optim.SGD, [weight], lr=1.0).step(context_id)
        print("weight", weight.to_here().tolist())
        module = RemoteModule("worker1", torch.nn.Linear, args=(2, 1))
        print("shape", tuple(module(x).shape), "owner", module.module_rref.owner_name())
        print("runs on", type(RRef(1)).__module__.partition(".")[0], sys.argv[1:])
    rpc.shutdown()
"""
RESULTS = "gradient [3.0, 3.0]\nweight [-2.0, -2.0]\nshape (1,) owner worker1\n"


def lines_of(output: str) -> str:
    return output.replace("[worker 0] ", "")


def test_the_same_program_runs_on_both(run: Run) -> None:
    assert lines_of(run(PROGRAM, *LAUNCH, after=("a",))) == f"{RESULTS}runs on torch ['a']\n"
    ours = run(PROGRAM, *LAUNCH, "--torch", after=("a",))
    assert lines_of(ours) == f"{RESULTS}runs on gradwire ['a']\n"


def test_one_line_in_the_program_does_the_same(run: Run) -> None:
    assert lines_of(run(INSTALL + PROGRAM, *LAUNCH)) == f"{RESULTS}runs on gradwire []\n"


def test_the_timeout_of_a_worker_can_be_changed(run_here: Run) -> None:
    output = run_here(
        INSTALL
        + """
import os
from torch.distributed import rpc

options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{os.getcwd()}/store")
rpc.init_rpc("me", rank=0, world_size=1, rpc_backend_options=options)
print(rpc.get_rpc_timeout())
rpc._set_rpc_timeout(7)
print(rpc.get_rpc_timeout())
rpc.shutdown()
"""
    )
    assert output == "60.0\n7.0\n"


def test_modules_run_too(run: Run, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(PROGRAM)
    start = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-m', 'gradwire', "
    start += "'run', '--torch', '-n', '2', '-m', 'module']))"
    assert lines_of(run(start)) == f"{RESULTS}runs on gradwire []\n"


def test_spawned_processes_are_on_gradwire_too(run: Run) -> None:
    program = """
    import os
    import torch.multiprocessing as mp
    from torch.distributed import rpc

    def work(rank, place):
        options = rpc.TensorPipeRpcBackendOptions(init_method=place)
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
        if rank == 0:
            print(rpc.rpc_sync("worker1", max, args=(1, 2)), rpc.__name__)
        rpc.shutdown()

    if __name__ == "__main__":
        mp.spawn(work, args=(f"file://{os.getcwd()}/store",), nprocs=2)
    """
    assert run(program, "-m", "gradwire.compat") == "2 gradwire.compat.rpc\n"


def test_uninstalling_puts_everything_back(run_here: Run) -> None:
    program = """
    import multiprocessing.spawn
    import sys
    import torch
    import torch.distributed.nn.api.remote_module
    import torch.distributed.optim
    import torch.distributed.rpc._testing

    def names():
        places = [
            (name, module) for name, module in sys.modules.items()
            if name.startswith(("torch.distributed", "torch.jit", "torch.futures"))
        ]
        values = {(name, key): id(value) for name, module in places
                  for key, value in vars(module).items()}
        values.update({name: id(module) for name, module in places})
        return values

    import gradwire.compat
    import gradwire.compat.rpc._testing
    before, prepare = names(), multiprocessing.spawn.get_preparation_data
    gradwire.compat.install()
    gradwire.compat.install()
    assert torch.distributed.rpc.__name__ == "gradwire.compat.rpc"
    assert gradwire.compat.is_installed()
    gradwire.compat.uninstall()
    after = names()
    print(sorted(map(str, (key for key in before if before[key] != after.get(key)))))
    print(multiprocessing.spawn.get_preparation_data is prepare, gradwire.compat.is_installed())
    """
    assert run_here(program) == "[]\nTrue False\n"


def test_installing_is_refused_while_torchs_rpc_is_running(run_here: Run) -> None:
    program = """
    import os
    from torch.distributed import rpc
    place = f"file://{os.getcwd()}/store"
    options = rpc.TensorPipeRpcBackendOptions(init_method=place)
    rpc.init_rpc("me", rank=0, world_size=1, rpc_backend_options=options)
    import gradwire.compat
    try:
        gradwire.compat.install()
    except RuntimeError as error:
        print(error)
    rpc.shutdown()
    """
    assert "is running in this process already" in run_here(program)


ALONE = """
import os, threading, time, warnings
import torch
import gradwire.compat
gradwire.compat.install()
from torch.distributed import rpc
place = f"file://{os.getcwd()}/store"
def join(**options):
    rpc.init_rpc("me", rank=0, world_size=1, rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
        init_method=place, **options))
"""


def test_an_option_without_effect_is_named_once(run_here: Run) -> None:
    program = ALONE + textwrap.dedent("""
    for _ in range(2):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            join(_transports=["shm"], device_maps={"me": {0: 1}})
        print(sorted(str(w.message) for w in warned if "is ignored" in str(w.message)))
        rpc.shutdown()
    """)
    first, second = run_here(program).splitlines()
    assert "the option _transports is ignored" in first
    assert "the option device_maps is ignored" in first
    assert second == "[]"


def test_waiting_for_many_futures_ends_with_the_first_error(run_here: Run) -> None:
    program = ALONE + textwrap.dedent("""
    release = threading.Event()
    def wait():
        release.wait(30)
    def fail():
        raise KeyError("first")
    join()
    futures = [rpc.rpc_async("me", wait), rpc.rpc_async("me", fail)]
    for wait_for in (torch.futures.wait_all, lambda fs: torch.futures.collect_all(fs).wait()):
        try:
            wait_for(futures)
        except KeyError as error:
            print(error, futures[0].done())
    release.set()
    print(torch.futures.wait_all([futures[0]]))
    rpc.shutdown()
    """)
    assert run_here(program) == "'first' False\n'first' False\n[None]\n"


def test_special_methods_are_called_through_proxies(run_here: Run) -> None:
    program = ALONE + textwrap.dedent("""
    import copy
    join()
    table = rpc.RRef({"a": 1})
    print(table.rpc_sync().__getitem__("a"), table.rpc_async().__len__().wait())
    print(table.remote().__contains__("a").to_here())
    print(copy.copy(table.remote()).get("a").to_here())
    try:
        table.remote().__matmul__
    except AttributeError as error:
        print(error)
    rpc.shutdown()
    """)
    assert run_here(program) == "1 1\nTrue\n1\ntype object 'dict' has no attribute '__matmul__'\n"


def test_references_have_the_repr_of_torch(run_here: Run) -> None:
    program = ALONE + textwrap.dedent("""
    join()
    print(rpc.RRef(1))
    rpc.shutdown()
    """)
    assert run_here(program) == "OwnerRRef(GloballyUniqueId(created_on=0, local_id=0))\n"


def test_compiled_functions_and_modules_are_sent(run_here: Run) -> None:
    program = ALONE + textwrap.dedent("""
    from torch.distributed.rpc import RRef
    @torch.jit.script
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2
    @torch.jit.script
    def fetch(ref: RRef[torch.Tensor]) -> torch.Tensor:
        return ref.to_here() + 1
    def apply(module, x):
        return module(x).shape
    join()
    print(type(double).__name__, rpc.rpc_sync("me", double, args=(torch.ones(2),)).tolist())
    print(fetch(RRef(torch.ones(1))).tolist())
    module = torch.jit.script(torch.nn.Linear(2, 3))
    print(tuple(rpc.rpc_sync("me", apply, args=(module, torch.ones(2)))))
    rpc.shutdown()
    """)
    assert run_here(program) == "ScriptFunction [2.0, 2.0]\n[2.0]\n(3,)\n"


def test_gradients_are_averaged_in_contexts_of_both_kinds(run_here: Run) -> None:
    program = ALONE + textwrap.dedent("""
    import torch.distributed as dist
    import torch.distributed.autograd as dist_autograd
    import gradwire.autograd
    dist.init_process_group("gloo", init_method=place + "2", rank=0, world_size=1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    join()
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [model(torch.ones(2)).sum()])
        print(dist_autograd.get_gradients(context_id)[model.module.weight].tolist())
    print(model.module.weight.grad)
    with gradwire.autograd.context(into_grad=True) as context_id:
        gradwire.autograd.backward(context_id, [model(torch.ones(2)).sum()])
    print(model.module.weight.grad.tolist())
    rpc.shutdown()
    dist.destroy_process_group()
    """)
    assert run_here(program) == "[[1.0, 1.0]]\nNone\n[[1.0, 1.0]]\n"


def test_results_of_calls_outside_a_context_are_leaves_as_in_torch(run_here: Run) -> None:
    output = run_here(
        """
        import tempfile

        import torch

        from gradwire.compat import rpc

        with tempfile.TemporaryDirectory() as folder:
            options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/store")
            rpc.init_rpc("worker0", rank=0, world_size=1, rpc_backend_options=options)
            y = rpc.rpc_sync("worker0", torch.mul, args=(torch.ones(2, requires_grad=True), 2))
            (y * 3).sum().backward()
            print(y.is_leaf, y.grad.tolist())
            rpc.shutdown()
        """
    )
    assert output == "True [3.0, 3.0]\n"

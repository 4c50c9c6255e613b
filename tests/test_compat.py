"""Programs written for torch's RPC run on gradwire unchanged."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import runpy
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import gradwire.compat
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


RPC = "torch.distributed.rpc"
#: The modules of torch whose names belong to its RPC. Gradwire's modules replace all but the last
#: two, in which it replaces names.
RPC_MODULES = [
    "torch._C._distributed_autograd",
    "torch._C._distributed_rpc",
    "torch.distributed.autograd",
    RPC,
    f"{RPC}._utils",
    f"{RPC}.api",
    f"{RPC}.backend_registry",
    f"{RPC}.constants",
    f"{RPC}.functions",
    f"{RPC}.internal",
    f"{RPC}.options",
    f"{RPC}.rref_proxy",
    f"{RPC}.server_process_global_profiler",
    "torch.distributed.nn.api.remote_module",
    "torch.distributed.optim.optimizer",
]
#: Other modules of torch that import names of its RPC.
OTHER_MODULES = [
    "torch._jit_internal",
    "torch.distributed._shard.sharded_tensor",
    "torch.distributed.nn",
    "torch.distributed.optim",
    "torch.nn.parallel.distributed",
]
#: The names that `install` does not replace, by module and reason. Names of the two modules that
#: stay torch's keep torch's objects. Other names do not exist while gradwire is installed.
NOT_REPLACED = {
    (RPC, "counts the rendezvous stores that torch makes"): "_init_counter _init_counter_lock",
    (RPC, "checks the arguments of torch's init_rpc"): "_validate_rpc_args",
    (RPC, "is left over from a loop"): "method_factory new_method method docstring",
    (f"{RPC}._utils", "is the logger of torch's groups"): "logger",
    (f"{RPC}.api", "holds values that torch's _all_gather exchanges"): (
        "_ALL_WORKER_NAMES _all_gather_dict_lock _all_gather_sequence_id "
        "_all_gather_sequence_id_to_states"
    ),
    (f"{RPC}.api", "is for type annotations"): "T _P _R GenericWithOneTypeVar TYPE_CHECKING",
    ("torch.distributed.autograd", "is for type annotations"): "TYPE_CHECKING",
    (f"{RPC}.api", "is left over from a loop"): (
        "method_factory new_method method method_name docstring"
    ),
    (f"{RPC}.api", "is a step of torch's own calls"): "_get_should_profile _enable_rpc_profiler",
    (f"{RPC}.backend_registry", "is a step of torch's own start"): (
        "_group_membership_management _update_group_membership _init_process_group "
        "_backend_type_repr _backend_type_doc"
    ),
    (f"{RPC}.backend_registry", "compares the device maps of the workers"): (
        "_tensorpipe_validate_devices _tensorpipe_exchange_and_check_all_device_maps "
        "_validate_device_maps _create_device_list _create_reverse_mapping _get_device_infos "
        "_set_devices_and_reverse_device_map"
    ),
    (f"{RPC}.backend_registry", "is another name of the module constants"): "rpc_constants",
    (f"{RPC}.options", "is another name of the module constants"): "rpc_contants",
    (f"{RPC}.internal", "is a step of torch's own calls"): (
        "_thread_local_tensor_tables _run_function _handle_exception _start_record_function"
    ),
    (f"{RPC}.options", "converts devices for torch's options"): (
        "DeviceType _to_device _to_device_map _to_device_list"
    ),
    (f"{RPC}.rref_proxy", "is a step of torch's own calls"): (
        "_local_invoke _local_invoke_async_execution _invoke_rpc"
    ),
    ("torch.distributed.nn.api.remote_module", "is a part of torch's RemoteModule"): (
        "T _grad_t _REMOTE_MODULE_PICKLED_ATTRIBUTES _SerializedRemoteModule "
        "_REMOTE_MODULE_ATTRIBUTES_IGNORE_FOR_PICKLING _instantiate_template _create_module "
        "_create_module_with_interface _param_rrefs _raise_not_supported _remote_module_receiver "
        "_remote_module_reducer _recursive_script_module_receiver _recursive_script_module_reducer"
    ),
    ("torch.distributed.optim.optimizer", "is a part of torch's DistributedOptimizer"): (
        "functional_optim_map _ScriptLocalOptimizerInterface _ScriptLocalOptimizer _LocalOptimizer "
        "_new_local_optimizer _local_optimizer_step _new_script_local_optimizer "
        "_script_local_optimizer_step _wait_for_all logger _FunctionalLocalOptimizer "
        "_functional_local_optimizer_step _new_functional_local_optimizer"
    ),
    ("torch._jit_internal", "tells TorchScript's compiler of torch's references"): "PyRRef RRef",
    ("torch.jit.annotations", "tells TorchScript's compiler of torch's references"): "RRef",
}
LEFT = {f"{module}.{name}" for (module, _), names in NOT_REPLACED.items() for name in names.split()}
MISSING = object()


def names_in(module: ModuleType) -> dict[str, Any]:
    """Return the names in the module itself, also while gradwire's module replaces it."""
    names: dict[str, Any] = ModuleType.__getattribute__(module, "__dict__")
    return {name: value for name, value in names.items() if not name.startswith("__")}


def home_of(value: Any) -> str:
    """Return the name of a module, or the module in which a class or function was defined."""
    if isinstance(value, ModuleType):
        return value.__name__
    return str(getattr(value, "__module__", None) or "")


def is_of_rpc(value: Any) -> bool:
    """Return whether a value in one of RPC's modules was made there. If not, it was imported."""
    if isinstance(value, ModuleType) or callable(value):
        return home_of(value).startswith(tuple(RPC_MODULES))
    return value is not None and not home_of(value).startswith(("typing", "__future__"))


def is_gradwires(now: Any, before: Any) -> bool:
    """Return whether a name has a value of gradwire now. Equal constants count as gradwire's."""
    if now is MISSING or isinstance(before, (str, int, float, timedelta)):
        return bool(now == before)
    if isinstance(now, ModuleType) or callable(now):
        return home_of(now).startswith("gradwire.")
    return now is not before


def all_modules_of_torch() -> dict[str, ModuleType]:
    for name in [*RPC_MODULES, *OTHER_MODULES]:
        importlib.import_module(name)
    modules = list(sys.modules.items())
    return {name: module for name, module in modules if name.startswith("torch.")}


def test_every_name_that_a_program_can_import_is_gradwires() -> None:
    def check() -> tuple[list[str], list[str], int]:
        modules = all_modules_of_torch()
        # The names that belong to RPC, and its own objects under any name in torch.
        names = {
            (module, name): value
            for module in RPC_MODULES
            for name, value in names_in(modules[module]).items()
            if is_of_rpc(value)
        }
        own = {id(v) for v in names.values() if isinstance(v, type) or callable(v)}
        names |= {
            (module, name): value
            for module in set(modules) - set(RPC_MODULES)
            for name, value in names_in(modules[module]).items()
            if id(value) in own
        }
        gradwire.compat.install()
        torchs, inconsistent = [], []
        for (module, name), value in names.items():
            now = getattr(sys.modules[module], name, MISSING)
            # The module as it is imported now, and as a program has imported it before.
            if now is not getattr(modules[module], name, MISSING):
                inconsistent.append(f"{module}.{name}")
            if not is_gradwires(now, value):
                torchs.append(f"{module}.{name}")
        return sorted(torchs), inconsistent, len(names)

    with processes(check) as (child,):
        torchs, inconsistent, count = child.result()
    assert "\n".join(name for name in torchs if name not in LEFT) == ""
    assert inconsistent == []
    assert count > 200


def test_uninstalling_puts_everything_back() -> None:
    def check() -> tuple[list[str], list[str]]:
        import multiprocessing.spawn as spawn

        modules = all_modules_of_torch()
        before = {name: names_in(module) for name, module in modules.items()}
        prepare = spawn.get_preparation_data
        gradwire.compat.install()
        gradwire.compat.install()
        changed = [
            f"{m}.{n}"
            for m, names in before.items()
            for n, value in names.items()
            if getattr(modules[m], n, MISSING) is not value
        ]
        assert spawn.get_preparation_data is not prepare
        assert gradwire.compat.is_installed()
        gradwire.compat.uninstall()
        assert spawn.get_preparation_data is prepare
        assert not gradwire.compat.is_installed()
        assert {name for name in sys.modules if name.startswith("torch.")} >= set(modules)
        different = [name for name, module in modules.items() if sys.modules[name] is not module]
        different += [name for name in RPC_MODULES if type(modules[name]) is not ModuleType]
        for name, module in modules.items():
            after = names_in(module)
            different += [
                f"{name}.{key}"
                for key in after.keys() | before[name].keys()
                if after.get(key, MISSING) is not before[name].get(key, MISSING)
            ]
        return changed, different

    with processes(check) as (child,):
        changed, different = child.result()
    assert len(changed) > 100
    assert different == []


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


def test_the_warning_of_an_ignored_option_points_at_the_line_of_the_program(run_here: Run) -> None:
    program = ALONE + textwrap.dedent("""
    options = rpc.TensorPipeRpcBackendOptions(init_method=place, _transports=["shm"])
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        rpc.init_rpc("me", rank=0, world_size=1, rpc_backend_options=options)  # here
    (warning,) = [w for w in warned if "is ignored" in str(w.message)]
    with open(warning.filename) as file:
        print(file.read().splitlines()[warning.lineno - 1].rpartition("# ")[2])
    rpc.shutdown()
    """)
    assert run_here(program) == "here\n"


def test_names_of_torchs_own_library_know_the_worker(run_here: Run) -> None:
    """Libraries ask these names whether RPC runs, and whether an argument is a reference."""
    program = ALONE + textwrap.dedent("""
    from torch._C._distributed_autograd import _get_debug_info
    from torch._C._distributed_rpc import (
        PyRRef, RpcAgent, TensorPipeAgent, WorkerInfo, _get_current_rpc_agent,
        _is_current_rpc_agent_set, _TensorPipeRpcBackendOptionsBase,
    )
    print(_is_current_rpc_agent_set())
    join()
    agent = _get_current_rpc_agent()
    print(_is_current_rpc_agent_set(), isinstance(agent, RpcAgent), type(agent) is TensorPipeAgent)
    print(isinstance(agent.get_worker_info(), WorkerInfo))
    print(isinstance(agent.store, torch.distributed.Store))
    print(isinstance(agent._get_backend_options(), _TensorPipeRpcBackendOptionsBase))
    print(type(rpc.remote("me", max, args=(1, 2))) is torch._C._distributed_rpc.PyRRef is PyRRef)
    print(isinstance(rpc.RRef(1), PyRRef), _get_debug_info()["num_autograd_contexts"])
    print(isinstance(rpc.RRef(1).rpc_sync(), rpc.rref_proxy.RRefProxy))
    try:
        torch._C._distributed_rpc._invoke_rpc_builtin(agent.get_worker_info(), "aten::add", -1)
    except NotImplementedError as error:
        print(error)
    rpc.shutdown()
    print(_is_current_rpc_agent_set())
    """)
    assert run_here(program).splitlines() == [
        "False",
        "True True True",
        "True",
        "True",
        "True",
        "True",
        "True 0",
        "True",
        "gradwire has no _invoke_rpc_builtin: call rpc_sync, rpc_async or remote of "
        "torch.distributed.rpc instead",
        "False",
    ]


def test_a_module_that_was_imported_before_is_gradwires_too(run_here: Run) -> None:
    before = """
    from torch.distributed import rpc as early
    import torch.distributed._shard.sharded_tensor.api as sharded
    """
    after = """
    join()
    print(early is rpc, early.rpc_sync is rpc.rpc_sync, sharded.rpc.rpc_sync is rpc.rpc_sync)
    print(sharded.rpc._is_current_rpc_agent_set(), early.rpc_sync("me", max, args=(1, 2)))
    early.api._ignore_rref_leak = False
    print(rpc.api._ignore_rref_leak, "_gatherings" in dir(early.api))
    rpc.shutdown()
    gradwire.compat.uninstall()
    print(early.api._ignore_rref_leak, early.rpc_sync.__module__)
    """
    assert run_here(textwrap.dedent(before) + ALONE + textwrap.dedent(after)).splitlines() == [
        "False True True",
        "True 2",
        "False True",
        "True torch.distributed.rpc.api",
    ]


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

"""Which tests there are: those of torch's wheel that use its Python API on the CPU.

Their processes are forked, not spawned: importing torch anew in each would take most of the time.
So this process imports torch and the tests once, and must not start a thread.
"""

from __future__ import annotations

import importlib
import os
import re
import warnings

#: Seconds after which torch's harness ends the processes of a test and shows where they stand.
PATIENCE = 60
os.environ["DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"] = str(PATIENCE)

_HOME = "torch.testing._internal.distributed"

#: class -> (module, which of torch's fixtures it runs with)
CLASSES = {
    "RpcTest": ("rpc.rpc_test", "tensorpipe"),
    "TensorPipeAgentRpcTest": ("rpc.rpc_test", "tensorpipe"),
    "DistAutogradTest": ("rpc.dist_autograd_test", "tensorpipe"),
    "TensorPipeAgentDistAutogradTest": ("rpc.dist_autograd_test", "tensorpipe"),
    "FaultyAgentDistAutogradTest": ("rpc.dist_autograd_test", "faulty"),
    "DistOptimizerTest": ("rpc.dist_optimizer_test", "tensorpipe"),
    "FaultyAgentRpcTest": ("rpc.faulty_agent_rpc_test", "faulty"),
    "ParameterServerTest": ("rpc.examples.parameter_server_test", "tensorpipe"),
    "ReinforcementLearningRpcTest": (
        "rpc.examples.reinforcement_learning_rpc_test",
        "tensorpipe",
    ),
    "RemoteModuleTest": ("nn.api.remote_module_test", "tensorpipe"),
    "ThreeWorkersRemoteModuleTest": ("nn.api.remote_module_test", "tensorpipe"),
    "DdpUnderDistAutogradTest": ("ddp_under_dist_autograd_test", "tensorpipe"),
    "DdpComparisonTest": ("ddp_under_dist_autograd_test", "tensorpipe"),
}

#: Tests of TorchScript, of CUDA and of the legacy profiler, which no Python library can provide;
#: two that hang at their end now and then, also without any RPC: torch frees a module that has
#: joined while it holds the interpreter's lock, and waits for a thread that wants it; and one of
#: the same file, without such a module, that may tell processes to end before they listen,
_LEFT_OUT = re.compile(
    "jit|script|cuda|profil|record_function|test_ddp_comparison|test_backward_no_ddp"
)
#: but the two whose name says so although they are about neither.
_KEPT = {"test_disable_gil_profiling", "test_build_rpc_profiling_key"}


def load(plain_torch: bool = False) -> dict[str, type]:
    """The classes of tests, ready to run, with gradwire in the place of torch's RPC."""
    import torch

    torch.set_num_threads(1)  # a forked process hangs in OpenMP when its parent has used threads
    # Torch makes its pool anew in a forked process, and fails if two threads come to that at once.
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))
    if not plain_torch:
        from gradwire import compat

        compat.install()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_distributed import MultiProcessTestCase
        from torch.testing._internal.distributed.rpc.faulty_rpc_agent_test_fixture import (
            FaultyRpcAgentTestFixture,
        )
        from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import (
            TensorPipeRpcAgentTestFixture,
        )

        if plain_torch:
            # Importing the fixtures has given torch other names of backends than those it checks.
            from torch.distributed import rpc

            rpc.BackendType = rpc.backend_registry.BackendType

        class Forked(MultiProcessTestCase):  # type: ignore[misc]
            def setUp(self) -> None:
                super().setUp()
                self._start_processes(torch.multiprocessing.get_context("fork").Process)

        fixtures = {
            "tensorpipe": TensorPipeRpcAgentTestFixture,
            "faulty": FaultyRpcAgentTestFixture,
        }
        loaded: dict[str, type] = {}
        for name, (module, fixture) in CLASSES.items():
            tests = getattr(importlib.import_module(f"{_HOME}.{module}"), name)
            kind = type(name, (tests, fixtures[fixture], Forked), {"__module__": __name__})
            # Some tests send themselves, so they must be found by name.
            loaded[name] = globals()[name] = kind
    return loaded


def test_names(tests: type) -> list[str]:
    """The tests of a class that are run."""
    names = [name for name in dir(tests) if name.startswith("test_")]
    return [name for name in names if name in _KEPT or not _LEFT_OUT.search(name)]

"""Select the tests to run: the tests in torch's wheel that use the Python API of its RPC on the
CPU.

The processes of the tests are forked from this one, which has imported torch and the tests:
importing torch in every process would take most of the time. This process must not start a thread,
because a fork copies no other threads.
"""

from __future__ import annotations

import importlib
import os
import re
import warnings

#: Seconds after which torch's harness ends the processes of a test and shows their stacks.
TEST_SECONDS = 60
os.environ["DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"] = str(TEST_SECONDS)

_PACKAGE = "torch.testing._internal.distributed"

#: The classes of tests: for each, its module, and the fixture of torch that starts the RPC for it.
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

#: Matches the names of the tests that are left out: tests of TorchScript, CUDA and the legacy
#: profiler, which no Python library can provide; two tests that sometimes hang at their end, even
#: without RPC (torch frees a DDP module while it holds the GIL, and waits for a thread that needs
#: the GIL); and one test that may tell processes to end before they listen.
_EXCLUDED = re.compile(
    "jit|script|cuda|profil|record_function|test_ddp_comparison|test_backward_no_ddp"
)
#: Tests that run although `_EXCLUDED` matches their names: they test neither TorchScript nor the
#: profiler.
_INCLUDED = {"test_disable_gil_profiling", "test_build_rpc_profiling_key"}


def load(plain_torch: bool = False) -> dict[str, type]:
    """Return the classes of tests by name. Put gradwire in the place of torch's RPC, unless
    `plain_torch` is true."""
    import torch

    torch.set_num_threads(1)  # a forked process hangs in OpenMP when its parent has used threads
    # A forked process creates torch's thread pool anew, and fails if two threads do so at once.
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
            # Importing the fixtures has replaced `rpc.BackendType`, the enum that torch compares
            # backends with: restore it.
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
            tests = getattr(importlib.import_module(f"{_PACKAGE}.{module}"), name)
            kind = type(name, (tests, fixtures[fixture], Forked), {"__module__": __name__})
            # Some tests send their own class, so unpickling must find it by name.
            loaded[name] = globals()[name] = kind
    return loaded


def test_names(tests: type) -> list[str]:
    """Return the names of the selected tests of a class."""
    names = [name for name in dir(tests) if name.startswith("test_")]
    return [name for name in names if name in _INCLUDED or not _EXCLUDED.search(name)]

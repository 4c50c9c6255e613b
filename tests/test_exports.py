"""The modules have the names that they export."""

from __future__ import annotations

from types import ModuleType

import pytest

import gradwire
from gradwire import autograd, nn, optim, rpc


@pytest.mark.parametrize(
    "module", [gradwire, rpc, autograd, optim, nn], ids=lambda module: module.__name__
)
def test_exported_names_exist_are_sorted_and_listed(module: ModuleType) -> None:
    names = module.__all__
    assert names == sorted(set(names))
    assert set(names) <= set(dir(module))
    assert all(getattr(module, name) is not None for name in names)


def test_rpc_has_the_names_that_torch_documents() -> None:
    documented = """init_rpc rpc_sync rpc_async remote get_worker_info shutdown RRef WorkerInfo
        functions TensorPipeRpcBackendOptions"""
    assert set(documented.split()) <= set(rpc.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        gradwire.nothing  # noqa: B018

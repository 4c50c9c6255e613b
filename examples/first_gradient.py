"""worker0 differentiates through a function that runs on worker1.

gradwire run -n 2 examples/first_gradient.py
"""

import os

import torch

from gradwire import autograd, rpc

weight = torch.tensor([3.0, 4.0], requires_grad=True)  # each process has one: worker1's is used
weight.register_hook(lambda gradient: print("gradient of weight:", gradient))


def predict(x: torch.Tensor) -> torch.Tensor:
    return (weight * x).sum()


rpc.init_rpc(f"worker{os.environ['RANK']}")
if os.environ["RANK"] == "0":
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", predict, args=(x,))
        autograd.backward(context_id, [loss])
        print("gradient of x:", autograd.get_gradients(context_id)[x])
rpc.shutdown()

"""Two workers: a remote value, a loss, gradients through the calls, and an optimizer step.

gradwire run -n 2 examples/torch/first_steps.py [STEPS]             on torch
gradwire run --torch -n 2 examples/torch/first_steps.py [STEPS]     the same program on gradwire
"""

import os
import sys

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import optim
from torch.distributed.optim import DistributedOptimizer

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 1  # how many per line of output


def make_weight(seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.rand(3, 3, requires_grad=True)


def train() -> None:
    here, there = rpc.RRef(make_weight(1)), rpc.remote("worker1", make_weight, args=(2,))
    for turn in range(3):
        for _ in range(STEPS):
            with dist_autograd.context() as context_id:
                product = rpc.rpc_sync("worker1", torch.mm, args=(here.to_here(), there.to_here()))
                loss = (product - torch.eye(3)).square().sum()
                dist_autograd.backward(context_id, [loss])
                optimizer = DistributedOptimizer(optim.SGD, [here, there], lr=0.05)
                optimizer.step(context_id)
        print(f"turn {turn}: loss {loss.item():.4f}")


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    if rank == 0:
        train()
    rpc.shutdown()

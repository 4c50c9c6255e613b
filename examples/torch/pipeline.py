"""A model in two stages on two workers. Batches are split, so that both stages work in parallel.

gradwire run [--torch] -n 3 examples/torch/pipeline.py [STEPS]
"""

import os
import sys

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import Tensor, nn, optim
from torch.distributed.optim import DistributedOptimizer

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 1  # how many per line of output


class Stage(nn.Module):
    def __init__(self, seed: int, inputs: int, outputs: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(inputs, outputs)

    def forward(self, x: rpc.RRef) -> Tensor:
        return torch.tanh(self.layer(x.to_here()))

    def parameter_rrefs(self) -> list[rpc.RRef]:
        return [rpc.RRef(parameter) for parameter in self.parameters()]


class Pipeline:
    def __init__(self) -> None:
        self.stages = [
            rpc.remote("worker1", Stage, args=(1, 6, 8)),
            rpc.remote("worker2", Stage, args=(2, 8, 2)),
        ]

    def forward(self, batch: Tensor, parts: int) -> Tensor:
        futures = []
        for part in batch.chunk(parts):
            middle = self.stages[0].remote().forward(rpc.RRef(part))
            futures.append(self.stages[1].rpc_async().forward(middle))
        return torch.cat(torch.futures.wait_all(futures))

    def parameters(self) -> list[rpc.RRef]:
        return [rref for stage in self.stages for rref in stage.rpc_sync().parameter_rrefs()]


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=3)
    if rank == 0:
        torch.manual_seed(0)
        model = Pipeline()
        optimizer = DistributedOptimizer(optim.SGD, model.parameters(), lr=0.2)
        batch, target = torch.rand(12, 6), torch.rand(12, 2)
        for turn in range(4):
            for _ in range(STEPS):
                with dist_autograd.context() as context_id:
                    loss = nn.functional.mse_loss(model.forward(batch, parts=3), target)
                    dist_autograd.backward(context_id, [loss])
                    optimizer.step(context_id)
            print(f"turn {turn}: loss {loss.item():.4f}")
    rpc.shutdown()

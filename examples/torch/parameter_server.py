"""A parameter server and three trainers with different data, which take turns.

gradwire run [--torch] -n 4 examples/torch/parameter_server.py [STEPS]
"""

import os
import sys

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import Tensor, nn, optim
from torch.distributed.optim import DistributedOptimizer

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 5  # how many per line of output
TRAINERS = 3


class Server:
    """Holds the model. The trainers call it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def parameters(self) -> list[rpc.RRef]:
        return [rpc.RRef(parameter) for parameter in self.model.parameters()]


def train(server: rpc.RRef, rank: int) -> float:
    torch.manual_seed(rank)
    x = torch.rand(16, 4)
    target = x.sum(1, keepdim=True)
    optimizer = DistributedOptimizer(optim.SGD, server.rpc_sync().parameters(), lr=0.1)
    for _ in range(STEPS):
        with dist_autograd.context() as context_id:
            loss = nn.functional.mse_loss(server.rpc_sync().forward(x), target)
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
    return loss.item()


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    rpc.init_rpc("server" if rank == 0 else f"trainer{rank}", rank=rank, world_size=TRAINERS + 1)
    if rank == 0:
        server = rpc.RRef(Server())
        for epoch in range(3):
            losses = [
                rpc.rpc_sync(f"trainer{trainer}", train, args=(server, trainer))
                for trainer in range(1, TRAINERS + 1)
            ]
            print(f"epoch {epoch}:", " ".join(f"{loss:.4f}" for loss in losses))
    rpc.shutdown()

"""Data-parallel training with a remote embedding table.

Two trainers have the same layers and different data, and average the gradients of the layers. Both
use an embedding table on a server. A master starts the epochs.

    gradwire run [--torch] -n 4 examples/torch/data_parallel.py [STEPS]
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import Tensor, nn, optim
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer
from torch.nn.parallel import DistributedDataParallel

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 2  # how many per line of output
TRAINERS, WORDS, SIZE = 2, 12, 8


class Model(nn.Module):
    """Looks up rows in the remote table and applies the local layers."""

    def __init__(self, table: RemoteModule) -> None:
        super().__init__()
        self.table = table
        layers = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, 2))
        self.layers = DistributedDataParallel(layers)

    def forward(self, words: Tensor) -> Tensor:
        return self.layers(self.table.forward(words))

    def parameter_rrefs(self) -> list[rpc.RRef]:
        here = [rpc.RRef(parameter) for parameter in self.layers.parameters()]
        return here + self.table.remote_parameters()


class Trainer:
    def __init__(self, table: RemoteModule, rank: int) -> None:
        torch.manual_seed(rank)
        self.model = Model(table)
        self.optimizer = DistributedOptimizer(optim.SGD, self.model.parameter_rrefs(), lr=0.1)
        # Each trainer has words of its own, so the order of the trainers' steps does not matter.
        self.words = torch.randint(WORDS // TRAINERS, (16, 3)) * TRAINERS + rank
        self.labels = torch.randint(2, (16,))

    def train(self) -> float:
        for _ in range(STEPS):
            with dist_autograd.context() as context_id:
                loss = nn.functional.cross_entropy(self.model(self.words), self.labels)
                dist_autograd.backward(context_id, [loss])
                self.optimizer.step(context_id)
        return loss.item()


def make_table() -> nn.Module:
    torch.manual_seed(3)
    return nn.EmbeddingBag(WORDS, SIZE, mode="sum", sparse=True)


def run_master() -> None:
    table = RemoteModule("server", make_table)
    trainers = [
        rpc.remote(f"trainer{rank}", Trainer, args=(table, rank)) for rank in range(TRAINERS)
    ]
    for epoch in range(4):
        losses = torch.futures.wait_all([trainer.rpc_async().train() for trainer in trainers])
        print(f"epoch {epoch}:", " ".join(f"{loss:.4f}" for loss in losses))


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    name = f"trainer{rank}" if rank < TRAINERS else ("server", "master")[rank - TRAINERS]
    if rank < TRAINERS:  # before init_rpc, because then the master may already call this trainer
        dist.init_process_group("gloo", rank=rank, world_size=TRAINERS)
    rpc.init_rpc(name, rank=rank, world_size=TRAINERS + 2)
    if name == "master":
        run_master()
    rpc.shutdown()

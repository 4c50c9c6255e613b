"""Split learning: two clinics train a model with a server. Each clinic keeps its images, its labels
and the outer layers; the server has the inner layers and sees neither images nor labels.

    gradwire run [--torch] -n 3 examples/torch/split_learning.py [STEPS]
"""

import os
import sys

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import Tensor, nn, optim
from torch.distributed.optim import DistributedOptimizer

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 1  # how many per line of output
CLINICS = 2


class Body:
    """The inner layers, which all clinics share."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, features: Tensor) -> Tensor:
        return self.model(features)

    def parameters(self) -> list[rpc.RRef]:
        return [rpc.RRef(parameter) for parameter in self.model.parameters()]


class Clinic:
    def __init__(self, body: rpc.RRef) -> None:
        torch.manual_seed(rpc.get_worker_info().id)
        self.body = body
        self.head, self.tail = nn.Linear(6, 8), nn.Linear(4, 2)
        self.images, self.labels = torch.rand(10, 6), torch.randint(2, (10,))
        mine = [*self.head.parameters(), *self.tail.parameters()]
        rrefs = [rpc.RRef(parameter) for parameter in mine] + body.rpc_sync().parameters()
        self.optimizer = DistributedOptimizer(optim.SGD, rrefs, lr=0.3)

    def train(self) -> float:
        with dist_autograd.context() as context_id:
            features = torch.relu(self.head(self.images))
            guesses = self.tail(self.body.rpc_sync().forward(features))
            loss = nn.functional.cross_entropy(guesses, self.labels)
            dist_autograd.backward(context_id, [loss])
            self.optimizer.step(context_id)
        return loss.item()


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=CLINICS + 1)
    if rank == 0:
        body = rpc.RRef(Body())
        clinics = [
            rpc.remote(f"worker{rank}", Clinic, args=(body,)) for rank in range(1, CLINICS + 1)
        ]
        for turn in range(4):
            for _ in range(STEPS):
                losses = [clinic.rpc_sync().train() for clinic in clinics]
            print(f"turn {turn}:", " ".join(f"{loss:.4f}" for loss in losses))
    rpc.shutdown()

"""A parameter server that waits for the gradients of all trainers before each step. The trainers
receive the new parameters through a future, so no thread of the server is blocked.

    gradwire run [--torch] -n 3 examples/torch/batched_updates.py [STEPS]
"""

import os
import sys
import threading

import torch
import torch.distributed.rpc as rpc
from torch import Tensor, nn

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 2  # how many per line of output
TRAINERS = 2


class Server:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.rand(4))
        self.optimizer = torch.optim.SGD([self.weight], lr=0.1)
        self.lock = threading.Lock()
        self.updated: torch.futures.Future = torch.futures.Future()
        self.gradients: dict[int, Tensor] = {}

    def get(self) -> Tensor:
        return self.weight.detach()

    @staticmethod
    @rpc.functions.async_execution
    def update(server: rpc.RRef, rank: int, gradient: Tensor) -> torch.futures.Future:
        self = server.local_value()
        with self.lock:
            self.gradients[rank] = gradient
            future = self.updated
            if len(self.gradients) == TRAINERS:
                # Add the gradients by rank: the order of their arrival would change the rounding.
                self.weight.grad = sum(self.gradients[rank] for rank in sorted(self.gradients))
                self.optimizer.step()
                self.gradients, self.updated = {}, torch.futures.Future()
                future.set_result(self.weight.detach().clone())
        return future


def train(server: rpc.RRef, rank: int) -> float:
    torch.manual_seed(rank)
    x, weight = torch.rand(8, 4), server.rpc_sync().get()
    for _ in range(STEPS):
        weight = weight.requires_grad_()
        loss = (x @ weight - 1).square().mean()
        (gradient,) = torch.autograd.grad(loss, [weight])
        weight = rpc.rpc_sync(server.owner(), Server.update, args=(server, rank, gradient))
    return loss.item()


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=TRAINERS + 1)
    if rank == 0:
        server = rpc.RRef(Server())
        for turn in range(4):
            futures = [
                rpc.rpc_async(f"worker{trainer}", train, args=(server, trainer))
                for trainer in range(1, TRAINERS + 1)
            ]
            losses = torch.futures.wait_all(futures)
            print(f"turn {turn}:", " ".join(f"{loss:.4f}" for loss in losses))
    rpc.shutdown()

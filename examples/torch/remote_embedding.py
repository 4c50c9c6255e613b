"""A language model with its embedding and decoder on a server, and its LSTM on the trainer.

gradwire run [--torch] -n 2 examples/torch/remote_embedding.py [STEPS]
"""

import os
import sys
import threading

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import Tensor, nn, optim
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 1  # how many per line of output
WORDS, SIZE = 20, 8

seed_lock = threading.Lock()


def seeded(kind: type[nn.Module], *args: int) -> nn.Module:
    with seed_lock:  # the server may make both modules at the same time
        torch.manual_seed(3)
        return kind(*args)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = RemoteModule("server", seeded, args=(nn.Embedding, WORDS, SIZE))
        self.lstm = nn.LSTM(SIZE, SIZE)
        self.decoder = RemoteModule("server", seeded, args=(nn.Linear, SIZE, WORDS))

    def forward(self, words: Tensor) -> Tensor:
        return self.decoder(self.lstm(self.embedding(words))[0])

    def parameter_rrefs(self) -> list[rpc.RRef]:
        here = [rpc.RRef(parameter) for parameter in self.lstm.parameters()]
        return here + self.embedding.remote_parameters() + self.decoder.remote_parameters()


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    rpc.init_rpc("trainer" if rank == 0 else "server", rank=rank, world_size=2)
    if rank == 0:
        torch.manual_seed(0)
        model = Model()
        optimizer = DistributedOptimizer(optim.SGD, model.parameter_rrefs(), lr=0.5)
        text = torch.randint(WORDS, (9, 4))
        for turn in range(4):
            for _ in range(STEPS):
                with dist_autograd.context() as context_id:
                    guesses = model(text[:-1]).flatten(0, 1)
                    loss = nn.functional.cross_entropy(guesses, text[1:].flatten())
                    dist_autograd.backward(context_id, [loss])
                    optimizer.step(context_id)
            print(f"turn {turn}: loss {loss.item():.4f}")
    rpc.shutdown()

"""Two processes; one calls a function that runs in the other.

gradwire run -n 2 examples/hello.py
"""

import os

import torch

from gradwire import rpc


def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    print(f"{rpc.get_worker_info().name} multiplies by {factor:g}")
    return x * factor


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}")
    if rank == 0:
        print("here it is:", rpc.rpc_sync("worker1", scale, args=(torch.ones(3), 2)))
    rpc.shutdown()

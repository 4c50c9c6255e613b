"""One model in three processes.

The encoder lives on worker1 and the decoder on worker2. worker0 has the data, holds references to
both halves and calls them; at the end it checks the results against the same model in one process.

    gradwire run -n 3 examples/quickstart.py
"""

import os

import torch
from torch import nn

from gradwire import rpc


def make_encoder() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU()).requires_grad_(False)


def make_decoder() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(512, 10), nn.LogSoftmax(dim=1)).requires_grad_(False)


def decode(decoder: rpc.RRef[nn.Module], hidden: rpc.RRef[torch.Tensor]) -> torch.Tensor:
    """Runs where the decoder lives, and fetches the activations from where they are."""
    scores: torch.Tensor = decoder.local_value()(hidden.to_here())
    return scores


def main() -> None:
    batches = [torch.randn(64, 784) for _ in range(6)]

    encoder = rpc.remote("worker1", make_encoder)
    decoder = rpc.remote("worker2", make_decoder)
    print(f"encoder on {encoder.owner_name()}, decoder on {decoder.owner_name()}")

    print("one batch after the other: the activations come here and go on to worker2")
    results = []
    for number, batch in enumerate(batches):
        hidden = encoder.rpc_sync().forward(batch)
        results.append(decoder.rpc_sync().forward(hidden))
        print(f"  batch {number}: {tuple(batch.shape)} -> {tuple(results[-1].shape)}")

    print("all batches at once: the activations go from worker1 straight to worker2")
    hidden_refs = [encoder.remote().forward(batch) for batch in batches]
    futures = [rpc.rpc_async("worker2", decode, args=(decoder, ref)) for ref in hidden_refs]
    for number, future in enumerate(futures):
        results.append(future.wait())
        print(f"  batch {number}: {tuple(results[-1].shape)} arrived")

    local = nn.Sequential(make_encoder(), make_decoder())
    expected = [local(batch) for batch in batches] * 2
    difference = max((a - b).abs().max().item() for a, b in zip(results, expected, strict=True))
    print(f"largest difference from the same model in one process: {difference:g}")


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}")
    if rank == 0:
        main()
    rpc.shutdown()  # waits until all three are done

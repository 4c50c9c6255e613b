"""Train a model whose layers are in three processes. It learns to tell two spirals apart.

worker0 has the data and the first layer; worker1 and worker2 have the other layers. worker0 also
trains the same model in one process, and prints how much the two trainings differ.

    gradwire run -n 3 examples/quickstart.py
"""

import math
import os

import torch
from torch import Tensor, nn, optim

from gradwire import autograd, rpc
from gradwire.nn import RemoteModule
from gradwire.optim import DistributedOptimizer

STEPS = 120


def layer(number: int) -> nn.Module:
    """Make a layer of the model, with the same values in every process."""
    torch.manual_seed(number)
    sizes = [2, 64, 64, 1]
    linear = nn.Linear(sizes[number], sizes[number + 1])
    return nn.Sequential(linear, nn.Tanh()) if number < 2 else linear


def spirals(points: int = 200) -> tuple[Tensor, Tensor]:
    """Return points on two spirals, and the number of the spiral for each point."""
    turn = torch.linspace(0.25, 1, points).sqrt() * 3 * math.pi
    first = torch.stack([turn.cos(), turn.sin()], dim=1) * turn[:, None] / 10
    return torch.cat([first, -first]), torch.cat([torch.zeros(points, 1), torch.ones(points, 1)])


def main() -> None:
    x, y = spirals()
    loss_function = nn.BCEWithLogitsLoss()

    first = layer(0)
    second = RemoteModule("worker1", layer, args=(1,))
    third = RemoteModule("worker2", layer, args=(2,))
    model = nn.Sequential(first, second, third)
    optimizer = DistributedOptimizer(optim.Adam, model)
    schedule = optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.03, total_steps=STEPS)

    twin = nn.Sequential(layer(0), layer(1), layer(2))
    twin_optimizer = optim.Adam(twin.parameters())
    twin_schedule = optim.lr_scheduler.OneCycleLR(twin_optimizer, max_lr=0.03, total_steps=STEPS)

    print(f"layers on worker0, {second.on} and {third.on}; {len(x)} points on two spirals")
    print("step   learning rate   right   loss on 3 workers   in one process   difference")
    largest_difference = 0.0
    for step in range(1, STEPS + 1):
        with autograd.context() as context_id:
            scores = model(x)
            loss = loss_function(scores, y)
            autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        rate = schedule.get_last_lr()[0]
        schedule.step()

        twin_optimizer.zero_grad()
        twin_loss = loss_function(twin(x), y)
        twin_loss.backward()
        twin_optimizer.step()
        twin_schedule.step()

        difference = abs(loss.item() - twin_loss.item())
        largest_difference = max(largest_difference, difference)
        if step == 1 or step % 10 == 0:
            right = ((scores > 0) == (y > 0.5)).float().mean().item()
            print(
                f"{step:4d} {rate:15.4f} {right:7.0%} {loss.item():19.6f} "
                f"{twin_loss.item():16.6f} {difference:12.2g}"
            )

    state, twin_state = model.state_dict(), twin.state_dict()
    for name in twin_state:
        difference = (state[name] - twin_state[name]).abs().max().item()
        largest_difference = max(largest_difference, difference)
    print(f"largest difference in all losses and the final parameters: {largest_difference:g}")


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}")
    if rank == 0:
        main()
    rpc.shutdown()  # waits until all workers are done

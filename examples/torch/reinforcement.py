"""Reinforcement learning: an agent learns from observers on other workers, each with a world of its
own. In every step, an observer asks the agent for an action and reports the reward.

    gradwire run [--torch] -n 3 examples/torch/reinforcement.py [EPISODES]
"""

import os
import sys

import torch
import torch.distributed.rpc as rpc
from torch import Tensor, nn

EPISODES = int(sys.argv[1]) if len(sys.argv) > 1 else 1  # how many per line of output
OBSERVERS, STEPS = 2, 12


class World:
    """A point that drifts on a line. The reward is higher near the middle."""

    def __init__(self, seed: int) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.place = torch.zeros(1)

    def act(self, right: int) -> tuple[Tensor, float]:
        drift = torch.randn(1, generator=self.random)
        self.place = self.place + (1.0 if right else -1.0) + drift
        return self.place.clone(), -float(self.place.abs())


class Observer:
    def __init__(self) -> None:
        self.id = rpc.get_worker_info().id
        self.world = World(self.id)

    def run(self, agent: rpc.RRef) -> None:
        place = self.world.place = torch.zeros(1)
        for _ in range(STEPS):
            right = agent.rpc_sync().decide(self.id, place)
            place, reward = self.world.act(right)
            agent.rpc_sync().take_reward(self.id, reward)


class Agent:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.policy = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 2))
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=0.05)
        self.observers = [
            rpc.remote(f"worker{observer}", Observer) for observer in range(1, OBSERVERS + 1)
        ]
        self.chances: dict[int, list[Tensor]] = {}
        self.rewards: dict[int, list[float]] = {}
        self.random = {
            observer: torch.Generator().manual_seed(observer)
            for observer in range(1, OBSERVERS + 1)
        }

    def decide(self, observer: int, place: Tensor) -> int:
        chances = torch.softmax(self.policy(place), 0)
        choice = int(torch.multinomial(chances.detach(), 1, generator=self.random[observer]))
        self.chances.setdefault(observer, []).append(chances[choice].log())
        return choice

    def take_reward(self, observer: int, reward: float) -> None:
        self.rewards.setdefault(observer, []).append(reward)

    def learn(self, me: rpc.RRef) -> float:
        torch.futures.wait_all([observer.rpc_async().run(me) for observer in self.observers])
        losses = []
        for observer in sorted(self.rewards):
            rewards = torch.tensor(self.rewards[observer])
            gains = rewards.flip(0).cumsum(0).flip(0)
            gains = (gains - gains.mean()) / (gains.std() + 1e-6)
            losses.append(-(torch.stack(self.chances[observer]) * gains).sum())
        total = sum(sum(rewards) for rewards in self.rewards.values())
        self.optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        self.optimizer.step()
        self.chances, self.rewards = {}, {}
        return total


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=OBSERVERS + 1)
    if rank == 0:
        agent = Agent()
        me = rpc.RRef(agent)
        for turn in range(4):
            rewards = [agent.learn(me) for _ in range(EPISODES)]
            print(f"turn {turn}: reward {rewards[-1]:.2f}")
    rpc.shutdown()

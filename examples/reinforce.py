"""Balance a pole by REINFORCE, on many workers: paceline run -n 2 reinforce.py"""

import argparse

import torch
from cart_pole import CartPoles
from torch import nn
from torch.distributions import Categorical
from torch.optim import Adam
from torch.utils.data import TensorDataset

import paceline

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--iterations", type=int, default=30)
parser.add_argument("--steps", type=int, default=200, help="longest episode")
parser.add_argument("--save", default="reinforce.pt", help="where to save the weights")
args = parser.parse_args()

GROUPS, POLES = 8, 8  # rollouts of an iteration, and episodes in each

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
EPISODES, STEPS = GROUPS * POLES, args.steps
steps = torch.arange(STEPS)
discounts = (0.99 ** (steps[:, None] - steps)).tril()  # from the rewards of an episode to those from each step on
episodes = TensorDataset(torch.zeros(EPISODES, STEPS, 4), torch.zeros(EPISODES, STEPS), torch.zeros(EPISODES, STEPS))


def rollout(_):
    """Play some episodes. Return states, actions and rewards: 1 for each step until the pole has fallen."""
    with session.device:  # that of the model
        poles, standing, steps = CartPoles(POLES), torch.ones(POLES), []
        for _ in range(STEPS):
            state = poles.state
            action = Categorical(logits=model(state)).sample()
            steps.append((state, action.float(), standing))
            standing = standing * ~poles.step(action)
    return [torch.stack(column, 1) for column in zip(*steps, strict=True)]


def loss(model, microbatch):
    states, actions, weights = microbatch
    log_probability = Categorical(logits=model(states)).log_prob(actions)
    return -(weights * log_probability).sum(), len(states)


given = {"forward": loss, "data": episodes, "batch": EPISODES}
session = paceline.start(model=model, optimizer=lambda p: Adam(p, lr=0.01), **given)
for iteration in session.epochs(args.iterations):
    states, actions, rewards = map(torch.cat, zip(*session.map(rollout, range(GROUPS)), strict=True))
    session.print(f"iteration {iteration}  mean return {rewards.sum(1).mean():.1f}")
    to_go, played = rewards @ discounts, rewards > 0
    weights = (to_go - to_go[played].mean()) / to_go[played].std() * played
    for old, new in zip(episodes.tensors, (states, actions, weights), strict=True):
        old.copy_(new)
    for batch in session.batches():
        session.step(batch)
session.print("fingerprint", session.fingerprint())
session.export(args.save)

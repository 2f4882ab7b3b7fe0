"""Balance a pole by Q-learning from a replay buffer, on many workers: paceline run -n 2 replay.py"""

import argparse

import torch
from cart_pole import CartPoles
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import Adam

import paceline
from paceline.data import Growing

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--iterations", type=int, default=20)
parser.add_argument("--save", default="replay.pt", help="where to save the weights")
args = parser.parse_args()

GROUPS, POLES, STEPS = 4, 4, 32  # rollouts of an iteration, poles in each, and steps of each pole

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2))  # how soon the pole falls after each action
buffer = Growing()


def rollout(noise):
    """Play some steps, a part of them at random. Return states, actions, next states, and whether the pole fell."""
    with session.device:  # that of the model
        poles, steps = CartPoles(POLES), []
        for _ in range(STEPS):
            state = poles.state
            action = torch.where(torch.rand(POLES) < noise, torch.randint(2, (POLES,)), model(state).argmax(1))
            fallen = poles.step(action)
            steps.append((state, action, poles.state, fallen))
            poles.restart(fallen)
    return [torch.cat(column) for column in zip(*steps, strict=True)]


def loss(model, microbatch):
    states, actions, following, fallen = microbatch
    with torch.no_grad():
        wanted = torch.where(fallen, -1.0, 0.95 * model(following).amax(1))
    return mse_loss(model(states).gather(1, actions[:, None])[:, 0], wanted)


session = paceline.start(model=model, optimizer=lambda p: Adam(p, lr=0.002), forward=loss, data=buffer, batch=64)
for iteration in session.epochs(args.iterations):
    rollouts = session.map(rollout, [max(0.1, 1 - iteration / 10)] * GROUPS)
    states, actions, following, fallen = map(torch.cat, zip(*rollouts, strict=True))
    session.extend([*zip(states, actions, following, fallen, strict=True)])
    session.print(f"iteration {iteration}  {len(buffer)} samples  {fallen.sum()} poles fell")
    for batch in session.batches():
        session.step(batch)
session.print("fingerprint", session.fingerprint())
session.export(args.save)

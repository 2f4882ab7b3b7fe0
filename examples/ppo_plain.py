"""Balance a pole by proximal policy optimization (PPO), in plain PyTorch: python ppo_plain.py"""

import argparse

import torch
from cart_pole import CartPoles
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--iterations", type=int, default=15)
parser.add_argument("--steps", type=int, default=128, help="steps of a rollout")
parser.add_argument("--save", default="ppo_plain.pt", help="where to save the weights")
args = parser.parse_args()

GROUPS, POLES, PASSES = 8, 4, 4  # rollouts of an iteration, poles in each, and passes over the steps of all
SAMPLES = GROUPS * POLES * args.steps


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
        self.critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, state):
        return torch.distributions.Categorical(logits=self.actor(state)), self.critic(state).squeeze(-1)


torch.manual_seed(0)
model = ActorCritic()
samples = TensorDataset(torch.zeros(SAMPLES, 4), *(torch.zeros(SAMPLES) for _ in range(4)))


@torch.no_grad()
def rollout():
    """Play some steps. Return state, action, its log probability, advantage and value of each; and the falls."""
    poles, steps = CartPoles(POLES), []
    for _ in range(args.steps):
        state = poles.state
        policy, value = model(state)
        action = policy.sample()
        fallen = poles.step(action)
        poles.restart(fallen)
        steps.append((state, action, policy.log_prob(action), value, fallen))
    advantage, found, (_, next_value) = 0, [], model(poles.state)
    for state, action, log_probability, value, fallen in reversed(steps):  # generalized advantage estimation
        error = 1 + 0.99 * next_value * ~fallen - value
        advantage = error + 0.99 * 0.95 * advantage * ~fallen
        found.append((state, action, log_probability, advantage, advantage + value))
        next_value = value
    return [torch.cat(column) for column in zip(*found, strict=True)], sum(step[4].sum() for step in steps)


def loss(model, microbatch):
    state, action, log_probability, advantage, value = microbatch
    policy, guess = model(state)
    ratio = (policy.log_prob(action) - log_probability).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return -gain.mean() + 0.01 * nn.functional.mse_loss(guess, value) - 0.01 * policy.entropy().mean()


optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
loader = DataLoader(samples, batch_size=SAMPLES // 8, shuffle=True)
for iteration in range(args.iterations):
    rollouts, falls = zip(*(rollout() for _ in range(GROUPS)), strict=True)
    print(f"iteration {iteration}  {SAMPLES} steps, {sum(falls)} poles fell")
    for old, new in zip(samples.tensors, map(torch.cat, zip(*rollouts, strict=True)), strict=True):
        old.copy_(new)
    advantages = samples.tensors[3]
    advantages.copy_((advantages - advantages.mean()) / advantages.std())
    for _ in range(PASSES):
        for batch in loader:
            optimizer.zero_grad()
            loss(model, batch).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
torch.save(model.state_dict(), args.save)

"""A pole that stands on a cart, which a policy pushes left or right (Barto, Sutton and Anderson 1983)."""

import torch


class CartPoles:
    """Several poles at once, one row each: position, speed, angle and angular speed. A reward of 1 for each step."""

    def __init__(self, count):
        self.state = self._upright(count)

    @staticmethod
    def _upright(count):
        return torch.rand(count, 4) * 0.1 - 0.05

    def step(self, action):
        """Push each cart to the left (0) or right (1). Return which poles have fallen, or carts left the track."""
        _, speed, angle, spin = self.state.unbind(1)
        sin, cos = angle.sin(), angle.cos()
        push = (20.0 * action - 10.0 + 0.05 * spin.square() * sin) / 1.1
        spin_up = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos.square() / 1.1))
        speed_up = push - 0.05 * spin_up * cos / 1.1
        self.state = self.state + 0.02 * torch.stack([speed, speed_up, spin, spin_up], 1)
        return (self.state[:, 0].abs() > 2.4) | (self.state[:, 2].abs() > 0.21)

    def restart(self, fallen):
        """Put the poles that have fallen upright again."""
        self.state = torch.where(fallen[:, None], self._upright(len(fallen)), self.state)

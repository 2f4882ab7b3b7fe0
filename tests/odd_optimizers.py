"""Optimizers that several workers cannot share, as the text of scripts."""

NORMED = """
class Normed(torch.optim.SGD):
    # looks at all gradients at once
    def step(self, closure=None):
        gradients = [value.grad for group in self.param_groups for value in group["params"] if value.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient.div_(norm)
        return super().step(closure)
"""

NOISY = """
class Noisy(torch.optim.SGD):
    # adds the same noise to each row of four; a small parameter has no such rows
    def step(self, closure=None):
        for value in self.param_groups[0]["params"]:
            if value.grad is not None:
                value.grad.view(-1, 4).add_(torch.randn(4), alpha=0.01)
        return super().step(closure)
"""

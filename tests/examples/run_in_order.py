"""Runs a script of one process with the order of samples and the random numbers that a session of one microbatch has.

``run_in_order.py SCRIPT ARGUMENTS``. The script is left as it is: loaders that shuffle give Paceline's order, and where
it sets gradients to zero for its next step, the generators are seeded as for this step.
"""

import itertools
import runpy
import sys
import weakref
from pathlib import Path

import torch

from paceline.data.keys import ORDER, STEP, seed_all, seed_of

SEED = 0
epochs: dict[int, "itertools.count[int]"] = {}
steps: "weakref.WeakKeyDictionary[torch.optim.Optimizer, itertools.count[int]]" = weakref.WeakKeyDictionary()
turns: "weakref.WeakKeyDictionary[torch.optim.Optimizer, int]" = weakref.WeakKeyDictionary()
zero_grad = torch.optim.Optimizer.zero_grad


def in_order(sampler):
    epoch = next(epochs.setdefault(id(sampler), itertools.count()))
    seed = seed_of(ORDER, SEED, epoch)
    return iter(torch.randperm(len(sampler), generator=torch.Generator().manual_seed(seed)).tolist())


def zero_and_seed(optimizer, *arguments, **options):
    turn = turns.setdefault(optimizer, len(turns))
    step = next(steps.setdefault(optimizer, itertools.count()))
    seed_all(seed_of(STEP, SEED, step, 0, *((turn,) if turn else ())))
    zero_grad(optimizer, *arguments, **options)


torch.utils.data.RandomSampler.__iter__ = in_order
torch.optim.Optimizer.zero_grad = zero_and_seed
sys.argv = sys.argv[1:]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")

"""Runs a script of one process with the order of samples and the random numbers that a session of one microbatch has.

``run_in_order.py SCRIPT ARGUMENTS``. The script is left as it is: loaders that shuffle give Paceline's order, and
generators are seeded for each sample, and for each step where the script sets gradients to zero.
"""

import itertools
import runpy
import sys
import weakref
from pathlib import Path

import torch
from torch.utils.data import _utils

from paceline.data.keys import ORDER, SAMPLE, STEP, seed_all, seed_of

SEED = 0
epoch = 0
epochs: dict[int, "itertools.count[int]"] = {}
steps: "weakref.WeakKeyDictionary[torch.optim.Optimizer, itertools.count[int]]" = weakref.WeakKeyDictionary()
turns: "weakref.WeakKeyDictionary[torch.optim.Optimizer, int]" = weakref.WeakKeyDictionary()
zero_grad = torch.optim.Optimizer.zero_grad


def in_order(sampler):
    global epoch
    epoch = next(epochs.setdefault(id(sampler), itertools.count()))
    seed = seed_of(ORDER, SEED, epoch)
    return iter(torch.randperm(len(sampler), generator=torch.Generator().manual_seed(seed)).tolist())


def read_keyed(fetcher, samples):
    items = []
    for sample in samples:
        seed_all(seed_of(SAMPLE, SEED, epoch, sample))
        items.append(fetcher.dataset[sample])
    return fetcher.collate_fn(items)


def zero_and_seed(optimizer, *arguments, **options):
    turn = turns.setdefault(optimizer, len(turns))
    step = next(steps.setdefault(optimizer, itertools.count()))
    seed_all(seed_of(STEP, SEED, step, 0, *((turn,) if turn else ())))
    zero_grad(optimizer, *arguments, **options)


torch.utils.data.RandomSampler.__iter__ = in_order
torch.optim.Optimizer.zero_grad = zero_and_seed
_utils.fetch._MapDatasetFetcher.fetch = read_keyed
sys.argv = sys.argv[1:]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")

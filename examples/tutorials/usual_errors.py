"""Ten errors, provoked: paceline run -n 2 usual_errors.py killed

Plain PyTorch makes the same error: torchrun --nproc-per-node 2 usual_errors.py killed --ddp
"""

import argparse
import os
import signal
import time
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import paceline

FAULTS = "exception", "killed", "stuck", "early", "branch", "shapes", "nan", "none"
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("fault", choices=FAULTS, help="fault to provoke")
parser.add_argument("--ddp", action="store_true", help="train in plain PyTorch")
parser.add_argument("--timeout", type=int, default=10, help="seconds that a worker waits for another")
fault, ddp, timeout = vars(parser.parse_args()).values()

torch.manual_seed(0)
rank = int(os.environ.get("RANK", "0"))
inputs = torch.randn(512, 20)
targets = (inputs.sum(dim=1) > 0).long()
if fault == "nan":
    inputs[100] = float("nan")
data = TensorDataset(inputs, targets)
model = nn.Linear(20, 3 if fault == "shapes" and rank == 1 else 2)
make_optimizer = partial(torch.optim.AdamW, lr=3e-3)


def misbehave(step):
    """Return whether to leave the loop."""
    if fault == "branch" and rank == 0:
        dist.all_reduce(torch.zeros(1))  # a call that only this rank makes
    if rank == 1 and step == 3:
        if fault == "exception":
            raise ValueError("sample 17 has no label")
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "stuck":
            time.sleep(3600)
        return fault == "early"
    return False


def train_with_ddp():
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    replica = nn.parallel.DistributedDataParallel(model)
    optimizer = make_optimizer(replica.parameters())
    for step, (samples, labels) in enumerate(DataLoader(data, 32, sampler=DistributedSampler(data))):
        if misbehave(step):
            break
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(replica(samples), labels)
        loss.backward()
        optimizer.step()
    print(f"rank {rank}: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


def train_with_paceline():
    given = {"data": data, "batch": 64, "timeout_seconds": timeout}
    session = paceline.start(model=model, optimizer=make_optimizer, loss=nn.functional.cross_entropy, **given)
    for step, batch in enumerate(session.batches(epochs=1)):
        if misbehave(step):
            break
        report = session.step(batch)
    session.print(f"loss {report.loss:.4f}")


train_with_ddp() if ddp else train_with_paceline()

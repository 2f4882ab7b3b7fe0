"""The training that all contenders do: one model, one data set, one number of steps; with Paceline, and with plain DDP.

Each worker writes the time at which it has done a step. In the middle, rank 1 kills itself, once. DDP saves a
checkpoint after each step, so that an engine that starts it again loses no steps.
"""

from __future__ import annotations

STEPS, KILLED = 60, 40
"""Steps of 0.1 s; and after which of them a worker is killed."""

_COMMON = f"""
import os, signal, time
from pathlib import Path

FOLDER = Path(__file__).parent
STEPS, KILLED, BATCH = {STEPS}, {KILLED}, 12
os.chdir(FOLDER)


def append(name, line):
    with open(name, "ab", buffering=0) as file:
        file.write(line.encode())


def did(step, rank):
    append("steps", f"{{time.time()}} {{step}} {{rank}}\\n")
    if rank == 1 and step == KILLED and not Path("killed").exists():
        append("killed", str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.1)


def parts(torch):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    inputs = torch.randn(STEPS * BATCH, 8)
    return model, torch.utils.data.TensorDataset(inputs, inputs[:, :4].argmax(1))
"""

PACELINE = (
    _COMMON
    + """
from functools import partial
import torch
import paceline

again = {"resume": "auto", "checkpoint": {"directory": "saved", "every": 1}} if os.environ.get("AGAIN") else {}
model, data = parts(torch)
session = paceline.start(
    model=model, optimizer=partial(torch.optim.AdamW, lr=1e-2), loss=torch.nn.functional.cross_entropy,
    data=data, batch=BATCH, **again,
)
for batch in session.batches(steps=STEPS):
    session.step(batch)
    did(session.position, session.rank)
"""
)

DDP = (
    _COMMON
    + """
ENGINES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")
)
for rank, size in ENGINES:
    if rank in os.environ and "RANK" not in os.environ:
        os.environ |= {"RANK": os.environ[rank], "WORLD_SIZE": os.environ[size]}


def train():
    import torch
    import torch.distributed as dist

    own = not dist.is_initialized()  # Ray has made the group
    if own:
        dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model, data = parts(torch)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    done = 0
    if Path("saved.pt").exists():
        saved = torch.load("saved.pt")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["step"]
    dist.barrier()  # all have read it
    sampler = torch.utils.data.distributed.DistributedSampler(data)
    for step, (inputs, targets) in enumerate(torch.utils.data.DataLoader(data, BATCH // size, sampler=sampler), 1):
        if step <= done:
            continue
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(ddp(inputs), targets).backward()
        optimizer.step()
        if rank == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, "new.pt")
            os.replace("new.pt", "saved.pt")
        did(step, rank)
    if own:
        dist.destroy_process_group()


if __name__ == "__main__":
    train()
"""
)

RAY_TRAIN = """
import sys
from pathlib import Path

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

FOLDER = str(Path(__file__).parent)


def train():
    sys.path.insert(0, FOLDER)
    import ddp

    ddp.train()


ray.init(log_to_driver=False)
TorchTrainer(
    train,
    scaling_config=ScalingConfig(num_workers=4, placement_strategy="SPREAD"),
    run_config=RunConfig(storage_path=f"{FOLDER}/storage", failure_config=FailureConfig(max_failures=3)),
).fit()
"""

TORCH_DISTRIBUTOR = """
import sys
from pathlib import Path
from pyspark.ml.torch.distributor import TorchDistributor
from pyspark.sql import SparkSession

SparkSession.builder.master(sys.argv[1]).getOrCreate()
TorchDistributor(num_processes=2, local_mode=False, use_gpu=False).run(str(Path(__file__).with_name("ddp.py")))
"""

FILES = {"train.py": PACELINE, "ddp.py": DDP, "ray_train.py": RAY_TRAIN, "torch_distributor.py": TORCH_DISTRIBUTOR}

"""Memory of a worker in each phase of a sharded training, from the first line of the script to the exported file.

A GPT with AdamW in float32 is built under ``paceline.deferred()``, trained with one short microbatch for each worker,
evaluated, saved and exported, and resumed by new processes. A thread of each worker reads its proportional set size
(PSS) all the time. The figures are the most in each phase, on the worker with the most, without what the process had
after ``import paceline, torch`` and after making an optimizer of torch, which imports 70 MB. Beside them stands what
the same script needs for a tiny model: libraries, activations and buffers of the process group.

    python bench/sharded_memory.py --megabytes 400 --workers 4
    python bench/sharded_memory.py --megabytes 100 --workers 4 --set shard=gradients
    python bench/sharded_memory.py --megabytes 100 --workers 4 --limit 280      # RLIMIT_DATA, see --help
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from paceline.testing.ranks import run

SCRIPT = f"""
import json, os, re, resource, sys, threading
from contextlib import nullcontext
from functools import partial
import torch
import paceline

def megabytes():
    return int(re.search(r"Pss: +(\\d+)", open("/proc/self/smaps_rollup").read())[1]) / 1e3

torch.optim.AdamW(torch.nn.Linear(1, 1).parameters())
before, most, ended = megabytes(), {{}}, threading.Event()
phase = ["build"]
given = json.loads(os.environ["GIVEN"])
if given["limit"]:
    data = int(re.search(r"VmData:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (data + int(given["limit"] * 1e6),) * 2)
sys.path.insert(0, {str(Path(__file__).parent)!r})
from models import CHARACTERS, GPT

ROWS, LENGTH = 1, 16
workers = int(os.environ["WORLD_SIZE"])
torch.manual_seed(1)
tokens = torch.randint(0, CHARACTERS, (ROWS * workers * 8, LENGTH))
data = torch.utils.data.TensorDataset(tokens, tokens)

def watch():
    while not ended.wait(0.005):
        now = phase[0]
        most[now] = max(most.get(now, 0.0), megabytes() - before)

def loss(output, target):
    return torch.nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())

resume = "auto" if os.path.exists(os.environ["SAVED"]) else None
watcher = threading.Thread(target=watch)
watcher.start()
try:
    torch.manual_seed(0)
    with paceline.deferred() if given["deferred"] else nullcontext():
        model = GPT(given["width"], 8)
    phase[0] = "resume" if resume else "start"
    session = paceline.start(
        model=model, optimizer=partial(torch.optim.AdamW, lr=1e-4), loss=loss, data=data, batch=ROWS * workers,
        microbatches=workers, timeout_seconds=120, threads=1, checkpoint={{"directory": os.environ["SAVED"]}},
        resume=resume, **given["settings"],
    )
    phase[0] = "resumed steps" if resume else "first steps"
    for batch in session.batches(steps=5 if resume else 3):
        session.step(batch)
        if batch.step in (2, 4):
            phase[0] = "fingerprint"
    if not resume:
        phase[0] = "evaluate"
        session.evaluate(data)
        phase[0] = "save"
        session.save()
        phase[0] = "export"
        session.export(os.environ["SAVED"] + "/weights.safetensors")
finally:
    ended.set()
    watcher.join()
    parameters = sum(value.numel() for value in model.parameters())
    print(json.dumps({{"parameters": parameters, "most": most}}), flush=True)
"""
WIDTHS = 8 * 12  # bytes of float32 are 4 times this and the square of the width


def measure(workers: int, width: int, given: dict[str, object]) -> tuple[int, dict[str, float]]:
    """Number of parameters, and the most MB of any worker in each phase."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {"GIVEN": json.dumps({**given, "width": width}), "SAVED": f"{folder}/saved"}
        everyone = [run(SCRIPT, workers, Path(folder), environment=environment, deadline=900) for _ in range(2)]
    if any(one.code for ended in everyone for one in ended):
        raise SystemExit("\n".join(one.out + one.err for ended in everyone for one in ended))
    most: dict[str, float] = {}
    for ended in everyone:
        told = [json.loads(one.out.splitlines()[-1]) for one in ended]
        most = {phase: max(one["most"].get(phase, 0.0) for one in told) for phase in told[0]["most"]} | most
    return told[0]["parameters"], most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--megabytes", type=float, default=100, help="size of the weights")
    parser.add_argument(
        "--limit", type=float, default=0, help="MB that RLIMIT_DATA leaves to each worker after the imports"
    )
    parser.add_argument("--plain", action="store_true", help="build the model as usual")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="settings, such as exact=true")
    options = parser.parse_args()
    settings = {"strategy": "sharded"}
    for one in options.set:
        key, _, value = one.partition("=")
        settings[key] = json.loads(value) if value[:1] in '{["0123456789tfn' else value
    given = {"limit": options.limit, "deferred": not options.plain, "settings": settings}
    width = round((options.megabytes * 1e6 / 4 / WIDTHS) ** 0.5 / 64) * 64
    _, tiny = measure(options.workers, 64, {**given, "limit": 0})
    parameters, found = measure(options.workers, width, given)
    stages = {"optimizer": 8 + 8 / options.workers, "gradients": 4 + 12 / options.workers}
    least = stages.get(str(settings.get("shard")), 16 / options.workers)
    share, block = least * parameters / 1e6, 4 * 4 * width * width / 1e6
    print(f"{parameters * 4 / 1e6:.0f} MB of weights, {options.workers} workers: share {share:.0f} MB")
    print(f"share x 1.1 + largest parameter of {block:.0f} MB: {1.1 * share + block:.0f} MB")
    print(f"{'':16}{'MB':>8}{'tiny':>8}{'bytes a parameter':>20}{f'of {least:.1f}':>10}")
    for phase, value in found.items():
        rest = value - tiny.get(phase, 0.0)
        each = rest * 1e6 / parameters
        print(f"{phase:16}{value:8.0f}{tiny.get(phase, 0.0):8.0f}{each:20.1f}{each / least:10.2f}")


if __name__ == "__main__":
    main()

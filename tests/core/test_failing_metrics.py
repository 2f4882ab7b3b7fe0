"""A metric that fails on one rank: all raise, and a script that catches it goes on with all workers in step."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Printed = Callable[..., list[dict[str, Any]]]

SCRIPT = """
from functools import partial
import torch
import paceline
from subjects import classes, mlp, tell

data, test = classes(60), classes(301)
torch.manual_seed(0)
session = paceline.start(
    model=mlp(), optimizer=partial(torch.optim.SGD, lr=0.1), loss=torch.nn.functional.cross_entropy, data=data,
    batch=16, timeout_seconds=60,
)

def failing(output, target):
    if session.rank == 1:
        raise LookupError("no such class")
    return 0.0

class Failing:
    def reset(self):
        pass
    def update(self, output, target):
        pass
    def compute(self):
        return failing(None, None)

def sizes(model, microbatch):
    return torch.zeros(len(microbatch[1]), int(microbatch[1][0]) + 1)

def entries():
    # of texts; in a later chunk of rank 1 of something that cannot be sent
    chunks = []
    def forward(model, microbatch):
        chunks.append(microbatch)
        return ["text" if session.rank != 1 or len(chunks) < 3 else object() for _ in microbatch[1]]
    return forward

def raised(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"

found, values = [], []
for batch in session.batches(steps=2):
    session.step(batch)
    for call in (
        lambda: session.evaluate(test, failing),
        lambda: session.evaluate(test, Failing()),
        lambda: session.predict(test, lambda model, one: failing(None, None) or model(one[0])),
        lambda: session.predict(test, sizes, everywhere=False),
        lambda: session.evaluate([] if session.rank == 1 else test),
        lambda: session.predict(test, entries()),
    ):
        found.append(raised(call))
        values.append([session.evaluate(test), session.predict(test)[0].tolist()])
tell(found=found, values=values, last=session.evaluate(test), print=session.fingerprint())
"""


@pytest.mark.promise(
    "docs/evaluate.md", "If a metric raises on some ranks only, the others raise an `InputError` that quotes it."
)
@pytest.mark.parametrize("workers", [2, 3])
def test_all_workers_raise_what_one_does(printed: Printed, tmp_path: Path, workers: int) -> None:
    told = printed(SCRIPT, workers, tmp_path)
    assert len({str([one["values"], one["last"], one["print"]]) for one in told}) == 1
    for rank, one in enumerate(told):
        metric, computing, outputs, sizes, data, entries = one["found"][:6]
        assert one["found"][6:] == one["found"][:6]
        for text, method in ((metric, "evaluate"), (computing, "evaluate"), (outputs, "predict")):
            quoted = f"InputError: session.{method} failed on rank 1: LookupError: no such class"
            assert text == ("LookupError: no such class" if rank == 1 else quoted)
        begin = "InputError: " if rank == 0 else "InputError: session.predict failed on rank 0: InputError: "
        assert sizes.startswith(f"{begin}The sizes of the outputs differ")
        begin = "InputError: " if rank == 1 else "InputError: session.evaluate failed on rank 1: InputError: "
        assert data == f"{begin}evaluate: the data set, a list, has no samples (its length is 0)."
        begin = "InputError: " if rank == 1 else "InputError: session.predict failed on rank 1: InputError: "
        assert entries.startswith(f"{begin}predict: a value that the workers exchange cannot be sent: it is a b")

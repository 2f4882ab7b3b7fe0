"""A stream under the other strategies: each sees all samples once, and the synchronous ones give the same bits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

Printed = Callable[..., list[dict[str, Any]]]

STRATEGIES = """
from functools import partial
import torch
import paceline
from subjects import tell

class Rows:
    def __iter__(self):
        for number in range(22):
            yield torch.full((4,), number / 22) + 0.1 * torch.rand(4), torch.tensor([number / 11])

def train(strategy, **settings):
    torch.manual_seed(0)
    session = paceline.start(
        model=torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)), data=Rows(), batch=8,
        optimizer=partial(torch.optim.SGD, lr=0.1), loss=torch.nn.functional.mse_loss, strategy=strategy, **settings,
    )
    samples = []
    for epoch in range(2):
        for batch in session.batches(epochs=1):
            report = session.step(batch)
            samples.append([batch.epoch, batch.samples, batch.last, report.samples])
    return [samples, session.fingerprint()]

exact = dict(exact=True)
tell(
    allreduce=train("allreduce", **exact),
    stealing=train("stealing", **exact),
    server=train("parameter-server", **exact),
    pipeline=train("pipeline", pipeline={"schedule": "1f1b"}, **exact),
    auto=train("auto", **exact),
    local=train("local-sgd", local={"every": 2}),
    late=train("parameter-server", server={"mode": "async"}),
    drained=train("pipeline", pipeline={"schedule": "pipedream"}),
)
"""


def test_streams_with_other_strategies(printed: Printed, tmp_path: Path) -> None:
    both = printed(STRATEGIES, 2, tmp_path, deadline=120)
    sizes = [
        [epoch, size, size == 6, 22 * epoch + done] for epoch in (0, 1) for size, done in ((8, 8), (8, 16), (6, 22))
    ]
    assert all(samples == sizes for one in both for samples, _ in one.values())
    for name in ("allreduce", "stealing", "server", "pipeline", "auto"):
        assert {one[name][1] for one in both} == {both[0]["allreduce"][1]}, name
    assert both[0]["local"] == both[1]["local"]

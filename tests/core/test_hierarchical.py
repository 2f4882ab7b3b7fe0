"""Several workers on each of several machines: each gradient crosses the network once a machine."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Printed = Callable[..., list[dict[str, Any]]]


@pytest.mark.slow
def test_a_machine_with_a_slow_link_sends_less(printed: Printed, tmp_path: Path) -> None:
    """Of eight, one at half the rate: it adds up nothing, so its parts are all it sends; in small buckets."""
    small = "import paceline.schedule.link_shares as link_shares\nlink_shares._LEAST_MESSAGE = 64\n"
    unequal = "from subjects import unequal_links\nunequal_links()\n"
    told = printed(unequal + small + SENT, 8, tmp_path, machines=(1,) * 8, environment={"PACELINE_RUN": str(tmp_path)})
    sent = [bytes_sent(tmp_path, rank) / (3 * told[0]["gradients"]) for rank in range(8)]
    assert sent == pytest.approx([13 / 7, 1.0, *[13 / 7] * 6], rel=0.05)  # of (1 + 6 shares); whole cache lines
    events = map(json.loads, (tmp_path / "events" / "rank-0.jsonl").read_text().splitlines())
    assert [one["buckets"] for one in events if one["event"] == "reduction"] == [4]  # one would do, of 5 MB


SENT = """
from functools import partial
import torch
import paceline
from subjects import tell
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
data = torch.utils.data.TensorDataset(torch.randn(64, 64), torch.randn(64, 64))
session = paceline.start(
    model=model, optimizer=partial(torch.optim.SGD, lr=0.1), loss=torch.nn.functional.mse_loss, data=data, batch=16
)
for batch in session.batches(steps=3):
    session.step(batch)
tell(gradients=4 * sum(value.numel() for value in model.parameters()))
"""


def bytes_sent(run: Path, rank: int) -> int:
    """Of gradients, to workers of other machines."""
    events = map(json.loads, (run / "events" / f"rank-{rank}.jsonl").read_text().splitlines())
    return sum(one["bytes"] for one in events if one["event"] == "exchange" and one["what"] == "gradients")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("machines", "most"), [((2, 2), 1.0), ((4, 4), 1.0), ((2, 2, 2, 2), 1.5)], ids=str)
def test_a_machine_sends_its_sums_once(
    printed: Printed, tmp_path: Path, machines: tuple[int, ...], most: float
) -> None:
    environment = {"PACELINE_RUN": str(tmp_path)}
    told = printed(SENT, sum(machines), tmp_path, machines=machines, environment=environment)
    sent = []
    for rank in range(sum(machines)):
        sent.append(bytes_sent(tmp_path, rank))
    of_machine = [sum(sent[sum(machines[:place]) : sum(machines[: place + 1])]) for place in range(len(machines))]
    assert max(of_machine) / (3 * told[0]["gradients"]) == pytest.approx(most, rel=0.05)  # whole chunks

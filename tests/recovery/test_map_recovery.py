"""A worker is lost in a rollout: the others keep their results and compute its items; resumes and joiners get them."""

from __future__ import annotations

from typing import Any

import pytest
from launching import Ran, Run

from paceline.testing import faults

SCRIPT = """
import hashlib, json, os
import paceline, scripted, torch
from functools import partial
from subjects import mlp, tell

samples = [(torch.zeros(12), 0) for _ in range(24)]  # of the newest rollouts

def play(item):
    computed.append([session.position, item])
    mark = os.environ.get("MARK", "")
    if mark and session.position == 8 and item == 3 and not os.path.exists(mark):
        open(mark, "w").close()
        os.kill(os.getpid(), 9)
    states = torch.randn(4, 12)
    return states, torch.distributions.Categorical(logits=model(states)).sample()

torch.manual_seed(0)
model = mlp()
session = paceline.start(
    model=model, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9), loss=torch.nn.functional.cross_entropy,
    data=samples, batch=6, exact=True, timeout_seconds=30, strategy=os.environ.get("STRATEGY", "allreduce"),
    checkpoint={"every": None if "ALONE" in os.environ else 3, "keep": 9, "background": False},
)
told, computed = {}, []
for epoch in session.epochs(4):
    results = session.map(play, range(6))
    values = json.dumps([[one.tolist() for one in result] for result in results])
    told[epoch] = hashlib.sha256(values.encode()).hexdigest()
    samples[:] = [(state, int(action)) for result in results for state, action in zip(*result)]
    for batch in session.batches():
        if "MARK" in os.environ and batch.step > 8:
            scripted.refill(session, int(os.environ["WORKERS"]))
        scripted.say(session, session.step(batch))
scripted.end(session, told=told, computed=computed)
"""


def check(ran: Ran, alone: dict[str, Any]) -> list[dict[str, Any]]:
    """What each worker has told is what one process tells of these epochs; no worker computes an item twice."""
    assert ran.code == 0, ran.report()
    everyone = ran.printed()
    for one in everyone:
        assert one["fingerprint"] == alone["fingerprint"], ran.report()
        assert "3" in one["told"]
        assert one["told"] == {epoch: alone["told"][epoch] for epoch in one["told"]}, ran.report()
        assert len({tuple(call) for call in one["computed"]}) == len(one["computed"])
    return everyone


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("strategy", "standby"), [("allreduce", 2), ("sharded", 2), ("stealing", 0), ("pipeline", 1)])
def test_a_worker_is_lost_in_a_rollout(run: Run, undisturbed: Any, strategy: str, standby: int, tmp_path: Any) -> None:
    """Its items are computed again. A worker that joins later, and a resumed run, get the rollouts of their epoch."""
    alone, mark = undisturbed(SCRIPT), str(tmp_path / "mark")
    later = faults.kill(rank=0, step=13) if standby == 2 else None
    words = "-n", 3, "--elastic", "1:3", "--standby", standby
    killed = run(SCRIPT, *words, faults=later, MARK=mark, STRATEGY=strategy, WORKERS=str(3 if standby else 2))
    everyone = check(killed, alone)
    assert len(killed.launcher("lost")) == 1 + (standby == 2)
    assert len(everyone) >= (3 if standby else 2), killed.report()
    computed = [call for one in everyone for call in one["computed"] if call[0] == 8]
    left = [[8, item] for item in range(6)]
    assert sorted(computed) == [call for call in left if standby != 2 or call in computed], killed.report()
    resumed = run(SCRIPT, "-n", 2, "--resume", killed.run / "checkpoints" / "step-000006", name="resumed")
    for one in check(resumed, alone):
        assert min(one["told"]) == "1" and min(one["computed"])[0] == 8, resumed.report()

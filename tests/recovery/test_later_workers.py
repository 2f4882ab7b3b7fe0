"""What several workers could not train is refused before a second one comes; one that stays alone may do it."""

import pytest
from launching import Run
from odd_optimizers import NOISY, NORMED

IMPORTS = """
import scripted
import torch
from functools import partial
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset
"""
ROWS = """
class Rows(nn.Embedding):
    def forward(self, words):
        return functional.embedding(words, self.weight, sparse=True)

torch.manual_seed(0)
words = torch.randint(0, 20, (48, 5))
layers = [nn.Embedding(20, 4), nn.Flatten(), nn.Linear(20, 4)]
given = {"optimizer": partial(torch.optim.SGD, lr=0.1), "exact": True, "clip_norm": 1.0}
"""
HEAD = IMPORTS + NORMED + NOISY + ROWS
TAIL = """
session = scripted.begin(
    **{"model": nn.Sequential(*layers), "data": TensorDataset(words, words.sum(1) % 4), "batch": 16, "schedule": None,
       "loss": functional.cross_entropy} | given
)
print("started", flush=True)
for batch in session.batches(steps=3):
    scripted.say(session, session.step(batch))
scripted.end(session)
"""
SERVERS = 'given |= {"strategy": "parameter-server", "server": {"count": 2, "dedicated": True}}\n'
AT_THE_START = {
    "sparse module": (
        'layers[0] = nn.Embedding(20, 4, sparse=True); given["strategy"] = "stealing"',
        "'0' gives sparse gradients",
    ),
    "pipeline": (
        'given |= {"strategy": "pipeline", "optimizer": partial(Normed, lr=0.1)}',
        "Normed updates a parameter differently",
    ),
    "servers": (SERVERS + 'given["optimizer"] = partial(Normed, lr=0.1)', "Normed updates a parameter differently"),
    "single": ('given["strategy"] = "single"', "there may be 3 workers"),
}
IN_THE_FIRST_STEP = {
    "max_norm": (
        "layers[0] = nn.Embedding(20, 4, max_norm=0.5)",
        "changes the parameter '0.weight' in place, as an embedding with max_norm does. This run may have 3 workers",
    ),
    "sparse": ("layers[0] = Rows(20, 4)", "'0.weight' gets sparse gradients"),
    "noise": (
        'given |= {"strategy": "pipeline", "optimizer": partial(Noisy, lr=0.1)}',
        "Noisy draws random numbers",
    ),
}
CASES = AT_THE_START | IN_THE_FIRST_STEP


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", CASES)
def test_it_is_refused_where_more_workers_may_come(run: Run, case: str) -> None:
    script, words = CASES[case]
    ran = run(HEAD + script + TAIL, "-n", 1, "--elastic", "1:3")
    assert ran.code == 2, ran.report()
    assert words in ran.said, ran.report()
    assert ("started" in ran.logs["rank-0"]) == (case in IN_THE_FIRST_STEP), ran.report()
    assert not ran.steps("rank-0"), ran.report()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", CASES)
def test_it_is_trained_where_one_worker_stays_alone(run: Run, case: str) -> None:
    ran = run(HEAD + CASES[case][0] + TAIL, "-n", 1, "--standby", 1)
    assert ran.code == 0, ran.report()
    assert ran.steps("rank-0") == [0, 1, 2], ran.report()


def test_one_server_may_have_an_optimizer_that_looks_at_all_gradients(run: Run) -> None:
    """Two workers are enough for one server and one worker that computes, and there are never more."""
    script = HEAD + SERVERS + 'given["optimizer"] = partial(Normed, lr=0.1)' + TAIL
    ran = run(script, "-n", 1, "--elastic", "1:2")
    assert ran.code == 0, ran.report()

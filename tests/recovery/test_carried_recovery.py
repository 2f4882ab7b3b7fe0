"""A state that goes from batch to batch survives the loss of who computed it, and is in checkpoints."""

from typing import Any

from launching import Run

from paceline.testing import faults

CARRIED = """
import os
from functools import partial
import torch
import paceline
from subjects import tell

torch.manual_seed(1)
tokens = torch.randint(0, 12, (8 * 60,))

class Recurrent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(12, 8), torch.nn.Linear(8, 12)
        self.recurrent = torch.nn.GRU(8, 8, batch_first=True)

def forward(model, microbatch, hidden):
    output, hidden = model.recurrent(model.embedding(microbatch[0]), hidden)
    return torch.nn.functional.cross_entropy(model.head(output).flatten(0, 1), microbatch[1].flatten()), hidden

torch.manual_seed(0)
session = paceline.start(
    model=Recurrent(), optimizer=partial(torch.optim.Adam, lr=0.01), forward=forward, exact=True, batch=8,
    data=paceline.TokenRows(tokens, rows=8, length=8), timeout_seconds=30,
)
for epoch in range(2):
    for batch in session.batches(epochs=1):
        session.step(batch)
        if batch.step == 9 and "ALONE" not in os.environ:
            session.save()
tell(fingerprint=session.fingerprint(), position=session.position)
"""


def test_a_carried_state_survives(run: Run, undisturbed: Any) -> None:
    alone = undisturbed(CARRIED)
    plan = faults.kill(rank=1, step=5)
    killed = run(CARRIED, "-n", 2, "--elastic", "1:2", "--standby", 1, faults=plan)
    assert len(killed.launcher("lost")) == 1
    assert {str(one) for one in killed.printed()} == {str(alone)}, killed.report()
    assert killed.saved() == [10]
    resumed = run(CARRIED, "-n", 3, "--resume", killed.run / "checkpoints", name="two")
    assert resumed.printed() == [alone] * 3, resumed.report()

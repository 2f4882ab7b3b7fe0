"""A worker that is lost between two passes of a step: the step is made again, from the weights before it."""

from typing import Any

from launching import Run

CLOSURES = """
import os
from functools import partial
import torch
import paceline
from subjects import classes, mlp, tell


class Dying(torch.optim.LBFGS):
    steps = 0

    def step(self, closure):
        self.steps, calls = self.steps + 1, []

        def counted():
            calls.append(1)
            here = os.environ.get("RANK") == "1" and "ALONE" not in os.environ
            if here and self.steps == 3 and len(calls) == 3:
                os.kill(os.getpid(), 9)
            return closure()

        return super().step(counted)


session = paceline.start(
    model=mlp(), optimizer=partial(Dying, lr=0.5, max_iter=4, line_search_fn="strong_wolfe"),
    loss=torch.nn.functional.cross_entropy, data=classes(128), batch=32, exact=True, timeout_seconds=30,
)
for batch in session.batches(steps=6):
    session.step(batch)
tell(fingerprint=session.fingerprint(), position=session.position)
"""


def test_a_worker_lost_between_two_passes(run: Run, undisturbed: Any) -> None:
    alone = undisturbed(CLOSURES)
    killed = run(CLOSURES, "-n", 2, "--elastic", "1:2", "--standby", 1)
    assert killed.launcher("lost")  # the standby takes its place, and may be lost in the same way
    assert {str(one) for one in killed.printed()} == {str(alone)}, killed.report()

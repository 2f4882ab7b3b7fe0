"""Training starts from weights on disk: the same on any number of workers, or with a message that says why not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Printed = Callable[..., list[dict[str, Any]]]

HEAD = """
from functools import partial
from pathlib import Path
import torch
from torch import nn
from torch.nn import functional
import paceline
from subjects import tell

inputs = torch.randn(48, 6, generator=torch.Generator().manual_seed(1))
data = torch.utils.data.TensorDataset(inputs, inputs[:, :3].argmax(1))

def build(classes=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, classes))

def start(model=None, **settings):
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    given = dict(model=model or build(), optimizer=sgd, loss=functional.cross_entropy, data=data, batch=16)
    return paceline.start(**given | dict(timeout_seconds=60) | settings)

def train(session, steps=3):
    for batch in session.batches(steps=steps):
        report = session.step(batch)
    return report
"""

STARTS = """
first = start(exact=True, checkpoint=FOLDER + "/kept")
train(first)
first.export(FOLDER + "/w.safetensors")
first.export(FOLDER + "/w.pt")
first.save()
trained = first.model_state()

found = []
for path in ("w.safetensors", "w.pt", "kept", "kept/step-000003"):
    session = start(exact=True, weights=f"{FOLDER}/{path}")
    begun = session.model_state()
    assert all(torch.equal(value, begun[name]) for name, value in trained.items()), path
    report = train(session, 2)
    found.append(session.fingerprint())
tell(found=found, notes=report.notes[1])

# a checkpoint goes before the weights, which need not be there any more
session = start(exact=True, weights=FOLDER + "/gone.pt", checkpoint=FOLDER + "/kept", resume="auto")
assert session.position == 3

# the head has another number of classes
wide = build(5)
session = start(wide, weights={"path": FOLDER + "/w.pt", "skip": ["3."], "strict": False})
state = session.model_state()
assert torch.equal(state["0.weight"], trained["0.weight"]) and torch.equal(state["3.weight"], build(5)[3].weight)

said = []
inner = nn.Sequential(build())
for model, weights in (
    (build(5), FOLDER + "/w.pt"), (inner, FOLDER + "/w.pt"), (None, FOLDER + "/no.pt"), (None, FOLDER + "/w.txt"),
    (None, {"path": FOLDER + "/w.pt", "rename": ["3.=9."]}),
):
    try:
        start(model, weights=weights)
    except paceline.PacelineError as error:
        said.append(f"{type(error).__name__}: {error}".replace(FOLDER, ""))
session = start(inner, weights={"path": FOLDER + "/w.pt", "rename": {"": "0."}})
assert torch.equal(session.model_state()["0.3.bias"], trained["3.bias"])
session = start(weights={"path": FOLDER + "/w.pt", "rename": ["3.=9."], "strict": False})
tell(said=said, partly=train(session, 1).notes[1].replace(FOLDER, ""))
"""


@pytest.mark.slow
def test_training_starts_from_weights(printed: Printed, tmp_path: Path) -> None:
    runs = [
        printed(HEAD + STARTS.replace("FOLDER", repr(str(tmp_path / str(workers)))), workers, tmp_path)
        for workers in (1, 3)
    ]
    everyone = [one for run in runs for one in run]
    assert len({fingerprint for one in everyone for fingerprint in one["found"]}) == 1
    one = everyone[0]
    assert one["notes"].startswith("weights from ")
    assert all(other["said"] == one["said"] for other in everyone)
    assert one["said"] == [
        "CheckpointError: The weights in /w.pt do not have the shapes of the model: '3.weight' is [3, 8], the model's "
        "is [5, 8]; '3.bias' is [3], the model's is [5]. Build the same model, or leave them out (weights.skip).",
        "CheckpointError: None of the 9 tensors in /w.pt has a name of the model: it has '0.weight', '0.bias', "
        "'1.weight' and 6 more, the model '0.0.weight', '0.0.bias', '0.1.weight' and 6 more. With '0.' in front names "
        "fit: weights.rename==0.",
        "CheckpointError: There are no weights at /no.pt: there is no such file or folder.",
        "CheckpointError: There are no weights at /w.txt: there is no such file or folder.",
        "CheckpointError: The weights in /w.pt are not those of the model. It has no '3.weight', '3.bias'. The model "
        "has no '9.weight', '9.bias'. Rename (weights.rename), skip names of the model (weights.skip), or load what "
        "fits (weights.strict=false).",
    ]
    assert one["partly"] == (
        "weights from /w.pt: 7 tensors; not in it, so with their initial values: '3.weight', '3.bias'; not in the "
        "model, so left out: '9.weight', '9.bias'"
    )

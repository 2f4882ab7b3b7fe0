"""The complete weights leave training, from any strategy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.testing.ranks import Ended

Run = Callable[..., list[Ended]]
Printed = Callable[..., list[dict[str, Any]]]

HEAD = """
from functools import partial
from pathlib import Path
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional
import paceline
from paceline.checkpoint.tensors import fingerprint
from subjects import tell

tokens = torch.randint(0, 20, (48, 5), generator=torch.Generator().manual_seed(1))
data = torch.utils.data.TensorDataset(tokens, tokens.sum(1) % 20)

class Mean(nn.Module):
    def forward(self, value):
        return value.mean(1)

def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 8), Mean(), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 20))
    model[4].weight = model[0].weight
    return model

def start(**settings):
    model = build()
    adam = partial(torch.optim.Adam, lr=0.01)
    given = dict(model=model, optimizer=adam, loss=functional.cross_entropy, data=data, batch=16, timeout_seconds=60)
    return model, paceline.start(**given | settings)
"""

STRATEGIES = """
strategies = {
    "single-exact": dict(strategy="allreduce", exact=True),
    "stealing-exact": dict(strategy="stealing", exact=True),
    "servers-exact": dict(strategy="parameter-server", exact=True),
    "pipeline-exact": dict(strategy="pipeline", exact=True),
    "async": dict(strategy="parameter-server", server=dict(mode="async")),
    "hogwild": dict(strategy="hogwild"),
    "local-sgd": dict(strategy="local-sgd", local=dict(every=2)),
    "pipedream": dict(strategy="pipeline", pipeline=dict(schedule="pipedream")),
}
found = {}
for name, settings in strategies.items():
    model, session = start(**settings)
    for batch in session.batches(steps=4):
        session.step(batch)
        if name.startswith("pip") and batch.step < 2:
            for module in (model, model[4]):
                try:
                    module.state_dict()
                except paceline.InputError as error:
                    said = str(error)
        if batch.step == 1:
            early = session.model_state(everywhere=False)
            assert bool(early) == (session.rank == 0)
    state = session.model_state()
    safe = session.export(Path(FOLDER, f"{name}.safetensors"))
    half = session.export(Path(FOLDER, f"{name}.pt"), dtype=torch.bfloat16)
    written = load_file(safe)
    other = build()
    other.load_state_dict(written)
    other.load_state_dict(state)
    build().load_state_dict(torch.load(half, weights_only=True))
    assert state["0.weight"] is state["4.weight"] and written.keys() == state.keys()
    assert all(torch.equal(written[key], value) for key, value in state.items())
    assert all(torch.equal(value, other.get_parameter(key)) for key, value in model.named_parameters())
    moved = not torch.equal(state["0.weight"], build()[0].weight)
    for batch in session.batches(steps=1):
        session.step(batch)  # training goes on
    found[name] = [fingerprint(state), moved]
tell(**found)
tell(said=said)
"""


@pytest.mark.promise("docs/weights.md", "It is complete with any strategy: a pipeline's worker has the values")
def test_the_complete_weights_from_every_strategy(printed: Printed, tmp_path: Path) -> None:
    one, other = printed(HEAD + STRATEGIES.replace("FOLDER", repr(str(tmp_path / "out"))), 2, tmp_path)
    said = one.pop("said")
    assert said == other.pop("said")
    assert said.startswith("Linear.state_dict() was called between two steps of a pipeline, when this worker has the")
    assert "session.model_state() on every worker" in said
    assert one == other
    assert all(moved for _, moved in one.values())
    assert len({fingerprint for name, (fingerprint, _) in one.items() if name.endswith("exact")}) == 1
    assert len(list((tmp_path / "out").iterdir())) == 2 * len(one)


ERRORS = """
import logging
model, session = start()
for batch in session.batches(steps=2):
    session.step(batch)
said = []
Path(FOLDER).mkdir(exist_ok=True)
Path(FOLDER, "file").touch()
for path, dtype in ((Path(FOLDER, "file", "w.pt"), None), (Path(FOLDER, "w.txt"), None), ("w.pt", torch.int8)):
    try:
        session.export(path, dtype=dtype)
    except paceline.PacelineError as error:
        said.append(f"{type(error).__name__}: {error}")
tell(said=said)
"""


def test_what_cannot_be_written_is_said_on_every_rank(printed: Printed, tmp_path: Path) -> None:
    one, other = printed(HEAD + ERRORS.replace("FOLDER", repr(str(tmp_path / "out"))), 2, tmp_path)
    assert one == other
    first, second, third = one["said"]
    assert first.startswith(f"CheckpointError: The weights cannot be written to {tmp_path}/out/file/w.pt: ")
    assert second.startswith(f"ConfigError: '{tmp_path}/out/w.txt' cannot be a file of weights: its name must end in")
    assert third == "ConfigError: export(dtype=torch.int8): give a floating-point type, such as torch.bfloat16."


RESUMED = """
import os
model, session = start(exact=True, checkpoint=dict(directory=FOLDER + "/kept", every=3), resume="auto")
for part in range(3):
    for batch in session.batches(steps=3):
        session.step(batch)
    state = session.model_state()
    path = session.export(f"{FOLDER}/part-{part}.pt")
    if part == 1 and session.position == 6 and not AGAIN:
        session.save()
        os._exit(0)
tell(times=[os.stat(f"{FOLDER}/part-{part}.pt").st_mtime_ns for part in range(3)], last=fingerprint(state))
"""


def test_a_resumed_script_does_not_write_past_weights_again(printed: Printed, ranks: Run, tmp_path: Path) -> None:
    """The weights of the first part are gone when the second is resumed; its file stays as it was."""
    script = HEAD + RESUMED.replace("FOLDER", repr(str(tmp_path / "out")))
    ranks(script.replace("AGAIN", "False"), 1, tmp_path)
    before = (tmp_path / "out" / "part-0.pt").stat().st_mtime_ns
    one, other = printed(script.replace("AGAIN", "True"), 2, tmp_path)
    assert one == other
    assert one["times"][0] == before
    assert one["times"][0] < one["times"][1] < one["times"][2]

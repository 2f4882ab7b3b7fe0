"""The script that the engines start, and the fingerprint that all of them must end with."""

import os
import re
import tempfile
from functools import cache
from pathlib import Path

from fork_server import Command, ForkServer

SCRIPT = r"""
import os, signal
from functools import partial
from pathlib import Path
import torch
import paceline

SAVED = {"directory": "saved", "every": 2, "background": False}
torch.manual_seed(0)
inputs = torch.randn(96, 8)
session = paceline.start(
    model=torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 4)),
    optimizer=partial(torch.optim.AdamW, lr=1e-2),
    loss=torch.nn.functional.cross_entropy,
    data=torch.utils.data.TensorDataset(inputs, inputs[:, :4].argmax(1)),
    batch=12,
    exact=True,
    timeout_seconds=120,
    **({"resume": "auto", "checkpoint": SAVED} if os.environ.get("SAVE") else {}),
)
os.write(1, f"rank {session.rank} of {session.workers} from step {session.position}\n".encode())  # in one group
for batch in session.batches(epochs=2):
    session.step(batch)
    if session.rank == 1 and session.position == 7 and os.environ.get("KILL") and not Path("killed").exists():
        Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
os.write(1, f"fingerprint {session.fingerprint()}\n".encode())
"""

WAITS = """
    import time
    world = session._context.world
    while 3 <= session.position < 5 and world.size < COUNT and world.coordinator.pending <= world.generation:
        time.sleep(0.05)  # until the others join, which they do after the next step
    if session.position == 5 and not Path("on").exists():
        Path(f"reached-{session.rank}").write_text(str(os.getpid()))
        while not Path("on").exists() and not world.leaving:
            time.sleep(0.05)
"""


def write_script(folder: Path) -> Path:
    """The script in a folder."""
    path = folder / "train.py"
    path.write_text(SCRIPT)
    return path


def fingerprints(said: str) -> list[str]:
    """Each fingerprint in an output, but that of the note that all workers have printed it."""
    return re.findall(r"(?<!')fingerprint ([0-9a-f]{64})", said)


def alone(script: Path) -> str:
    """The fingerprint of one process; each text of a script is run once."""
    return _fingerprint_of(script.read_text())


@cache
def _fingerprint_of(text: str) -> str:
    assert ForkServer.used is not None
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "train.py").write_text(text)
        command = Command(("train.py",), os.environ, folder / "out", folder / "err", folder)
        assert ForkServer.used.run(command, 120.0) == 0, (folder / "err").read_text()
        return fingerprints((folder / "out").read_text())[0]


def waiting_script(folder: Path, count: int) -> tuple[Path, str]:
    """The script, which after five steps of so many workers waits for a file ``on`` or a signal; its fingerprint."""
    script = write_script(folder)
    expected = alone(script)
    waits = WAITS.replace("COUNT", str(count))
    script.write_text(SCRIPT.replace("    session.step(batch)\n", "    session.step(batch)" + waits, 1))
    return script, expected

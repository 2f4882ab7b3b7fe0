"""Spoil checkpoints as an attacker or a bad disk would, and resume: nothing may run code, hang, or pass unseen."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import math
import os
import pickle
import random
import shutil
import signal
import socket
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import paceline
from paceline.checkpoint import resume
from paceline.checkpoint.manifest import FILE, METADATA, TENSORS, dtype_of

SECONDS = 30
MARKER = "PACELINE_TEST_MARKER"


class Bomb:
    """Makes a file when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return exec, (f"import os; open(os.environ[{MARKER!r}], 'w').close()",)


def session_in(directory: str, key: Path | None, seed: int = 0, **settings: Any) -> paceline.Session:
    torch.manual_seed(seed)
    inputs = torch.randn(64, 6)
    return paceline.start(
        model=torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1)),
        optimizer=partial(torch.optim.AdamW, lr=0.01),
        loss=torch.nn.functional.mse_loss,
        data=torch.utils.data.TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)),
        batch=16,
        exact=True,
        schedule=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
        checkpoint={"directory": directory, "every": 2, "keep": 9, "background": False, "key_file": key},
        **settings,
    )


def train(session: paceline.Session, steps: int = 6) -> str:
    for batch in session.batches(steps=steps):
        session.step(batch)
    return session.fingerprint()


def folders_of(run: Path) -> list[Path]:
    """The folders of the complete checkpoints of a run, the newest last."""
    return sorted(path.parent for path in run.rglob(FILE) if not path.relative_to(run).parts[0].startswith("damaged"))


class Mutation:
    """One way to spoil the newest checkpoint of a run, chosen by a seed; ``other`` is another run, of another seed."""

    def __init__(self, run: Path, other: Path, seed: int, store: str) -> None:
        self.run, self.store, self.random = run, store, random.Random(seed)
        self.good, self.newest = folders_of(run)[-2:]
        self.other = folders_of(other)[-1]
        ways = [self.bytes_flipped, self.cut, self.longer, self.swapped, self.bomb, self.sealed_bomb, self.forged]
        ways += [self.odd_text, self.lost, self.whole, self.odd_name]
        ways += [] if store == "memory://" else [self.not_a_file]
        self.way = ways[seed % len(ways)]
        self.file = self.random.choice([FILE, TENSORS, METADATA])
        self.what = f"{self.way.__name__} {self.file}"
        self.refused = False
        self.positions = {4}  # from which the run may go on

    def apply(self) -> None:
        self.way()

    def bytes_flipped(self) -> None:
        content = bytearray((self.newest / self.file).read_bytes())
        for _ in range(self.random.choice([1, 1, 3, 50])):
            content[self.random.randrange(len(content))] ^= 1 << self.random.randrange(8)
        (self.newest / self.file).write_bytes(content)

    def cut(self) -> None:
        size = (self.newest / self.file).stat().st_size
        os.truncate(self.newest / self.file, self.random.choice([0, 1, size - 1, self.random.randrange(size)]))

    def longer(self) -> None:
        with (self.newest / self.file).open("ab") as file:
            file.write(self.random.choice([b" ", b"\0" * 4096, self.random.randbytes(300), b"\n"]))

    def swapped(self) -> None:
        source = self.random.choice([self.good, self.other])
        if (source / self.file).read_bytes() == (self.newest / self.file).read_bytes():  # the index may be the same
            self.file = TENSORS
        self.what += f" from {source}"
        shutil.copy(source / self.file, self.newest / self.file)

    def bomb(self) -> None:
        if self.random.random() < 0.5:
            (self.newest / self.file).write_bytes(pickle.dumps(Bomb()))
        else:
            content = io.BytesIO()
            torch.save({"extra": Bomb()}, content)
            (self.newest / self.file).write_bytes(content.getvalue())

    def sealed_bomb(self) -> None:
        """A bomb in each file, of the size and hash that the manifest says: nothing but the reader protects then."""
        bomb, self.positions = pickle.dumps(Bomb(), protocol=2), {4, 6}
        data = self.newest / TENSORS
        content = data.read_bytes()
        if self.random.random() < 0.5:  # in front of the elements of the first tensor, where no element is
            content = bomb.ljust(64, b".") + content[max(64, len(bomb)) :]
        else:  # each archive of torch.save gets another data.pkl
            archive = self.newest / "archive"
            with zipfile.ZipFile(archive, "w") as file:
                for name, inside in (("data.pkl", bomb), ("version", b"3\n"), ("data/0", bytes(2000))):
                    file.writestr(f"archive/{name}", inside)
            content = archive.read_bytes() + content[archive.stat().st_size :]
            archive.unlink()
        data.write_bytes(content)
        (self.newest / METADATA).write_bytes(bomb)
        said = self.hashed(content)
        said["files"][METADATA] = [len(bomb), hashlib.sha256(bomb).hexdigest()]
        self.seal(said)

    def hashed(self, content: bytes) -> dict[str, Any]:
        """What the manifest says about the file with the tensors, if it has these bytes and the same elements."""
        values, rest, place = json.loads((self.newest / FILE).read_text()), hashlib.sha256(), 0
        for name, offset in sorted(values["offsets"].items(), key=lambda one: one[1]):
            dtype, shape = values["tensors"][name]
            rest.update(content[place:offset])
            place = offset + dtype_of(dtype).itemsize * math.prod(shape)
        rest.update(content[place:])
        return {"files": {TENSORS: [len(content), rest.hexdigest()]}}

    def seal(self, changes: dict[str, Any]) -> None:
        """Change the manifest, and make its checksum right."""
        values = json.loads((self.newest / FILE).read_text()) | changes
        del values["checksum"]
        signature = values.pop("signature", None)
        body = json.dumps(values, indent=1)
        checksum = hashlib.sha256(body.encode()).hexdigest()
        seals = {"checksum": checksum} | ({"signature": signature} if signature else {})
        (self.newest / FILE).write_text(f"{body[:-2]},{json.dumps(seals, indent=1)[1:]}")

    def forged(self) -> None:
        """Values that no run has, with a right checksum."""
        values = json.loads((self.newest / FILE).read_text())
        state, files, offsets = values["state"], values["files"], values["offsets"]
        first = "parameter/0.weight"
        code = {"$code": "os.system"}
        choices: list[dict[str, Any]] = [
            {"step": 10**12},
            {"step": -6},
            {"step": "6"},
            {"step": 4},
            {"step": 6.5},
            {"step": 10**3000},
            {"format": 3},
            {"format": 4},
            {"format": 6},
            {"hashes": {}},
            {"parts": {}},
            {"time": float("nan")},
            {"files": {"../../../etc/passwd": files[TENSORS], METADATA: files[METADATA]}},
            {"files": {"/etc/passwd": files[TENSORS], METADATA: files[METADATA]}},
            {"files": files | {TENSORS: [10**15, "0" * 64]}},
            {"files": files | {TENSORS: [files[TENSORS][0], "0" * 64]}},
            {"offsets": dict.fromkeys(offsets, 704)},
            {"offsets": offsets | {first: 10**15}},
            {"offsets": offsets | {first: offsets[first] - 4}},
            {"state": state | {"groups": [state["groups"][0] | {"lr": code}]}},
            {"state": state | {"groups": [state["groups"][0] | {"params": []}]}},
            {"state": state | {"schedule": state["schedule"] | {"lr_lambdas": [code]}}},
            {"state": state | {"strategy_state": {"$tensor": "parameter/none"}}},
            {"state": state | {"groups": 3}},
            {"state": json.loads("[" * 90 + "]" * 90)},
            {"state": None},
            {"fingerprint": "0" * 64},
            {"fingerprint": "x" * 64},
            {"order": 3},
            {"numerics": {"exact": {"a": 1}}},
            {"versions": {"torch": "2" * 10**6}},
            {"surprise": 1},
        ]
        place = self.random.randrange(len(choices))
        self.what = f"forged {str(choices[place])[:60]}"
        self.seal(choices[place])

    def odd_text(self) -> None:
        text = (self.newest / FILE).read_text()
        body = text[: text.rindex(',\n "checksum"')]
        place = self.random.randrange(8)
        self.what = f"odd text {place}"
        texts = [
            lambda: text.replace('"step": 6', '"step": 6,\n "step": 6'),
            lambda: text.replace('"step": 6', '"step": 6, "step": 1000000000000'),
            lambda: "[" * 200_000,
            lambda: '{"a":' * 200_000 + "1" + "}" * 200_000,
            lambda: text.replace('"step": 6', '"step": ' + "6" * 100_000),
            lambda: json.dumps(json.loads(text)),
            lambda: f'{body},\n "checksum": "{hashlib.sha256(body.encode()).hexdigest()}"\n}}',
            lambda: text.encode("utf-16", "surrogateescape").decode("latin-1"),
        ]
        (self.newest / FILE).write_text(texts[place]())

    def not_a_file(self) -> None:
        """Something at which a reader might wait, or which leads elsewhere."""
        path = self.newest / self.file
        path.rename(self.run / "elsewhere")
        kind = self.random.choice(["pipe", "socket", "link", "zero", "loop", "directory", "folder link", "folder pipe"])
        self.what += f" {kind}"
        if kind == "pipe":
            os.mkfifo(path)
        if kind == "socket":
            with socket.socket(socket.AF_UNIX) as one:
                here = Path.cwd()
                os.chdir(path.parent)  # the path of a socket is short
                one.bind(path.name)
                os.chdir(here)
        targets = {"link": self.run / "elsewhere", "zero": "/dev/zero", "loop": path.name}
        if kind in targets:
            path.symlink_to(targets[kind])
        if kind == "directory":
            path.mkdir()
        if kind.startswith("folder"):
            (self.run / "elsewhere").rename(path)
            self.newest.rename(self.run / "elsewhere")
            if kind == "folder link":
                self.newest.symlink_to(self.run / "elsewhere")
                self.positions |= {6} if self.store else set()  # fsspec follows it, to what is not changed
            else:
                os.mkfifo(self.newest)

    def lost(self) -> None:
        (self.newest / self.file).unlink()

    def whole(self) -> None:
        """A whole checkpoint of another step or of another run."""
        self.refused = self.random.random() < 0.5
        source = self.other if self.refused else self.good
        self.what = f"the whole of {'another run' if self.refused else 'another step'}"
        shutil.rmtree(self.newest)
        shutil.copytree(source, self.newest)

    def odd_name(self) -> None:
        """The newest one once more, under the name of a later step."""
        name = self.random.choice(["step-000008", "step-1000000000000", "step-" + "9" * 18])
        self.what, self.positions = name, {6}
        shutil.copytree(self.run / self.newest.relative_to(self.run).parts[0], self.run / name, symlinks=True)


class Said(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def attempt(mutation: Mutation, directory: str, key: Path | None, expected: str) -> str:
    """Resume from a spoilt run; what is wrong with how it went, or nothing."""
    said, log = Said(), logging.getLogger("paceline")
    log.addHandler(said)
    signal.signal(signal.SIGALRM, _too_late)
    signal.alarm(SECONDS)
    position = -1
    try:
        session = session_in(directory, key, resume="auto")
        position = session.position
        result = train(session)
    except paceline.CheckpointError as error:
        result = f"refused: {error}"
    except Exception as error:  # noqa: BLE001 - what a user must never see
        result = f"{type(error).__name__}: {error}"
    finally:
        signal.alarm(0)
        log.removeHandler(said)
    if os.path.exists(os.environ[MARKER]):
        os.unlink(os.environ[MARKER])
        return "code was run"
    if mutation.refused:
        return (
            "" if result.startswith("refused: ") and "checkpoints of two runs" in result else f"not refused: {result}"
        )
    if result != expected or position not in mutation.positions:
        return f"from {position} to another end: {result}"
    if position == 6 in mutation.positions and mutation.way != mutation.odd_name:
        return ""
    names = {mutation.newest.relative_to(mutation.run).parts[0], mutation.what}
    told = any(name in line and len(line) < 2000 for name in names for line in said.lines)
    return "" if told else f"no reason: {said.lines}"


def _too_late(*_: object) -> None:
    raise TimeoutError(f"it took longer than {SECONDS} seconds")


def failures(home: Path, seeds: range, store: str = "", signed: bool = False) -> list[str]:
    """Mutate, resume, and collect what went wrong; ``home`` is an empty folder."""
    key = home / "key" if signed else None
    if key is not None:
        key.touch(mode=0o600)
        key.write_text("0123456789abcdef" * 4)
    os.environ[MARKER] = str(home / "marker")
    expected = train(session_in(str(home / "whole"), key))
    train(session_in(str(home / "other"), key, seed=1))
    found = []
    for seed in seeds:
        run = home / f"run-{seed}"
        shutil.copytree(home / "whole", run)
        mutation = Mutation(run, home / "other", seed, store)
        mutation.apply()
        directory = str(run)
        if store:
            directory = f"{store}{run}"
        if store == "memory://":
            fsspec = __import__("fsspec")
            fsspec.filesystem("memory").put(f"{run}/", f"{run}/", recursive=True)
        if signed and mutation.way == mutation.sealed_bomb:
            mutation.positions = {4}
        with mock.patch.object(resume, "MISSING_SECONDS", 0.2):  # for so long a file that is gone is waited for
            wrong = attempt(mutation, directory, key, expected)
        if wrong:
            found.append(f"{seed} {mutation.what}: {wrong}")
        shutil.rmtree(run)
    del os.environ[MARKER]
    return found

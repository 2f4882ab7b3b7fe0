"""Random mutations of the product, and whether the quick tests notice them.

Each mutation changes one expression or statement of a copy of the tree: a flipped comparison, an off-by-one number, a
removed call, swapped arguments, an early return. The tests of its area then run on the copy, unit tests first. A
mutation that no test notices is either equivalent to the code or lacks a test.

    python bench/mutations.py --seed 7 --count 40 --area recovery,reduction,checkpoint
    python bench/mutations.py --seed 7 --count 40 --only 3 --tests tests/unit/test_rpc.py
    python bench/mutations.py --seed 7 --times test.xml --longest 3      # without tests that took more than 3 s there
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn

import mutators
import pytest

ROOT = Path(__file__).resolve().parent.parent
_END_WITH_PARENT, _ADOPT_ORPHANS = 1, 36  # PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER
QUICK, HANG = "not slow and not place", "hang: no test ended in"
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", "site", "runs", "shared")


class Area(NamedTuple):
    """The globs of the files of a part of the product, and those of the tests with real workers that exercise it."""

    sources: Sequence[str]
    real: Sequence[str]


AREAS = {
    "recovery": Area(
        ("training/*", "training/recovery/*", "coordinator/*", "comm/rendezvous/*", "comm/world.py"),
        ("tests/core/test_resumed_loops.py", "tests/core/test_session.py", "tests/recovery/test_*.py"),
    ),
    "reduction": Area(
        ("comm/reduction/*", "comm/shm/*", "schedule/tree.py", "schedule/*shares.py", "step/gradients/accumulate.py",
         "step/commit.py", "step/gradients/fusion.py", "step/gradients/fixed_point.py", "step/gradients/codec.py",
         "step/gradients/lanes.py", "step/gradients/floats.py"),
        ("tests/core/test_[efh]*.py", "tests/recovery/test_recovery.py"),
    ),
    "checkpoint": Area(
        ("checkpoint/*", "checkpoint/storage/*"),
        ("tests/checkpoint/test_*.py", "tests/core/test_[bkms]*.py", "tests/recovery/test_part_writers.py"),
    ),
    "pipelines": Area(
        ("strategies/pipeline/*", "schedule/pipeline/*", "schedule/balance.py", "partition/*"),
        ("tests/core/test_p[ir]*.py", "tests/core/test_re*.py", "tests/recovery/test_pipeline_recovery.py"),
    ),
    "servers": Area(
        ("comm/servers/*", "strategies/parameter_server/*"),
        ("tests/core/test_*server*.py", "tests/core/test_hogwild.py", "tests/recovery/test_[as]*.py"),
    ),
    "data": Area(
        ("data/*", "data/*/*"),
        ("tests/core/test_data.py", "tests/core/test_[cfps]*.py", "tests/recovery/test_carried_recovery.py"),
    ),
    "probes": Area(
        ("step/probes/*", "step/checks.py", "step/loss.py", "step/numerics.py", "partition/*_check.py"),
        ("tests/core/test_loss_reduction.py", "tests/core/test_repeatability.py", "tests/core/test_[bno]*.py"),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Mutation:
    """One change of one file of an area."""

    area: str
    path: Path
    edit: mutators.Edit

    def __str__(self) -> str:
        return f"{self.area}: {self.path}:{self.edit.line}: {self.edit.kind}: {self.edit.before} -> {self.edit.after}"


def choose(areas: Sequence[str], seed: int, count: int) -> list[Mutation]:
    """Choose mutations of these areas in turn; the same seed gives the same mutations of the same tree."""
    chosen: list[Mutation] = []
    queues = {}
    for area in areas:
        paths = sorted({path for glob in AREAS[area].sources for path in (ROOT / "paceline").glob(glob)})
        found = [Mutation(area, path.relative_to(ROOT), edit) for path in paths if path.suffix == ".py"
                 for edit in mutators.edits(path.read_text())]  # fmt: skip
        random.Random(f"{seed} {area}").shuffle(found)
        queues[area] = found
    while len(chosen) < count and any(queues.values()):
        chosen += [queues[area].pop() for area in areas if queues[area]]
    return chosen[:count]


def tests_of(mutation: Mutation, tree: Path) -> list[str]:
    """Return test files: those that import the module, other unit tests of the area's packages, then real ones."""
    area, (*package, module) = AREAS[mutation.area], mutation.path.with_suffix("").parts
    packages = {"paceline." + source.split("/*")[0].removesuffix(".py").replace("/", ".") for source in area.sources}
    texts = {path: path.read_text() for path in sorted((tree / "tests").glob("*/test_*.py"))}
    near = [path for path, text in texts.items() if module in text and ".".join(package) in text]
    near += [
        path for path, text in texts.items() if path.parent.name == "unit" and any(one in text for one in packages)
    ]
    near += [path for glob in area.real for path in sorted(tree.glob(glob))]
    return list(dict.fromkeys(str(path.relative_to(tree)) for path in near))


class FirstFailure:
    """A plugin of pytest that leaves out slow tests and keeps the name of the first test that fails."""

    def __init__(self, file: Path, left_out: frozenset[str]) -> None:
        self.file, self.left_out = file, left_out

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid not in self.left_out]

    def pytest_runtest_logreport(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed and not self.file.exists():
            self.file.write_text(report.nodeid)

    pytest_collectreport = pytest_runtest_logreport


def slow_tests(times: Path | None, longest: float) -> frozenset[str]:
    """Read the ids of the tests that took longer from a JUnit file of pytest."""
    if times is None:
        return frozenset()
    slow = (case for case in ElementTree.parse(times).iter("testcase") if float(case.get("time", 0)) > longest)
    return frozenset(f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}" for case in slow)


def attempt(copy: Path, mutation: Mutation, tests: Sequence[str], left_out: frozenset[str], seconds: float) -> str:
    """Run the tests on the mutated copy; return the first that fails there and not without the mutation, if any."""
    while test := _failure(copy, mutation, tests, left_out, seconds):
        if test.startswith(HANG) or not _failure(copy, None, [test], frozenset(), seconds):
            return test
        left_out |= {test}  # it fails on this machine
    return ""


def _failure(
    copy: Path, mutation: Mutation | None, tests: Sequence[str], left_out: frozenset[str], seconds: float
) -> str:
    failed, out, ended, status, size = copy.parent / "failed", copy.parent / "out.txt", 0, 0, 0
    failed.unlink(missing_ok=True)
    with _mutated(copy, mutation) if mutation else nullcontext():
        pid = os.fork()
        if pid == 0:
            _test(copy, tests, FirstFailure(failed, left_out))
        begin = time.monotonic()
        while not ended and time.monotonic() - begin < seconds:
            time.sleep(0.1)
            ended, status = os.waitpid(pid, os.WNOHANG)
            if out.exists() and out.stat().st_size != size:  # a test has ended
                size, begin = out.stat().st_size, time.monotonic()
        _end_children()
    if status and not failed.exists():
        raise SystemExit(f"\npytest could not run {mutation}: see {out}")
    return failed.read_text() if failed.exists() else "" if ended else f"{HANG} {seconds:.0f} s"


@contextmanager
def _mutated(copy: Path, mutation: Mutation) -> Iterator[None]:
    path = copy / mutation.path
    kept = path.read_text()

    def write(text: str) -> None:
        path.write_text(text)
        for file in (path.parent / "__pycache__").glob(f"{path.stem}.*"):  # it may be as old and of a file as large
            file.unlink()

    write(mutation.edit.apply(kept))
    try:
        yield
    finally:
        write(kept)


def _test(copy: Path, tests: Sequence[str], plugin: FirstFailure) -> NoReturn:
    os.setsid()
    ctypes.CDLL(None).prctl(_END_WITH_PARENT, signal.SIGKILL)
    os.chdir(copy)
    out = os.open(copy.parent / "out.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(out, stream)
    sys.path[:] = [str(copy), *(path for path in sys.path if Path(path) not in (ROOT, ROOT / "bench"))]
    os.environ |= {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-m", QUICK, *tests], plugins=[plugin])
    os._exit(0 if code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) or plugin.file.exists() else 1)


def _end_children() -> None:
    """Kill what runs below this process, which adopts orphans."""
    while True:
        children = [int(pid) for task in Path("/proc/self/task").iterdir()
                    for pid in (task / "children").read_text().split()]  # fmt: skip
        if not children:
            return
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        for pid in children:
            os.waitpid(pid, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=20, help="number of mutations, over all areas")
    parser.add_argument("--area", default=",".join(AREAS), help="defaults to all: %(default)s")
    parser.add_argument("--list", action="store_true", help="print the mutations and run nothing")
    parser.add_argument("--only", type=int, action="append", help="run only this mutation of the list")
    parser.add_argument("--tests", nargs="+", help="test files to run in place of the area's")
    parser.add_argument("--times", type=Path, help="JUnit file of a whole run")
    parser.add_argument("--longest", type=float, default=3.0, help="leave out tests that took longer in --times")
    parser.add_argument("--deadline", type=float, default=300.0, help="seconds in which a test must end")
    given = parser.parse_args()
    chosen = choose(given.area.split(","), given.seed, given.count)
    numbers = given.only or range(len(chosen))
    if given.list:
        print("\n".join(f"{number} {chosen[number]}" for number in numbers))
        return
    ctypes.CDLL(None).prctl(_ADOPT_ORPHANS, 1)
    left_out, survived = slow_tests(given.times, given.longest), list[int]()
    for name in ("torch._dynamo", "torch.distributed.checkpoint"):
        __import__(name)
    assert "paceline" not in sys.modules, "the forks are to import the mutated one"
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        copy = Path(shutil.copytree(ROOT, Path(folder) / "tree", ignore=LEFT_OUT))
        for number in numbers:
            print(f"{number} {chosen[number]}", end="", flush=True)
            tests = given.tests or tests_of(chosen[number], copy)
            found = attempt(copy, chosen[number], tests, left_out, given.deadline)
            print(f" | {found or 'SURVIVED'}", flush=True)
            survived += [] if found else [number]
    print(f"{len(numbers)} mutations, {len(numbers) - len(survived)} noticed, {len(survived)} survived: {survived}")


if __name__ == "__main__":
    main()

"""What others rely on: the public names, the settings, the options. Change these lists with care."""

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer.main

import paceline
from paceline import config
from paceline.cli.main import COMMANDS, _application
from paceline.settings import Arguments

PACKAGE = Path(paceline.__file__).parent
LONGEST_FILE = 400
MOST_ENTRIES, MOST_ENTRIES_OF_PACKAGE = 14, 26

NAMES = {
    *("Batch", "Report", "Session", "start", "Settings", "CheckpointSettings"),
    *("PacelineError", "ConfigError", "InputError", "NonFiniteLoss", "StartError", "DisagreementError"),
    *("CheckpointError", "WorkerLost", "WorkerSilent", "RunFailed", "launch", "ParquetDataset", "TokenRows"),
}
SETTINGS = {
    *("strategy", "batch", "batch_per_worker", "microbatches", "seed", "exact", "drop_last", "scale_lr"),
    *("warmup_steps", "clip_norm", "autocast", "recompute", "compile", "workers_per_loader"),
    *("checkpoint.directory", "checkpoint.every", "checkpoint.keep", "checkpoint.keep_hours"),
    *(
        "checkpoint.background",
        "checkpoint.mtbf_hours",
        "checkpoint.retry_seconds",
        "checkpoint.key_file",
        "resume",
        "nonfinite",
    ),
    *("trackers", "tracking.directory", "tracking.project", "tracking.name"),
    *("missing_gradient", "audit", "audit_action", "threads", "timeout_seconds", "hang_seconds"),
    *(
        "transport",
        "reduction",
        "bucket_megabytes",
        "shares",
        "backup.workers",
        "local.every",
        "local.after",
    ),
    *("pipeline.schedule", "pipeline.stages", "pipeline.chunks", "pipeline.cut", "pipeline.replicas"),
    *("pipeline.memory_gigabytes", "pipeline.recompute", "pipeline.update_every", "pipeline.vertical_sync"),
    "pipeline.flush_every",
    *("average.kind", "average.decay", "average.after", "average.every"),
    *("weights.path", "weights.strict", "weights.rename", "weights.skip", "weights.key"),
    *(
        "server.mode",
        "server.copies",
        "server.count",
        "server.dedicated",
        "server.staleness",
        "server.scale_lr",
        "server.drop_after",
    ),
}
OPTIONS = {
    "run": {
        *("--workers", "-n", "-np", "--nproc-per-node", "--set", "--resume", "--name", "--runs-dir", "--plan"),
        "--no-preload",
        *("--port", "--quiet", "--elastic", "--standby", "--nodes", "--nnodes", "--rendezvous"),
        *("--secret-file", "--patience", "--grace", "--launcher", "--on", "--dry-run", "--detach"),
        *("--hosts", "-H", "--hostfile", "--time", "--partition", "--account", "--gpus", "--image", "--namespace"),
        "--volume",
        *("--kind", "--address", "--master", "--horovod", "--host-discovery-script"),
    },
    "horovodrun": set(),  # those of horovodrun: see its own table
    "config": {"--set", "--plan"},
    "verify": {"--workers", "--steps", "--set", "--plan"},
    "profile": {"--workers", "-n", "--stages", "--memory", "--output", "--set", "--plan"},
    "export": {"--dtype", "--averaged"},
    "timeline": {"--step", "--output", "--runs-dir"},
    "demo": {"--workers", "-n"},
    "doctor": {
        *("--workers", "-n", "-np", "--nproc-per-node", "--nodes", "--nnodes", "--rendezvous", "--secret-file"),
        *("--data", "--checkpoints", "--runs-dir", "--patience", "--verbose", "-v", "--json", "--on", "--dry-run"),
        *("--hosts", "-H", "--hostfile", "--gpus", "--address", "--master"),
    },
}


def test_the_public_names() -> None:
    assert set(paceline.__all__) == NAMES
    assert all(hasattr(paceline, name) for name in NAMES)
    assert set(dir(paceline)) == NAMES


def test_the_settings() -> None:
    assert set(config.flat_keys()) == SETTINGS
    assert set(Arguments.__annotations__) == {key.partition(".")[0] for key in SETTINGS}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_options_of_each_command(command: str) -> None:
    application = typer.main.get_command(_application([command]))
    parameters = application.commands[command].params  # type: ignore[attr-defined]
    options = [one for one in parameters if one.param_type_name == "option"]
    assert {name for option in options for name in (*option.opts, *option.secondary_opts)} == OPTIONS[command]


def test_no_file_is_too_long() -> None:
    lengths = {path.relative_to(PACKAGE): len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    assert not {path: length for path, length in lengths.items() if length > LONGEST_FILE}


def test_no_folder_holds_too_many_entries() -> None:
    """Modules and folders; the package itself may hold more, as its modules are what its users read first."""
    folders = {folder for path in PACKAGE.rglob("*.py") for folder in path.parents if folder.is_relative_to(PACKAGE)}
    held = {
        folder: [one for one in folder.iterdir() if not one.stem.startswith("__") and (one.is_file() or one in folders)]
        for folder in folders
    }
    assert len(held.pop(PACKAGE)) <= MOST_ENTRIES_OF_PACKAGE
    assert not {folder: len(entries) for folder, entries in held.items() if len(entries) > MOST_ENTRIES}


@pytest.fixture(scope="module")
def lint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], str]:
    """Add a line to a file of a copy of the package; what the contracts say of that."""
    root = tmp_path_factory.mktemp("copy")
    shutil.copytree(PACKAGE, root / "paceline", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(PACKAGE.parent / "pyproject.toml", root)
    command = "import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())"

    def check(file: str, line: str) -> str:
        path = root / "paceline" / file
        before = path.read_text()
        path.write_text(f"{before}\n\n{line}\n")
        try:
            ended = subprocess.run(
                [sys.executable, "-c", command, "--no-cache"], cwd=root, capture_output=True, text=True, check=False
            )
        finally:
            path.write_text(before)
        assert ended.returncode in (0, 1), ended.stderr
        assert (ended.returncode == 1) == ("BROKEN" in ended.stdout), ended.stdout
        return ended.stdout

    return check


TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    "


def test_the_contracts_hold(lint: Callable[[str, str], str]) -> None:
    assert "0 broken" in lint("errors.py", "")


@pytest.mark.parametrize(
    ("file", "line", "contract"),
    [
        ("data/order.py", f"{TYPES}from paceline.data.feed import Feed", "No circle in any package"),
        ("comm/shm/arena.py", f"{TYPES}from paceline.comm.world import World", "No circle in any package"),
        ("errors.py", f"{TYPES}from paceline.session import Session", "Imports point down only"),
        ("comm/world.py", "import paceline.testing", "Training reaches no code for tests"),
        ("launchers/base.py", "import torch", "Torch is not imported before training starts"),
    ],
)
def test_a_contract_breaks(lint: Callable[[str, str], str], file: str, line: str, contract: str) -> None:
    assert f"{contract} BROKEN" in lint(file, line)


@pytest.mark.parametrize(
    "line",
    [
        "import paceline",
        "from paceline import Settings, InputError, config",
        "import paceline.testing.ranks",
        "from paceline.cli.main import main; sys.argv = ['paceline', '--help']; atexit.register(check); main()",
    ],
)
def test_torch_is_not_imported_before_it_is_needed(line: str) -> None:
    script = f"""
import atexit, os, sys
def check():
    os._exit(7 if "torch" in sys.modules else 0)
{line}
check()
"""
    ended = subprocess.run([sys.executable, "-c", script], cwd=PACKAGE.parent, capture_output=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_training_imports_no_code_for_tests() -> None:
    script = "import sys, paceline.session; sys.exit('paceline.testing' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=PACKAGE.parent, check=False).returncode == 0


def test_a_worker_that_starts_waits_for_no_import_that_it_may_never_need() -> None:
    script = "import sys, paceline.session; sys.exit('torch.distributed.checkpoint' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=PACKAGE.parent, check=False).returncode == 0


def test_commands_do_not_hide_modules_of_python() -> None:
    """The demo's script is run from their folder, where Python looks first."""
    files = {path.stem for path in (Path(paceline.__file__).parent / "cli").glob("*.py")}
    assert not files & sys.stdlib_module_names


UNSAFE = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "TCPStore", "rpc"} | {
    f"{name}_object{ending}"
    for name in ("all_gather", "gather", "broadcast", "scatter", "send", "recv")
    for ending in ("", "_list")
}
"""What runs code from bytes, or listens to strangers."""
ALLOWED = {
    "testing/decorator.py": {"pickle"},  # a test hands its arguments to its own processes, in its own folder
    "testing/worker_main.py": {"pickle"},
    "cli/launch.py": {"cloudpickle"},  # a function and its results, in a folder of the user's own
    "launchers/call_worker.py": {"cloudpickle"},
    "horovod/ray/ray_logger.py": {"cloudpickle"},  # values for callbacks, in such a folder, too
    "horovod/torch/__init__.py": {"broadcast_object"},  # Horovod's own, of objects among the workers of a run
    "horovod/torch/elastic/state.py": {"broadcast_object"},
    "horovod/keras/__init__.py": {"broadcast_object"},
    "horovod/torch/functions.py": {"cloudpickle", "broadcast_object"},
    "checkpoint/files.py": {"pickle"},  # writes the index of torch.distributed.checkpoint, and never reads it
    "comm/rendezvous/env_init.py": {"TCPStore"},  # the store that torchrun or the user has asked for
}


def _names(path: Path) -> set[str]:
    """The names that a file uses, and ``torch.load`` if that may unpickle."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.alias):
            found.update(node.name.split("."))
        elif isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            given = {word.arg: ast.unparse(word.value) for word in node.keywords}
            found |= {"torch.load"} if given.get("weights_only") != "True" else set()
    return found


def test_no_code_from_bytes() -> None:
    used = {
        path.relative_to(PACKAGE).as_posix(): _names(path) & (UNSAFE | {"torch.load"}) for path in PACKAGE.rglob("*.py")
    }
    assert {name: names for name, names in used.items() if names} == ALLOWED


ASKS_FOR_DEVICE = re.compile(r"\.type [!=]= |\.is_cuda")
ABOUT_TENSORS = {
    "checkpoint/training_state.py": "copies to pinned memory",
    "comm/transport/host_copy.py": "copies to pinned memory",
    "comm/rendezvous/devices.py": "chooses the device",
    "comm/transport/choice.py": "chooses the transport",
    "comm/transport/through_host.py": "copies to pinned memory",
    "data/feed.py": "loads ahead of a device",
    "data/objects/values.py": "compares without a wait of the host",
    "data/prefetch.py": "copies to the device",
    "horovod/torch/gradients.py": "plans sums of what is on the CPU",
    "step/gradients/fixed_point.py": "computes norms where it is quick",
    "step/loss.py": "adds up losses where they are",
    "step/replicas.py": "adds up bits where they are",
    "strategies/full_batch.py": "divides where the sums are",
}


def test_who_communicates_asks_what_the_transport_can_do_and_not_for_the_device() -> None:
    asking = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if ASKS_FOR_DEVICE.search(path.read_text()) and "device" in path.read_text()
    }
    asking = {one for one in asking if not one.startswith(("diagnostics/doctor/", "observe/"))}
    assert asking == set(ABOUT_TENSORS)

"""What others rely on: the public names, the settings, the options. Change these lists with care."""

import ast
import functools
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import public_api
import pytest
import torch
import typer.main
from torch.distributed import distributed_c10d as c10d

import paceline
from paceline import config
from paceline.cli.main import COMMANDS, _application
from paceline.system import patches, torch_internals
from paceline.training.setup import Arguments

PACKAGE = Path(paceline.__file__).parent
PUBLIC = Path(__file__).with_name("public_api.txt")
LONGEST_FILE = 400
MOST_ENTRIES, MOST_ENTRIES_OF_PACKAGE = 14, 26

SETTINGS = {
    *("strategy", "batch", "batch_per_worker", "microbatches", "seed", "exact", "drop_last", "scale_lr"),
    *("warmup_steps", "clip_norm", "autocast", "recompute", "memory_gigabytes", "compile", "workers_per_loader"),
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
    *(
        "missing_gradient",
        "audit",
        "audit_action",
        "threads",
        "events",
        "profile_steps",
        "timeout_seconds",
        "hang_seconds",
    ),
    *(
        "transport",
        "reduction",
        "wire",
        "wire_ratio",
        "wire_rank",
        "communication",
        "tolerance",
        "bucket_megabytes",
        "shard",
        "shard_copy",
        "shard_within",
        "shares",
        "backup.workers",
        "local.every",
        "local.outer_lr",
        "local.outer_momentum",
        "local.replicas",
        "local.after",
        "local.fragments",
        "local.delay",
        "local.mixing",
        "local.uneven",
        "local.adaptive",
        "local.quorum",
        "local.grace_seconds",
        "local.sites",
        "local.sampled",
        "local.masked",
        "local.threshold",
        "local.clip",
        "local.noise",
        "local.delta",
    ),
    *("pipeline.schedule", "pipeline.stages", "pipeline.chunks", "pipeline.cut", "pipeline.replicas"),
    *("pipeline.recompute", "pipeline.update_every", "pipeline.vertical_sync"),
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
        *("--volume", "--alert", "--notify"),
        *("--kind", "--address", "--master", "--horovod", "--host-discovery-script"),
    },
    "horovodrun": set(),  # those of horovodrun: see its own table
    "config": {"--set", "--plan"},
    "verify": {"--workers", "--steps", "--set", "--plan", "--runs-dir"},
    "profile": {"--workers", "-n", "--stages", "--memory", "--output", "--set", "--plan"},
    "plan": {
        *(
            "--workers",
            "-n",
            "--link",
            "--speeds",
            "--latency",
            "--memory",
            "--steps",
            "--epochs",
            "--tolerance",
            "--prove",
        ),
        *("--machines", "--here", "--spot", "--trace", "--deadline", "--budget", "--save", "--json", "--set", "--plan"),
    },
    "export": {"--dtype", "--averaged"},
    "logs": {
        *("--rank", "--step", "--event", "--slower-than", "--text", "--follow", "-f", "--sql", "--json", "--parquet"),
        *("--collect", "--runs-dir"),
    },
    "replay": {"--step", "--ranks", "--anomaly", "--samples", "--profile", "--pdb", "--runs-dir"},
    "why": {"--json", "--collect", "--runs-dir"},
    "tune": {
        *("--workers", "-n", "--only", "--branches", "--steps", "--span", "--samples", "--set", "--plan", "--json"),
        "--runs-dir",
    },
    "dashboard": {"--host", "--port", "--token", "--runs-dir"},
    "trace": {"--step", "--output", "--otel", "--collect", "--runs-dir"},
    "demo": {"--workers", "-n"},
    "doctor": {
        *("--workers", "-n", "-np", "--nproc-per-node", "--nodes", "--nnodes", "--rendezvous", "--secret-file"),
        *("--data", "--checkpoints", "--runs-dir", "--patience", "--verbose", "-v", "--json", "--on", "--dry-run"),
        *("--hosts", "-H", "--hostfile", "--gpus", "--address", "--master"),
    },
}


def test_the_public_names() -> None:
    """With signatures, methods and attributes: ``tests/public_api.py`` writes the file after a change."""
    assert public_api.listed() == PUBLIC.read_text(encoding="utf-8")
    assert dir(paceline) == sorted(paceline.__all__)


def test_the_version_is_described() -> None:
    changes, citation = ((PACKAGE.parent / name).read_text() for name in ("CHANGELOG.md", "CITATION.cff"))
    version, date = re.findall(r"^## \[(.+)\] - (\S+)$", changes, re.MULTILINE)[0]
    assert version == paceline.__version__
    assert f"\nversion: {version}\ndate-released: {date}\n" in citation


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
        (
            "cli/run.py",
            "import paceline.system.torch_internals",
            "Torch is not imported before training starts",
        ),
    ],
)
def test_a_contract_breaks(lint: Callable[[str, str], str], file: str, line: str, contract: str) -> None:
    assert f"{contract} BROKEN" in lint(file, line)


def test_the_contract_about_torch_names_the_modules_of_system() -> None:
    contracts = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (named,) = (set(one["source_modules"]) for one in contracts if one["id"] == "light")
    modules = {f"paceline.system.{path.stem}" for path in (PACKAGE / "system").glob("[!_]*.py")}
    assert modules - named == {"paceline.system.torch_internals"}


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


def test_a_worker_that_starts_imports_nothing_that_it_may_never_need() -> None:
    """Code for tests, and what is slow: its start waits for each import."""
    script = (
        "import paceline.session, sys; print(*{'paceline.testing', 'torch.distributed.checkpoint'} & {*sys.modules})"
    )
    command = [sys.executable, "-c", script]
    assert not subprocess.run(command, cwd=PACKAGE.parent, check=True, capture_output=True).stdout.split()


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


@functools.cache
def trees() -> dict[str, ast.Module]:
    """The files of the package, which take seconds to parse."""
    return {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}


@functools.cache
def _nodes(tree: ast.AST) -> list[ast.AST]:
    return [*ast.walk(tree)]


def _names(tree: ast.AST) -> set[str]:
    """The names that a file uses, and ``torch.load`` if that may unpickle."""
    found = set()
    for node in _nodes(tree):
        if isinstance(node, ast.alias):
            found.update(node.name.split("."))
        elif isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        is_load = isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "load"
        if is_load and ast.unparse(node.func) == "torch.load":
            given = {word.arg: ast.unparse(word.value) for word in node.keywords}
            found |= {"torch.load"} if given.get("weights_only") != "True" else set()
    return found


def test_no_code_from_bytes() -> None:
    used = {path: _names(tree) & (UNSAFE | {"torch.load"}) for path, tree in trees().items()}
    assert {name: names for name, names in used.items() if names} == ALLOWED


ASKS_FOR_DEVICE = re.compile(r"\.type [!=]= |\.is_cuda")
ABOUT_TENSORS = {
    "checkpoint/training_state.py": "copies to pinned memory",
    "checkpoint/weights/deferred/operations.py": "draws from the generator of the device",
    "comm/transport/host_copy.py": "copies to pinned memory",
    "comm/rendezvous/devices.py": "chooses the device",
    "comm/transport/choice.py": "chooses the transport",
    "comm/transport/through_host.py": "copies to pinned memory",
    "data/feed.py": "loads ahead of a device",
    "data/objects/values.py": "compares without a wait of the host",
    "data/loading/prefetch.py": "copies to the device",
    "horovod/torch/gradients.py": "plans sums of what is on the CPU",
    "planning/budget.py": "adds what is kept in the memory of the host",
    "planning/profile.py": "counts the memory of a process, which holds the tensors on the CPU only",
    "step/gradients/codec.py": "computes norms where it is quick",
    "step/loss.py": "adds up losses where they are",
    "step/replicas.py": "adds up bits where they are",
    "strategies/full_batch.py": "divides where the sums are",
    "strategies/sharded/shared_weights.py": "moves tensors that are on the CPU",
}


def test_who_communicates_asks_what_the_transport_can_do_and_not_for_the_device() -> None:
    asking = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if ASKS_FOR_DEVICE.search(path.read_text()) and "device" in path.read_text()
    }
    asking = {one for one in asking if not one.startswith(("diagnostics/doctor/", "observe/"))}
    assert asking == set(ABOUT_TENSORS)


INTERNALS = "system/torch_internals.py"
OF_OTHERS = {
    *("_asdict", "_current_frames", "_exit", "_getframe", "_replace", "_set_native_id"),  # Python
    *("_Hash", "_NamedFuncPointer"),  # types that only stubs of Python have
    *("_inst", "_rand"),  # the generators of random and NumPy
    *("_active_spark_context", "_ensure_initialized", "_jrdd", "_jsc"),  # Spark
    *("_flatten_layers", "_learning_rate"),  # Keras
    "_get_file_writer",  # TensorBoard
}
"""Private names of Python and of other libraries than torch."""
SOURCES = (
    *("distributed/distributed_c10d", "overrides", "optim/optimizer", "optim/sgd", "optim/lr_scheduler", "_ops"),
    *("autograd/grad_mode", "nn/modules/batchnorm", "utils/data/dataloader", "utils/_python_dispatch"),
)
PRIVATE = re.compile(r"_(_?[A-Za-z]\w*)(?<!__)")


def _imports(tree: ast.AST) -> dict[str, str]:
    """What a file imports, by the names that it has there."""
    found = {}
    for node in _nodes(tree):
        if isinstance(node, ast.ImportFrom):
            found.update({one.asname or one.name: f"{node.module}.{one.name}" for one in node.names})
        elif isinstance(node, ast.Import):
            found.update({one.asname or one.name.partition(".")[0]: one.name for one in node.names})
    return found


def _defined(tree: ast.AST) -> set[str]:
    """The names that a file gives to functions, classes, variables, and attributes of its own objects."""
    found = set()
    for node in _nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and getattr(node.value, "id", "") == "self"
        ):
            found.add(node.attr)
    return found


def _overrides(tree: ast.AST) -> set[str]:
    """The methods of classes that inherit from what is imported from torch."""
    imports, found = _imports(tree), set()
    for kind in (node for node in _nodes(tree) if isinstance(node, ast.ClassDef)):
        bases = [imports.get(ast.unparse(one).partition(".")[0], "") for one in kind.bases]
        if any("torch" in base for base in bases):
            found |= {one.name for one in kind.body if isinstance(one, ast.FunctionDef)}
    return found


def _texts(tree: ast.AST) -> set[str]:
    return {one.value for one in _nodes(tree) if isinstance(one, ast.Constant) and isinstance(one.value, str)}


def _names_of_torch() -> set[str]:
    """The private names in the file that may use them."""
    nodes = _nodes(trees()[INTERNALS])
    names = {one.attr for one in nodes if isinstance(one, ast.Attribute)}
    names |= _texts(trees()[INTERNALS]) | {one.name for one in nodes if isinstance(one, ast.FunctionDef)}
    return {*filter(PRIVATE.fullmatch, names)} - {one.id for one in nodes if isinstance(one, ast.Name)}


def _misused(tree: ast.AST, of_torch: set[str], known: set[str]) -> set[str]:
    """The private names in a file that are torch's, or that are neither this package's nor of ``OF_OTHERS``."""
    imports, own = _imports(tree), _defined(tree)
    found = {whole for whole in imports.values() if whole.startswith("torch.") and "._" in whole}
    found |= {text for text in _texts(tree) - own if text in of_torch or re.fullmatch(r"torch\.[\w.]*\b_\w+", text)}
    found |= _overrides(tree) & of_torch
    for node in _nodes(tree):
        if isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr):
            code = ast.unparse(node)
            first = code.partition(".")[0]
            from_torch = imports.get(first, "").partition(".")[0] == "torch"
            is_own = first in ("self", "cls") and node.attr in own
            if from_torch or (node.attr in of_torch and not is_own) or node.attr not in known:
                found.add(code)
    return found


def test_one_file_uses_private_names_of_torch() -> None:
    of_torch, known = _names_of_torch(), set().union(*map(_defined, trees().values()), OF_OTHERS)
    others = {path: _misused(tree, of_torch, known) for path, tree in trees().items() if path != INTERNALS}
    assert {path: names for path, names in others.items() if names} == {}


@pytest.mark.parametrize(
    "code",
    [
        "import torch._dynamo",
        "from torch.utils._pytree import tree_map",
        "from torch.nn.modules.batchnorm import _NormBase",
        "import torch.distributed as dist\ndist.distributed_c10d._get_default_store()",
        "view._base",
        "getattr(tensor, '_version')",
        "importlib.import_module('torch._dynamo')",
        "class Module(nn.Module):\n    def keep(self):\n        return self._buffers",
        "from torch import nn\nclass Module(nn.Module):\n    def _apply(self, function):\n        pass",
    ],
)
def test_a_private_name_of_torch_is_found(code: str) -> None:
    assert _misused(ast.parse(code), _names_of_torch(), set(OF_OTHERS))


def test_torch_has_the_private_names() -> None:
    """Names in C or of classes from these objects; others, such as those that a step sets, from torch's sources."""
    objects = (torch, torch._C, torch.Tensor, torch.UntypedStorage, torch.nn.Module(), c10d.ProcessGroup, c10d.Work)
    found = {name for one in objects for name in dir(one)}
    for source in SOURCES:
        found |= {*re.findall(r"\w+", (Path(torch.__file__).parent / f"{source}.py").read_text())}
    names = _names_of_torch()
    assert {"_version", "_foreach_norm", "_apply"} <= names
    assert names - found == {torch_internals.HOOKS_PREFIX}
    assert [name for name in found if name.startswith(torch_internals.HOOKS_PREFIX)]
    assert torch_internals.storage_info("file", 0, 1).length == 1


def test_patches_are_listed() -> None:
    """Assignments to what is imported from other libraries, and to classes of objects or their dictionaries."""
    listed = re.findall(r"^([\w/]+\.py)$", str(patches.__doc__), re.MULTILINE)
    found = set()
    for path, tree in trees().items():
        foreign = {name for name, whole in _imports(tree).items() if whole.partition(".")[0] != "paceline"}
        for node in _nodes(tree):
            if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
                target = ast.unparse(node)
                is_foreign = target.partition(".")[0] in foreign and not re.search(r"\(|^os.environ", target)
                found |= {path} if is_foreign or "__dict__" in target or "__class__" in target else set()
    assert found <= set(listed) <= set(trees())
    assert listed == sorted(listed)

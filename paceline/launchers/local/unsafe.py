"""Checks for differences between a fork and a new Python. If a check fails, workers start as new Pythons.
A new Python first imports modules from the script's folder, and its libraries read the environment at load time. In a
fork the libraries are already loaded.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import os
import re
import sys
import threading
from collections.abc import Container, Iterator, Mapping, Sequence
from types import ModuleType

LOAD_TIME = re.compile(
    r"(OMP|GOMP|KMP|MKL|OPENBLAS|GOTO|BLIS|VECLIB|NUMEXPR|DNNL|ONEDNN|ATEN|NPY|NUMPY"
    r"|TORCH(?!_NCCL)|PYTORCH|TORCHDYNAMO|TORCHINDUCTOR|TRITON)_[A-Z0-9_]+"
)
"""Names of environment variables that libraries read at load time."""
_START_TIME = re.compile(r"PYTHON.*|LD_.*|MALLOC_.*|GLIBC_TUNABLES|LANG|LC_.*")
_PLACES = "OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"
_END_OF_ZIP, _LONGEST_END = b"PK\x05\x06", 1 << 16
_READS = "get", "getenv"
_CALLS = {"importlib", "runpy", "exec", "eval", "__import__"}
"""Names that can import a module without an import statement in the script."""
_SET_BY_LIBRARIES = {
    *("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"),  # torch, at the first use of its compiler
    *("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"),  # scikit-learn, when it is imported
}
_SUFFIXES = tuple(importlib.machinery.all_suffixes())


class Unsafe(Exception):
    """Raised if a fork could differ from a new Python. The message gives the reason."""


def needs_libraries(path: str) -> bool:
    """Return whether a script may import modules outside the standard library. False if it cannot be parsed."""
    try:
        with open(path, "rb") as file:
            nodes = list(ast.walk(ast.parse(file.read())))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(name in _CALLS or name not in sys.stdlib_module_names for node in nodes for name in _imported(node))


def _imported(node: ast.AST) -> Iterator[str]:
    """Yield the top-level modules that a node imports, and the name of a function that can run other code."""
    if isinstance(node, ast.Import):
        yield from (one.name.partition(".")[0] for one in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield (node.module or "").partition(".")[0]
    elif isinstance(node, ast.Name) and node.id in _CALLS:
        yield node.id


def check_script(path: str) -> None:
    """Raise Unsafe if the script is not plain source code, or may set variables that libraries read at load time.

    Raises:
        OSError: the script cannot be read.
    """
    with open(path, "rb") as file:
        source = file.read()
    name = os.path.basename(path)
    if source[:2] == importlib.util.MAGIC_NUMBER[:2] or _END_OF_ZIP in source[-_LONGEST_END:]:
        raise Unsafe(f"{name} is not plain source")
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise Unsafe(f"{name} cannot be parsed") from None
    if (variable := next(_variables(tree), None)) is not None:
        raise Unsafe(f"{name} names {variable}, which libraries read when they are loaded")


def _variables(tree: ast.AST) -> Iterator[str]:
    """Yield the load-time variables that the script names, except where it only reads them."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and LOAD_TIME.fullmatch(node.value):
            yield node.value
        if isinstance(node, ast.keyword) and node.arg is not None and LOAD_TIME.fullmatch(node.arg):
            yield node.arg
        if not _only_reads(node):
            waiting += ast.iter_child_nodes(node)


def _only_reads(node: ast.AST) -> bool:
    if isinstance(node, ast.Subscript):
        return isinstance(node.ctx, ast.Load) and isinstance(node.slice, ast.Constant)
    if isinstance(node, ast.Compare):  # "OMP_NUM_THREADS" in os.environ
        return True
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name in _READS


def check_folders(folders: Sequence[str], modules: Mapping[str, ModuleType], always: Container[str]) -> None:
    """Raise Unsafe if a new Python would import a different module than the loaded one.

    Args:
        folders: folders in which a worker first looks for modules, in search order.
        always: names of modules that every Python loads before it knows these folders.
    """
    loaded = {name.partition(".")[0] for name in modules} - {"__main__"}
    seen: set[str] = set()
    for folder in folders:
        for name, path in _importable(folder):
            if name in seen or name not in loaded or name in always or name in sys.builtin_module_names:
                continue
            seen.add(name)
            if not _same(modules.get(name), path):
                raise Unsafe(f"{path} hides the module {name} that torch or Paceline has imported")


def _importable(folder: str) -> Iterator[tuple[str, str]]:
    """Yield name and file of each module and package in a folder."""
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        if (suffix := next((one for one in _SUFFIXES if entry.name.endswith(one)), None)) is not None:
            yield entry.name[: -len(suffix)].partition(".")[0], entry.path
        elif "." not in entry.name:
            for one in _SUFFIXES:
                if os.path.exists(first := os.path.join(entry.path, f"__init__{one}")):
                    yield entry.name, first
                    break


def _same(module: ModuleType | None, path: str) -> bool:
    found = getattr(module, "__file__", None)
    try:
        return found is not None and (found == path or os.path.samefile(found, path))
    except OSError:
        return False


def check_binding(cores: bool, environment: Mapping[str, str]) -> None:
    """Raise Unsafe if the process is bound to cores and a variable makes a library bind its threads to cores too."""
    if cores and (name := next((name for name in _PLACES if name in environment), None)):
        raise Unsafe(f"{name} binds threads to cores")


def same_libraries(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Return whether two environments agree in all variables that Python and its libraries read at startup."""
    names = (name for name in one.keys() | other.keys() if LOAD_TIME.fullmatch(name) or _START_TIME.fullmatch(name))
    return all(one.get(name) == other.get(name) for name in names)


def check_process() -> None:
    """Raise Unsafe if this process cannot be forked safely because it has threads or has used a GPU.

    Call this after a first fork: OpenBLAS ends its threads before a fork and restarts them when they are needed.
    """
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        names = ", ".join(sorted({one.name for one in threading.enumerate()} - {"MainThread"}))
        raise Unsafe(f"importing torch has started {threads - 1} threads{f' ({names})' if names else ''}")
    for opened in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{opened}")
        except OSError:
            continue
        if target.startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri")):
            raise Unsafe(f"importing torch has opened {target}")
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise Unsafe("importing torch has initialized CUDA")


def late_variables(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return warnings about variables that the script changed after the libraries which read them were loaded.

    Args:
        before: environment at the start of a forked worker.
    """
    names = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    changed = [name for name in names if LOAD_TIME.fullmatch(name) and name not in _SET_BY_LIBRARIES]
    if not changed:
        return []
    return [
        f"{', '.join(changed)}: changed by the script, and libraries read such variables when they are loaded, before "
        f"the script began. If it is to have an effect, set it outside, or start with --no-preload."
    ]

"""Package ``horovod`` with Paceline's modules, for scripts that contain ``import horovod.torch``.

``paceline run --horovod`` adds this folder to the workers' ``PYTHONPATH``. No torch.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from paceline.environments import env

FOLDER = str(Path(__file__).resolve().parent)
_OURS = "paceline."


def is_installed() -> bool:
    """Return whether the original Horovod is installed."""
    found = importlib.util.find_spec("horovod")
    return found is not None and not (found.origin or "").startswith(FOLDER)


def make_importable() -> None:
    """Make ``horovod`` importable in this process, unless the original Horovod is installed."""
    if not is_installed() and FOLDER not in sys.path:
        sys.path.insert(0, FOLDER)


class _Finder(importlib.abc.MetaPathFinder):
    """Import hook that finds ``paceline.horovod.torch`` as ``horovod.torch``: one module with two names."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith("horovod.") or importlib.util.find_spec(_OURS + name) is None:
            return None
        return importlib.machinery.ModuleSpec(name, _Loader())


class _Loader(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(_OURS + spec.name)
        self._own = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own


def install() -> None:
    """Install the import hook and set the environment variables that Horovod scripts read for their rank."""
    sys.meta_path.insert(0, _Finder())
    env.set_horovod_identity(env.identity())

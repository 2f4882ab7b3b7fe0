"""Horovod's interface, by Paceline (:mod:`paceline.horovod`): scripts written for Horovod run unchanged."""

from paceline.horovod import __version__, run
from paceline.horovod.unchanged import install

__all__ = ["__version__", "run"]

install()

"""Horovod's interface from :mod:`paceline.horovod`, with which scripts written for Horovod run unchanged."""

from paceline.horovod import __version__, run
from paceline.horovod.unchanged import install

__all__ = ["__version__", "run"]

install()

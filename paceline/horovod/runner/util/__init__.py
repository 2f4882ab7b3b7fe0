"""Helpers under Horovod's module path ``horovod.runner.util``."""

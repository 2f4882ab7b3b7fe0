"""Horovod's errors under Horovod's module path."""

from paceline.horovod.errors import HorovodInternalError, HostsUpdatedInterrupt

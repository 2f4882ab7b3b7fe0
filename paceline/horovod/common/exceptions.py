"""The errors of Horovod, where it has them."""

from paceline.horovod.errors import HorovodInternalError, HostsUpdatedInterrupt

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt"]

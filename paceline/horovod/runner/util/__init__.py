"""Where scripts written for Horovod look for its helpers."""

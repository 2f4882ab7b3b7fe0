"""Script that runs a module as ``python -m`` does, for workers of ``horovodrun python -m MODULE``."""

import os
import runpy
import sys

if __name__ == "__main__":
    sys.path[0] = os.getcwd()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)

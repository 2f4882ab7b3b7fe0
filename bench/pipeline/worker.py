"""What each worker runs: its share of a part, and it writes down what it has to say."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

import torch
from sleeping import sharpen_sleep


def main() -> None:
    part, home = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    sharpen_sleep()
    work = importlib.import_module(part).work
    result = work(json.loads((home / "given.json").read_text()))
    (home / f"result-{os.environ['RANK']}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()

"""Program that prints torch's versions and devices, and the bits that this processor computes, as JSON.

Torch needs seconds and hundreds of megabytes, and may fail to load, so the doctor starts it in a separate process.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from paceline.step.numerics import canary


def facts() -> dict[str, Any]:
    """Return the properties of torch that must be the same on all machines."""
    gpus = torch.cuda.device_count()
    return {
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "cuDNN": torch.backends.cudnn.version() if torch.version.cuda else None,
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else None,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "canary": canary(),
        "gpus": [torch.cuda.get_device_name(number) for number in range(gpus)],
    }


if __name__ == "__main__":
    print(json.dumps(facts()))  # noqa: T201 - read by the doctor

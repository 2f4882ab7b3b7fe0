"""What torch says of itself, and the bits that this processor computes: run as a program, prints JSON.

Torch needs seconds and hundreds of megabytes, and may fail to load: so the doctor starts it in a process of its own.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch


def canary() -> str:
    """Hash results whose last bits differ where processors, or libraries, compute in another order."""
    torch.set_num_threads(1)
    count = torch.arange(96 * 160, dtype=torch.float32)
    left = ((count * 0.618034) % 1.0 - 0.5).reshape(96, 160)
    right = ((count * 0.414214) % 1.0 - 0.5).reshape(160, 96)
    image = left.reshape(1, 4, 48, 80)
    results = [
        left @ right,
        torch.nn.functional.conv2d(image, right[:72, :4].reshape(8, 4, 3, 3), padding=1),
        torch.softmax(left, 1),
        torch.nn.functional.layer_norm(left, (160,)),
        torch.nn.functional.gelu(left),
        torch.tanh(right).exp().sum(0),
        (left.bfloat16() @ right.bfloat16()).float(),
        left.double() @ right.double(),
    ]
    digest = hashlib.sha256()
    for result in results:
        digest.update(result.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def facts() -> dict[str, Any]:
    """What must be the same on all machines."""
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

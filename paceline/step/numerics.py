"""Numerical environment: the factors, besides the script and the versions, that decide the bits of a step."""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import torch

from paceline.environments import env


def numerics(exact: bool) -> dict[str, int | str]:
    """Return the numerical environment by name, as saved in a checkpoint. With ``exact`` it includes a canary."""
    return {
        "exact": exact,
        "threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "canary": canary() if exact else "none",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "float32": float32_precision(),
        "cublas": env.text("CUBLAS_WORKSPACE_CONFIG") or "default",
    }


def float32_precision() -> str:
    """Describe the precision of float32 matrix products, convolutions and RNNs on GPUs and on the CPU."""
    backends: Any = torch.backends
    if hasattr(backends, "fp32_precision"):
        gpu = [one.fp32_precision for one in (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)]
        cpu = [one.fp32_precision for one in (backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn)]
    else:  # torch < 2.9
        gpu = [_tf32(backends.cuda.matmul.allow_tf32), _tf32(backends.cudnn.allow_tf32)]
        cpu = [torch.get_float32_matmul_precision()]
    override = env.text("NVIDIA_TF32_OVERRIDE")
    forced = "" if override is None else f", NVIDIA_TF32_OVERRIDE={override}"
    return f"gpu {' '.join(gpu)}, cpu {' '.join(cpu)}{forced}"


def _tf32(allowed: bool) -> str:
    return "tf32" if allowed else "ieee"


@functools.cache
def canary() -> str:
    """Return a hash of results whose last bits differ if processors or libraries compute in another order.

    The name of an instruction set does not reveal the kernels that a library has chosen for a processor.
    """
    threads = torch.get_num_threads()
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
    torch.set_num_threads(threads)
    digest = hashlib.sha256()
    for result in results:
        digest.update(result.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def ask_for_determinism() -> None:
    """Ask GPU libraries for deterministic kernels where they have them."""
    torch.backends.cudnn.benchmark = False
    env.set_default("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # otherwise cuBLAS may add in a different order each time
    torch.use_deterministic_algorithms(True, warn_only=True)

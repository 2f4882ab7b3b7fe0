"""The bits that this processor computes."""

from __future__ import annotations

import functools
import hashlib

import torch


@functools.cache
def canary() -> str:
    """Hash results whose last bits differ where processors, or libraries, compute in another order.

    The name of an instruction set does not say which kernels a library has chosen for a processor.
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

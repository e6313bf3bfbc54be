"""Clips a rank's gradient by the norm of all its buckets, before they are compressed."""

from collections.abc import Sequence

import torch

from sidcomp.runtime.bucket import Bucket


def clip(buckets: Sequence[Bucket], limit: float) -> None:
    """Scales the gradients in all buckets down, if their 2-norm together is above `limit`.

    A norm that is not finite changes nothing: such a step is discarded. Waits for no device.
    """
    norms = [torch.linalg.vector_norm(b.buffer, dtype=torch.float32) for b in buckets if b.buffer.numel()]
    if not norms:
        return
    norm = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]))
    factor = torch.where(norm.isfinite(), (limit / norm).clamp(max=1.0), 1.0)
    for b in buckets:
        b.buffer.mul_(factor.to(b.buffer.device, b.buffer.dtype))

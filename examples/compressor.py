"""A codec without DDP: numpy arrays (or torch tensors) in, payload bytes out, and back.

python examples/compressor.py
"""

import numpy as np
import sidcomp

n, ranks = 100_000, 4
rng = np.random.default_rng(0)
gradients = rng.laplace(size=(ranks, n)).astype(np.float32)

for codec in sidcomp.codecs():
    c = sidcomp.Compressor(codec.name, n)
    payload = c.encode(gradients[0])
    sent = c.finish(payload, gradients[0].copy())  # in the place of the gradient
    error = np.linalg.norm(sent - gradients[0]) / np.linalg.norm(gradients[0])
    lost = np.abs(sent + c.residual() - gradients[0]).max()  # sent + kept = gradient
    print(
        f"{codec.name:8} {payload.nbytes:7,} bytes, 1/{gradients[0].nbytes / payload.nbytes:.1f} of float32; "
        f"relative error {error:.5f}, not accounted for {lost:.1e}"
    )

encoders = [sidcomp.Compressor("topk", n, density=0.01, rank=r, world=ranks) for r in range(ranks)]
payloads = [c.encode(g) for c, g in zip(encoders, gradients, strict=True)]
for c, g in zip(encoders, gradients, strict=True):
    mean = c.finish(payloads, g)  # all payloads at once, summed in rank order: the same on every rank
print(f"the mean of {ranks} ranks' top 1 %: {np.count_nonzero(mean):,} of {n:,} elements are not zero")

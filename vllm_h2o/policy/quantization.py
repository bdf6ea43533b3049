"""Keys and values in int8: rounded once, with one scale per token and KV head.

    scale = max |x| / 127,  q = round(x / scale),  x ~ q * scale

Symmetric, halves to even; a resident slot keeps `q` and `scale`.
"""

from __future__ import annotations

import torch

NUM_SCALES = 2
"""Float32 of a slot in a KV head: its key's and its value's."""
LARGEST = 127
"""Of int8, of either sign: as many steps above zero as below."""


def quantize(vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round vectors.

    Args:
        vectors: `[..., head_size]` of any float type.

    Returns:
        `[..., head_size]` int8 and `[...]` float32 scales. A vector with NaN or
        infinity has such a scale and zeros, so that it is NaN when it is read.
    """
    wide = vectors.float()
    scales = wide.abs().amax(dim=-1) / LARGEST
    steps = (wide / scales[..., None]).round().clamp(-LARGEST, LARGEST)
    # Of a vector of zeros, or of numbers too small to be divided: 0 / 0, x / 0.
    steps = steps.where(scales[..., None] > 0, 0).nan_to_num(nan=0.0)
    return steps.to(torch.int8), scales


def dequantize(steps: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Float32 vectors `[..., head_size]` of what `quantize` returned."""
    return steps.float() * scales[..., None]

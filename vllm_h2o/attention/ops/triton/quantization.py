"""Device functions: keys and values in int8, see `policy.quantization`."""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_h2o.policy.quantization import LARGEST

_LARGEST = tl.constexpr(float(LARGEST))
# Added and taken away again it leaves no digits behind the point, halves to even.
_ROUNDS = tl.constexpr(1.5 * 2.0**23)


@triton.jit
def quantized(vectors):
    """`(steps, scales)` of float32 `[n, D]`, padded by zeros; steps are floats."""
    scales = tl.div_rn(tl.max(tl.abs(vectors), axis=1), _LARGEST)
    is_nan = tl.max((vectors != vectors).to(tl.int32), axis=1) > 0
    scales = tl.where(is_nan, float("nan"), scales)
    divisors = tl.where(scales > 0, scales, 1.0)[:, None]
    steps = tl.div_rn(vectors, tl.broadcast_to(divisors, vectors.shape))
    steps = tl.where((scales > 0)[:, None] & (steps == steps), steps, 0.0)
    steps = tl.minimum(tl.maximum(steps, -_LARGEST), _LARGEST)
    return (steps + _ROUNDS) - _ROUNDS, scales


@triton.jit
def rounded(vector):
    """What is read of float32 `[D]`, padded by zeros, once it has been quantized."""
    steps, scales = quantized(vector[None, :])
    return tl.reshape(steps * scales[:, None], vector.shape)

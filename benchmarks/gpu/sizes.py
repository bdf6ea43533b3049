"""What is measured: the shapes of the targets, and a miniature of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """Shapes of the benchmark.

    Attributes:
        num_rows: Rows of the decode batch.
        num_heads: Query heads.
        num_kv_heads: KV heads.
        head_size: Of a head.
        block_size: Tokens per block.
        budget: Resident slots per row.
        context: Tokens of the full context, and of the prompt.
        window: Observation queries.
        num_layers: Layers that a measured decode step cycles through, so that
            none finds its pages in a cache.
        copy_bytes: Of the copy that bandwidth is measured with.
        dtype: Name of a torch dtype.
    """

    num_rows: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    budget: int
    context: int
    window: int
    num_layers: int
    copy_bytes: int
    dtype: str


FULL = Sizes(
    num_rows=32, num_heads=32, num_kv_heads=8, head_size=128, block_size=16,
    budget=2048, context=32768, window=64, num_layers=8, copy_bytes=2**30,
    dtype="bfloat16",
)  # fmt: skip
# float16: the interpreter multiplies bfloat16 as integers.
TINY = Sizes(
    num_rows=2, num_heads=4, num_kv_heads=2, head_size=64, block_size=16,
    budget=64, context=128, window=8, num_layers=2, copy_bytes=2**16,
    dtype="float16",
)  # fmt: skip

"""Pages of random tokens at the benchmark's size."""

from __future__ import annotations

import torch

from benchmarks.gpu.sizes import Sizes
from tests.attention.triton_state import empty_pages
from vllm_h2o.attention.pages import Pages


def random_pages(num_blocks: int, sizes: Sizes, device: torch.device) -> Pages:
    """Pages whose slots all hold a token of its own age."""
    pages = empty_pages(
        num_blocks, sizes.num_kv_heads, sizes.head_size, sizes.block_size,
        getattr(torch, sizes.dtype), device,
    )  # fmt: skip
    pages.keys.normal_()
    pages.values.normal_()
    pages.attention.uniform_()
    ages = torch.arange(sizes.budget, dtype=torch.int32, device=device)
    pages.births.copy_(ages.view(-1, 1, sizes.block_size).repeat(
        -(-num_blocks // (sizes.budget // sizes.block_size)), 1, 1
    )[:num_blocks])  # fmt: skip
    return pages


def random_tokens(
    num_tokens: int, num_heads: int, sizes: Sizes, device: torch.device
) -> torch.Tensor:
    """`[num_tokens, num_heads, head_size]`."""
    return torch.randn(
        num_tokens, num_heads, sizes.head_size,
        dtype=getattr(torch, sizes.dtype), device=device,
    )  # fmt: skip

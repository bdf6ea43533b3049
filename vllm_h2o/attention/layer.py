"""A layer bound to the KV cache that it runs on."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_h2o.attention.ops import LayerParams
from vllm_h2o.attention.pages import Pages
from vllm_h2o.policy.config import H2OConfig


@dataclass(frozen=True, eq=False)
class BoundLayer:
    """What operations on a layer's rows take.

    Attributes:
        config: The policy.
        pages: Those of resident blocks.
        dense: The same cache's pages as vLLM has them; where blocks are pages, these.
        params: The layer's constants.
        dense_params: Those for rows that stay dense and have pages of their own.
    """

    config: H2OConfig
    pages: Pages
    dense: Pages
    params: LayerParams
    dense_params: LayerParams

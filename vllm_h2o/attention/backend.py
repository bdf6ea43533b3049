"""What the attention backends of all platforms share.

Each class stands before its stock counterpart among the bases of a platform's
class: `cpu_backend.py`, `cuda_backend.py`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.utils.math_utils import cdiv
from vllm.v1.attention.backend import AttentionType
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec

from vllm_h2o.attention import ops
from vllm_h2o.attention.drafts import Drafted
from vllm_h2o.attention.gate import LayerGate
from vllm_h2o.attention.layer import BoundLayer
from vllm_h2o.attention.metadata import H2OMetadata
from vllm_h2o.attention.ops import Chunk, Held, LayerParams, ResidentRows, ScoredLayer
from vllm_h2o.attention.pages import Pages
from vllm_h2o.attention.placements import BY_HEAD, UNIFORM, LayerPlacements
from vllm_h2o.core.settings import h2o_config, longest_request
from vllm_h2o.core.spec import H2OAttentionSpec
from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.geometry import BlockCut
from vllm_h2o.policy.layout import SlotLayout
from vllm_h2o.policy.options import share_of
from vllm_h2o.policy.reach import MovingKeys
from vllm_h2o.policy.rotation import Rotation

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionBackend as _StockBackend
    from vllm.v1.attention.backend import AttentionImpl as _StockImpl
else:
    # The stock classes come next among the bases of a platform's.
    _StockBackend = _StockImpl = object


class DenseMetadata:
    """Attention metadata by which layers attend densely, without a KV cache."""

    def attend(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
    ) -> torch.Tensor:
        """Attention of one layer over the whole text that a pass reads.

        Args:
            layer: vLLM's `Attention`.
            query: `[n, num_heads, head_size]`, after RoPE.
            key: `[n, num_kv_heads, head_size]`, after RoPE.
            value: `[n, num_kv_heads, head_size_v]`.
            output: `[n, num_heads, head_size_v]`, is filled.
        """
        raise NotImplementedError


class H2OBackend(_StockBackend):
    """Turns the specs of full-attention layers into H2O's."""

    # Of resident blocks, see `policy.geometry`; 0: pages are blocks.
    most_page_slots = 0

    @classmethod
    def check_supported(cls, spec: FullAttentionSpec, vllm_config: VllmConfig) -> None:
        """Raise ValueError for what the platform's kernels do not have."""
        raise NotImplementedError

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Turn the spec of a full-attention layer into H2O's.

        vLLM probes with `block_size=1` to learn the bytes of a token, from which it
        sizes the blocks of hybrids. H2O answers as stock does.
        """
        spec = super().customize_spec(spec)
        if type(spec) is not FullAttentionSpec or spec.block_size == 1:
            return spec
        vllm_config = get_current_vllm_config()
        config = h2o_config(vllm_config)
        assert config is not None, "only H2O's worker registers this"
        cls.check_supported(spec, vllm_config)
        longest = longest_request(vllm_config)
        return H2OAttentionSpec.of(spec, config, longest, cls.most_page_slots)


class H2OImpl(_StockImpl):
    """One layer: prompts by the stock backend (on CPU, steps that mostly score by our
    kernel), decodes by our kernels.

    Layers that are not full decoder attention run stock.
    """

    # What every stock implementation sets, each with a type of its own.
    attn_type: Any
    sliding_window: Any
    logits_soft_cap: Any
    num_kv_heads: int
    sinks: torch.Tensor | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.attn_type != AttentionType.DECODER or _has_window(self.sliding_window):
            return
        _refuse_layer(self)
        config = h2o_config(get_current_vllm_config())
        assert config is not None, "only H2O's worker registers this"
        self.h2o = config
        self.placements: LayerPlacements | None = None
        self.gate: LayerGate | None = None
        self.rotation: Rotation | None = None
        self._bound: BoundLayer | None = None
        self._bound_to: tuple[Any, ...] = ()

    def resolve(
        self, config: H2OConfig, gate: LayerGate | None, rotation: Rotation | None
    ) -> None:
        """Take what the start has decided since the layer was made.

        Args:
            config: The policy; its `prompt_score` is not `auto` any more.
            gate: Of the layer, if prompts go by it.
            rotation: Of its keys, if they move (`vllm_h2o.policy.reach`).
        """
        self.h2o, self.gate, self.rotation = config, gate, rotation

    @property
    def pages(self) -> Pages:
        """Of the cache that the layer has last run on, those of resident blocks."""
        return self._layer.pages

    @property
    def layout(self) -> SlotLayout:
        """The slots of a head on average."""
        return self._layer.params.layout

    def view(self, kv_cache: torch.Tensor) -> Pages:
        """View the cache as the platform's stock kernels lay it out, with our state."""
        raise NotImplementedError

    def view_dense(self, kv_cache: torch.Tensor) -> Pages:
        """View keys and values of dense blocks, where resident ones are otherwise."""
        raise NotImplementedError

    def view_cut(self, kv_cache: torch.Tensor, page_slots: int, cut: BlockCut) -> Pages:
        """View the pages that resident blocks are cut into, see `policy.geometry`.

        Args:
            kv_cache: The layer's cache.
            page_slots: Slots of a page.
            cut: Where pages are.
        """
        raise NotImplementedError

    def view_resident(self, kv_cache: torch.Tensor, spec: H2OAttentionSpec) -> Pages:
        """View the pages of resident blocks by the spec: blocks, or cut from them."""
        if spec.pages_are_blocks:
            return self.view(kv_cache)
        return self.view_cut(kv_cache, spec.page_slots, spec.cut)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of one layer; see the base class for shapes.

        Prompt rows run first, on dense blocks that stock vLLM has just written.
        Resident rows write nothing but blocks of their own request.
        """
        metadata = attn_metadata
        if not isinstance(metadata, H2OMetadata):
            if isinstance(metadata, DenseMetadata):
                return metadata.attend(layer, query, key, value, output)
            return super().forward(
                layer, query, key, value, kv_cache, metadata, output,
                output_scale, output_block_scale,
            )  # fmt: skip
        bound = self._bind(kv_cache, metadata.spec)
        if metadata.stock is not None:
            self._forward_prompts(layer, query, key, value, kv_cache, metadata, output)
        for prompt in metadata.prompts:
            tokens = prompt.tokens
            prompt.attend(layer.layer_name, bound, query[tokens], output[tokens])
        if metadata.resident is not None:
            self._decode(
                (query, key, value, output), metadata.resident,
                metadata.resident_tokens, metadata.drafted,
            )  # fmt: skip
        if metadata.dense is not None:
            self._decode(
                (query, key, value, output), metadata.dense, metadata.dense_tokens
            )
        return output

    def scored_layer(
        self,
        kv_cache: torch.Tensor,
        spec: H2OAttentionSpec,
        filled: torch.Tensor | None = None,
    ) -> ScoredLayer:
        """The layer, with the state of a request that has just filled the budget.

        Until then every head holds all tokens, the one at position p in slot p.

        Args:
            kv_cache: The layer's cache.
            spec: The layer's.
            filled: `[pages of the budget]` int32 of the request's resident blocks;
                None: no state is needed.
        """
        layer, state = self._bind(kv_cache, spec), {}
        if filled is not None:
            held = filled.long()
            state = {
                name: mine[held].transpose(0, 1).flatten(1)
                for name, mine in layer.pages.state.items()
            }
        return ScoredLayer(layer.pages, state, layer.params)

    def warm_up(
        self,
        kv_cache: torch.Tensor,
        spec: H2OAttentionSpec,
        padding: Iterable[tuple[ResidentRows, Drafted | None]],
    ) -> None:
        """Call all kernels: a prompt of zeros in vLLM's null block, rows of padding.

        Args:
            kv_cache: The layer's cache.
            spec: The layer's.
            padding: Batches to decode, with what takes back their drafts.
        """
        bound, layout = self._bind(kv_cache, spec), spec.page_layout
        pages, dense, params = bound.pages, bound.dense, bound.params
        position = layout.budget
        zeros = functools.partial(torch.zeros, device=kv_cache.device)
        num_kv_heads = pages.keys.shape[1]
        dtype = kv_cache.dtype
        query = zeros(1, self.num_heads, self.head_size, dtype=dtype)
        names = *pages.state, *params.method.prompt_fields
        state = {name: zeros(num_kv_heads, position + 1) for name in names}
        resident = zeros(layout.budget_blocks + 1, dtype=torch.int32)
        prompt = zeros(cdiv(position + 1, dense.block_size), dtype=torch.int32)
        layer, kernels = ScoredLayer(pages, state, params, dense), params.operations
        if params.gate is None:
            kernels.observe(query, dense, prompt, position, state, params)
        else:
            kernels.score_by_gate([layer], prompt, position)
        placements, placement = params.placements, UNIFORM
        if placements is not None and placements.table.has(BY_HEAD):
            placement = BY_HEAD
        held = Held(resident, placement, position)
        kernels.transition([layer], prompt, held, position, self.h2o)
        if placement == BY_HEAD:  # in place, where heads part
            of_held = [ScoredLayer(pages, state, params)]
            kernels.transition(of_held, resident, held, position, self.h2o)
        if placements is not None and placements.grows:
            kernels.order_rings([layer], held)
        if self.h2o.reads_on:
            chunk = Chunk(position + 1, 0, 0, 0, prompt, held)
            output, state = torch.empty_like(query), {}
            for _ in range(2):  # a chunk's first step, and one that has its state
                kernels.read_on(
                    query, position, dense, pages, chunk, state, params, output
                )
            layer = ScoredLayer(pages, state, params, dense)
            kernels.compress_chunk([layer], chunk, self.h2o)
            if params.moving is not None:
                kernels.move_keys([layer], held)
        for rows, drafted in padding:
            num_tokens = len(rows.positions) * rows.most_tokens
            query = zeros(num_tokens, *query.shape[1:], dtype=dtype)
            key = query[:, :num_kv_heads]
            batch = query, key, key, torch.empty_like(query)
            self._decode(batch, rows, None, drafted)
            if drafted is not None:
                drafted.take_back(zeros(len(rows.positions), dtype=torch.int32))

    def unbind(self) -> None:
        """Let go of a cache: vLLM makes one only to measure graphs with."""
        if hasattr(self, "_bound"):
            self._bound, self._bound_to, self.placements = None, (), None

    @property
    def _layer(self) -> BoundLayer:
        assert self._bound is not None, "it has not run on a cache"
        return self._bound

    def _bind(self, kv_cache: torch.Tensor, spec: H2OAttentionSpec) -> BoundLayer:
        """View the pages once: vLLM binds the cache after the impl is made."""
        bound_to = (
            kv_cache.data_ptr(),
            kv_cache.shape,
            self.placements,
            self.h2o,
            spec,
        )
        if bound_to == self._bound_to:
            return self._layer
        pages = dense = self.view_resident(kv_cache, spec)
        if not spec.pages_are_blocks:
            dense = self.view_dense(kv_cache)
        params = LayerParams(
            layout=spec.page_layout,
            scale=self.scale,
            softcap=float(self.logits_soft_cap or 0.0),
            method=self.h2o.method,
            placements=self.placements,
            sink_logits=self._sink_logits(kv_cache.device),
            read=share_of(self.h2o.read),
            merge=self.h2o.merges,
            group=self.num_heads // self.num_kv_heads,
            gate=self.gate,
            kernels=ops.kernels_of(kv_cache.device),
            moving=self._moving(spec, kv_cache.device),
        )
        of_dense = dataclasses.replace(
            params, layout=spec.dense_layout, placements=None
        )
        if not kv_cache.is_cpu:
            # Copied to the device now: no later step, and no capture of one, may.
            _ = params.device_tables
        self._bound = BoundLayer(self.h2o, pages, dense, params, of_dense)
        self._bound_to = bound_to
        return self._bound

    def _moving(
        self, spec: H2OAttentionSpec, device: torch.device
    ) -> MovingKeys | None:
        if spec.reach is None or self.rotation is None:
            return None
        return MovingKeys.of(spec.reach, self.rotation, device)

    def _sink_logits(self, device: torch.device) -> torch.Tensor | None:
        """Of this rank's query heads; on CUDA the parameter itself, since a graph that
        has been captured reads it at its address."""
        if self.sinks is None:
            return None
        sinks = self.sinks.detach()
        return sinks.float() if device.type == "cpu" else sinks

    def _forward_prompts(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: H2OMetadata,
        output: torch.Tensor,
    ) -> None:
        tokens = metadata.stock_tokens
        if tokens is None:
            super().forward(layer, query, key, value, kv_cache, metadata.stock, output)
        else:
            part = torch.empty_like(output[: len(tokens)])
            super().forward(
                layer, query[tokens], key, value, kv_cache, metadata.stock, part
            )
            output[tokens] = part

    def _decode(
        self,
        batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        rows: ResidentRows,
        tokens: torch.Tensor | None,
        drafted: Drafted | None = None,
    ) -> None:
        """Decode rows of a batch, its query, key, value and output."""
        *inputs, output = batch
        if tokens is None:
            # Of several tokens a row it says itself which.
            all_rows = slice(len(rows.positions) if rows.counts is None else None)
            query, key, value = (part[all_rows] for part in inputs)
            mine = output[all_rows]
        else:
            query, key, value = (part[tokens] for part in inputs)
            mine = torch.empty_like(output[: len(tokens)])
        pages, params = self._layer.pages, self._layer.params
        if rows.stay_dense:
            pages, params = self._layer.dense, self._layer.dense_params
        log = drafted.logs.of(pages, params) if drafted else None
        params.operations.decode_resident(
            query, key, value, pages, rows, params, mine, log
        )
        if tokens is not None:
            output[tokens] = mine


def _has_window(sliding_window: int | tuple[int, int]) -> bool:
    """Whether a layer is windowed: -1 or (-1, -1) means it is not."""
    if isinstance(sliding_window, tuple):
        return sliding_window[0] >= 0
    return sliding_window > 0


def _refuse_layer(impl: Any) -> None:
    """Raise ValueError for attention that the resident kernels do not compute."""
    refused = {
        "ALiBi": impl.alibi_slopes is not None,
        "KV sharing between layers": impl.kv_sharing_target_layer_name is not None,
    }
    for feature, present in refused.items():
        if present:
            raise ValueError(
                f"H2O does not support {feature}, which this model uses: "
                "drop --kv-policy (kv_policy, enable_h2o)"
            )

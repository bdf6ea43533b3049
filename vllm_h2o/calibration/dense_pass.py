"""The attention of texts that are read to measure a model's heads.

A text runs through the loaded model with a `DensePass` as the attention metadata of all
layers: each attends densely, without a KV cache, and those that evict note what their
heads would lose under each budget of a grid (`vllm_h2o.calibration.sensitivity`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from vllm.model_executor.layers.linear import RowParallelLinear

from vllm_h2o.attention.backend import DenseMetadata
from vllm_h2o.calibration.gate_fit import Examples, examples_of, paid_later
from vllm_h2o.calibration.sensitivity import (
    LAST,
    OBSERVED,
    PAST,
    STRIDE,
    Paid,
    Rule,
    head_errors,
)
from vllm_h2o.policy.gate import expected, features
from vllm_h2o.policy.rotation import Rotation
from vllm_h2o.policy.softmax import attention_of

_FUSED_HEAD_SIZE = 256
"""Above it, with a mask or with a soft cap torch has no attention on CUDA that does not
hold the logits of all queries."""
_TILE = 256
"""Queries whose logits are held at a time then."""


class DensePass(DenseMetadata):
    """One text's attention metadata.

    Attributes:
        errors: By layer name `[rules, num_kv_heads, len(grid)]` float32: this rank's
            errors, relative as `vllm_h2o.calibration.sensitivity` says, mean over the
            observed queries. The rules are `PAST` and `LAST`, or a gate's.
        examples: By layer name what a gate learns of this rank's heads.
        rotations: By layer name what rotated the keys; None: no module of vLLM's.
    """

    def __init__(
        self,
        projections: Mapping[str, RowParallelLinear | None],
        grid: Sequence[int],
        rotations: Mapping[str, Rotation | None] | None = None,
        gates: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Measure the layers that `projections` names.

        Args:
            projections: Of every layer that evicts, by its name, the output
                projection; None where it is not known: changes are then measured
                before it, and over the norm of the layer's own output.
            grid: Budgets in tokens.
            rotations: Of these layers, how they rotate their keys (None: not at all);
                without it there is nothing for a gate to learn.
            gates: Of these layers, `[num_kv_heads, F]` weights of this rank's heads:
                what is lost by them is measured, and nothing learned.
        """
        self._known, self._gates = rotations, gates
        self._projections, self._grid = projections, grid
        self._changes: dict[str, torch.Tensor] = {}
        self._projected: dict[str, torch.Tensor] = {}
        self._rotation: Rotation | None = None
        self._measures: dict[str, Callable[[torch.Tensor], None]] = {}
        self.errors: dict[str, torch.Tensor] = {}
        self.examples: dict[str, Examples] = {}
        self.rotations: dict[str, Rotation | None] = {}

    def attend(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
    ) -> torch.Tensor:
        """See the base class."""
        impl, name = layer.impl, layer.layer_name
        self.rotations[name], self._rotation = self._rotation, None
        softcap = float(impl.logits_soft_cap or 0.0)
        window = layer.sliding_window
        if window is not None and window >= len(query):
            window = None
        sinks = _sinks(impl)
        no_fused = softcap or window or sinks is not None
        if no_fused or query.shape[2] > _FUSED_HEAD_SIZE:
            _attend_in_tiles(
                query, key, value, output, impl.scale, softcap, window, sinks
            )
        else:
            _attend(query, key, value, output, impl.scale)
        if name in self._projections:
            measure = functools.partial(
                self._measured, impl, name, query, key, value, output.clone()
            )
            if self._projections[name] is None:
                measure(output)
                self._note(name, output.flatten(1))
            else:  # A gate may multiply the output on its way to the projection.
                self._measures[name] = measure
        return output

    def _measured(
        self,
        impl: Any,
        name: str,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        taken: torch.Tensor,
    ) -> None:
        """Measure a layer, given what its projection takes of its output."""
        gram = _gram(self._projections[name], key.shape[1], output)
        plain = key
        if self._known is not None and (known := self._known[name]) is not None:
            plain = known.undone(key)
        rules, learns = [PAST, LAST], self._known is not None and self._gates is None
        if self._gates is not None:
            rules = [_rule_of(self._gates[name], plain, value)]
        paid: list[list[torch.Tensor]] = []
        self._changes[name] = head_errors(
            query.float(), key.float(), value.float(), gram, impl.scale,
            float(impl.logits_soft_cap or 0.0), self._grid, rules,
            (lambda scored: paid.append(paid_later(scored, STRIDE)))
            if learns else None,
            _gate(taken.reshape(output.shape), output), _sinks(impl),
        )  # fmt: skip
        if learns:
            self.examples[name] = examples_of(plain, value, paid)

    def before_rotation(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Remember how the keys are rotated that the next attention gets.

        A hook of torch's modules, as are the next three.
        """
        self._rotation = Rotation.of(module)

    def after_projection(
        self,
        name: str,
        module: nn.Module,
        inputs: tuple[Any, ...],
        named: dict[str, Any],
        output: Any,
    ) -> None:
        """Measure the attention `name` by what its projection took, and remember what
        that returned.

        The name comes before what torch gives. What is added to it in place, before a
        norm takes it in, does not change the memory.
        """
        (taken, *_) = (*inputs, *named.values())
        if name in self._measures:
            self._measures.pop(name)(taken)
        whole = output[0] if isinstance(output, tuple) else output
        self._projected[name] = _last(whole).clone()

    def before_norm(
        self, name: str, module: nn.Module, inputs: tuple[Any, ...], named: dict
    ) -> None:
        """Relate the changes to what the projection put out, if this norm takes it in.

        Of all norms of a decoder layer only one does: a norm that takes in the stream
        too leaves what is added to the stream as it is.
        """
        projected = self._projected.get(name)
        given = [x for x in (*inputs, *named.values()) if isinstance(x, torch.Tensor)]
        if name not in self._changes or projected is None or len(given) != 1:
            return
        if torch.equal(_last(given[0]), projected):
            self._note(name, projected)

    def after_layer(
        self, name: str, module: nn.Module, inputs: tuple[Any, ...], output: Any
    ) -> None:
        """Relate the changes of a decoder layer to the stream that it leaves.

        Most of vLLM's return what they add and the stream that it belongs to, to be
        summed by the next. It is called at once, since the next layer's normalization
        may write over its input.
        """
        self._projected.pop(name, None)
        if name not in self._changes:
            return
        parts = output if isinstance(output, tuple | list) else (output,)
        parts = [x for x in parts if isinstance(x, torch.Tensor)]
        alike = [_last(x).float() for x in parts if x.shape == parts[0].shape]
        if not alike or len(alike[0]) < OBSERVED:
            raise ValueError(f"what the decoder layer of {name} returns is not known")
        self._note(name, torch.stack(alike).sum(dim=0))

    def _note(self, name: str, unit: torch.Tensor) -> None:
        """The errors of a layer, relative to `[n, size]`."""
        norm = unit[-OBSERVED:].float().pow(2).sum(dim=-1)
        self.errors[name] = (self._changes.pop(name) / norm).mean(dim=-1)


def _rule_of(weights: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Rule:
    """What a gate keeps of what stands before the observed queries.

    Args:
        weights: `[num_kv_heads, F]`.
        key: `[n, num_kv_heads, head_size]` before RoPE.
        value: `[n, num_kv_heads, head_size_v]`.
    """
    past = len(key) - OBSERVED
    ages = past - torch.arange(past, device=key.device)
    x = features(key[:past].float(), value[:past].float(), ages)
    scores = expected(x, weights)

    def score(head: int, paid: Paid) -> torch.Tensor:
        return scores[head]

    return Rule(score)


def _sinks(impl: Any) -> torch.Tensor | None:
    """`[num_heads]` float32 logits, if the softmax has sinks."""
    return None if impl.sinks is None else impl.sinks.detach().float()


def _gate(taken: torch.Tensor, output: torch.Tensor) -> torch.Tensor | None:
    """What multiplies the outputs `[n, heads, size]` of the observed queries.

    Also a norm's factors; 1 where an output of 0 does not tell.
    """
    taken, output = (x[-OBSERVED:].float() for x in (taken, output))
    if torch.equal(taken, output):
        return None
    return (taken / output).nan_to_num(1.0, 1.0, 1.0)


def _last(hidden: torch.Tensor) -> torch.Tensor:
    """`[n, size]` of the observed tokens; transformers has a batch of one in front."""
    return hidden.flatten(0, -2)[-OBSERVED:]


def output_projection(model: nn.Module, layer: Any) -> RowParallelLinear | None:
    """The linear layer that takes in what all heads of an attention put out.

    The only one of its input's width below the nearest module around the attention
    that has any, whatever the model calls it; None: there are several, or none.
    """
    path = _path(model, layer)
    width = layer.impl.num_heads * layer.head_size_v
    while path:
        path = path.rpartition(".")[0]
        found = [
            module
            for module in model.get_submodule(path).modules()
            if isinstance(module, RowParallelLinear)
            and module.input_size_per_partition == width
        ]
        if found:
            return found[0] if len(found) == 1 else None
    return None


def decoder_layer(model: nn.Module, layer: nn.Module) -> nn.Module:
    """The decoder layer of an attention: its path ends at the first number.

    Raises:
        ValueError: The path has none.
    """
    parts = _path(model, layer).split(".")
    for i, part in enumerate(parts):
        if part.isdecimal():
            return model.get_submodule(".".join(parts[: i + 1]))
    raise ValueError(f"{'.'.join(parts)!r} is in no numbered layer")


def called_module(model: nn.Module, projection: nn.Module) -> nn.Module:
    """What computes a projection: LoRA's layers do without its forward pass."""
    around = (
        m for m in model.modules() if getattr(m, "base_layer", None) is projection
    )
    return next(around, projection)


def norms_of(decoder: nn.Module) -> list[nn.Module]:
    """The normalizations of a decoder layer itself, as their classes are called."""
    return [x for x in decoder.children() if "norm" in type(x).__name__.lower()]


def _path(model: nn.Module, layer: nn.Module) -> str:
    return next((name for name, x in model.named_modules() if x is layer), "")


def _gram(
    projection: RowParallelLinear | None, num_kv_heads: int, output: torch.Tensor
) -> torch.Tensor:
    """`[num_kv_heads, width, width]` float32, see `sensitivity.head_errors`.

    The projection is applied to unit vectors: packed or quantized, its weight can not
    be read. They are as long as a typical output of a head, for which a quantized
    layer may have a scale.
    """
    width = output[0].numel()
    if projection is None:
        share = width // num_kv_heads
        return torch.eye(share, device=output.device).expand(num_kv_heads, -1, -1)
    length = output.abs().mean().clamp(min=1e-6)
    unit = torch.eye(width, dtype=output.dtype, device=output.device) * length
    columns = projection.quant_method.apply(projection, unit, None).float() / length
    own = columns.unflatten(0, (num_kv_heads, -1))
    return own @ own.transpose(1, 2)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    scale: float,
) -> None:
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    attended = F.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scale, enable_gqa=True
    )
    output.copy_(attended[0].transpose(0, 1))


def _attend_in_tiles(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    scale: float,
    softcap: float,
    window: int | None,
    sinks: torch.Tensor | None,
) -> None:
    group = query.shape[1] // key.shape[1]
    keys, values = (x.float().repeat_interleave(group, 1) for x in (key, value))
    for rows in torch.arange(len(query), device=query.device).split(_TILE):
        logits = torch.einsum("qhd,thd->hqt", query[rows].float() * scale, keys)
        hidden = ~_visible(rows, len(key), window)
        sink = None if sinks is None else sinks[:, None]
        probs = attention_of(logits, hidden, softcap=softcap, sink=sink)
        attended = torch.einsum("hqt,thd->qhd", probs, values)
        output[rows] = attended.to(output.dtype)


def _visible(rows: torch.Tensor, num_keys: int, window: int | None) -> torch.Tensor:
    """`[rows, num_keys]` bool: the keys that these queries see."""
    age = rows[:, None] - torch.arange(num_keys, device=rows.device)
    return (age >= 0) if window is None else (age >= 0) & (age < window)

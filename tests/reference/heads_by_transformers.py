"""A model's head profile, measured on transformers: the oracle of an engine's.

For every KV head of every full-attention layer and every budget of a grid: the errors
of `vllm_h2o.calibration.sensitivity`, over the squared norm of the stream after the
layer, or of what attention puts out where that is normalized. Where a gate multiplies
the heads' outputs, their changes are multiplied alike; where a sink takes part in the
softmax, it takes part in what is left of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_h2o.calibration.sensitivity import OBSERVED, grid_of, head_errors
from vllm_h2o.policy.profile import HeadProfile

_ATTENTION = "h2o_calibration"


@dataclass
class _Layer:
    """What is collected of one layer."""

    attended: tuple[Any, ...] = ()
    changes: torch.Tensor | None = None
    errors: list[torch.Tensor] = field(default_factory=list)


class _Measurement:
    """Errors of every KV head while a model reads."""

    def __init__(self, grid: Sequence[int]) -> None:
        self.grid = grid
        self.layers: dict[int, _Layer] = {}

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float,
        dropout: float = 0.0,
        softcap: float | None = None,
        sliding_window: int | None = None,
        s_aux: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """A transformers attention function, `[1, heads, n, head_size]` each."""
        group = query.shape[1] // key.shape[1]
        n = query.shape[2]
        output = torch.empty_like(query)
        layer = self.layers.setdefault(module.layer_idx, _Layer())
        layer.attended, layer.changes = (), None
        hidden = _hidden(n, sliding_window)
        for head in range(key.shape[1]):
            heads = slice(head * group, (head + 1) * group)
            logits = query[0, heads] @ key[0, head].T * scaling
            if softcap:
                logits = softcap * torch.tanh(logits / softcap)
            logits = logits.masked_fill_(hidden, float("-inf"))
            if s_aux is not None:
                sinks = s_aux[heads, None, None].expand(-1, n, 1)
                logits = torch.cat([logits, sinks], dim=-1)
            probs = logits.softmax(dim=-1)[..., :n]
            output[0, heads] = probs @ value[0, head]
        if not sliding_window:
            tensors = (x[0].transpose(0, 1) for x in (query, key, value, output))
            layer.attended = *tensors, scaling, softcap or 0.0, s_aux
        return output.transpose(1, 2), None

    def project(self, index: int, projection: torch.nn.Linear, taken: Any) -> None:
        """Measure the changes, given what a layer's output projection takes."""
        layer = self.layers[index]
        if not layer.attended:
            return
        q, k, v, output, scaling, softcap, sinks = layer.attended
        gate = (taken[0].view_as(output) / output)[-OBSERVED:]
        weight = projection.weight.T.unflatten(0, (k.shape[1], -1))
        gram = weight @ weight.transpose(1, 2)
        (layer.changes,) = head_errors(
            q, k, v, gram, scaling, softcap, self.grid, gate=gate, sink_logits=sinks
        )

    def after(self, index: int, output: Any) -> None:
        """Relate the changes of a layer to what it or its attention puts out."""
        whole = output[0] if isinstance(output, tuple) else output
        norm = whole[0, -OBSERVED:].float().pow(2).sum(dim=-1)
        layer = self.layers.get(index)  # None: not attention
        if layer is not None and layer.changes is not None:
            layer.errors.append((layer.changes / norm).mean(dim=-1))


def _output_projection(module: Any) -> torch.nn.Linear:
    """The last projection of an attention module."""
    for name in ("o_proj", "out_proj", "dense"):
        if isinstance(found := getattr(module, name, None), torch.nn.Linear):
            return found
    raise ValueError(
        f"{type(module).__name__} has no output projection that is known here: this "
        "model can not be calibrated, use --h2o-head-budgets uniform"
    )


def _hidden(n: int, sliding_window: int | None) -> torch.Tensor:
    """`[n, n]` bool: the keys that a query must not see."""
    hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
    if sliding_window:
        hidden |= torch.ones(n, n, dtype=torch.bool).tril(-sliding_window)
    return hidden


@torch.no_grad()
def measure(model: Any, texts: Sequence[Sequence[int]], name: str) -> HeadProfile:
    """Measure a profile.

    Args:
        model: A transformers causal language model on the CPU, float32. Its
            attention is replaced and its layers get hooks, for good: load another
            copy for other work.
        texts: Token ids, all of one length, more than `2 * OBSERVED`.
        name: Of the model, for the profile's `measured_on`.

    Raises:
        ValueError: No texts, texts too short or of several lengths.
    """
    from transformers import AttentionInterface

    lengths = {len(text) for text in texts}
    if len(lengths) != 1 or min(lengths) <= 2 * OBSERVED:
        raise ValueError(
            f"texts have {sorted(lengths)} tokens: give texts of one length, "
            f"more than {2 * OBSERVED} tokens"
        )
    (length,) = lengths
    grid = grid_of(length)
    measurement = _Measurement(grid)
    AttentionInterface.register(_ATTENTION, measurement.attend)
    model.set_attn_implementation(_ATTENTION)
    for index, layer in enumerate(model.get_decoder().layers):
        names = "post_feedforward_layernorm", "post_mlp_layernorm"
        normalizes = any(hasattr(layer, name) for name in names)
        (layer.self_attn if normalizes else layer).register_forward_hook(
            lambda _, __, output, index=index: measurement.after(index, output)
        )
        if (attention := getattr(layer, "self_attn", None)) is not None:
            _output_projection(attention).register_forward_pre_hook(
                lambda linear, inputs, index=index: measurement.project(
                    index, linear, inputs[0]
                )
            )
    for text in texts:
        model(input_ids=torch.tensor([list(text)]), use_cache=False, logits_to_keep=1)
    evicting = [layer.errors for _, layer in sorted(measurement.layers.items())]
    errors = [
        torch.stack(per_text).mean(dim=0).tolist() for per_text in evicting if per_text
    ]
    rounded = [
        [[float(f"{e:.4g}") for e in head] for head in layer] for layer in errors
    ]
    source = f"{name}, {len(texts)} texts of {length} tokens"
    return HeadProfile(grid, rounded, source, length)

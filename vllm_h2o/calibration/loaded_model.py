"""A model whose weights are loaded reads texts, before its KV cache is allocated.

Each text is one pass of the model under vLLM's forward context, with a `DensePass` as
the attention metadata: one way for CPU and CUDA, runners V1 and V2. All ranks do
alike.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT
from vllm.model_executor.models.interfaces import requires_raw_input_tokens

from vllm_h2o.calibration.dense_pass import (
    DensePass,
    called_module,
    decoder_layer,
    norms_of,
    output_projection,
)
from vllm_h2o.calibration.sensitivity import OBSERVED
from vllm_h2o.calibration.state_layers import states
from vllm_h2o.calibration.token_ids import seeded_texts
from vllm_h2o.core.settings import h2o_config
from vllm_h2o.policy.rotation import Rotation, has_rotation

if TYPE_CHECKING:
    from vllm.config import VllmConfig

FEWEST_TOKENS = 4 * OBSERVED
"""Of a text."""
ANSWERED_TOKENS, ANSWERS = 64, 512
"""Ids that a model answers to, and how many numbers of its answers are compared."""


@dataclass(frozen=True)
class LoadedModel:
    """A model in its worker.

    Attributes:
        vllm_config: The engine's.
        runner: vLLM's model runner, V1 or V2.
        layers: The attention modules that evict, by name.
    """

    vllm_config: VllmConfig
    runner: Any
    layers: Mapping[str, Any]

    def read(self, dense_pass: DensePass, ids: list[int]) -> torch.Tensor:
        """Run one text through the model.

        Returns:
            `[len(ids), hidden_size]`, the answers before the output embedding.
        """
        model, config = self.runner.get_model(), self.vllm_config
        lengths = np.array([len(ids)], np.int32)
        with (
            torch.inference_mode(),
            set_current_vllm_config(config),
            self._listening(model, dense_pass),
            self.runner.maybe_select_dummy_loras(config.lora_config, lengths),
            states(config, len(ids), self.runner.device) as of_states,
            # Compiled code would be traced with this pass, for good.
            set_forward_context(
                self._metadata(dense_pass) | of_states,
                config,
                num_tokens=len(ids),
                skip_compiled=True,
            ),
        ):
            inputs = self._inputs(model, torch.tensor(ids, device=self.runner.device))
            return model.forward(intermediate_tensors=None, **inputs)

    @functools.cached_property
    def rotations(self) -> dict[str, Rotation | None]:
        """How the layers rotate their keys, by name; None: not at all.

        Seen in a pass of the model, since neither its config nor what modules it has
        says which of them it uses in which layer.
        """
        dense_pass, config = DensePass({}, ()), self.vllm_config.model_config
        (ids, *_) = seeded_texts(config, ANSWERED_TOKENS)
        self.read(dense_pass, ids)
        rotations = dense_pass.rotations
        if has_rotation(config.hf_text_config) and not any(rotations.values()):
            # Rotated by something else than vLLM's modules.
            return dict.fromkeys(rotations, Rotation(None))
        return rotations

    def _metadata(self, dense_pass: DensePass) -> dict[str, Any]:
        """The metadata of every attention, by name."""
        modules = self.vllm_config.compilation_config.static_forward_context
        return dict.fromkeys(modules, dense_pass)

    @contextmanager
    def _listening(self, model: nn.Module, dense_pass: DensePass) -> Iterator[None]:
        """Tell the pass what passes through the decoder layers."""
        with ExitStack() as hooks:
            for rotary in set(_ROPE_DICT.values()):
                hook = rotary.register_forward_pre_hook(dense_pass.before_rotation)
                hooks.callback(hook.remove)
            for name, layer in self.layers.items():
                decoder = decoder_layer(model, layer)
                tell = functools.partial(dense_pass.after_layer, name)
                hooks.callback(decoder.register_forward_hook(tell).remove)
                projection = output_projection(model, layer)
                if projection is None:
                    continue
                called = called_module(model, projection)
                tell = functools.partial(dense_pass.after_projection, name)
                hook = called.register_forward_hook(tell, with_kwargs=True)
                hooks.callback(hook.remove)
                for norm in norms_of(decoder):
                    tell = functools.partial(dense_pass.before_norm, name)
                    hook = norm.register_forward_pre_hook(tell, with_kwargs=True)
                    hooks.callback(hook.remove)
            yield

    def _inputs(self, model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor | None]:
        """Arguments of `model.forward`, as vLLM's runners give them for text."""
        config = self.vllm_config.model_config
        positions = torch.arange(len(ids), device=ids.device)
        if config.uses_mrope:
            positions = positions.expand(3, -1)
        if not config.supports_multimodal_inputs:
            return {"input_ids": ids, "positions": positions, "inputs_embeds": None}
        return {
            "input_ids": ids if requires_raw_input_tokens(model) else None,
            "positions": positions,
            "inputs_embeds": model.embed_input_ids(ids),
        }


def answers(model: LoadedModel) -> list[float]:
    """What tells one model from another: a unit vector of `ANSWERS` numbers.

    They are of the hidden states that the model answers to fixed ids with, less their
    mean over the ids, which is much alike for models of one family.
    """
    (ids, *_) = seeded_texts(model.vllm_config.model_config, ANSWERED_TOKENS)
    hidden = model.read(DensePass({}, ()), ids).float().cpu()
    numbers = (hidden - hidden.mean(dim=0)).flatten()
    chosen = torch.linspace(0, numbers.numel() - 1, ANSWERS).long()
    unit = nn.functional.normalize(numbers[chosen], dim=0)
    return [float(f"{x:.4g}") for x in unit.tolist()]


def longest_step(vllm_config: VllmConfig) -> tuple[str, int]:
    """Tokens of the longest text that one step takes, and the option that says so."""
    most = {
        "--max-model-len": vllm_config.model_config.max_model_len,
        "--max-num-batched-tokens": vllm_config.scheduler_config.max_num_batched_tokens,
    }
    config = h2o_config(vllm_config)
    if config is not None and config.moves_keys:
        most["what the model was trained for"] = config.trained_length
    return min(most.items(), key=lambda item: item[1])

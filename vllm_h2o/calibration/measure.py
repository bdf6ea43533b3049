"""A loaded model measures its own heads, before its KV cache is allocated.

Each text is one pass of the model under vLLM's forward context, with a `DensePass` as
the attention metadata: one way for CPU and CUDA, runners V1 and V2. All ranks do
alike.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from tqdm import tqdm
from vllm.config import set_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank, get_tp_group
from vllm.forward_context import set_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT
from vllm.model_executor.models.interfaces import requires_raw_input_tokens
from vllm.model_executor.models.utils import extract_layer_index
from vllm.tokenizers import cached_tokenizer_from_config

from vllm_h2o.calibration.dense_pass import (
    DensePass,
    called_module,
    decoder_layer,
    norms_of,
    output_projection,
)
from vllm_h2o.calibration.gate_fit import LEAST_EXPLAINED, Examples, Lessons
from vllm_h2o.calibration.sensitivity import OBSERVED, grid_of
from vllm_h2o.calibration.state_layers import states
from vllm_h2o.calibration.texts import calibration_texts, digest
from vllm_h2o.core.settings import h2o_config
from vllm_h2o.policy.gate import num_features
from vllm_h2o.policy.options import shortened
from vllm_h2o.policy.profile import HeadProfile, gate_in_json
from vllm_h2o.policy.rotation import Rotation, has_rotation

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(f"vllm.{__name__}")

FEWEST_TOKENS = 4 * OBSERVED
"""Of a text."""
NUM_SEEDED_TEXTS = 4
MOST_BYTES = 2**30
"""Of the host's memory for what the gate is learned from."""
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


def measure(
    model: LoadedModel,
    texts: Sequence[list[int]],
    kind: str,
    seconds: float = float("inf"),
) -> HeadProfile:
    """Measure the profile of a model whose weights are loaded.

    Args:
        model: The model.
        texts: Token ids, all of one length, at least `FEWEST_TOKENS`; on all ranks the
            same.
        kind: What these are, for the profile's `measured_on`.
        seconds: No text is begun that would not be read within them, but the first.

    Raises:
        ValueError: The model's modules are not those that its layers should have, or
            what was measured is of no use.
    """
    start, per_text, length = time.perf_counter(), [], len(texts[0])
    lessons, rotations = Lessons(), _rotations_to_learn_by(model)
    first = get_tensor_model_parallel_rank() == 0
    num_kv_heads = model.vllm_config.model_config.get_total_num_kv_heads()
    for ids in tqdm(texts, desc="H2O reads", unit="text", disable=not first):
        errors, examples = _read(model, ids, rotations)
        per_text.append(_of_all_ranks(errors, num_kv_heads))
        if rotations is not None:
            lessons.add(examples)
        spent = time.perf_counter() - start
        if of_first_rank(spent + spent / len(per_text) > seconds):
            break
    errors = torch.stack(per_text).mean(dim=0)
    if not errors.isfinite().all() or not errors.any():
        raise ValueError("the errors of its heads are not finite, or all zero")
    rounded = [
        [[float(f"{e:.4g}") for e in head] for head in layer]
        for layer in errors.tolist()
    ]
    source = f"{len(per_text)} texts of {length} {kind}, read by an engine"
    gate = _learned(lessons, num_kv_heads) if rotations is not None else None
    return HeadProfile(grid_of(length), rounded, source, length, gate)


def _learned(lessons: Lessons, num_kv_heads: int) -> dict[str, Any] | None:
    """The gate, for the profile; None, with a warning: it is of no use."""
    result = lessons.result()
    if result is None:
        logger.warning_once("H2O has no gate: that takes two texts, and one was read")
        return None
    weights, explained = (_of_all_ranks(x, num_kv_heads) for x in result)
    r2 = float(explained.mean())
    if not weights.isfinite().all() or not LEAST_EXPLAINED <= r2 <= 1:
        logger.warning_once(
            "H2O has no gate: it would explain %.2f of the variance of what tokens of "
            "another text get, and is of use from %.1f",
            r2, LEAST_EXPLAINED,
        )  # fmt: skip
        return None
    logger.info_once(
        "H2O's gate explains %.2f of the variance of what tokens of another text get",
        r2,
    )
    return gate_in_json(weights, r2)


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


def _rotations_to_learn_by(model: LoadedModel) -> dict[str, Rotation | None] | None:
    """None, and said: what the gate would be learned from takes too much memory."""
    layers = model.layers.values()
    sizes = [
        layer.impl.num_kv_heads * num_features(layer.head_size, layer.head_size_v) ** 2
        for layer in layers
    ]
    if (held := 3 * 4 * sum(sizes)) > MOST_BYTES:
        logger.info_once(
            "H2O has no gate: to learn it would take %d MiB", held // 1024**2
        )
        return None
    return model.rotations


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


def texts_to_read(model_config: Any, length: int) -> tuple[list[list[int]], str]:
    """Token ids of texts, all of one length, and what these are.

    Those of `vllm_h2o.calibration.texts`; random ones where the engine has no
    tokenizer, or one that makes too few tokens of them. All ranks have the first one's.
    """
    texts: list[list[int]] = []
    if get_tensor_model_parallel_rank() == 0:
        try:
            texts = _tokenized(model_config, length)
        except Exception as error:
            logger.warning_once("H2O can not tokenize its texts: %s", shortened(error))
    if texts := of_first_rank(texts):
        return texts, f"tokens (vllm-h2o's, {digest()})"
    return seeded_texts(model_config, length), "random token ids"


def _tokenized(model_config: Any, length: int) -> list[list[int]]:
    """The ends of the texts, where what is asked for has been said before."""
    tokenizer = cached_tokenizer_from_config(model_config)
    if tokenizer is None:
        return []
    start = _first_ids(model_config)
    ids = [
        tokenizer.encode(text, add_special_tokens=False)
        for text in calibration_texts(length).values()
    ]
    cut = [start + list(each)[len(start) - length :] for each in ids]
    return cut if all(len(each) == length for each in cut) else []


def _first_ids(model_config: Any) -> list[int]:
    """What prompts of the model begin with, if anything."""
    first = getattr(model_config.hf_text_config, "bos_token_id", None)
    if isinstance(first, int) and 0 <= first < model_config.get_vocab_size():
        return [first]
    return []


def seeded_texts(model_config: Any, length: int) -> list[list[int]]:
    """Random token ids that every start has alike; each says its first half twice.

    So heads that look up what stood before show themselves.
    """
    generator = torch.Generator().manual_seed(0)
    size = model_config.get_vocab_size()
    # Special and unused tokens sit at both ends of a vocabulary.
    low, high = size // 50, max(9 * size // 10, size // 50 + 1)
    start, texts = _first_ids(model_config), []
    for _ in range(NUM_SEEDED_TEXTS):
        half = torch.randint(low, high, ((length + 1) // 2,), generator=generator)
        texts.append((start + 2 * half.tolist())[:length])
    return texts


def of_first_rank(mine: Any) -> Any:
    """What the first tensor-parallel rank has, so that all decide alike."""
    group = get_tp_group()
    return mine if group.world_size == 1 else group.broadcast_object(mine, src=0)


def _read(
    model: LoadedModel, ids: list[int], rotations: Mapping[str, Rotation | None] | None
) -> tuple[torch.Tensor, list[Examples]]:
    """Of one text `[layers, num_kv_heads of this rank, grid]` float32 errors, and by
    layer what the gate learns of it."""
    modules = model.runner.get_model()
    names = sorted(model.layers, key=extract_layer_index)
    projections = {
        name: output_projection(modules, model.layers[name]) for name in names
    }
    dense_pass = DensePass(projections, grid_of(len(ids)), rotations)
    model.read(dense_pass, ids)
    if missing := set(names) - set(dense_pass.errors):
        raise ValueError(f"its layer {min(missing)} has not attended")
    errors = torch.stack([dense_pass.errors[name] for name in names])
    return errors, [
        dense_pass.examples[name] for name in names if rotations is not None
    ]


def _of_all_ranks(mine: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """`[layers, num_kv_heads, ..]` on the CPU, from this rank's part.

    With fewer heads than ranks, neighbouring ranks have the same head and queries of
    their own: the mean counts.
    """
    group = get_tp_group()
    joined = group.all_gather(mine.to(group.device).contiguous(), dim=1).cpu()
    return joined.unflatten(1, (num_kv_heads, -1)).mean(dim=2)

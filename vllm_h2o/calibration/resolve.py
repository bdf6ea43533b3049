"""At startup: what the options leave open is decided, once, when the model is loaded.

That is which head profile an engine goes by, and whether prompts go by its gate.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index

from vllm_h2o.attention.gate import LayerGate
from vllm_h2o.attention.heads import HeadBudgets
from vllm_h2o.calibration.head_profiles import (
    check_profile,
    holds_longest,
    profile_at_startup,
    profile_path,
    why_not_measured,
)
from vllm_h2o.calibration.loaded_model import (
    ANSWERED_TOKENS,
    FEWEST_TOKENS,
    LoadedModel,
    longest_step,
)
from vllm_h2o.calibration.ranks import of_first_rank, own_kv_heads
from vllm_h2o.core.settings import h2o_config, layout_of, longest_request
from vllm_h2o.core.spec import H2OAttentionSpec
from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.gate import num_features
from vllm_h2o.policy.options import (
    ATTENTION,
    AUTO,
    CACHE,
    GATE,
    MEASURE,
    REQUEST,
    TEXT,
)
from vllm_h2o.policy.profile import HeadProfile
from vllm_h2o.policy.request import RequestLimits
from vllm_h2o.policy.rotation import Rotation
from vllm_h2o.policy.trials import Trials, Way

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheSpec

logger = init_logger(f"vllm.{__name__}")


@dataclass(frozen=True)
class Resolved:
    """What a start has decided.

    Attributes:
        config: The policy; its `prompt_score` is not `auto` any more.
        profile: Of the model; None: there is none.
        file: Where the profile is from, if it is a user's.
        device: Torch's name of the kind of device.
        by_head: Whether heads have budgets by the profile.
        num_layers: That evict.
    """

    config: H2OConfig
    device: str
    profile: HeadProfile | None = None
    file: Path | None = None
    by_head: bool = False
    num_layers: int = 0

    @property
    def source(self) -> str:
        """Where the budgets of the heads are from, for messages."""
        if self.profile is None:
            return repr(self.config.head_budgets)
        return str(self.file or self.profile.measured_on)

    def specs(
        self, specs: dict[str, KVCacheSpec], fingerprint: str
    ) -> dict[str, KVCacheSpec]:
        """The layers' specs, which tell the scheduler and the builders of it."""
        ours = {x for x in specs.values() if type(x) is H2OAttentionSpec}
        resolved = {
            spec: replace(self.spec(spec), fingerprint=fingerprint) for spec in ours
        }
        return {
            name: resolved[spec] if type(spec) is H2OAttentionSpec else spec
            for name, spec in specs.items()
        }

    def limits(self, spec: H2OAttentionSpec) -> RequestLimits:
        """What requests may ask for, by the spec of a layer that evicts."""
        return replace(spec, h2o=self.config).limits(self.device)

    def spec(self, spec: H2OAttentionSpec) -> H2OAttentionSpec:
        """The spec of a layer that evicts."""
        spec = replace(spec, h2o=self.config)
        if self.config.head_budgets == REQUEST:
            # One layer may get all that a request has, one head as much as it can keep.
            heads, longest = self.num_layers * spec.num_kv_heads, spec.longest_head
            most = min(spec.num_kv_heads * longest, heads * spec.layout.budget)
            return replace(
                spec, richest_slots=longest, richest_layer_slots=most,
                slots_per_token=heads,
            )  # fmt: skip
        if not self.by_head:
            return spec
        assert self.profile is not None
        ladder = self.limits(spec).ladder
        budgets = HeadBudgets(self.profile, self.config, ladder, spec.page_slots)
        head, layer = budgets.richest_slots(spec.num_kv_heads)
        return replace(
            spec, richest_slots=head, richest_layer_slots=layer,
            slots_per_token=budgets.slots_per_token(spec.num_kv_heads),
        )  # fmt: skip


def resolve(model: LoadedModel) -> Resolved:
    """Decide what the options leave open.

    Args:
        model: With its weights loaded, before its KV cache is allocated.

    Raises:
        ValueError: The user asks for what there is not: to measure what can not be
            measured, or for a gate.
    """
    start, config = time.perf_counter(), h2o_config(model.vllm_config)
    assert config is not None
    file = profile_path(config, model.vllm_config.model_config.model)
    profile = None
    if file and get_tensor_model_parallel_rank() == 0:
        profile = HeadProfile.load(file)
    # Ranks on other machines may see other files.
    file, profile = of_first_rank((file, profile))
    if file is None:
        profile = profile_at_startup(model)
    if profile is not None and not file:
        logger.info_once(
            "H2O has the profile of the heads, after %.1f s: %s",
            time.perf_counter() - start, profile.measured_on,
        )  # fmt: skip
    if config.gated and not holds_longest(model.vllm_config, config):
        _check_gate(model, config, profile)
    chosen, why = _chosen(model, config, profile)
    config = replace(config, prompt_score=chosen.rule, chosen=why)
    device = model.vllm_config.device_config.device_type
    layers = len(model.layers)
    return Resolved(config, device, profile, file, chosen.by_head, layers)


def _chosen(
    model: LoadedModel, config: H2OConfig, profile: HeadProfile | None
) -> tuple[Way, str]:
    """What prompts and budgets go by, of what the user leaves open, and why."""
    rules, why = [config.prompt_score], ""
    if config.prompt_score == AUTO:
        why = _why_by_attention(model, config, profile)
        rules = [ATTENTION] if why else [GATE, ATTENTION]
        if needed := _why_gate(model, config):
            if why:
                beside, drop = needed
                raise ValueError(
                    "H2O does not support h2o_prompt_score (--h2o-prompt-score) "
                    f"{ATTENTION!r} {beside}, and {why}: use "
                    f"h2o_prompt_score={GATE!r} with h2o_head_budgets={MEASURE!r}, or "
                    + drop
                )
            rules = [GATE]
    heads = [False]
    if profile is not None:
        heads = [True, False] if config.head_budgets in (AUTO, MEASURE) else [True]
    ways = [Way(rule, by_head) for rule in rules for by_head in heads]
    chosen, share = ways[0], _share(model, config)
    regrets = {}
    if profile and profile.trials and len(ways) > 1:
        regrets = Trials.of_json(profile.trials).regrets(ways, share)
    if regrets:
        chosen = next(iter(regrets))
        told = ", ".join(f"{x:.2f} by {way.name}" for way, x in regrets.items())
        told = f"regrets on texts left out are {told}"
        why = f"{why}; {told}" if why else told
    return chosen, f"{chosen.name}: {why}" if why else ""


def _why_gate(model: LoadedModel, config: H2OConfig) -> tuple[str, str] | None:
    """Beside what prompts can not go by attention, and what to do without it."""
    vllm_config = model.vllm_config
    if not config.keeps_heavy_set:
        return None
    holds_all = holds_longest(vllm_config, config)
    if vllm_config.model_config.is_mm_prefix_lm and not holds_all:
        # Its queries are scored as if each saw none of the tokens behind it.
        beside = "on a model that reads images in both directions"
        return beside, "--language-model-only"
    if vllm_config.kv_transfer_config is not None:
        # Queries that score do not run where their tokens are loaded. A request may ask
        # for less than all.
        return "with --kv-transfer-config", "drop --kv-transfer-config"
    return None


def _share(model: LoadedModel, config: H2OConfig) -> float:
    """Of the context that is kept, where that is least."""
    if config.share is not None:
        return config.share
    longest = longest_request(model.vllm_config)
    return layout_of(model.vllm_config, config).budget / longest


def _why_by_attention(
    model: LoadedModel, config: H2OConfig, profile: HeadProfile | None
) -> str:
    """Why prompts can not go by a gate where the user leaves it open."""
    parallel = model.vllm_config.parallel_config
    if parallel.data_parallel_size > 1 or parallel.enable_eplb:
        # Their ranks may know of different profiles, and their passes belong
        # together: one that made a pass for its gate would wait for the others.
        return "with data parallelism or EPLB the gate has to be asked for"
    if holds_longest(model.vllm_config, config):
        return "nothing is evicted"
    # Ranks on other machines may see other files.
    return of_first_rank(_why_no_gate(model, config, profile))


def _why_no_gate(
    model: LoadedModel, config: H2OConfig, profile: HeadProfile | None
) -> str:
    """What there would have to be for prompts to go by a gate; empty: there is."""
    if profile is None:
        why = why_not_measured(model.vllm_config, config)
        return why or "there is no head profile, see the log"
    if profile.gate is None:
        return "the head profile in force has no gate"
    sizes = {layer.impl.head_size for layer in model.layers.values()}
    has, needed = profile.gate["features"], [num_features(x, x) for x in sizes]
    if needed != [has]:
        return (
            f"the gate of the head profile in force has {has} weights for a head, "
            f"where this model needs {needed}"
        )
    option, tokens = longest_step(model.vllm_config)
    if tokens < ANSWERED_TOKENS:
        return f"{option} is {tokens}, to see how keys rotate takes {ANSWERED_TOKENS}"
    return ""


def _check_gate(
    model: LoadedModel, config: H2OConfig, profile: HeadProfile | None
) -> None:
    """Raise ValueError where a gate is asked for and there is none."""
    why = _why_no_gate(model, config, profile)
    if not why:
        return
    option, tokens = longest_step(model.vllm_config)
    measured = f"h2o_head_budgets={MEASURE!r}"
    if tokens < FEWEST_TOKENS:
        measured += f" with {option} of at least {FEWEST_TOKENS}"
    raise ValueError(
        f"h2o_prompt_score (--h2o-prompt-score) is {GATE!r}, but {why}: use "
        f"{measured}, or h2o_prompt_score={ATTENTION!r}"
    )


def gates_of(model: LoadedModel, resolved: Resolved) -> dict[str, LayerGate]:
    """The gates of the layers that evict, by name; none where prompts do without."""
    config, profile, vllm_config = resolved.config, resolved.profile, model.vllm_config
    if not config.gated or holds_longest(vllm_config, config):
        return {}
    assert profile is not None
    names = sorted(model.layers, key=extract_layer_index)
    check_profile(profile, resolved.source, vllm_config, len(names))
    gates = {}
    for name, weights in zip(names, profile.gate_weights(), strict=True):
        impl = model.layers[name].impl
        own_heads = own_kv_heads(vllm_config, impl.num_kv_heads)
        own = torch.from_numpy(weights.copy())[own_heads]
        group = impl.num_heads // impl.num_kv_heads
        own = own.to(model.runner.device)
        gates[name] = LayerGate(own, model.rotations[name], group)
    return gates


def moving_rotations(
    model: LoadedModel, config: H2OConfig
) -> dict[str, Rotation | None]:
    """How the keys of the layers that evict are rotated; none where no key moves.

    Raises:
        ValueError: It is not known, or not for so many positions.
    """
    if not config.moves_keys:
        return {}
    option, tokens = longest_step(model.vllm_config)
    longest = model.vllm_config.model_config.max_model_len
    if tokens < ANSWERED_TOKENS:
        why = f"{option} is {tokens}, to see how keys rotate takes {ANSWERED_TOKENS}"
        raise _immovable(why)
    rotations = model.rotations
    for name, rotation in rotations.items():
        if rotation is None:
            continue
        if rotation.angles is not None and len(rotation.angles) < longest:
            why = f"layer {name} has angles for {len(rotation.angles)} positions only"
            raise _immovable(f"--max-model-len is {longest}, but {why}")
        try:
            _ = rotation.frequencies
        except ValueError as error:
            raise _immovable(f"of layer {name}: {error}") from error
    if not any(rotations[name] for name in model.layers):
        raise _immovable("the keys of this model are not rotated")
    return {name: rotations[name] for name in model.layers}


def _immovable(why: str) -> ValueError:
    return ValueError(
        f"h2o_positions (--h2o-positions) is {CACHE!r}, but {why}: use {TEXT!r} and a "
        "--max-model-len that the model was trained for"
    )

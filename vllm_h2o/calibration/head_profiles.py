"""Where a model's head profile is from: a file, the cache, or a measurement now.

The user's file, or one beside the weights, comes first. Without one `auto` looks into
the cache, and measures what is not there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.distributed import get_tensor_model_parallel_rank
from vllm.logger import init_logger

from vllm_h2o.calibration import cache
from vllm_h2o.calibration.loaded_model import (
    FEWEST_TOKENS,
    LoadedModel,
    answers,
    longest_step,
)
from vllm_h2o.calibration.measure import measure
from vllm_h2o.calibration.progress import Progress
from vllm_h2o.calibration.ranks import of_first_rank
from vllm_h2o.calibration.texts import MOST_TOKENS
from vllm_h2o.calibration.token_ids import texts_to_read
from vllm_h2o.core.settings import (
    CALIBRATE,
    CALIBRATE_SECONDS,
    h2o_config,
    layout_of,
    longest_request,
    most_seconds,
    uses_profile_cache,
)
from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.options import (
    ATTENTION,
    AUTO,
    MEASURE,
    REQUEST,
    UNIFORM,
    shortened,
)
from vllm_h2o.policy.profile import FILE_NAME, HeadProfile

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(f"vllm.{__name__}")

_OFFLINE = "measure elsewhere with python -m vllm_h2o.calibrate and give the file"


def profile_path(config: H2OConfig, model: str) -> Path | None:
    """The profile's file; None where there is none to be read.

    Args:
        config: The policy.
        model: The model's folder, or its name.
    """
    if config.head_budgets in (UNIFORM, MEASURE, REQUEST):
        return None
    if config.head_budgets != AUTO:
        return Path(config.head_budgets)
    path = Path(model) / FILE_NAME
    return path if config.may_differ_by_head and path.is_file() else None


def check_profile(
    profile: HeadProfile, source: Path | str, vllm_config: VllmConfig, num_layers: int
) -> None:
    """Raise ValueError when a head profile is another model's."""
    num_kv_heads = vllm_config.model_config.get_total_num_kv_heads()
    if (profile.num_layers, profile.num_kv_heads) != (num_layers, num_kv_heads):
        raise ValueError(
            f"h2o_head_budgets (--h2o-head-budgets): {shortened(source)} is for "
            f"{profile.num_layers} layers of {profile.num_kv_heads} KV heads, this "
            f"model has {num_layers} of {num_kv_heads} with full attention: measure "
            "it with python -m vllm_h2o.calibrate, or use 'uniform'"
        )


def profile_at_startup(model: LoadedModel) -> HeadProfile | None:
    """Find or measure a profile, where none is in a file.

    Args:
        model: With its weights loaded, before its KV cache is allocated.

    Returns:
        The profile; None: all heads have the same budget, or each request shares it
        out.

    Raises:
        ValueError: The user asks to measure what can not be measured.
    """
    config = h2o_config(model.vllm_config)
    assert config is not None
    if config.head_budgets == MEASURE:
        return _measured_as_asked(model)
    if config.head_budgets != AUTO or not config.may_differ_by_head:
        return None
    if why := of_first_rank(why_not_measured(model.vllm_config, config)):
        logger.info_once("H2O gives all KV heads the same budget: %s", why)
        return None
    try:
        return _found_or_measured(model)
    except Exception as error:
        parallel = model.vllm_config.parallel_config
        if parallel.world_size_across_dp > 1 and not isinstance(error, ValueError):
            raise  # Not all ranks may have failed, and others wait for this one.
        # Its text only: vLLM remembers what it logged once, and an exception holds
        # the frames that it went through, with the model in them.
        said = f"{type(error).__name__}: {error}"
    logger.warning_once(
        "H2O could not measure this model's heads, all get the same budget: %s. "
        "Quality is lower; %s, or silence this with --h2o-head-budgets uniform",
        said, _OFFLINE,
    )  # fmt: skip
    return None


def _measured_as_asked(model: LoadedModel) -> HeadProfile:
    try:
        tokens = _asked_tokens(model.vllm_config)
        texts = texts_to_read(model.vllm_config.model_config, tokens)
        profile, _ = measure(model, *texts)
        if uses_profile_cache():
            _keep(answers(model), profile)
        return profile
    except Exception as error:
        raise ValueError(
            "h2o_head_budgets (--h2o-head-budgets) is 'measure', but this model's "
            f"heads can not be measured: {type(error).__name__}: {error}; use "
            "'uniform', or the file of a profile"
        ) from error


def why_not_measured(vllm_config: VllmConfig, config: H2OConfig) -> str:
    """Why `auto` does not look for a measured profile; empty: it does."""
    option, tokens = longest_step(vllm_config)
    stages = vllm_config.parallel_config.pipeline_parallel_size
    cases = {
        f"{CALIBRATE} is 0": not uses_profile_cache(),
        "the budget holds the longest request": holds_longest(vllm_config, config),
        f"--pipeline-parallel-size is {stages}, no worker has all layers": stages > 1,
        "--load-format is dummy": vllm_config.load_config.load_format == "dummy",
        f"{option} is {tokens}, to measure them takes {FEWEST_TOKENS}": (
            tokens < FEWEST_TOKENS
        ),
    }
    return next((why for why, holds in cases.items() if holds), "")


def holds_longest(vllm_config: VllmConfig, config: H2OConfig) -> bool:
    """Whether the budget holds the longest request, so that nothing is ever evicted."""
    longest = longest_request(vllm_config)
    return layout_of(vllm_config, config).budget >= longest


def _asked_tokens(vllm_config: VllmConfig) -> int:
    return min(longest_step(vllm_config)[1], MOST_TOKENS)


def _found_or_measured(model: LoadedModel) -> HeadProfile | None:
    """What the cache has, unless longer texts can be read now."""
    mine = answers(model)
    config = h2o_config(model.vllm_config)
    assert config is not None
    found = _found(model, mine, gated=config.prompt_score != ATTENTION)
    enough = found and (found.gate or not config.gated)
    asked = _asked_tokens(model.vllm_config)
    if found and enough and found.context_tokens >= asked:
        return found
    parallel = model.vllm_config.parallel_config
    if parallel.data_parallel_size > 1 or parallel.enable_eplb:
        # Passes of the ranks belong together, and another may have found a file.
        if not found:
            logger.info_once(
                "H2O gives all KV heads the same budget: with data parallelism or EPLB "
                "a model's heads are not measured; start it once without, or %s",
                _OFFLINE,
            )
        return found
    texts, kind = texts_to_read(model.vllm_config.model_config, asked)
    shape = len(model.layers), model.vllm_config.model_config.get_total_num_kv_heads()
    progress = Progress(cache.progress_folder(mine, *shape, texts))
    # Who insists on a gate waits for it: there is none before all has been read.
    seconds = math.inf if config.gated else most_seconds()
    profile, complete = measure(model, texts, kind, progress, seconds)
    if complete:
        _keep(mine, profile)
        return profile
    logger.warning_once(
        "H2O has not measured this model to the end, only by %s, since %s is %g: the "
        "next start reads on. Until then quality may be lower",
        profile.measured_on, CALIBRATE_SECONDS, seconds,
    )  # fmt: skip
    return found or profile


def _found(
    model: LoadedModel, mine: Sequence[float], gated: bool
) -> HeadProfile | None:
    """What the cache has for a model with these answers, with a gate if one is needed.

    The first rank looks, so that all have the same.
    """
    found = None
    if get_tensor_model_parallel_rank() == 0:
        heads = model.vllm_config.model_config.get_total_num_kv_heads()
        try:
            found = cache.find(mine, len(model.layers), heads, gated)
        except OSError as error:
            logger.warning_once(
                "H2O has no cache of head profiles (VLLM_H2O_CACHE): %s",
                shortened(error),
            )
    found = of_first_rank(found)
    if found is None:
        return None
    path, profile = found
    logger.info_once("H2O knows this model's heads from %s", path)
    return profile


def _keep(mine: Sequence[float], profile: HeadProfile) -> None:
    """Write the profile of a model with these answers to the cache."""
    if get_tensor_model_parallel_rank():
        return
    try:
        logger.info_once("H2O keeps what it measured in %s", cache.keep(mine, profile))
    except OSError as error:
        logger.warning_once(
            "H2O can not keep what it measured and will measure it again at the next "
            "start (%s): set VLLM_H2O_CACHE to a folder that can be written to",
            shortened(error),
        )

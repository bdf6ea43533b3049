"""What H2O needs of vLLM's model runners, V1 and V2, on every platform.

Target: `_determine_batch_execution_and_padding` of runner V1,
    `gather_batch_req_state` of runner V2, and where vLLM speculates
    `_update_states_after_model_execute` of V1, `postprocess_sampled` of V2; of the
    worker's own runner only.
Why: the metadata builder must know which request a row is, and both runners take a
    batch of one token per request for a decode. A prompt's step may have one token
    too, and the CUDA graph of a resident decode must not be replayed for it. What
    drafts have changed that were refused must be undone before the next step.
How: all are wrapped. V1 keeps its batch in row order; V2 orders each step anew, and
    says how in what it returns. With a prompt in the batch both then say that it is no
    uniform decode, which vLLM runs piecewise, with attention outside the graphs. The
    last is called with what was sampled, right after that.
Upstream: not proposed.
Remove when: a metadata builder gets request ids and what was sampled, and may veto a
    full graph.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from vllm_h2o.core.compat import INSTALL

if TYPE_CHECKING:
    from vllm.v1.worker.utils import AttentionGroup

    from vllm_h2o.attention.step import StepRows

_V1 = "_determine_batch_execution_and_padding"
_V2 = "gather_batch_req_state"
_SAMPLED_V1 = "_update_states_after_model_execute"
_SAMPLED_V2 = "postprocess_sampled"


def follow(runner: Any, step: StepRows, is_v2: bool) -> None:
    """Connect the steps to a runner, once.

    Raises:
        RuntimeError: The runner is none that H2O knows.
    """
    name = _V2 if is_v2 else _V1
    wrapped = getattr(runner, name, None)
    if wrapped is None:
        raise RuntimeError(
            f"H2O does not know the model runner {type(runner).__name__}, which has no "
            f"{name}: {INSTALL}, or drop --kv-policy"
        )
    if hasattr(wrapped, "h2o_step"):
        return
    wrapper = _following_v2(wrapped, step) if is_v2 else _following_v1(wrapped, step)
    wrapper.h2o_step = step
    setattr(runner, name, wrapper)
    if not is_v2:
        step.request_ids = lambda: runner.input_batch.req_ids
    if runner.speculative_config is not None:
        name, settling = (
            (_SAMPLED_V2, _settling_v2) if is_v2 else (_SAMPLED_V1, _settling_v1)
        )
        setattr(runner, name, settling(getattr(runner, name), step))


def _following_v1(determine: Any, step: StepRows) -> Any:
    @functools.wraps(determine)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not step.all_decode:
            kwargs["force_uniform_decode"] = False
        return determine(*args, **kwargs)

    return wrapper


def _settling_v1(update: Any, step: StepRows) -> Any:
    @functools.wraps(update)
    def wrapper(output_token_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # -1 behind the last one that a row has given.
        step.settle((output_token_ids != -1).sum(dim=1))
        return update(output_token_ids, *args, **kwargs)

    return wrapper


def _settling_v2(update: Any, step: StepRows) -> Any:
    @functools.wraps(update)
    def wrapper(
        idx_mapping: Any,
        sampled_tokens: Any,
        num_sampled: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        step.settle(num_sampled)
        return update(idx_mapping, sampled_tokens, num_sampled, *args, **kwargs)

    return wrapper


def _following_v2(gather: Any, step: StepRows) -> Any:
    @functools.wraps(gather)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        state, uniform_token_count = gather(*args, **kwargs)
        request_ids = state.req_ids if state is not None else ()
        step.request_ids = lambda: request_ids
        return state, uniform_token_count if step.all_decode else None

    return wrapper


def attention_groups(runner: Any, is_v2: bool) -> Iterator[AttentionGroup]:
    """The groups whose builders want the plan."""
    if is_v2:
        return (group for groups in runner.attn_groups for group in groups)
    return runner._attn_group_iterator()

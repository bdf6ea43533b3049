"""What a request asks of H2O is read before it is queued.

Target: `vllm.v1.engine.input_processor.InputProcessor.process_inputs`.
Why: a bad wish has to be refused where vLLM refuses bad requests, in the process that
    talks to the client: there an error is HTTP 400 and disturbs nobody. vLLM's own
    hooks there (`LogitsProcessor.validate_params`, `Platform.validate_request`) do not
    know the engine's config.
How: the method is wrapped on the class, once, when an engine with H2O is configured;
    requests of engines without it pass as they are. What is around this method, such
    as requests made elsewhere, the scheduler checks again.
Upstream: a hook of a scheduler class that validates a request's parameters.
Remove when: vLLM has one.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from vllm_h2o.core.settings import h2o_config, layout_of, longest_request
from vllm_h2o.policy.request import RequestLimits, RequestOptions, asks_anything

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine import EngineCoreRequest


def check_requests() -> None:
    """Let input processors check what requests ask of H2O; idempotent."""
    from vllm.v1.engine.input_processor import InputProcessor

    process_inputs = InputProcessor.process_inputs
    if not hasattr(process_inputs, "checks_h2o"):
        InputProcessor.process_inputs = _checking(process_inputs)  # type: ignore[method-assign]


def _checking(process_inputs: Any) -> Any:
    @functools.wraps(process_inputs)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> EngineCoreRequest:
        from vllm.exceptions import VLLMValidationError

        request = process_inputs(self, *args, **kwargs)
        params, config = request.sampling_params, self.vllm_config
        asks = params is not None and asks_anything(params.extra_args)
        if asks and h2o_config(config) is not None:
            try:
                limits, most = limits_of(config), _most_tokens(request, config)
                options = RequestOptions.parse(params.extra_args, limits, most)
                longest = config.model_config.max_model_len
                room = longest if request.resumable else most
                options.check_length(limits.config, room)
            except ValueError as error:
                raise VLLMValidationError(str(error), parameter="extra_args") from error
        return request

    wrapped.checks_h2o = True  # type: ignore[attr-defined]
    return wrapped


def limits_of(vllm_config: VllmConfig) -> RequestLimits:
    """What requests may ask of an engine, as far as this process knows it."""
    config = h2o_config(vllm_config)
    assert config is not None
    device, longest = (
        vllm_config.device_config.device_type,
        longest_request(vllm_config),
    )
    return RequestLimits.of(config, layout_of(vllm_config, config), device, longest)


def _most_tokens(request: EngineCoreRequest, vllm_config: VllmConfig) -> int:
    """Tokens that a request can have at its end."""
    from vllm.utils import length_from_prompt_token_ids_or_embeds

    params = request.sampling_params
    assert params is not None and params.max_tokens is not None
    prompt = length_from_prompt_token_ids_or_embeds(
        request.prompt_token_ids, request.prompt_embeds
    )
    return min(prompt + params.max_tokens, vllm_config.model_config.max_model_len)

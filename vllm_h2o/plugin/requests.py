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

from vllm_h2o.core.settings import h2o_config
from vllm_h2o.policy.request import RequestOptions

if TYPE_CHECKING:
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
        config, params = h2o_config(self.vllm_config), request.sampling_params
        if config is not None and params is not None:
            try:
                RequestOptions.parse(params.extra_args, config)
            except ValueError as error:
                raise VLLMValidationError(str(error), parameter="extra_args") from error
        return request

    wrapped.checks_h2o = True  # type: ignore[attr-defined]
    return wrapped

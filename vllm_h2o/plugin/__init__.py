"""Wiring: how the pieces reach the inside of vLLM.

`early_hook` is the only entry point. It adds the engine arguments; these name
our scheduler and worker classes, and the worker registers the attention
backend. With no H2O option given, none of that happens.
"""

from __future__ import annotations

import functools
import os


def early_hook() -> None:
    """Entry point `vllm.platform_plugins`: no platform, but early enough.

    vLLM builds `EngineArgs` before general plugins load, and looks for
    platforms before it imports the module of `EngineArgs`.
    """
    from vllm_h2o.plugin.import_hook import when_imported

    when_imported("vllm.engine.arg_utils", _add_engine_args)
    when_imported("vllm.envs", _add_variables)


def _add_engine_args(module) -> None:
    from vllm_h2o.plugin.engine_args import extend

    extend(module)


_OUR_VARIABLES = (
    "VLLM_H2O_CACHE",
    "VLLM_H2O_CALIBRATE",
    "VLLM_H2O_CALIBRATE_SECONDS",
    "VLLM_H2O_KERNELS",
)


def _add_variables(module) -> None:
    """Name what is set of our environment variables: vLLM warns of those that it does
    not know, or refuses them. One that is not set is no part of what it hashes."""
    for name in _OUR_VARIABLES:
        if name in os.environ:
            module.environment_variables[name] = functools.partial(os.getenv, name)

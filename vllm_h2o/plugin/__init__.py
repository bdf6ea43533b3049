"""Wiring: how the pieces reach the inside of vLLM.

`early_hook` is the only entry point. It adds the engine arguments; these name
our scheduler and worker classes, and the worker registers the attention
backend. With no H2O option given, none of that happens.
"""

from __future__ import annotations


def early_hook() -> None:
    """Entry point `vllm.platform_plugins`: no platform, but early enough.

    vLLM builds `EngineArgs` before general plugins load, and looks for
    platforms before it imports the module of `EngineArgs`.
    """
    from vllm_h2o.plugin.import_hook import when_imported

    when_imported("vllm.engine.arg_utils", _add_engine_args)


def _add_engine_args(module) -> None:
    from vllm_h2o.plugin.engine_args import extend

    extend(module)

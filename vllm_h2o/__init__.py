"""H2O (Heavy-Hitter Oracle) KV-cache eviction for vLLM.

`vllm serve MODEL --kv-policy h2o` and `LLM(MODEL, enable_h2o=True)` bound the
KV cache of every request to a budget of token slots. See README.md.
"""

__version__ = "0.1.0"

__all__ = ["__version__", "stats"]


def stats(llm) -> dict[str, int]:
    """Return the H2O counters of a running `vllm.LLM`.

    Args:
        llm: A `vllm.LLM` made with a `kv_policy` other than `full`.

    Returns:
        `transitions`, `tokens_evicted`, `blocks_freed`, `blocks_in_use`,
        `peak_blocks_in_use`, `preemptions`, `kept_requests`, `continued_tokens`:
        counts as of the last step that the engine scheduled. In an engine of this
        process `blocks_in_use` is of now.

    Raises:
        ValueError: H2O is off in this engine.
    """
    from vllm_h2o.core.settings import h2o_config

    if h2o_config(llm.llm_engine.vllm_config) is None:
        raise ValueError(
            "H2O is off in this engine, so it has no counters: "
            "make it with LLM(MODEL, enable_h2o=True)"
        )
    in_this_process = getattr(llm.llm_engine.engine_core, "engine_core", None)
    if in_this_process is not None:
        # No step comes behind the last request's, to tell the workers of its end.
        return in_this_process.scheduler.counters()
    return llm.collective_rpc("h2o_stats")[0]

"""Which of vLLM's tests fail with H2O's scheduler in stock's place, and why they may.

By a part of their names. With a budget that never binds everything else is as stock's;
with a small one tests may miss what they expect of blocks, but nothing ends, hangs or
leaks.
"""

from __future__ import annotations

_ON_NO_SCHEDULER = "calls a scheduler's methods on an object that is none"
_PARTS_OF_BLOCKS = (
    "hits of a part of a block (models with states), which H2O's layers do not take"
)
_READ_BEFORE = "sets what H2O's scheduler has read when it was made"
_SESSIONS = (
    "a session's next turn is read from its first token, unless H2O keeps what the one "
    "before has held"
)

HARNESS: dict[str, str] = {
    "test_abort_request_when_structured_output_fsm_cannot_advance": _ON_NO_SCHEDULER,
    "test_connector_completes_partial_prefix_without_importing": _ON_NO_SCHEDULER,
    "test_hybrid_cache_mamba_align_shared_prefix_detection": _ON_NO_SCHEDULER,
    "test_mamba_eagle_resume_checkpoint": _ON_NO_SCHEDULER,
    "test_mamba_align_encoder_cache_cap_makes_progress": _READ_BEFORE,
    "test_mamba_align_eagle_schedules_encoder_at_boundary": _READ_BEFORE,
    "test_hisparse_capacity_query_does_not_require_hot_blocks": (
        "asks a manager of a request that it was not told of"
    ),
    "test_cow_retentions_deferred_until_copy_step_processed": (
        "takes blocks from the pool that no request holds, and copies them by hand"
    ),
}
"""With any budget: what tests do that no engine does."""

DIFFERENT: dict[str, str] = HARNESS | {
    "test_spec_decode_padding_first_decode_step": (
        "a prompt ends with a step of its own, which is not padded with drafts"
    ),
    "test_partial_prefix_cache_hits.py::test_dcp_": _PARTS_OF_BLOCKS,
    "test_partial_prefix_cache_hits.py::test_hybrid_": _PARTS_OF_BLOCKS,
    "test_kpool_tail_supports_128_token_partial_hash_hits": _PARTS_OF_BLOCKS,
    "test_resumable_request_handoff": _SESSIONS,
    "test_streaming_e2e_lifecycle": _SESSIONS,
    "test_update_request_as_session_with_output_tokens": _SESSIONS,
}
"""With a budget that never binds."""

ENDED: dict[str, str] = HARNESS | {
    "test_kv_pressure_preemption_with_inflight_output[0]": (
        "has four steps in flight where the config says one stage: H2O counts those of "
        "the config, and tests/core has up to five of them"
    ),
}
"""With a small budget: what is raised elsewhere than in vLLM's tests."""

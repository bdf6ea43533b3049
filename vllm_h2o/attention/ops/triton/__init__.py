"""The Triton kernels: resident decode, prompt scoring, the transition, reading on.

Needs torch and triton, not vLLM. Nothing outside this package imports triton.
Without a GPU the kernels run under Triton's interpreter (TRITON_INTERPRET=1).
"""

from vllm_h2o.attention.ops.reference import attend_observed, start
from vllm_h2o.attention.ops.triton.chunks import (
    chunk_end_bytes,
    compress_chunk,
    move_bytes,
    move_keys,
)
from vllm_h2o.attention.ops.triton.gate import score_by_gate
from vllm_h2o.attention.ops.triton.growth import order_rings
from vllm_h2o.attention.ops.triton.launch import (
    CAPABILITIES,
    FORMS,
    check_supported,
    decode_resident,
    draft_log,
)
from vllm_h2o.attention.ops.triton.layers import batches
from vllm_h2o.attention.ops.triton.reading_on import read_bytes, read_on
from vllm_h2o.attention.ops.triton.scoring import observe, own_observe_bytes
from vllm_h2o.attention.ops.triton.selection import select
from vllm_h2o.attention.ops.triton.splitting import (
    DecodeScratch,
    Tuning,
    slots_with_logits,
)
from vllm_h2o.attention.ops.triton.take_back import take_back
from vllm_h2o.attention.ops.triton.transition import (
    copy_kept,
    layer_bytes,
    own_score_bytes,
    transition,
)

__all__ = [
    "CAPABILITIES",
    "FORMS",
    "DecodeScratch",
    "Tuning",
    "attend_observed",
    "batches",
    "check_supported",
    "chunk_end_bytes",
    "compress_chunk",
    "select",
    "copy_kept",
    "decode_resident",
    "draft_log",
    "layer_bytes",
    "move_bytes",
    "move_keys",
    "observe",
    "order_rings",
    "own_observe_bytes",
    "own_score_bytes",
    "read_bytes",
    "read_on",
    "score_by_gate",
    "slots_with_logits",
    "start",
    "take_back",
    "transition",
]

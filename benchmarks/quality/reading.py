"""What every system outside the engine is asked: be forced through a text, answer.

A `Reader` is one model with one cache under one eviction policy. Its first `read`
is the prompt, at whose end it compresses; what follows is read token by token, so
that it evicts while it goes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
)


class Reader(Protocol):
    """A model reading texts of equal length side by side.

    Attributes:
        held_tokens: the most tokens that a query after the prompt attended to,
            itself included.
    """

    held_tokens: int

    def read(self, tokens: torch.Tensor) -> torch.Tensor:
        """Read on.

        Args:
            tokens: `[num_texts, n]` int64, the prompt first, then `n` = 1.

        Returns:
            `[num_texts, vocab]` float32 logits after the last of them.
        """
        ...


@dataclass
class ForcedRecord:
    """One text under one policy; entry i predicts the i-th forced token.

    Attributes:
        logprobs: natural log-probability of the forced token.
        top1: the model's own first choice.
        full_logprobs: the full cache's log-probability of the forced token; empty
            without a reference.
        kl: KL(full cache || this) in nats; empty likewise.
        agreed: whether the first choice is the full cache's; empty likewise.
        held_tokens: the most tokens that a query after the prompt attended to.
    """

    logprobs: list[float] = field(default_factory=list)
    top1: list[int] = field(default_factory=list)
    full_logprobs: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    agreed: list[bool] = field(default_factory=list)
    held_tokens: int = 0

    def add(self, logits: torch.Tensor, token: int, full: np.ndarray | None) -> None:
        """Append one prediction from `[vocab]` logits and `full`'s log-softmax."""
        logprobs = logits.float().log_softmax(dim=-1)
        self.logprobs.append(logprobs[token].item())
        self.top1.append(int(logits.argmax()))
        if full is not None:
            # Renormalized, or float16's rounding would add a bias of about 1e-4.
            theirs = torch.from_numpy(full.astype(np.float32)).log_softmax(dim=-1)
            self.full_logprobs.append(theirs[token].item())
            self.kl.append((theirs.exp() * (theirs - logprobs)).sum().item())
            self.agreed.append(self.top1[-1] == int(theirs.argmax()))


def write_reference(path: Path, logits: torch.Tensor) -> None:
    """Save the log-softmax of `[num_tokens, vocab]` logits as a float16 .npy."""
    shape = tuple(logits.shape)
    file = np.lib.format.open_memmap(path, mode="w+", dtype=np.float16, shape=shape)
    for row, row_logits in zip(file, logits, strict=True):
        row[:] = row_logits.float().log_softmax(dim=-1).numpy()
    file.flush()


def open_references(paths: list[Path] | None, count: int) -> list[np.ndarray | None]:
    """Memory-mapped `[num_tokens, vocab]` log-softmax per text, or None for each."""
    if paths is None:
        return [None] * count
    if len(paths) != count:
        raise ValueError(f"{count} texts have {len(paths)} references: give one each")
    return [np.load(path, mmap_mode="r") for path in paths]


def stack(name: str, texts: list[list[int]]) -> torch.Tensor:
    """`[num_texts, n]` int64.

    Raises:
        ValueError: the texts are not of equal length.
    """
    lengths = sorted({len(text) for text in texts})
    if len(lengths) != 1:
        raise ValueError(f"{name} have {lengths} tokens: cut them to one length")
    return torch.tensor(texts)


def record_all(
    logits: torch.Tensor, tokens: list[int], reference: Path | None
) -> ForcedRecord:
    """A record of `[num_tokens, vocab]` logits that one pass gave."""
    record = ForcedRecord()
    (full,) = open_references(reference and [reference], 1)
    for i, token in enumerate(tokens):
        record.add(logits[i], token, None if full is None else full[i])
    return record


@torch.no_grad()
def force(
    reader: Reader,
    prompts: list[list[int]],
    continuations: list[list[int]],
    references: list[Path] | None,
) -> list[ForcedRecord]:
    """Read the prompts, then the continuations token by token, and keep records.

    Args:
        reader: fresh, with a cache of its own.
        prompts: one per text, of equal length.
        continuations: one per text, of equal length.
        references: one file per text, as `write_reference` makes them from the
            full cache.
    """
    steps = stack("continuations", continuations)
    full = open_references(references, len(prompts))
    records = [ForcedRecord() for _ in prompts]
    logits = reader.read(stack("prompts", prompts))
    for i, tokens in enumerate(steps.unbind(dim=1)):
        if i:
            logits = reader.read(steps[:, i - 1 : i])
        for text, record in enumerate(records):
            rows = full[text]
            record.add(
                logits[text], int(tokens[text]), None if rows is None else rows[i]
            )
    for record in records:
        record.held_tokens = reader.held_tokens
    return records


def stop_token_ids(config: GenerationConfig) -> set[int]:
    """The tokens that end an answer."""
    stop = config.eos_token_id
    return set(stop if isinstance(stop, list) else [stop])


def until_stop(answer: list[int], stops: set[int]) -> list[int]:
    """The answer without its first stop token and what follows it."""
    end = next((i for i, token in enumerate(answer) if token in stops), None)
    return answer[:end]


@torch.no_grad()
def answer_greedily(
    reader: Reader,
    context: list[int],
    question: list[int],
    max_tokens: int,
    question_known: bool,
    stops: set[int],
) -> list[int]:
    """The greedy answer, without the stop token.

    Args:
        reader: fresh, with a cache of its own.
        context: tokens in which the answer is.
        question: tokens after it, not empty.
        max_tokens: of the answer.
        question_known: compress after context and question; else after the
            context, and read the question token by token while evicting.
        stops: tokens that end it.
    """
    prompt, rest = (context + question, []) if question_known else (context, question)
    logits = reader.read(torch.tensor([prompt]))
    for token in rest:
        logits = reader.read(torch.tensor([[token]]))
    answer: list[int] = []
    while len(answer) < max_tokens:
        token = int(logits[0].argmax())
        if token in stops:
            break
        answer.append(token)
        if len(answer) < max_tokens:
            logits = reader.read(torch.tensor([[token]]))
    return answer


class AnswersGreedily:
    """Runners that have a fresh `Reader` for each question.

    Attributes:
        stops: Tokens that end an answer.
    """

    stops: set[int]

    def reader(
        self, policy: Any, budget_tokens: int, prompt_tokens: int
    ) -> AbstractContextManager[Reader]:
        """A fresh reader under a policy and a budget, for a prompt of that length."""
        raise NotImplementedError

    def answer(
        self,
        policy: Any,
        context: list[int],
        question: list[int],
        max_tokens: int,
        budget_tokens: int,
        question_known: bool,
    ) -> list[int]:
        """The greedy answer; see `answer_greedily`.

        A question that is not known is read after the context was compressed.
        """
        prompt_tokens = len(context) + (len(question) if question_known else 0)
        with self.reader(policy, budget_tokens, prompt_tokens) as reader:
            return answer_greedily(
                reader, context, question, max_tokens, question_known, self.stops
            )


class LlamaRunner(AnswersGreedily):
    """A llama in float32 with an attention of ours, read by a fresh reader each time.

    Args:
        model_folder: As `from_pretrained` takes it.
        attention: What transformers is to call the attention.
        attend: It, after transformers' attention interface.
        reader_of: Makes a `Reader` of the model, the policy and the budget in tokens.
    """

    def __init__(
        self,
        model_folder: Path,
        attention: str,
        attend: Callable[..., Any],
        reader_of: Callable[[PreTrainedModel, Any, int], Reader],
    ) -> None:
        AttentionInterface.register(attention, attend)
        self.model = AutoModelForCausalLM.from_pretrained(
            model_folder, dtype=torch.float32, attn_implementation=attention
        ).eval()
        self.reader_of = reader_of
        self.stops = stop_token_ids(self.model.generation_config)

    def forced(
        self,
        policy: Any,
        prompts: list[list[int]],
        continuations: list[list[int]],
        budget_tokens: int,
        references: list[Path] | None,
    ) -> list[ForcedRecord]:
        """Read each prompt, then be forced through its continuation, as one batch.

        Args are those of `PeerRunner.forced`.
        """
        reader = self.reader_of(self.model, policy, budget_tokens)
        return force(reader, prompts, continuations, references)

    def reader(
        self, policy: Any, budget_tokens: int, _prompt_tokens: int
    ) -> AbstractContextManager[Reader]:
        """See the base class."""
        return nullcontext(self.reader_of(self.model, policy, budget_tokens))

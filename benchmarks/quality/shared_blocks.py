"""Block-granular H2O with shared decisions, as paged engines do it: the reference.

Plain torch inside transformers' llama. Every `unit_tokens` tokens one decision is
made, over whole blocks (or single tokens, at 1), and shared by whom the policy
says: by nobody, by all KV heads of a layer, or by all heads of all layers. Half of
the budget is heavy, half recent, and the block of the sinks is pinned.

Only what is kept is stored: each KV head has as many slot blocks as the budget,
and a new block takes the slot block of the one that it evicts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from benchmarks.quality.reading import LlamaRunner

ATTENTION = "shared_blocks"
SHARED_BY = ("head", "layer", "model")
SCORES = ("sum", "mean", "random")
NUM_SINKS = 4
UNUSED = 1 << 40  # the block number of a slot block that holds nothing


@dataclass(frozen=True)
class BlockPolicy:
    """What is evicted at once, and who shares the decision.

    Attributes:
        unit_tokens: tokens of a block; 1 for H2O by tokens.
        shared_by: "head" (each KV head decides), "layer" or "model".
        score: of a token: the "sum" of the probabilities it received, its "mean"
            over the queries that could see it, or "random".
        seed: of the random score.
    """

    unit_tokens: int = 32
    shared_by: str = "head"
    score: str = "sum"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.shared_by not in SHARED_BY:
            raise ValueError(f"shared_by={self.shared_by!r}: one of {SHARED_BY}")
        if self.score not in SCORES:
            raise ValueError(f"score={self.score!r}: one of {SCORES}")


class BlockStore:
    """Keys, values and scores of what is kept, by layer, text and KV head.

    Blocks are numbered by position: token p is in block p // `unit_tokens`. State
    has the shape `[num_layers, num_texts, num_kv_heads, slots, ...]`; a slot holds
    one block, or nothing while its number is `UNUSED`. Heads that share decisions
    have the same blocks in the same slots.
    """

    def __init__(self, policy: BlockPolicy, budget_tokens: int) -> None:
        self.policy = policy
        self.unit = policy.unit_tokens
        self.num_slots = budget_tokens // self.unit
        self.recent_blocks = self.num_slots // 2
        self.pinned_blocks = -(-NUM_SINKS // self.unit)
        if self.num_slots - self.recent_blocks <= self.pinned_blocks:
            raise ValueError(
                f"a budget of {budget_tokens} tokens has {self.num_slots} blocks of "
                f"{self.unit}: give at least {2 * self.pinned_blocks + 2} blocks"
            )
        self.generator = torch.Generator().manual_seed(policy.seed)
        self.num_tokens = 0
        self.prompt: list[tuple[torch.Tensor, ...]] = []

    def add_prompt(
        self, keys: torch.Tensor, values: torch.Tensor, scores: torch.Tensor
    ) -> None:
        """Take one layer's `[num_texts, num_kv_heads, n, ...]`, layer after layer."""
        self.prompt.append((keys, values, scores))

    def compress_prompt(self) -> None:
        """Move the prompt into slots: all of it, or sinks, heavy and recent blocks."""
        keys, values, scores = map(torch.stack, zip(*self.prompt, strict=True))
        self.prompt.clear()
        self.num_tokens = scores.shape[3]
        num_blocks = -(-self.num_tokens // self.unit)
        padding = num_blocks * self.unit - self.num_tokens
        scores = F.pad(scores, (0, padding)).unflatten(3, (-1, self.unit))
        blocks = torch.arange(num_blocks).expand(scores.shape[:4])
        if num_blocks > self.num_slots:
            blocks = self._choose(scores, blocks)
        free = max(0, self.num_slots - num_blocks)
        self.blocks = F.pad(blocks, (0, free), value=UNUSED)
        self.scores = F.pad(_gather(scores, blocks), (0, 0, 0, free))
        self.keys, self.values = (
            F.pad(
                _gather(
                    F.pad(states, (0, 0, 0, padding)).unflatten(3, (-1, self.unit)),
                    blocks,
                ),
                (0, 0, 0, 0, 0, free),
            )
            for states in (keys, values)
        )
        # The slot of the block that grows: the last one that is in use.
        self.growing = torch.full(blocks.shape[:3], blocks.shape[3] - 1)

    def make_room(self) -> None:
        """Before the next token: at a block's first, give it a slot, evicting."""
        if self.num_tokens % self.unit == 0:
            block = self.num_tokens // self.unit
            if block < self.num_slots:
                self.growing = torch.full(self.growing.shape, block)
            else:
                evictable = (self.blocks >= self.pinned_blocks) & (
                    self.blocks <= block - self.recent_blocks
                )
                values = self._values(self.scores, self.blocks)
                values = values.masked_fill(~evictable, float("inf"))
                self.growing = values.argmin(dim=-1)
            slot = self.growing.unsqueeze(-1)
            self.blocks.scatter_(3, slot, block)
            self.scores.scatter_(
                3, slot.unsqueeze(-1).expand(*slot.shape, self.unit), 0.0
            )
        self.num_tokens += 1

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store the newest token's `[num_texts, num_kv_heads, head_dim]`."""
        texts = torch.arange(key.shape[0])[:, None]
        heads = torch.arange(key.shape[1])
        offset = (self.num_tokens - 1) % self.unit
        self.keys[layer][texts, heads, self.growing[layer], offset] = key
        self.values[layer][texts, heads, self.growing[layer], offset] = value

    def visible(self, layer: int) -> torch.Tensor:
        """`[num_texts, num_kv_heads, slots * unit_tokens]` bool: holds a token."""
        first = self.blocks[layer].unsqueeze(-1) * self.unit
        return (first + torch.arange(self.unit) < self.num_tokens).flatten(2)

    def _choose(self, scores: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """The numbers of the prompt's blocks that stay, in order of time."""
        values = self._values(scores, blocks)
        values[..., : self.pinned_blocks] = float("inf")
        values[..., values.shape[3] - self.recent_blocks :] = float("inf")
        return values.topk(self.num_slots, dim=-1).indices.sort(dim=-1).values

    def _values(self, scores: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """What blocks are compared by, `[num_layers, num_texts, heads, blocks]`."""
        if self.policy.score == "random":
            values = torch.rand(blocks.shape, generator=self.generator)
        elif self.policy.score == "mean":
            positions = blocks.unsqueeze(-1) * self.unit + torch.arange(self.unit)
            queries = (self.num_tokens - positions).clamp(min=1)
            values = (scores / queries).sum(dim=-1)
        else:
            values = scores.sum(dim=-1)
        shared = {"head": (), "layer": (2,), "model": (0, 2)}[self.policy.shared_by]
        for dim in shared:
            values = values.sum(dim=dim, keepdim=True)
        return values.expand(blocks.shape).clone()


def _gather(states: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Pick blocks from `[num_layers, num_texts, num_kv_heads, num_blocks, ...]`."""
    index = blocks.view(*blocks.shape, *(1,) * (states.dim() - 4))
    return states.gather(3, index.expand(*blocks.shape, *states.shape[4:]))


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    store: BlockStore,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: over the store, scoring what it holds.

    `query` is `[num_texts, num_heads, n, head_dim]`; `key` and `value`, with
    `num_kv_heads`, are those of the same n tokens: the prompt's, or one.
    """
    num_kv_heads, n = key.shape[1:3]
    layer = module.layer_idx
    query = query.unflatten(1, (num_kv_heads, -1))
    if n > 1:
        mask = torch.ones(n, n, dtype=torch.bool).tril()
        keys, values = key, value
    else:
        store.append(layer, key[:, :, 0], value[:, :, 0])
        mask = store.visible(layer)[:, :, None, None]
        keys, values = (
            store.keys[layer].flatten(2, 3),
            store.values[layer].flatten(2, 3),
        )
    logits = query @ keys.unsqueeze(2).transpose(-1, -2) * scaling
    probabilities = logits.masked_fill_(~mask, float("-inf")).softmax(dim=-1)
    scores = probabilities.sum(dim=(2, 3))
    if n > 1:
        store.add_prompt(key, value, scores)
    else:
        store.scores[layer] += scores.unflatten(2, (-1, store.unit))
    mixed = probabilities @ values.unsqueeze(2)
    return mixed.flatten(1, 2).transpose(1, 2).contiguous(), None


class BlockReader:
    """A `Reader`: transformers' llama with a `BlockStore` for its cache."""

    def __init__(self, model: PreTrainedModel, store: BlockStore) -> None:
        self.model = model
        self.store = store
        self.held_tokens = 0

    def read(self, tokens: torch.Tensor) -> torch.Tensor:
        """Read the prompt, then single tokens."""
        start, n = self.store.num_tokens, tokens.shape[1]
        if start:
            assert n == 1, "what follows the prompt is read token by token"
            self.store.make_room()
            held = int(self.store.visible(0)[0, 0].sum())
            self.held_tokens = max(self.held_tokens, held)
        logits = self.model(
            input_ids=tokens,
            position_ids=torch.arange(start, start + n)[None],
            use_cache=False,
            logits_to_keep=1,
            store=self.store,
        ).logits[:, -1]
        if not start:
            self.store.compress_prompt()
        return logits


class SharedBlocks(LlamaRunner):
    """Block policies; a KV head never holds more than the budget, the newest token
    included."""

    def __init__(self, model_folder: Path) -> None:
        def reader_of(
            model: PreTrainedModel, policy: BlockPolicy, budget_tokens: int
        ) -> BlockReader:
            return BlockReader(model, BlockStore(policy, budget_tokens))

        super().__init__(model_folder, ATTENTION, attend, reader_of)

"""CAKE as its authors evict, in plain torch inside transformers' llama.

What the preset `cake` is compared with; what differs is in its description
(`vllm_h2o.policy.methods.cake`). Formulas and their order are those of
`antgroup/cakekv` (arXiv 2503.12491) with t1 = t2 = 1, its default, without its cascade,
which frees memory sooner but keeps the same tokens; a layer's share may differ by a
token or two, and a prompt within the budget is never evicted from.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from benchmarks.quality.reading import ForcedRecord, LlamaRunner

ATTENTION = "cake"
WINDOW, POOLING, GAMMA = 32, 5, 200.0


class CakeStore:
    """What is kept of one text, by layer: KV heads of a layer keep equally many.

    Attributes:
        keys: Of each layer, `[1, num_kv_heads, kept, head_dim]`.
        values: The same.
        budgets: Of each layer, tokens before the last `WINDOW`; empty: all are kept.
    """

    def __init__(self, budget_tokens: int) -> None:
        if budget_tokens <= WINDOW:
            raise ValueError(f"budget_tokens={budget_tokens}: give more than {WINDOW}")
        self.budget_tokens = budget_tokens
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.budgets: list[int] = []
        self._preferences: list[torch.Tensor] = []
        self._scores: list[torch.Tensor] = []

    def add_prompt(
        self, keys: torch.Tensor, values: torch.Tensor, attention: torch.Tensor
    ) -> None:
        """Take one layer's prompt, layer after layer.

        Args:
            keys: `[1, num_kv_heads, n, head_dim]`.
            values: The same.
            attention: `[num_kv_heads, group, WINDOW, n]` of the last queries.
        """
        old = attention[..., :-WINDOW]
        self.keys.append(keys)
        self.values.append(values)
        entropy = -(old * (old + 1e-10).log()).sum()
        self._preferences.append(entropy * old.var(dim=2).sum())
        self._scores.append(_pooled(old.mean(dim=2) + GAMMA * old.var(dim=2)))

    def compress_prompt(self) -> None:
        """Keep of each layer what it may, once all have read the prompt."""
        old = self.keys[0].shape[2] - WINDOW
        if old <= self.budget_tokens:
            return
        self.budgets = _shared_out(
            torch.stack(self._preferences), self.budget_tokens - WINDOW, old
        )
        for layer, scores in enumerate(self._scores):
            self._keep(layer, scores)

    def append(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add a token's, and return all that are held."""
        self.keys[layer] = torch.cat([self.keys[layer], keys], dim=2)
        self.values[layer] = torch.cat([self.values[layer], values], dim=2)
        return self.keys[layer], self.values[layer]

    def evict(self, layer: int, attention: torch.Tensor) -> None:
        """Drop what the newest query, `[num_kv_heads, group, held]`, looks at least."""
        if self.budgets and attention.shape[2] > self.budgets[layer] + WINDOW:
            self._keep(layer, _pooled(attention[..., :-WINDOW]))

    def _keep(self, layer: int, scores: torch.Tensor) -> None:
        """Those of `[num_kv_heads, held - WINDOW]` highest scores, in their order."""
        kept = scores.topk(min(self.budgets[layer], scores.shape[1])).indices
        for held in (self.keys, self.values):
            head_dim = held[layer].shape[3]
            index = kept[None, :, :, None].expand(-1, -1, -1, head_dim)
            best, last = held[layer].gather(2, index), held[layer][:, :, -WINDOW:]
            held[layer] = torch.cat([best, last], dim=2)


def _pooled(scores: torch.Tensor) -> torch.Tensor:
    """`[num_kv_heads, n]` of `[num_kv_heads, group, n]`: means of neighbours, heads."""
    return F.avg_pool1d(scores, POOLING, 1, POOLING // 2).mean(dim=1)


def _shared_out(preferences: torch.Tensor, average: int, most: int) -> list[int]:
    """Tokens of each layer; what is above `most` the others get in equal parts."""
    total = average * len(preferences)
    tokens = (preferences / preferences.sum() * total).long().clamp(max=most)
    while (left := total - int(tokens.sum())) > 0:
        below = (tokens < most).nonzero().flatten()
        tokens[below] += left // len(below)
        tokens[below[: left % len(below)]] += 1
        tokens.clamp_(max=most)
    return tokens.tolist()


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    store: CakeStore,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: over the store, which evicts.

    `query` is `[1, num_heads, n, head_dim]`; `key` and `value`, with `num_kv_heads`,
    are those of the same n tokens: the prompt's, or one.
    """
    num_kv_heads, n = key.shape[1:3]
    grouped = query[0].unflatten(0, (num_kv_heads, -1))
    if n > 1:
        last = grouped[:, :, -WINDOW:] @ key[0].unsqueeze(1).mT * scaling
        unseen = torch.ones(last.shape[2:], dtype=torch.bool).triu(n - WINDOW + 1)
        attention = last.masked_fill_(unseen, float("-inf")).softmax(dim=-1)
        store.add_prompt(key, value, attention)
        mixed = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
        return mixed.transpose(1, 2).contiguous(), None
    keys, values = store.append(module.layer_idx, key, value)
    attention = (grouped @ keys[0].unsqueeze(1).mT * scaling).softmax(dim=-1)
    mixed = attention @ values[0].unsqueeze(1)
    store.evict(module.layer_idx, attention[:, :, 0])
    return mixed.flatten(0, 1)[None].transpose(1, 2).contiguous(), None


class CakeReader:
    """A `Reader` of one text: transformers' llama with a `CakeStore` for its cache."""

    def __init__(self, model: PreTrainedModel, budget_tokens: int) -> None:
        self.model, self.store = model, CakeStore(budget_tokens)
        self.position = self.held_tokens = 0

    def read(self, tokens: torch.Tensor) -> torch.Tensor:
        """Read the prompt, then single tokens."""
        start, n = self.position, tokens.shape[1]
        self.position += n
        logits = self.model(
            input_ids=tokens,
            position_ids=torch.arange(start, start + n)[None],
            use_cache=False,
            logits_to_keep=1,
            store=self.store,
        ).logits[:, -1]
        if start:
            held = [keys.shape[2] for keys in self.store.keys]
            self.held_tokens = max(self.held_tokens, round(sum(held) / len(held)))
        else:
            self.store.compress_prompt()
        return logits


class CakeRunner(LlamaRunner):
    """CAKE; a KV head holds the budget on average."""

    def __init__(self, model_folder: Path) -> None:
        def reader_of(
            model: PreTrainedModel, policy: str, budget_tokens: int
        ) -> CakeReader:
            return CakeReader(model, budget_tokens)

        super().__init__(model_folder, ATTENTION, attend, reader_of)

    def forced(
        self,
        policy: str,
        prompts: list[list[int]],
        continuations: list[list[int]],
        budget_tokens: int,
        references: list[Path] | None,
    ) -> list[ForcedRecord]:
        """See the base class; one by one, since texts differ in what layers hold."""
        paths = [[path] for path in references] if references else [None] * len(prompts)
        return [
            record
            for prompt, tokens, path in zip(prompts, continuations, paths, strict=True)
            for record in super(CakeRunner, self).forced(
                policy, [prompt], [tokens], budget_tokens, path
            )
        ]

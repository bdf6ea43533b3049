"""The gate's regression on transformers' llama: keys as the projection makes them."""

from __future__ import annotations

from typing import Any

import torch

OBSERVED, STRIDE, NEWEST = 128, 8, 32


@torch.inference_mode()
def examples(
    model: Any, ids: list[int]
) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """`[layers][KV heads]` of `[tokens, F]` features and `[tokens]` roots of what later
    queries pay on average."""
    config, n, seen = model.config, len(ids), {}
    hooks = [
        module.register_forward_hook(
            lambda m, i, out, name=name: seen.update({name: out})
        )
        for name, module in model.named_modules()
        if name.endswith(("k_proj", "v_proj"))
    ]
    attentions = model(torch.tensor([ids]), output_attentions=True).attentions
    for hook in hooks:
        hook.remove()
    count, size = config.num_key_value_heads, config.head_dim
    found = []
    for layer, attention in enumerate(attentions):
        prefix = f"model.layers.{layer}.self_attn."
        keys, values = (
            seen[prefix + name][0].view(n, count, size) for name in ("k_proj", "v_proj")
        )
        found.append(
            [
                _of_head(keys[:, head], values[:, head], probs)
                for head, probs in enumerate(attention[0].unflatten(0, (count, -1)))
            ]
        )
    return found


def _of_head(
    keys: torch.Tensor, values: torch.Tensor, probs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of `[n, head_size]` keys and values and `[group, n, n]` attention."""
    scoring, rows, roots = [*range(0, len(keys) - OBSERVED, STRIDE)], [], []
    for first in (3 * len(scoring) // 8, 3 * len(scoring) // 4):
        later = scoring[first : first + len(scoring) // 4]
        prompt = later[0]
        for token in range(prompt - NEWEST):
            k, v = keys[token], values[token]
            beside = [
                k.norm().log(),
                v.norm().log(),
                torch.tensor(prompt - token).log(),
            ]
            units = [x / x.norm() * len(x) ** 0.5 for x in (k, v)]
            rows.append(torch.cat([*units, torch.stack(beside), torch.ones(1)]))
            roots.append(probs[:, later, token].mean() ** 0.25)
    return torch.stack(rows), torch.stack(roots)


def weights(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """`[F]` of one head, by ridge regression to the examples of several texts.

    Over standardized features, a tenth of whose number is the penalty; the constant
    comes last and has none.
    """
    x = torch.cat([rows for rows, _ in parts]).double()[:, :-1]
    y = torch.cat([roots for _, roots in parts]).double()
    spread = x.std(dim=0, correction=0)
    z = (x - x.mean(dim=0)) / spread
    products = z.T @ z + 0.1 * len(z) * torch.eye(z.shape[1])
    slopes = torch.linalg.solve(products, z.T @ (y - y.mean())) / spread
    return torch.cat([slopes, (y.mean() - slopes @ x.mean(dim=0))[None]])


def explained(weight: torch.Tensor, part: tuple[torch.Tensor, torch.Tensor]) -> float:
    """R^2 of one head on a text."""
    x, y = (each.double() for each in part)
    return float(1 - (y - x @ weight).square().mean() / y.var(correction=0))

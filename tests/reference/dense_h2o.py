"""H2O written down densely: whole attention matrices, keep-masks over positions.

Shares no code with vllm_h2o. A model in plain torch reads the prompt with full
attention; then every policy ("variant") decodes greedily side by side, so that
the weights are read once for all of them. Nothing is ever moved: each layer and
KV head has a mask over all positions, and evicting is clearing a bit.
"""

from __future__ import annotations

import copy
import itertools
import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import GptOssConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


@dataclass(frozen=True)
class Variant:
    """One policy; `window=None` means that every prompt query scores."""

    window: int | None
    pooling: int
    score: str
    unit: str
    decay: float = 1.0
    sinks: int = 4
    read: float = 1.0
    merge: bool = False


@dataclass(frozen=True)
class Sizes:
    """Token counts: budget = heavy + recent."""

    heavy: int
    recent: int
    block: int

    @property
    def budget(self) -> int:
        return self.heavy + self.recent


class DenseLlama:
    """A llama in float32, from a folder with config.json and safetensors.

    Attributes:
        attending: Numbers of the layers with full attention; others compute what comes
            before it.
    """

    norms = "input_layernorm", "post_attention_layernorm"
    output = "self_attn.o_proj"
    mlp = "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.weights = load_file(folder / "model.safetensors")
        kinds = config.get("layer_types") or (
            ["full_attention"] * config["num_hidden_layers"]
        )
        assert kinds[-1] == "full_attention"
        self.attending = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
        self.num_heads = config["num_attention_heads"]
        self.num_kv_heads = config["num_key_value_heads"]
        self.head_dim = config.get("head_dim") or (
            config["hidden_size"] // self.num_heads
        )
        self.epsilon = config.get("rms_norm_eps") or config["norm_eps"]
        theta = config["rope_parameters"]["rope_theta"]
        exponents = torch.arange(0, self.head_dim, 2) / self.head_dim
        self.frequencies = 1.0 / theta**exponents

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return x * self.weights[f"model.{name}.weight"]

    def linear(self, x: torch.Tensor, number: int, name: str) -> torch.Tensor:
        place = f"model.layers.{number}.{name}"
        return F.linear(
            x, self.weights[f"{place}.weight"], self.weights.get(f"{place}.bias")
        )

    def rope(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate `[n, heads, head_dim]` by `[n]` positions."""
        angles = positions[:, None] * self.frequencies
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    def attention(
        self, logits: torch.Tensor, seen: torch.Tensor, number: int
    ) -> torch.Tensor:
        """Softmax of `[heads, queries, n]` logits where they are seen.

        Some models (GraniteSWA, gpt-oss) have a logit per head that takes part in it,
        and that no token has.
        """
        logits = logits.masked_fill(~seen, float("-inf"))
        sinks = self.weights.get(f"model.layers.{number}.self_attn.sinks")
        if sinks is None:
            return logits.softmax(dim=-1)
        sinks = sinks[:, None, None].expand(*logits.shape[:-1], 1)
        return torch.cat([logits, sinks], dim=-1).softmax(dim=-1)[..., :-1]

    def before_attention(
        self, x: torch.Tensor, number: int, reads: bool
    ) -> torch.Tensor:
        """What a layer of full attention takes in, after those of other kinds.

        Args are the hidden states of a prompt that is read, else of a token of each
        variant.
        """
        place = self.attending.index(number)
        first = self.attending[place - 1] + 1 if place else 0
        for other in range(first, number):
            x = self.other_layer(x, other, reads)
        return x

    def other_layer(self, x: torch.Tensor, number: int, reads: bool) -> torch.Tensor:
        """A whole layer without full attention."""
        raise NotImplementedError

    def project(self, x: torch.Tensor, number: int, positions: torch.Tensor):
        """Queries, keys, values `[n, heads, head_dim]` of hidden states `[n, d]`."""
        hidden = self.norm(x, f"layers.{number}.{self.norms[0]}")
        heads = {"q": self.num_heads, "k": self.num_kv_heads, "v": self.num_kv_heads}
        q, k, v = (
            self.linear(hidden, number, f"self_attn.{name}_proj").view(
                len(x), count, self.head_dim
            )
            for name, count in heads.items()
        )
        q, k = self.normed_heads(q, k, number)
        return self.rope(q, positions), self.rope(k, positions), v

    def normed_heads(self, q: torch.Tensor, k: torch.Tensor, number: int):
        """Queries and keys as they are rotated."""
        return q, k

    def after_attention(self, x: torch.Tensor, attended: torch.Tensor, number: int):
        """Residual, output projection and MLP."""
        x = x + self.linear(attended.flatten(1), number, self.output)
        return self.with_mlp(x, number)

    def with_mlp(self, x: torch.Tensor, number: int) -> torch.Tensor:
        hidden = self.norm(x, f"layers.{number}.{self.norms[1]}")
        return x + self.feed_forward(hidden, number)

    def feed_forward(self, hidden: torch.Tensor, number: int) -> torch.Tensor:
        gate, up, down = self.mlp
        inner = F.silu(self.linear(hidden, number, gate))
        return self.linear(inner * self.linear(hidden, number, up), number, down)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.weights["model.embed_tokens.weight"][tokens]

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        tied = self.weights["model.embed_tokens.weight"]
        return self.norm(x, "norm") @ self.weights.get("lm_head.weight", tied).T


class DenseLfm2(DenseLlama):
    """An LFM2: between its attention, layers that mix each channel's last tokens."""

    norms = "operator_norm", "ffn_norm"
    output = "self_attn.out_proj"
    mlp = "feed_forward.w1", "feed_forward.w3", "feed_forward.w2"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        config = json.loads((folder / "config.json").read_text())
        self.reach = config["conv_L_cache"]
        self.past: dict[int, torch.Tensor] = {}

    def other_layer(self, x: torch.Tensor, number: int, reads: bool) -> torch.Tensor:
        return self.with_mlp(self.convolve(x, number, reads), number)

    def convolve(self, x: torch.Tensor, number: int, reads: bool) -> torch.Tensor:
        """Residual and short convolution: `[n, d]`, or `[variants, d]` a token each."""
        hidden = self.norm(x, f"layers.{number}.operator_norm")
        entering, leaving, inner = self.linear(hidden, number, "conv.in_proj").chunk(
            3, dim=-1
        )
        fresh = entering * inner
        if reads:
            seen = F.pad(fresh, (0, 0, self.reach - 1, 0)).unfold(0, self.reach, 1)
            self.past[number] = seen[-1:]
        else:
            past = self.past[number].expand(len(x), -1, -1)
            seen = torch.cat([past[..., 1:], fresh[..., None]], dim=-1)
            self.past[number] = seen
        weight = self.weights[f"model.layers.{number}.conv.conv.weight"][:, 0]
        mixed = leaving * (seen * weight).sum(dim=-1)
        return x + self.linear(mixed, number, "conv.out_proj")

    def normed_heads(self, q: torch.Tensor, k: torch.Tensor, number: int):
        return (
            self.norm(q, f"layers.{number}.self_attn.q_layernorm"),
            self.norm(k, f"layers.{number}.self_attn.k_layernorm"),
        )

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x, "embedding_norm")
        return normed @ self.weights["model.embed_tokens.weight"].T


class DenseGptOss(DenseLlama):
    """A gpt-oss: windowed layers between those of full attention, experts, YaRN."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.config = GptOssConfig.from_pretrained(folder)
        self.frequencies, self.stretch = ROPE_INIT_FUNCTIONS["yarn"](
            self.config, torch.device("cpu")
        )
        self.past: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def rope(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return super().rope(x, positions) * self.stretch

    def other_layer(self, x: torch.Tensor, number: int, reads: bool) -> torch.Tensor:
        """Attention to the last tokens; keys and values `[variants or 1, n, ..]`."""
        n = 0 if reads else self.past[number][0].shape[1]
        positions = n + (torch.arange(len(x)) if reads else torch.zeros(len(x)))
        q, *fresh = self.project(x, number, positions)
        if reads:
            q, held = q[None], [each[None] for each in fresh]
        else:
            q, held = (
                q[:, None],
                [
                    torch.cat([past.expand(len(x), -1, -1, -1), each[:, None]], dim=1)
                    for past, each in zip(self.past[number], fresh, strict=True)
                ],
            )
        self.past[number] = held
        group = self.num_heads // self.num_kv_heads
        keys, values = (each.repeat_interleave(group, 2) for each in held)
        logits = torch.einsum("bqhd,bkhd->bhqk", q, keys) * self.head_dim**-0.5
        age = n + torch.arange(q.shape[1])[:, None] - torch.arange(keys.shape[1])
        seen = (age >= 0) & (age < self.config.sliding_window)
        attention = torch.stack([self.attention(one, seen, number) for one in logits])
        mixed = torch.einsum("bhqk,bkhd->bqhd", attention, values)
        return self.after_attention(x, mixed.flatten(0, 1), number)

    def feed_forward(self, hidden: torch.Tensor, number: int) -> torch.Tensor:
        """The best experts' outputs, by a softmax among them."""
        config, place = self.config, f"model.layers.{number}.mlp.experts"
        best = self.linear(hidden, number, "mlp.router").topk(
            config.num_experts_per_tok, dim=-1
        )
        weights = torch.zeros(len(hidden), config.num_local_experts)
        weights.scatter_(1, best.indices, best.values.softmax(dim=-1))
        gate_up, gate_up_bias, down, down_bias = (
            self.weights[f"{place}.{name}"]
            for name in (
                "gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"
            )
        )  # fmt: skip
        inner = torch.einsum("nd,edf->nef", hidden, gate_up) + gate_up_bias
        gate = inner[..., ::2].clamp(max=config.swiglu_limit)
        up = inner[..., 1::2].clamp(-config.swiglu_limit, config.swiglu_limit)
        inner = (up + 1) * gate * torch.sigmoid(config.swiglu_alpha * gate)
        outputs = torch.einsum("nef,efd->ned", inner, down) + down_bias
        return torch.einsum("ne,ned->nd", weights, outputs)


class Head:
    """The greedy rule in one KV head of one layer of one variant."""

    def __init__(
        self, variant: Variant, common: Sizes, sizes: Sizes, capacity: int
    ) -> None:
        self.variant, self.common, self.sizes = variant, common, sizes
        self.kept = torch.zeros(capacity, dtype=torch.bool)
        self.received = torch.zeros(capacity)
        self.slots = torch.zeros(capacity, dtype=torch.int64)
        self.first_query = 0
        self.close_calls: set[int] = set()
        self.close_heirs: set[int] = set()
        self.lost: int | None = None
        self.threshold: float | None = None

    def stretched(self, capacity: int) -> Head:
        """A copy with room for so many tokens."""
        other = copy.copy(self)
        for name in ("kept", "received", "slots"):
            mine = getattr(self, name)
            more = mine.new_zeros(capacity - len(mine))
            setattr(other, name, torch.cat([mine, more]))
        other.close_calls, other.close_heirs = set(), set()
        return other

    def hold(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Where its keys and values are, `[capacity, head_dim]`; it may change them."""
        self.past_keys, self.past_values = keys, values

    def note_close_call(self, kept: tuple[float, int], lost: tuple[float, int]) -> None:
        """Remember decisions that float32 rounding may turn around.

        Args are (value, unit); two programs that sum in another order agree to
        about 1e-6 of a value.
        """
        (high, winner), (low, loser) = kept, lost
        if high - low <= 1e-5 * abs(high):
            size = self.sizes.block if self.variant.unit == "block" else 1
            for i in (winner, loser):
                self.close_calls.update(range(i * size, (i + 1) * size))

    def meet(self, first: int, values: torch.Tensor) -> None:
        """Get to know the values `[n, head_dim]` of the tokens from `first` on."""

    def read_prompt(self, attention: torch.Tensor) -> None:
        """Score and compress from `[group, n, n]` attention probabilities."""
        variant, sizes = self.variant, self.sizes
        n = attention.shape[1]
        self.first_query = 0 if variant.window is None else max(0, n - variant.window)
        self.received[:n] = self.scored(attention[:, self.first_query :].sum(dim=0))
        # Below the common budget all heads keep everything, whatever their own is.
        if n <= max(sizes.budget, self.common.budget):
            self.kept[:n] = True
            self.slots[:n] = torch.arange(n)
        if n > self.common.budget and n > sizes.budget:
            self.select(n)

    def read_on(self, attention: torch.Tensor) -> None:
        """Score what is kept and a chunk, and compress them.

        Takes `[group, m, n]` attention of the chunk's queries, the last m of n tokens.
        A mean is over all queries that have looked at a token; it then stands for those
        of the chunk's window.
        """
        variant, (_, m, n) = self.variant, attention.shape
        start, born = n - m, torch.arange(n)
        eligible = self.kept[:n] | (born >= start)
        window = 0 if variant.window is None else max(0, n - variant.window)
        first = self.first_of_chunk(start, window)
        observed = attention[:, first - start :].sum(dim=0)
        looked = (start - born.clamp(min=self.first_query)).clamp(min=0)
        looked += n - born.clamp(min=first)
        got = self.received[:n] * self.decay_of(len(observed)) + self.scored(observed)
        expected, queries = self.expected(start, n, window)
        got[start:] += expected
        looked[start:] += queries
        if variant.score == "mean":
            got = got / looked * (n - born.clamp(min=window))
        self.received[:n], self.first_query = got, window
        self.kept[:n] = eligible
        if eligible.sum() > self.sizes.budget:
            self.select(n, start)
        else:
            self.slots[:n] = born

    def first_of_chunk(self, start: int, window: int) -> int:
        """Position of the first query of a chunk that scores."""
        return max(start, window)

    def decay_of(self, num_queries: int) -> float:
        """What old scores are multiplied by."""
        return self.variant.decay**num_queries

    def expected(self, start: int, n: int, window: int):
        """What a chunk's tokens have beside, and how many queries' attention it is."""
        return torch.zeros(n - start), torch.zeros(n - start, dtype=torch.int64)

    def scored(self, observed: torch.Tensor) -> torch.Tensor:
        """Scores `[n]` of a prompt by what each of its queries gave, `[m, n]`."""
        ages = torch.arange(len(observed) - 1, -1, -1)
        return (observed * (self.variant.decay**ages)[:, None]).sum(dim=0)

    def select(self, n: int, start: int = 0) -> None:
        """Keep what a head of this size keeps of `n` tokens.

        Of those before `start` it keeps none that it has lost, and these are no
        neighbours any more.
        """
        variant, sizes = self.variant, self.sizes
        lost = ~self.kept[:n] if start else torch.zeros(n, dtype=torch.bool)
        self.kept[:n] = False
        value = self.scores(n)[:n].clone()
        if sizes.budget >= self.common.budget:
            value[start:] = self.pooled(value[start:])
        value[lost] = float("-inf")
        unit = sizes.block if variant.unit == "block" else 1
        recent_from = -(-n // unit) * unit - sizes.recent
        self.kept[recent_from:n] = True
        groups = value[:recent_from].view(-1, unit).sum(dim=1).tolist()
        pinned = -(-variant.sinks // unit)
        ranked = sorted(range(pinned, len(groups)), key=lambda i: (-groups[i], i))
        winners = [*range(pinned), *ranked][: sizes.heavy // unit]
        if len(ranked) > len(winners) - pinned > 0:
            # Where neighbours share a score, others may be close to theirs.
            losers = ranked[len(winners) - pinned :]
            last, first = winners[-1], losers[0]
            for i in winners[pinned:]:
                self.note_close_call((groups[i], i), (groups[first], first))
            for i in losers:
                self.note_close_call((groups[last], last), (groups[i], i))
        for slot, i in enumerate(sorted(winners)):
            self.kept[i * unit : (i + 1) * unit] = True
            self.slots[i * unit : (i + 1) * unit] = slot * unit + torch.arange(unit)
        for position in range(recent_from, n):
            self.slots[position] = self.ring_slot(position)
        self.merge((~self.kept[:n]).nonzero().flatten().tolist(), at_once=True)

    def pooled(self, value: torch.Tensor) -> torch.Tensor:
        """Values `[n]` of a prompt, each the highest of its neighbours'."""
        half = self.variant.pooling // 2
        padded = F.pad(value, (half, half), value=float("-inf"))
        return padded.unfold(0, self.variant.pooling, 1).amax(dim=1)

    def merge(self, lost: list[int], at_once: bool) -> None:
        """D2O: lost values are averaged into those of the most similar kept keys."""
        if not self.variant.merge:
            return
        kept = self.kept.nonzero().flatten().tolist()
        similar = F.cosine_similarity(
            self.past_keys[lost][:, None], self.past_keys[kept][None], dim=-1
        )
        best = similar.amax(dim=1).tolist()
        if at_once:
            self.threshold = least = sum(best) / len(best)
        elif self.threshold is None:
            self.threshold = least = best[0]
        else:
            least = self.threshold
            self.threshold = 0.3 * least + 0.7 * best[0]
        heirs: dict[int, list[int]] = {}
        for i, cosine in enumerate(best):
            self.note_close_heirs(similar[i], kept, least)
            if cosine >= least:
                heirs.setdefault(kept[int(similar[i].argmax())], []).append(i)
        for heir, mine in heirs.items():
            weights = torch.tensor([1.0, *(best[i] for i in mine)]).exp()
            values = self.past_values[[heir, *(lost[i] for i in mine)]]
            self.past_values[heir] = weights @ values / weights.sum()

    def note_close_heirs(
        self, similar: torch.Tensor, kept: list[int], least: float
    ) -> None:
        """Remember who may or may not inherit, by float32 rounding; see above.

        Args are the cosines of a lost key with the kept ones, these, and the threshold.
        """
        high, *others = similar.topk(min(2, len(kept))).values.tolist()
        close_second = bool(others) and high - others[0] <= 1e-5
        if abs(high - least) <= 1e-5 or (close_second and high >= least - 1e-5):
            near = (similar >= high - 1e-5).nonzero().flatten().tolist()
            self.close_heirs.update(kept[i] for i in near)

    def ring_slot(self, position: int) -> int:
        """Where a new token goes."""
        heavy, recent = self.sizes.heavy, self.sizes.recent
        return position if position < heavy else heavy + (position - heavy) % recent

    def scores(self, seen: int) -> torch.Tensor:
        """What tokens are compared by after `seen` tokens."""
        if self.variant.score == "sum":
            return self.received
        born = torch.arange(len(self.received)).clamp(min=self.first_query)
        return self.received / (seen - born).clamp(min=1)

    def make_room(self, position: int) -> None:
        """H2O's step before the token at `position` joins a full set."""
        variant, sizes = self.variant, self.sizes
        unit = sizes.block if variant.unit == "block" else 1
        if position == self.common.budget > sizes.budget:
            self.select(position)
        if position < max(sizes.budget, self.common.budget) or position % unit:
            return
        leaving = (position - sizes.recent) // unit
        pinned = -(-variant.sinks // unit)
        end = (leaving + 1) * unit
        value = self.scores(position)[pinned * unit : end].view(-1, unit).sum(dim=1)
        value[~self.kept[pinned * unit : end : unit]] = float("inf")
        # Ties: what leaves the window loses, else the oldest (argmin: the first).
        loser = int(value[:-1].argmin())
        if value[-1] <= value[loser]:
            loser = leaving - pinned
        if len(value) > 1:
            low = value[loser].item()
            value[loser] = float("inf")
            runner_up = int(value.argmin())
            self.note_close_call(
                (value[runner_up].item(), pinned + runner_up), (low, pinned + loser)
            )
        loser, leaving = (pinned + loser) * unit, leaving * unit
        self.kept[loser : loser + unit] = False
        # What graduates takes the slots of what it beat.
        self.slots[leaving : leaving + unit] = self.slots[loser : loser + unit]
        self.lost = loser

    def join(self, position: int) -> None:
        """Take in the new token."""
        self.kept[position] = True
        first = position < self.common.budget  # all heads have the common slots
        self.slots[position] = position if first else self.ring_slot(position)

    def visible(self, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Which tokens the newest's query reads.

        Args are `[group, head_dim]` and `[n, head_dim]`, of the tokens up to it.
        """
        n, variant = len(keys), self.variant
        sizes = self.common if n <= self.common.budget else self.sizes
        kept = self.kept[:n]
        if variant.read == 1.0 or n - 1 < self.first_query:
            return kept
        pages: dict[int, list[int]] = {}
        for position in kept.nonzero().flatten().tolist():
            page = int(self.slots[position]) // sizes.block
            pages.setdefault(page, []).append(position)
        bounds = {}
        for page, positions in pages.items():
            mine, slots = keys[positions], self.slots[positions]
            bound = 0.6 * mine.amax(dim=0) + 0.4 * mine.amin(dim=0)
            bounds[page] = float(query.sum(dim=0) @ bound)
            ends = (slots < variant.sinks) | (slots >= sizes.heavy)
            if ends.any() or n - 1 in positions:
                bounds[page] = float("inf")
        always = sum(bound == float("inf") for bound in bounds.values())
        count = always - int(-variant.read * (len(pages) - always) // 1)
        ranked = sorted(pages, key=lambda page: (-bounds[page], page))
        read = torch.zeros_like(kept)
        for page in ranked[:count]:
            read[pages[page]] = True
        return read

    def accumulate(self, attention: torch.Tensor) -> None:
        """Add `[n]` probabilities, summed over the query heads of the group."""
        n = len(attention)
        kept, scores = self.kept[:n], self.received[:n]
        self.received[:n] = torch.where(kept, self.added(scores, attention), scores)
        if self.lost is not None:
            self.merge([self.lost], at_once=False)
            self.lost = None

    def added(self, scores: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
        """Scores `[n]` once another query has given this much."""
        return scores * self.variant.decay + attention

    def survivors(self) -> list[int]:
        return self.kept.nonzero().flatten().tolist()


@dataclass
class Result:
    """Tokens, survivors by layer and KV head, and losses of one variant.

    `losses` are of the forced tokens, in nats. `margin` is the least by which a first
    choice was ahead of the second, in logits.
    """

    tokens: list[int]
    heads: list[list[Head]]
    losses: list[float]
    margin: float
    keys: list[torch.Tensor] = field(repr=False, default_factory=list)
    values: list[torch.Tensor] = field(repr=False, default_factory=list)


@torch.no_grad()
def generate(
    model: DenseLlama,
    prompt: list[int],
    num_tokens: int,
    variants: list[Variant],
    sizes: Sizes,
    own_sizes: list[list[Sizes]] | None = None,
    forced: list[int] | None = None,
    head_class: type[Head] = Head,
    chunk: int | list[int] | None = None,
    before: Result | None = None,
) -> list[Result]:
    """Decode greedily, or through `forced` tokens, under every variant.

    `own_sizes` are those of each layer and KV head; `sizes` then is their average,
    up to which nothing is evicted. `head_class` may score otherwise. A prompt is read
    in chunks of `chunk` tokens, or with these ends, by one variant, or whole. It goes
    on from what another prompt and its answer have left `before`, with which it begins.
    """
    n, capacity = len(prompt), len(prompt) + num_tokens
    group = model.num_heads // model.num_kv_heads
    scale = model.head_dim**-0.5

    def head_of(variant: Variant, layer: int, head: int) -> Head:
        own = own_sizes[layer][head] if own_sizes else sizes
        return head_class(variant, sizes, own, capacity)

    heads = [
        [
            [head_of(v, layer, g) for g in range(model.num_kv_heads)]
            for layer in range(len(model.attending))
        ]
        for v in variants
    ]
    shape = (len(variants), model.num_kv_heads, capacity, model.head_dim)
    keys, values = ([torch.zeros(shape) for _ in model.attending] for _ in range(2))
    assert chunk is None and before is None or len(variants) == 1
    done = 0
    if before is not None:
        done = before.keys[0].shape[2] - 1  # the last token was never computed
        for layer in range(len(model.attending)):
            keys[layer][:, :, :done] = before.keys[layer][:, :, :done]
            values[layer][:, :, :done] = before.values[layer][:, :, :done]
        heads = [[[head.stretched(capacity) for head in x] for x in before.heads]]
    ends = chunk if isinstance(chunk, list) else [*range(done, n, chunk or n)[1:], n]
    for start, end in itertools.pairwise([done, *ends]):
        x = model.embed(torch.tensor(prompt[start:end]))
        causal = torch.ones(end - start, end, dtype=torch.bool).tril(start)
        for layer, number in enumerate(model.attending):
            x = model.before_attention(x, number, reads=True)
            q, k, v = model.project(x, number, torch.arange(start, end))
            keys[layer][:, :, start:end] = k.transpose(0, 1)
            values[layer][:, :, start:end] = v.transpose(0, 1)
            # Up to a first chunk all variants' are alike.
            past, content = (
                of[layer][0, :, :end].repeat_interleave(group, 0)
                for of in (keys, values)
            )
            kept = torch.stack([head.kept[:end] for head in heads[0][layer]])
            seen = causal & (kept[:, None] | (torch.arange(end) >= start))
            logits = torch.einsum("qhd,hkd->hqk", q, past) * scale
            attention = model.attention(
                logits, seen.repeat_interleave(group, 0), number
            )
            mixed = torch.einsum("hqk,hkd->qhd", attention, content)
            for g in range(model.num_kv_heads):
                given = attention[g * group : (g + 1) * group]
                for i in range(len(variants)):
                    head = heads[i][layer][g]
                    head.hold(keys[layer][i, g], values[layer][i, g])
                    head.meet(start, v[:, g])
                    if start:
                        head.read_on(given)
                    else:
                        head.read_prompt(given)
            x = model.after_attention(x, mixed, number)
    tokens: list[list[int]] = [[] for _ in variants]
    losses: list[list[float]] = [[] for _ in variants]
    margins = [float("inf") for _ in variants]

    def next_tokens(logits: torch.Tensor) -> None:
        logprobs = logits.log_softmax(dim=-1)
        for mine, lost, row in zip(tokens, losses, logprobs, strict=True):
            token = forced[len(mine)] if forced else int(row.argmax())
            mine.append(token)
            lost.append(-float(row[token]))
        best = logits.topk(2).values
        for i, ahead in enumerate((best[:, 0] - best[:, 1]).tolist()):
            margins[i] = min(margins[i], ahead)

    next_tokens(model.logits(x[-1]).expand(len(variants), -1))
    for position in range(n, n + num_tokens - 1):
        x = model.embed(torch.tensor([t[-1] for t in tokens]))
        for layer, number in enumerate(model.attending):
            x = model.before_attention(x, number, reads=False)
            q, k, v = model.project(x, number, torch.full((len(variants),), position))
            keys[layer][:, :, position], values[layer][:, :, position] = k, v
            past = keys[layer][:, :, : position + 1]
            q = q.view(len(variants), model.num_kv_heads, group, model.head_dim)
            masks = []
            for i, per_variant in enumerate(heads):
                for g, head in enumerate(per_variant[layer]):
                    head.make_room(position)
                    head.meet(position, v[i, g, None])
                    head.join(position)
                    masks.append(head.visible(q[i, g], past[i, g]))
            kept = torch.stack(masks).view(len(variants), model.num_kv_heads, 1, -1)
            logits = (q @ past.transpose(-1, -2) * scale).flatten(1, 2)[:, :, None]
            seen = kept.repeat_interleave(group, 1)
            attention = torch.stack(
                [
                    model.attention(*of_variant, number)
                    for of_variant in zip(logits, seen, strict=True)
                ]
            ).view(len(variants), model.num_kv_heads, group, -1)
            mixed = attention @ values[layer][:, :, : position + 1]
            for i, per_variant in enumerate(heads):
                for g, head in enumerate(per_variant[layer]):
                    head.accumulate(attention[i, g].sum(dim=0))
            x = model.after_attention(x, mixed.flatten(1, 2), number)
        next_tokens(model.logits(x))
    parts = zip(tokens, heads, losses, margins, strict=True)
    return [Result(*part, keys, values) for part in parts]

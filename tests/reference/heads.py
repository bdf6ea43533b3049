"""Heads of the dense reference by other rules than sums in the model's type."""

import torch

from tests.reference.dense_h2o import Head, Sizes

_GATE_QUERIES = 64


class PeakHead(Head):
    """The most attention that any query has paid, the method of a package in tests."""

    def scored(self, observed):
        return observed.amax(dim=0)

    def added(self, scores, attention):
        return scores.maximum(attention)


class NormHead(Head):
    """The method `norm`: the mean times the length of the value."""

    def __init__(self, *args):
        super().__init__(*args)
        self.norms = torch.zeros_like(self.received)

    def meet(self, first, values):
        self.norms[first : first + len(values)] = values.abs().sum(dim=-1)

    def scores(self, seen):
        return super().scores(seen) * self.norms


class RoundedHead(Head):
    """Decodes from keys and values in int8, rounded once by their largest element."""

    def read_prompt(self, attention):
        super().read_prompt(attention)
        self.round(slice(attention.shape[1]))

    def meet(self, first, values):
        if first:
            self.round(slice(first, first + len(values)))

    def round(self, tokens):
        for vectors in (self.past_keys[tokens], self.past_values[tokens]):
            step = vectors.abs().amax(dim=-1, keepdim=True) / 127
            vectors.copy_((vectors / step).round() * step)


class GrowingHead(Head):
    """Has other sizes from the tokens on at which its request grows.

    Until then heads may have parted; after that there is no budget common to all.
    """

    def __init__(self, growth, variant, common, sizes, capacity):
        super().__init__(variant, common, sizes, capacity)
        self.growth, self.average = growth, common

    def grow(self, position):
        if position in self.growth:
            self.average, self.sizes = self.growth[position]
            self.common = Sizes(0, 0, self.average.block)

    def read_on(self, attention):
        """A chunk ends where the budget grows; only of rich heads neighbours share."""
        self.grow(attention.shape[2] - attention.shape[1])
        common, self.common = self.common, self.average
        super().read_on(attention)
        self.common = common

    def make_room(self, position):
        """What a larger budget has room for needs none."""
        self.grow(position)
        grown = position >= min(self.growth, default=position + 1)
        if not grown or self.kept.sum() == self.sizes.budget:
            super().make_room(position)


class GrowingRoundedHead(GrowingHead, RoundedHead):
    """A request in int8 that grows."""


class MovingHead(Head):
    """Keys farther back than `limit` move up before each token at a multiple of
    `step`."""

    def __init__(self, model, step, limit, *args):
        super().__init__(*args)
        self.model, self.places = model, torch.arange(len(self.kept))
        self.step, self.limit = step, limit

    def stretched(self, capacity):
        other = super().stretched(capacity)
        other.places = torch.arange(capacity)
        other.places[: len(self.places)] = self.places
        return other

    def read_on(self, attention):
        super().read_on(attention)
        end = attention.shape[2]
        for position in range(end - attention.shape[1], end):
            self.move(position)

    def make_room(self, position):
        self.move(position)
        super().make_room(position)

    def move(self, position):
        if position % self.step == 0:
            held = torch.arange(len(self.places)) < position
            far = held & (position - self.places > self.limit)
            by = torch.full((int(far.sum()),), self.step)
            keys = self.past_keys[far]
            self.past_keys[far] = self.model.rope(keys[:, None], by)[:, 0]
            self.places[far] += self.step


def gated_heads(model, weights, base=Head):
    """Heads of the dense reference that go by these weights, `[layers, heads, F]`."""
    left = iter(weights.flatten(0, 1))

    class GateHead(base):
        def __init__(self, *args):
            super().__init__(*args)
            self.weights = next(left)

        def scored(self, observed):
            """Of a first chunk expected alone, of a later one beside what it gets."""
            if self.kept.any():
                return super().scored(observed)
            return self.expected(0, observed.shape[1], 0)[0]

        def first_of_chunk(self, start, window):
            """All of a later chunk's queries count."""
            return start

        def expected(self, start, n, window):
            """What each token is expected to get, as often as queries are meant."""
            tokens = torch.arange(start, n)
            keys = model.rope(self.past_keys[start:n, None], -tokens)[:, 0]
            scores = []
            for token, key, value in zip(
                tokens.tolist(), keys, self.past_values[start:n], strict=True
            ):
                units = [x / x.norm() * len(x) ** 0.5 for x in (key, value)]
                beside = [key.norm(), value.norm(), torch.tensor(float(n - token))]
                beside = torch.stack(beside).log()
                x = torch.cat([*units, beside, torch.ones(1)])
                expected = max(float(x @ self.weights), 0.0) ** 4
                queries = min(_GATE_QUERIES, n - token)
                scores.append(
                    model.num_heads // model.num_kv_heads * expected * queries
                )
            return torch.tensor(scores), (n - tokens).clamp(max=_GATE_QUERIES)

    return GateHead


class CakeHead(Head):
    """Mean plus 200 times the variance, pooled by the mean of five."""

    window = 32

    def read_prompt(self, attention):
        """Also what layers are compared by."""
        n = attention.shape[1]
        first = n - self.window
        seen = attention[:, first:].flatten(0, 1)
        old = seen[:, :first]
        self.of_tokens = torch.stack(
            [score_of(attention[:, max(first, t) :, t]) for t in range(n)]
        )
        logs = old.clamp(min=torch.finfo(torch.float32).tiny).log()
        self.preference = float(-(old * logs).sum() * old.var(dim=0).sum())
        self.of_prompt = True
        super().read_prompt(attention)
        self.of_prompt = False

    def scored(self, observed):
        return observed.sum(dim=0)

    def scores(self, seen):
        return self.of_tokens if self.of_prompt else self.received

    def pooled(self, value):
        if not self.of_prompt:
            return value
        near = [value[max(i - 2, 0) : i + 3].sum() / 5 for i in range(len(value))]
        return torch.stack(near)

    @staticmethod
    def shares(heads):
        """Of the layers' heads: what each wishes, and how many blocks at least."""
        return [head.preference for head in heads], [1] * len(heads)


def score_of(attention):
    """Of a prompt token that so much attention is paid, `[query heads, queries]`."""
    variance = attention.var() if attention.numel() > 1 else 0
    return attention.mean() + 200 * variance


class D2OHead(Head):
    """Sums of the attention; how unevenly they are spread is what layers differ in.

    Three of the layers never have less than the average of `average_blocks`.
    """

    average_blocks = 8

    def read_prompt(self, attention):
        """Also what layers are compared by."""
        sums = attention.sum(dim=(0, 1))
        self.spread = float((sums - sums.mean()).square().mean())
        super().read_prompt(attention)

    @classmethod
    def shares(cls, heads):
        """Of the layers' heads: what each wishes, and how many blocks at least."""
        spread = torch.tensor([head.spread for head in heads])
        scaled = (spread - spread.min()) / (spread.max() - spread.min())
        fewest = [1] * len(heads)
        fewest[0] = fewest[1] = fewest[-1] = cls.average_blocks
        wish = torch.exp(-scaled)
        return (wish / wish.sum()).tolist(), fewest

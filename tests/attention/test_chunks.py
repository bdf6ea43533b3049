"""Chunks of a prompt that are read beside what is held, head by head by the rules."""

import dataclasses

import pytest
import torch

from tests.attention.test_decode import make_cache, pages_of, params_of, placements_of
from tests.pairs import in_pairs
from vllm_h2o.attention.ops import Chunk, Held, ScoredLayer, cpu, reference
from vllm_h2o.attention.pages import Pages
from vllm_h2o.attention.placements import BY_HEAD, UNIFORM
from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.methods import METHODS
from vllm_h2o.policy.quantization import dequantize, quantize

HEADS, KV_HEADS, SIZE, BLOCK, CHUNK = 6, 3, 16, 16, 96
BUDGET = 48
BLOCKS = [[2, 5, 1], [5, 1, 3], [2, 3, 5]]
STAGING = [1, 20, 5, 14, 2, 9]
BY_ATTENTION = H2OConfig(prompt_score="attention", pooling=1, observation_window=24)


class Sequence:
    """A layer that reads random tokens in chunks; queries, keys and values of all."""

    def __init__(self, num_tokens, params, by_head=False, quantized=False):
        random = torch.Generator().manual_seed(num_tokens)
        self.query, self.keys, self.values = (
            torch.randn(heads, num_tokens, SIZE, generator=random)
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        self.query *= 3
        params = dataclasses.replace(params, group=HEADS // KV_HEADS)
        caches = [
            make_cache(torch.float32, KV_HEADS, SIZE, params.layout.block_size)
            for _ in BLOCKS
        ]
        fields = params.method.fields
        pages = [
            pages_of(cache, params, True) if quantized else Pages.view(cache, fields)
            for cache in caches
        ]
        self.placement = BY_HEAD if by_head else UNIFORM
        if by_head:
            params = dataclasses.replace(
                params, placements=placements_of(pages, 1, BLOCKS)
            )
        self.pages, self.params = pages[1], params
        blocks = torch.randperm(20, generator=random)
        self.table = blocks[: params.layout.budget_blocks].int()
        cache = make_cache(torch.float32, KV_HEADS, SIZE, BLOCK)
        self.dense = Pages.view_dense(cache)
        staged = [STAGING[i % len(STAGING)] for i in range(-(-num_tokens // BLOCK))]
        self.blocks = torch.tensor(staged, dtype=torch.int32)

    def write(self, first, last):
        """Put tokens into dense blocks, as vLLM does before a layer attends."""
        for position in range(first, last):
            block, i = self.blocks[position // BLOCK], position % BLOCK
            self.dense.keys[block, :, :, i] = self.keys[:, position]
            self.dense.values[block, :, i] = self.values[:, position]

    def begin(self, config):
        """Read the first chunk and compress it."""
        self.write(0, CHUNK)
        fields = (*self.params.method.fields, *self.params.method.prompt_fields)
        state = {name: torch.zeros(KV_HEADS, CHUNK) for name in fields}
        first = CHUNK - config.observation_window
        kernel, query = reference, self.query.transpose(0, 1)
        kernel.start(self.dense, self.blocks, 0, CHUNK, state, self.params)
        kernel.observe(
            query[first:CHUNK], self.dense, self.blocks, first, state, self.params
        )
        layer = ScoredLayer(self.pages, state, self.params, self.dense)
        held = Held(self.table, self.placement, CHUNK)
        kernel.transition([layer], self.blocks, held, first, config)

    def read_on(self, start, end, config, steps, kernel=reference):
        """Read a later chunk in steps of these lengths; its attention."""
        window = config.observation_window
        chunk = Chunk(
            end, max(start, end - window), max(0, start - window),
            max(0, end - window), self.blocks, Held(self.table, self.placement, start),
        )  # fmt: skip
        state, outputs = {}, []
        for first, last in zip(steps, steps[1:], strict=False):
            self.write(first, last)
            query = self.query[:, first:last].transpose(0, 1)
            output = torch.full_like(query, float("nan"))
            kernel.read_on(
                query, first, self.dense, self.pages, chunk, state, self.params, output
            )
            outputs.append(output)
        layer = ScoredLayer(self.pages, state, self.params, self.dense)
        kernel.compress_chunk([layer], chunk, config)
        return torch.cat(outputs)

    def places(self, head):
        """The pages of a head, `[(pages, number)]`, and its slots."""
        if self.placement == UNIFORM:
            return [(self.pages, i) for i in self.table], self.params.layout
        own = self.params.placements
        pages = [
            (own.layers[page.layer], self.table[page.column])
            for page in own.pages(BY_HEAD)[head]
        ]
        return pages, own.layouts(BY_HEAD)[head]

    def held(self, head, end):
        """`{position: (slot, key, value)}` of a head after `end` tokens."""
        pages, layout = self.places(head)
        found = {}
        for slot in range(min(end, layout.budget)):
            of, number = pages[slot // layout.block_size]
            i = slot % layout.block_size
            key, value = of.keys[number, head, :, i], of.values[number, head, i]
            if of.quantized:
                key = dequantize(key, of.key_scales[number, head, i])
                value = dequantize(value, of.value_scales[number, head, i])
            found[int(of.births[number, head, i])] = slot, key, value
        assert len(found) == min(end, layout.budget)
        return found

    def attention(self, head, start, end, seen):
        """`[group, end - start, end]` of what was held and the chunk, by definition."""
        group = HEADS // KV_HEADS
        query = self.query[head * group : (head + 1) * group, start:end]
        logits = query @ self.keys[head, :end].T * self.params.scale
        if cap := self.params.softcap:
            logits = cap * (logits / cap).tanh()
        positions = torch.arange(end)
        visible = positions <= torch.arange(start, end)[:, None]
        known = torch.zeros(end, dtype=torch.bool)
        known[[*seen]] = True
        visible &= known | (positions >= start)
        logits = logits.masked_fill(~visible, float("-inf"))
        if self.params.sink_logits is not None:
            sink = self.params.sink_logits.view(KV_HEADS, group)[head]
            sink = sink[:, None, None].expand(*logits.shape[:2], 1)
            return torch.cat([logits, sink], dim=-1).softmax(dim=-1)[..., :-1]
        return logits.softmax(dim=-1)


@pytest.mark.parametrize("case", ["plain", "softcap", "sinks"])
def test_where_everything_fits_it_is_dense_attention(case):
    softcap = 20.0 if case == "softcap" else 0.0
    params = params_of(softcap=softcap, heavy_slots=176, recent_slots=80)
    if case == "sinks":
        params = dataclasses.replace(params, sink_logits=torch.randn(HEADS))
    layer = Sequence(250, params)
    layer.begin(BY_ATTENTION)
    outputs = [
        layer.read_on(96, 192, BY_ATTENTION, [96, 130, 192]),
        layer.read_on(192, 250, BY_ATTENTION, [192, 250]),
    ]
    for head in range(KV_HEADS):
        attention = layer.attention(head, 96, 250, range(96))
        expected = attention @ layer.values[head]
        actual = torch.cat(outputs)[:, 2 * head : 2 * head + 2].transpose(0, 1)
        torch.testing.assert_close(actual, expected)
        assert all(slot == at for at, (slot, *_) in layer.held(head, 250).items())


@in_pairs(
    "quantized, by_head, end",
    [False, True],
    [False, True],
    [192, 150, 100],
)
def test_what_is_held_is_what_was_there(quantized, by_head, end):
    """Recent tokens in the ring, sinks, and the best of the rest, all unchanged."""
    layer = Sequence(200, params_of(mean=True), by_head, quantized)
    layer.begin(BY_ATTENTION)
    before = [layer.held(head, CHUNK) for head in range(KV_HEADS)]
    output = layer.read_on(CHUNK, end, BY_ATTENTION, [CHUNK, end])
    for head in range(KV_HEADS):
        _, layout = layer.places(head)
        held = layer.held(head, end)
        recent = range(max(0, end - layout.recent_slots), end)
        assert {*recent, *range(4)} <= {*held} <= {*before[head], *range(CHUNK, end)}
        for position, (slot, key, value) in held.items():
            expected = layer.keys[head, position], layer.values[head, position]
            if quantized:
                expected = [dequantize(*quantize(vector)) for vector in expected]
            assert torch.equal(key, expected[0]) and torch.equal(value, expected[1])
            if position in recent and end > layout.budget:
                assert slot == layout.slot(position)
        if not quantized:
            attention = layer.attention(head, CHUNK, end, before[head])
            actual = output[:, 2 * head : 2 * head + 2].transpose(0, 1)
            torch.testing.assert_close(actual, attention @ layer.values[head, :end])


@pytest.mark.parametrize("name", METHODS)
def test_steps_do_not_matter(name):
    """By every method; kernels are the reference's."""
    results = []
    for kernel, steps in ((reference, [96, 192]), (cpu, [96, 97, 150, 192])):
        params = dataclasses.replace(params_of(), method=METHODS[name]())
        layer = Sequence(200, params)
        layer.begin(BY_ATTENTION)
        output = layer.read_on(96, 192, BY_ATTENTION, steps, kernel)
        held = [[*layer.held(head, 192)] for head in range(KV_HEADS)]
        state = torch.stack([x[layer.table.long()] for x in layer.pages.state.values()])
        results.append((output, held, state))
    (expected, held, state), (actual, also_held, same_state) = results
    torch.testing.assert_close(actual, expected)
    assert held == also_held
    torch.testing.assert_close(same_state, state)


@pytest.mark.parametrize("name", METHODS)
def test_the_best_are_kept(name):
    """By each method's own formula, of what the queries of both windows have paid, or
    where a prompt keeps more than a slot does, those of the last."""
    params = dataclasses.replace(params_of(sinks=0), method=METHODS[name]())
    layer, start, end, window = Sequence(200, params), CHUNK, 192, 24
    layer.begin(BY_ATTENTION)
    before = [layer.held(head, start) for head in range(KV_HEADS)]
    got = [attention_got(layer, head) for head in range(KV_HEADS)]
    layer.read_on(start, end, BY_ATTENTION, [start, end])
    for head in range(KV_HEADS):
        paid = layer.attention(head, start, end, before[head])[:, -window:]
        scores = {}
        for position in (*before[head], *range(start, end - 16)):
            seen = min(window, end - position)
            mine = paid[:, -seen:, position]
            total = got[head].get(position, 0.0) + mine.sum()
            looked = seen + min(window, max(start - position, 0))
            length = layer.values[head, position].abs().sum()
            scores[position] = {
                "sum": total,
                "d2o": total,
                "mean": total / looked,
                "norm": total / looked * length,
                "cake": mine.mean() + 200.0 * mine.var(),
            }[name]
        best = sorted(scores, key=lambda position: -float(scores[position]))[:32]
        assert {*layer.held(head, end)} == {*best, *range(end - 16, end)}


def test_what_is_pooled_is_not_what_a_token_has_got():
    """Neighbours share their scores when a chunk is compressed, and no more."""
    got = []
    for pooling in (1, 5):
        layer = Sequence(200, params_of(sinks=0))
        layer.begin(BY_ATTENTION)
        config = dataclasses.replace(BY_ATTENTION, pooling=pooling)
        layer.read_on(CHUNK, 192, config, [CHUNK, 192])
        got.append([attention_got(layer, head) for head in range(KV_HEADS)])
    for alone, pooled in zip(*got, strict=True):
        assert alone.keys() != pooled.keys()
        both = alone.keys() & pooled.keys()
        assert {token: alone[token] for token in both} == {
            token: pooled[token] for token in both
        }


def attention_got(layer, head):
    """What each token that a head holds has got, all heads alike."""
    pages = layer.pages
    births, got = (
        part[layer.table.long(), head].flatten().tolist()
        for part in (pages.births, pages.attention)
    )
    return dict(zip(births, got, strict=True))

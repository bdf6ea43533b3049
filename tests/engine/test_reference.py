"""H2O is H2O: the engine against the dense reference, in float32.

All rules on a llama of four layers with random weights, the presets on SmolLM2.
"""

import itertools
import json
from contextlib import contextmanager

import pytest

from benchmarks.smollm2 import ensure_model
from tests.engine.helpers import (
    SMOLLM2_HEADS,
    assert_equal_densely,
    engine,
    prompts_of,
)
from tests.engine.tiny_models import random_prompts, save_granite_swa, save_llama
from tests.reference.dense_h2o import DenseLlama, Sizes, Variant
from tests.reference.dense_h2o import generate as generate_densely
from tests.reference.sizes import sizes_of_heads
from vllm_h2o.policy.profile import HeadProfile

pytestmark = pytest.mark.engine

BUDGET, NUM_TOKENS = 256, 48
LENGTHS = (300, 400, 900)
SEEDS = dict(zip(LENGTHS, (3, 15, 4), strict=True))
"""By which no token of any variant is within 0.0025 of another."""
SIZES = Sizes(heavy=128, recent=128, block=32)
FACTORS = (None, 64), (1, 15), ("sum", "mean"), ("token", "block")
HALF = [
    Variant(*(values[i] for values, i in zip(FACTORS, levels, strict=True)))
    for levels in itertools.product((0, 1), repeat=len(FACTORS))
    if sum(levels) % 2 == 0
]
"""Any three of the four factors in all their combinations."""
VARIANTS = [
    *HALF,
    Variant(1, 1, "sum", "token", decay=0.0, sinks=0),
    Variant(64, 15, "mean", "token", decay=0.9),
]
OTHER_HALF = [
    variant
    for variant in itertools.starmap(Variant, itertools.product(*FACTORS))
    if variant not in HALF
]


def settings_of(variant):
    return json.dumps(
        {
            "budget": BUDGET,
            "observation_window": variant.window or "all",
            "pooling": variant.pooling,
            "score": variant.score,
            "eviction_unit": variant.unit,
            "score_decay": variant.decay,
            "sinks": variant.sinks,
            "recent_ratio": 0.5,
        }
    )


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def llm(llama):
    options = {"kv_policy": "h2o", "h2o_budget": BUDGET, "skip_tokenizer_init": True}
    with engine(llama, **options, h2o_head_budgets="uniform") as llm:
        yield llm


@pytest.fixture(scope="module")
def prompts():
    return [random_prompts(n, seed=seed)[0] for n, seed in SEEDS.items()]


@pytest.fixture(scope="module")
def expected(llama, prompts):
    """What the reference gives to each prompt, by variant; these are `VARIANTS`."""
    return densely(llama, prompts, VARIANTS)


@pytest.fixture(scope="module")
def expected_of_others(llama, prompts):
    """The same of `OTHER_HALF`."""
    return densely(llama, prompts, OTHER_HALF)


def densely(folder, prompts, variants):
    model = DenseLlama(folder)
    by_prompt = [
        generate_densely(model, prompt, NUM_TOKENS, variants, SIZES)
        for prompt in prompts
    ]
    assert max(len(set(result.tokens)) for result in by_prompt[0]) > 10
    return dict(zip(variants, zip(*by_prompt, strict=True), strict=True))


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.rule("R2")
def test_engine_equals_reference(llm, prompts, expected, variant):
    check_variant(llm, prompts, variant, expected)


@pytest.mark.slow
@pytest.mark.parametrize("variant", OTHER_HALF, ids=str)
def test_engine_equals_reference_also_here(llm, prompts, expected_of_others, variant):
    check_variant(llm, prompts, variant, expected_of_others)


def check_variant(llm, prompts, variant, expected):
    llm.collective_rpc("probe_set_policy", args=(settings_of(variant),))
    assert_equal_densely(llm, prompts, expected[variant])


def test_h2o_paper_equals_reference():
    """The preset that is the paper's, by its name, on SmolLM2."""
    prompts, variant = prompts_of(*LENGTHS), Variant(None, 1, "sum", "token", sinks=0)
    expected = densely(ensure_model(), prompts, [variant])[variant]
    with engine(kv_policy="h2o-paper", h2o_budget=BUDGET) as llm:
        assert_equal_densely(llm, prompts, expected)


@pytest.mark.parametrize("block", [pytest.param(32, marks=pytest.mark.slow), 128])
@pytest.mark.rule("R12")
def test_budgets_by_head_equal_reference(block):
    """Also of a request that fills the common budget while it generates.

    vLLM's default on CPU are blocks of 128, which heads have in pages of 64 slots.
    """
    profile, page = HeadProfile.load(SMOLLM2_HEADS), min(block, 64)
    common = Sizes(heavy=BUDGET // 2, recent=BUDGET // 2, block=page)
    variant = Variant(64, 15, "mean", "token")
    prompts = prompts_of(230, 310, 700)
    own = [
        sizes_of_heads(profile, BUDGET, page, 2048, len(prompt), NUM_TOKENS)
        for prompt in prompts
    ]
    assert len({head.budget for layer in own[-1] for head in layer}) > 4
    assert own[0] != own[-1], "all are of one class of lengths"
    model = DenseLlama(ensure_model())
    expected = [
        generate_densely(model, prompt, NUM_TOKENS, [variant], common, sizes)[0]
        for prompt, sizes in zip(prompts, own, strict=True)
    ]
    settings = json.loads(settings_of(variant))
    options = {f"h2o_{name}": value for name, value in settings.items()}
    with engine(kv_policy="h2o", block_size=block, **options) as llm:
        if page < block:
            llm.collective_rpc("probe_poison")
        assert_equal_densely(llm, prompts, expected)


@contextmanager
def engine_in_chunks(folder, prompts):
    """An engine that reads in steps of 256, once it has equalled the reference."""
    variant, model = VARIANTS[-1], DenseLlama(folder)
    expected = [
        generate_densely(model, prompt, NUM_TOKENS, [variant], SIZES)[0]
        for prompt in prompts
    ]
    assert max(len(set(result.tokens)) for result in expected) > 10
    settings = json.loads(settings_of(variant))
    options = {f"h2o_{name}": value for name, value in settings.items()}
    options |= {"kv_policy": "h2o", "skip_tokenizer_init": True}
    with engine(folder, max_num_batched_tokens=256, **options) as llm:
        assert_equal_densely(llm, prompts, expected)
        yield llm


def test_layout_vec16_equals_reference(tmp_path):
    """vLLM's layout on CPU for head sizes that 32 does not divide."""
    folder = save_llama(tmp_path, head_dim=80)
    with engine_in_chunks(folder, random_prompts(300, 400, 700)) as llm:
        assert llm.collective_rpc("probe_layout") == ["vec16"]


@pytest.mark.slow
def test_softmax_sinks_equal_reference(tmp_path):
    """Also of a request that fills its budget while it generates."""
    with engine_in_chunks(
        save_granite_swa(tmp_path), random_prompts(230, 400, 700, seed=2)
    ):
        pass

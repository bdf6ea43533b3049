"""A method is one class: a whole engine runs it in plain torch."""

import pytest

from benchmarks.smollm2 import ensure_model
from tests.engine.helpers import (
    SMOLLM2_HEADS,
    assert_equal_densely,
    engine,
    outcome,
    prompts_of,
)
from tests.engine.tiny_models import random_prompts, save_llama
from tests.policy.packages import example_of, install_kernels, install_method
from tests.reference.dense_h2o import DenseLlama, Head, Sizes, Variant, generate
from tests.reference.heads import NormHead, PeakHead
from tests.reference.sizes import sizes_of_heads
from vllm_h2o.policy.methods import METHODS, add_from_packages
from vllm_h2o.policy.profile import HeadProfile

pytestmark = pytest.mark.engine

NUM_TOKENS, SIZES = 12, Sizes(64, 64, 32)


def options_of(name):
    return {
        "kv_policy": "h2o",
        "h2o_budget": 128,
        "h2o_score": name,
        "h2o_recent_ratio": 0.5,
        "h2o_observation_window": 64,
        "h2o_head_budgets": "uniform",
    }


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """Of random weights, and small: plain torch takes its time."""
    return save_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def peak(tmp_path, monkeypatch):
    """The docs' example, in a package that brings it by an entry point."""
    code = example_of("adding-a-method.md")
    install_method(tmp_path, monkeypatch, "peak", code, "Peak")
    add_from_packages()
    yield options_of("peak")
    del METHODS["peak"]


def test_a_method_of_eight_lines_equals_its_dense_reference(
    llama, peak, tmp_path, monkeypatch
):
    """On the docs' example of kernels, in a package that brings them likewise."""
    code = example_of("kernels.md")
    install_kernels(tmp_path, monkeypatch, "my_kernels", code)
    check(llama, peak, "sum", PeakHead, monkeypatch, kernels="my_kernels")


def test_a_method_with_state_of_its_own_equals_its_dense_reference(llama, monkeypatch):
    check(llama, options_of("norm"), "mean", NormHead, monkeypatch)


@pytest.mark.parametrize("kernels", ["", "reference"])
def test_reading_some_pages_equals_its_dense_reference(llama, monkeypatch, kernels):
    """Of eight pages the ring's two and the three best of the six others; by the
    kernels, of four the ring's and the two best of the others."""
    options = options_of("mean") | {
        "h2o_budget": 256,
        "h2o_recent_ratio": 0.25,
        "h2o_read": "50%",
    }
    sizes = Sizes(192, 64, 32 if kernels else 64)
    lengths = (400, 250)
    rules = {"kernels": kernels, "read": 0.5}
    check(llama, options, "mean", Head, monkeypatch, sizes, lengths, **rules)


@pytest.mark.parametrize(
    "kernels", ["", pytest.param("reference", marks=pytest.mark.slow)]
)
def test_merging_equals_its_dense_reference(llama, monkeypatch, kernels):
    """At the transition and at every graduation."""
    options, sizes, lengths = options_of("mean"), SIZES, (300, 122)
    if not kernels:
        options["h2o_budget"], sizes, lengths = 256, Sizes(128, 128, 64), (400, 250)
    options["h2o_merge"], rules = "value", {"kernels": kernels, "merge": True}
    check(llama, options, "mean", Head, monkeypatch, sizes, lengths, **rules)


def test_all_with_budgets_by_head_equal_their_dense_reference(monkeypatch):
    """A method of its own, reading and merging.

    Also of a request that fills the common budget while it generates.
    """
    profile, lengths = HeadProfile.load(SMOLLM2_HEADS), (400, 250)
    own = [
        sizes_of_heads(profile, 256, 32, 2048, length, NUM_TOKENS) for length in lengths
    ]
    assert len({head.budget for layer in own[0] for head in layer}) > 4
    options = options_of("norm") | {
        "h2o_budget": 256,
        "h2o_read": "50%",
        "h2o_merge": "value",
        "h2o_head_budgets": "auto",
    }
    common = Sizes(128, 128, 32)
    both = {"read": 0.5, "merge": True}
    check(None, options, "mean", NormHead, monkeypatch, common, lengths, own, **both)


def check(
    folder,
    options,
    score,
    head_class,
    monkeypatch,
    sizes=SIZES,
    lengths=(300, 122),
    own=(None, None),
    kernels="reference",
    **rules,
):
    """In chunks, of a prompt beyond the budget and of one that fills it later; the
    second time they hit the prefix cache. Without a folder it is SmolLM2."""
    monkeypatch.setenv("VLLM_H2O_KERNELS", kernels)
    variant = Variant(64, 15, score, "token", **rules)
    model = DenseLlama(folder or ensure_model())
    prompts = random_prompts(*lengths, seed=2) if folder else prompts_of(*lengths)
    expected = [
        generate(
            model, prompt, NUM_TOKENS, [variant], sizes, heads, head_class=head_class
        )[0]
        for prompt, heads in zip(prompts, own, strict=True)
    ]
    options |= {"max_num_batched_tokens": 256, "enable_prefix_caching": True}
    # Of those of 128 KV heads have pages of 64 slots.
    options |= {"block_size": 32 if kernels or sizes is SIZES else 128}
    with engine(folder, skip_tokenizer_init=bool(folder), **options) as llm:
        assert_equal_densely(llm, prompts, expected)
        assert_equal_densely(llm, prompts, expected)


def test_a_method_without_a_kernel_is_refused(peak):
    with (
        pytest.raises(ValueError, match="h2o_score='peak'.*VLLM_H2O_KERNELS=reference"),
        engine(**peak),
    ):
        pass


def outcomes(prompts, options):
    """Tokens and survivors."""
    with engine(**options) as llm:
        return [outcome(llm, prompt, 48) for prompt in prompts]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"kv_policy": "h2o", "h2o_budget": 128}, marks=pytest.mark.slow),
        {
            "kv_policy": "cake",
            "h2o_merge": "value",
            "h2o_budget": "70%",
            "block_size": 128,
        },
    ],
    ids=str,
)
def test_the_reference_equals_the_kernels(monkeypatch, options):
    """Of prompts beyond the budget, and of one that fills it while it generates; with
    the budgets by head of SmolLM2's profile, and with those of each prompt, where that
    of 350 tokens grows from 256 slots to 384 after its 384th."""
    prompts = prompts_of(350, 122 if options["kv_policy"] == "h2o" else 230)
    expected = outcomes(prompts, options)
    monkeypatch.setenv("VLLM_H2O_KERNELS", "reference")
    monkeypatch.setattr("vllm_h2o.attention.ops.cpu._library", must_not_be_called)
    assert outcomes(prompts, options) == expected


def must_not_be_called():
    raise AssertionError("the reference needs no C")


def test_other_kernels_are_refused(monkeypatch):
    monkeypatch.setenv("VLLM_H2O_KERNELS", "fast")
    with (
        pytest.raises(
            ValueError, match="VLLM_H2O_KERNELS is 'fast': unset it.*'reference'"
        ),
        engine(kv_policy="h2o", h2o_budget=128),
    ):
        pass

"""A hybrid model: only its full-attention layers are compressed."""

import pytest

import vllm_h2o
from tests.engine.helpers import (
    assert_pool_whole,
    check,
    engine,
    generate,
    greedy,
    scheduler,
)
from tests.engine.tiny_models import random_prompts, save_hybrid
from vllm_h2o.policy.profile import FILE_NAME, HeadProfile

pytestmark = pytest.mark.engine

LENGTHS = (50, 200, 333, 700)
OPTIONS = {
    "skip_tokenizer_init": True,
    "max_num_batched_tokens": 256,
    "max_model_len": 1024,
    "enable_prefix_caching": True,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_hybrid(tmp_path_factory.mktemp("gemma3"))


def run(llm):
    """Tokens of each prompt, and how many of its own were found in the cache."""
    inputs = [{"prompt_token_ids": p} for p in random_prompts(*LENGTHS)]
    outputs = llm.generate(inputs, greedy(100, detokenize=False), use_tqdm=False)
    assert_pool_whole(llm)
    hits = [output.num_cached_tokens for output in outputs]
    return [list(output.outputs[0].token_ids) for output in outputs], hits


def test_only_full_attention_layers_are_compressed(model):
    with engine(model, kv_policy="h2o", h2o_budget=128, **OPTIONS) as llm:
        layers = llm.collective_rpc("probe_h2o_layers")[0]
        assert [int(name.split(".")[2]) for name in layers] == [2, 5]
        managers = scheduler(llm).kv_cache_manager.coordinator.single_type_managers
        assert sorted({type(m).__name__ for m in managers}) == [
            "H2OManager",
            "SlidingWindowManager",
        ]
        llm.collective_rpc("probe_watch")
        cold, _ = run(llm)
        survivors = llm.collective_rpc("probe_survivors")[0]
        for per_layer in survivors.values():
            for heads in per_layer:
                assert all(len(set(head)) == len(head) == 128 for head in heads)
        stats = vllm_h2o.stats(llm)
        assert stats["transitions"] == len(LENGTHS)
        assert stats["tokens_evicted"] == sum(n + 99 - 128 for n in LENGTHS)
        check(llm)
        warm, hits = run(llm)
        assert warm == cold, "a warm prefix cache changed the tokens"
        # All but the window of 32 that scores, in whole blocks.
        assert hits == [(n - 32) // 32 * 32 for n in LENGTHS]


def test_a_repeat_behind_a_shared_prefix_hits(model):
    """Windowed layers keep where prompts part, and where a repeat resumes."""
    shared, *tails = random_prompts(400, 101, 131)
    prompts = [{"prompt_token_ids": shared + tail} for tail in tails]
    with engine(model, kv_policy="h2o", h2o_budget=128, **OPTIONS) as llm:
        cached = [
            llm.generate([p], greedy(8, detokenize=False), use_tqdm=False)[0]
            for p in (*prompts, *prompts)
        ]
        assert_pool_whole(llm)
    again = [(400 + n - 32) // 32 * 32 for n in (101, 131)]
    assert [output.num_cached_tokens for output in cached[2:]] == again
    tokens = [output.outputs[0].token_ids for output in cached]
    assert tokens[:2] == tokens[2:]


def test_several_groups_of_compressed_layers(tmp_path):
    """Each has its own metadata; scores of a prompt in chunks are kept for all."""
    model, prompt = save_hybrid(tmp_path, windowed=1, full=3), random_prompts(300)
    options = OPTIONS | {"enable_prefix_caching": False}
    window = {"h2o_observation_window": "all"}
    results = []
    with engine(model, kv_policy="h2o", h2o_budget=64, **window, **options) as llm:
        managers = scheduler(llm).kv_cache_manager.coordinator.single_type_managers
        assert [type(m).__name__ for m in managers].count("H2OManager") == 3
        for chunk in (1024, 64, 33):
            scheduler(llm).max_num_scheduled_tokens = chunk
            llm.collective_rpc("probe_watch")
            tokens = generate(llm, prompt, 16)
            (survivors,) = llm.collective_rpc("probe_survivors")[0].values()
            results.append((tokens, survivors))
            assert_pool_whole(llm)
    assert results[1] == results[0] and results[2] == results[0]


def test_budgets_by_head_in_several_groups_are_refused(tmp_path):
    model = save_hybrid(tmp_path, windowed=1, full=3)
    HeadProfile([64, 512], [[[0.5, 0.1]] * 4] * 6).save(model / FILE_NAME)
    with (
        pytest.raises(ValueError, match="several KV cache groups"),
        engine(model, kv_policy="h2o", h2o_budget=64, **OPTIONS),
    ):
        pass


def test_budget_that_never_binds_gives_stock_tokens(model):
    """In blocks that were cut for others, of which nothing may show, also to windowed
    layers."""
    probe = {"worker_extension_cls": "tests.engine.inert_probe.InertProbe"}
    options = OPTIONS | {"block_size": 128}
    with engine(model, **probe, **options) as llm:
        expected, _ = run(llm)
    with engine(model, kv_policy="h2o", h2o_budget=1024, **options) as llm:
        llm.collective_rpc("probe_poison")
        assert run(llm)[0] == expected

"""A hybrid model: only its full-attention layers are compressed."""

import pytest
import torch

import vllm_h2o
from tests.engine.helpers import (
    add,
    assert_equal_densely,
    assert_pool_whole,
    check,
    engine,
    generate,
    greedy,
    scheduler,
)
from tests.engine.tiny_models import (
    ROTATES_ALL_HEADS,
    random_prompts,
    save_gpt_oss,
    save_granite4,
    save_hybrid,
    save_lfm2,
    save_nemotron_h,
    save_qwen3_next,
)
from tests.reference.dense_h2o import DenseGptOss, DenseLfm2, Sizes, Variant
from tests.reference.dense_h2o import generate as generate_densely
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


def run(llm, prompts=None, **wishes):
    """Tokens of each prompt, and how many of its own were found in the cache."""
    prompts = prompts or random_prompts(*LENGTHS)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    sampling = greedy(100, detokenize=False, extra_args={"h2o": wishes})
    outputs = llm.generate(inputs, sampling, use_tqdm=False)
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


@pytest.mark.parametrize(
    ("save", "options", "block"),
    [
        pytest.param(
            save_qwen3_next,
            {"dtype": "bfloat16"},
            288,
            # Where the processor has no bfloat16, vLLM keeps states in it none the
            # less, and its attention rounds otherwise than our kernel; so it does
            # where it has AMX.
            marks=pytest.mark.skipif(
                not torch.cpu._is_avx512_bf16_supported()
                or torch.cpu._is_amx_tile_supported(),
                reason="needs AVX512_BF16 without AMX",
            ),
        ),
        pytest.param(save_gpt_oss, {"block_size": 128}, 128, marks=pytest.mark.slow),
        pytest.param(
            save_lfm2,
            {"compilation_config": ROTATES_ALL_HEADS},
            32,
            marks=pytest.mark.slow,
        ),
        # What vLLM lacks on CPU is Mamba2 with a prefix cache.
        pytest.param(
            save_granite4,
            {"enable_prefix_caching": False},
            64,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            save_nemotron_h,
            {"enable_prefix_caching": False},
            64,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_other_hybrids_have_stock_tokens_and_are_compressed(
    tmp_path, save, options, block
):
    """vLLM makes blocks as long as a state needs. Of gpt-oss the softmax has sinks."""
    model, options = save(tmp_path), OPTIONS | options
    probe = {"worker_extension_cls": "tests.engine.inert_probe.InertProbe"}
    with engine(model, **probe, **options) as llm:
        expected = [run(llm), run(llm)]
    with engine(model, kv_policy="h2o", h2o_budget=1024, **options) as llm:
        llm.collective_rpc("probe_poison")
        assert [run(llm), run(llm)] == expected
        assert len({tuple(tokens) for tokens in expected[0][0]}) == len(LENGTHS)
        assert scheduler(llm).h2o_managers[0].block_size == block
        llm.collective_rpc("probe_watch")
        once, again = (run(llm, budget=block) for _ in range(2))
        assert once[0] == again[0] != expected[0][0]
        survivors = llm.collective_rpc("probe_survivors")[0]
        held = {
            len(head)
            for layers in survivors.values()
            for heads in layers
            for head in heads
        }
        assert held == {block}


@pytest.mark.parametrize(
    ("save", "dense_model", "others", "block", "seed"),
    [
        # Layers of short convolution have a state; one in three attends.
        (save_lfm2, DenseLfm2, "MambaManager", 32, 1),
        # Every other layer is windowed; all have sinks.
        (save_gpt_oss, DenseGptOss, "SlidingWindowManager", 128, 2),
    ],
)
def test_beside_others_equals_reference(
    tmp_path, logged, save, dense_model, others, block, seed
):
    """In steps of 256 tokens; also of prompts that hit, and after a preemption."""
    folder = save(tmp_path)
    model, variant = dense_model(folder), Variant(32, 15, "mean", "token")
    sizes = Sizes(heavy=64, recent=64, block=block)
    prompts = random_prompts(400, 600, 777, seed=seed)

    def dense(prompt, num_tokens=48):
        (result,) = generate_densely(model, prompt, num_tokens, [variant], sizes)
        return result

    expected = [dense(prompt) for prompt in prompts]
    assert max(len(set(result.tokens)) for result in expected) > 10
    options = {"h2o_budget": 128, "h2o_recent_ratio": 0.5}
    options |= {"h2o_head_budgets": "uniform", "num_gpu_blocks_override": 256}
    options |= OPTIONS | {"compilation_config": ROTATES_ALL_HEADS}
    with engine(folder, kv_policy="h2o", block_size=block, **options) as llm:
        llm.collective_rpc("probe_poison")
        managers = scheduler(llm).kv_cache_manager.coordinator.single_type_managers
        kinds = [type(manager).__name__ for manager in managers]
        assert kinds.count("H2OManager") == 1 and others in kinds
        warned = any("where other layers keep states" in said for _, said in logged())
        assert warned == (others == "MambaManager")
        for _ in range(2):
            assert_equal_densely(llm, prompts, expected)
            assert_pool_whole(llm)
        tokens, hits = run(llm, prompts)
        assert hits == [(n - 32) // block * block for n in (400, 600, 777)]
        # What a request had generated when it was preempted is its prompt's end.
        add(llm, "preempted", prompts[0], 40)
        (request,), generated = scheduler(llm).requests.values(), []
        while len(generated) < 40:
            outputs = llm.llm_engine.step()
            if len(generated) < 10 <= request.num_output_tokens:
                generated = list(request.output_token_ids)
                scheduler(llm).reset_prefix_cache(reset_running_requests=True)
            elif outputs and outputs[0].finished:
                break
        answer = list(outputs[0].outputs[0].token_ids)
        assert answer[: len(generated)] == tokens[0][: len(generated)] == generated
        rest = dense(prompts[0] + generated, 40 - len(generated))
        assert rest.margin > 1e-3 and answer[len(generated) :] == rest.tokens
        assert vllm_h2o.stats(llm)["preemptions"] == 1
        assert_pool_whole(llm)

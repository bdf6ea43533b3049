"""Residents in int8, the default on CPU: an engine near the rules written down densely.

Teacher-forced. Rounding makes steps of the last digits of keys and values, so that
those of another order of sums show, as they do in a reference whose weights differ by
1e-6: losses are a tenth as far from the reference's as those of one that does not
round.
"""

import itertools
import json

import pytest
import torch

from benchmarks.forcing import forced, processor
from tests.engine.helpers import assert_pool_whole, engine, scheduler
from tests.engine.test_growth import growth
from tests.engine.test_parallel import SINKS, joined
from tests.engine.tiny_models import (
    ROTATES_ALL_HEADS,
    random_prompts,
    save_gpt_oss,
    save_heads,
    save_lfm2,
    save_llama,
)
from tests.reference.dense_h2o import (
    DenseGptOss,
    DenseLfm2,
    DenseLlama,
    Head,
    Variant,
    generate,
)
from tests.reference.heads import GrowingHead, GrowingRoundedHead, RoundedHead
from tests.reference.sizes import own_sizes, sizes_of_heads
from vllm_h2o.attention.heads import HeadBudgets
from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.ladder import Ladder
from vllm_h2o.policy.profile import FILE_NAME, HeadProfile

pytestmark = pytest.mark.engine

BLOCK, PAGE = 96, 48
"""Slots of a block of 32 tokens with heads of 32 numbers in float32, and of its two
pages."""
VARIANT = Variant(64, 1, "mean", "token")
OPTIONS = {
    "kv_policy": "h2o",
    "h2o_resident_dtype": "auto",
    "h2o_recent_ratio": 0.5,
    "h2o_observation_window": 64,
    "h2o_pooling": 1,
    "h2o_prompt_score": "attention",
    "skip_tokenizer_init": True,
    "max_num_batched_tokens": 256,
    "max_model_len": 1024,
}
LENGTH = 80
KINDS = RoundedHead, Head


def start(folder, **options):
    return engine(folder, **(OPTIONS | {"logits_processors": [processor()]} | options))


def in_turns(prompts, length=LENGTH):
    """Texts as a prompt, and the answer that is forced."""
    return [(text[:-length], text[-length:]) for text in prompts]


def assert_near(llm, folder, turns, expected, wishes=None):
    """Of each turn: what it loses and what survives are as the reference has it.

    `expected` are, for each, the results of one that rounds and of one that does not.
    """
    llm.collective_rpc("probe_watch")
    files = [folder / f"{i}.json" for i in range(len(turns))]
    llm.generate(
        [{"prompt_token_ids": prompt} for prompt, _ in turns],
        [
            forced(answer, record_path=str(file), h2o=wishes or {})
            for (_, answer), file in zip(turns, files, strict=True)
        ],
        use_tqdm=False,
    )
    ranks = [list(x.values()) for x in llm.collective_rpc("probe_survivors")]
    survivors = joined(ranks)
    for i, (rounded, exact) in enumerate(expected):
        losses = -torch.tensor(json.loads(files[i].read_text())["logprobs"])
        near, far = (
            (losses - torch.tensor(result.losses)).abs().mean()
            for result in (rounded, exact)
        )
        assert near < far / 4
        pairs = [
            (set(ours), set(theirs.survivors()))
            for mine, heads in zip(survivors[i], rounded.heads, strict=True)
            for ours, theirs in zip(mine, heads, strict=True)
        ]
        assert all(len(ours) == len(theirs) for ours, theirs in pairs)
        held = sum(len(theirs) for _, theirs in pairs)
        assert sum(len(ours & theirs) for ours, theirs in pairs) >= 0.99 * held
    assert_pool_whole(llm)


@pytest.mark.parametrize(
    ("save", "dense", "block", "options"),
    [
        (save_llama, DenseLlama, 32, {}),
        # Each rank has sinks of its own.
        pytest.param(
            SINKS, DenseLlama, 32, {"tensor_parallel_size": 2}, marks=pytest.mark.slow
        ),
        # Layers of short convolution have a state.
        (save_lfm2, DenseLfm2, 32, {"compilation_config": ROTATES_ALL_HEADS}),
        # Every other layer is windowed, and the softmax has sinks.
        (save_gpt_oss, DenseGptOss, 128, {}),
    ],
)
def test_engine_is_near_reference(tmp_path, monkeypatch, save, dense, block, options):
    """Of a prompt beyond the budget, and of one that fills it while it generates."""
    options = dict(options)
    if options.get("tensor_parallel_size"):
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        options["distributed_executor_backend"] = "mp"
    folder = save(tmp_path / "model")
    with start(
        folder,
        h2o_budget=BLOCK,
        h2o_head_budgets="uniform",
        block_size=block,
        **options,
    ) as llm:
        llm.collective_rpc("probe_poison")
        spec = scheduler(llm).h2o_managers[0].kv_cache_spec
        budget, page = spec.layout.budget, spec.page_slots
        sizes = own_sizes(budget // page, page)
        turns = in_turns(random_prompts(budget + 380, budget + 60))
        model = dense(folder)
        expected = [
            [
                generate(
                    model, prompt, LENGTH, [VARIANT], sizes, forced=answer,
                    head_class=kind,
                )[0]
                for kind in KINDS
            ]
            for prompt, answer in turns
        ]  # fmt: skip
        assert_near(llm, tmp_path, turns, expected)


def test_in_chunks_and_going_on(tmp_path):
    """By head: prompts in chunks, and the next turn of one of them."""
    save_heads(folder := save_llama(tmp_path / "model"), gated=False)
    profile, model = HeadProfile.load(folder / FILE_NAME), DenseLlama(folder)
    chunk, common = 256, own_sizes(BLOCK // PAGE, PAGE)
    texts = random_prompts(640, 380, 320)
    turns = in_turns(texts[:2])

    def dense(prompt, answer, own, before=(None, None)):
        return [
            generate(
                model, prompt, LENGTH, [VARIANT], common, own, forced=answer,
                head_class=kind, chunk=chunk, before=held,
            )[0]
            for kind, held in zip(KINDS, before, strict=True)
        ]  # fmt: skip

    own = [
        sizes_of_heads(profile, BLOCK, PAGE, 1024, len(prompt), LENGTH)
        for prompt, _ in turns
    ]
    assert len({head.budget for layer in own[0] for head in layer}) > 1
    expected = [dense(*turn, sizes) for turn, sizes in zip(turns, own, strict=True)]
    with start(
        folder, h2o_budget=BLOCK, h2o_prefill_chunk=chunk, h2o_keep="end",
        enable_prefix_caching=True,
    ) as llm:  # fmt: skip
        assert_near(llm, tmp_path, turns, expected)
        ((more, answer),) = in_turns(texts[2:])
        turn = sum(turns[0], []) + more, answer
        result = dense(*turn, own[0], expected[0])
        assert_near(llm, tmp_path, [turn], [result], {"continue": True})
        assert scheduler(llm).h2o_stats.continued_tokens == 640 - 1


def test_growth_and_going_on(tmp_path):
    """By head: a prompt that is compressed and grows twice; one that fills its budget
    and then grows, and its next turn, which grows within what it reads."""
    save_heads(folder := save_llama(tmp_path / "model"), gated=False)
    # 2 blocks up to 3 times as many tokens, 3 up to 4, 4 up to 5, 5 up to 7.
    ladder, length = Ladder.of_share(0.7, 2 * BLOCK, 5, BLOCK, 7 * BLOCK), 210
    config = H2OConfig(recent_ratio=0.5, budget="35%", min_budget=2 * BLOCK)
    profile, model = HeadProfile.load(folder / FILE_NAME), DenseLlama(folder)
    budgets = HeadBudgets(profile, config, ladder, PAGE)
    texts = random_prompts(306 + length, 186 + length, 200)

    def sizes_of(blocks):
        return [[own_sizes(n, PAGE) for n in layer] for layer in budgets.split(blocks)]

    def dense(kind, prompt, answer, step):
        """Of a request that begins with a budget of the ladder."""
        grows_at = {ladder.lengths[i]: i + 1 for i in range(step, 3)}
        heads = itertools.product(range(4), repeat=2)

        def head_class(*args):
            return kind(growth(grows_at, ladder, sizes_of, *next(heads)), *args)

        blocks = ladder.budgets[step]
        return generate(
            model, prompt, length, [VARIANT], own_sizes(2 * blocks, PAGE),
            sizes_of(blocks), forced=answer, head_class=head_class,
        )[0]  # fmt: skip

    def dense_next(before, prompt, answer, grows_at):
        """Of its next turn, which grows at this many tokens."""
        for layer, heads in enumerate(before.heads):
            for number, head in enumerate(heads):
                head.growth |= growth(grows_at, ladder, sizes_of, layer, number)
        return generate(
            model, prompt, LENGTH, [VARIANT], own_sizes(4, PAGE), forced=answer,
            before=before, chunk=[*grows_at, len(prompt)],
        )[0]  # fmt: skip

    kinds = GrowingRoundedHead, GrowingHead
    turns = in_turns(texts[:2], length)
    expected = [
        [dense(kind, *turn, step) for kind in kinds]
        for turn, step in zip(turns, (1, 0), strict=True)
    ]
    with start(
        folder, h2o_budget=config.budget, h2o_min_budget=2 * BLOCK, h2o_keep="end",
        enable_prefix_caching=True, max_model_len=7 * BLOCK,
    ) as llm:  # fmt: skip
        assert scheduler(llm)._limits.ladder == ladder
        assert_near(llm, tmp_path, turns, expected)
        ((more, answer),) = in_turns(texts[2:])
        turn = sum(turns[1], []) + more, answer
        result = [dense_next(before, *turn, {480: 3}) for before in expected[1]]
        assert_near(llm, tmp_path, [turn], [result], {"continue": True})
        assert scheduler(llm).h2o_stats.continued_tokens == 186 + length - 1

"""What else requests ask of vLLM, and who runs it, beside compressed requests."""

import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import SamplingParams
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.kv_cache_utils import get_block_hash, maybe_convert_block_hash

from tests.engine.helpers import (
    add,
    answers,
    assert_pool_whole,
    engine,
    generate,
    greedy,
    pool,
    scheduler,
)
from tests.engine.tiny_models import (
    random_prompts,
    save_heads,
    save_llama,
    save_reading_llama,
)
from vllm_h2o import stats

pytestmark = pytest.mark.engine

BUDGET, BLOCK, NUM_TOKENS = 96, 32, 40
OPTIONS = {
    "kv_policy": "h2o",
    "h2o_budget": BUDGET,
    "h2o_keep": "end",
    "h2o_head_budgets": "uniform",
    "enable_prefix_caching": True,
    "max_model_len": 512,
    "max_num_batched_tokens": 128,
    "num_gpu_blocks_override": 64,
}
FULL = {"extra_args": {"h2o": {"policy": "full"}}}
PROMPTS = random_prompts(300, 200, 150, 230)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    """With SmolLM2's tokenizer, for grammars and words."""
    model = save_reading_llama(tmp_path_factory.mktemp("reading"))
    with engine(model, **OPTIONS) as llm:
        yield llm


def sampled(llm, prompts, parameters):
    """All answers of each request, of a batch whose requests are all compressed."""
    before = stats(llm)["transitions"]
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(inputs, parameters, use_tqdm=False)
    count = sum(parameter.n for parameter in parameters)
    assert stats(llm)["transitions"] - before == count
    assert_pool_whole(llm)
    return [output.outputs for output in outputs]


def test_sampling_is_as_asked_for(llm):
    """By a grammar, without words, with a bias, several answers, log-probabilities:
    beside each other as alone, where nothing is drawn."""
    (free,) = generate(llm, PROMPTS[3:], NUM_TOKENS)
    bad = llm.get_tokenizer().decode(free[7:8])
    grammar = StructuredOutputsParams(regex="(cat|dog){30}")
    parameters = [
        SamplingParams(max_tokens=200, temperature=0.0, structured_outputs=grammar),
        SamplingParams(max_tokens=NUM_TOKENS, n=3, ignore_eos=True),
        greedy(NUM_TOKENS, logprobs=3, logit_bias={11: 100.0, 12: 99.0}),
        greedy(NUM_TOKENS, bad_words=[bad], repetition_penalty=1.3),
    ]
    together = sampled(llm, PROMPTS, parameters)
    (by_grammar,), several, (biased,), (without,) = together
    text = llm.get_tokenizer().decode(by_grammar.token_ids, skip_special_tokens=True)
    assert re.fullmatch("(cat|dog){30}", text)
    assert len({tuple(answer.token_ids) for answer in several}) == 3
    assert set(biased.token_ids) <= {11, 12}
    assert all(len(step) >= 3 for step in biased.logprobs)
    assert free[7] not in without.token_ids
    for i, expected in enumerate(together):
        if parameters[i].n > 1:
            continue
        (alone,) = sampled(llm, PROMPTS[i : i + 1], parameters[i : i + 1])
        assert [x.token_ids for x in alone] == [x.token_ids for x in expected]


def test_prompt_logprobs_are_of_a_dense_prompt(llm):
    """Those of a request that is not compressed, also where the prompt is known."""
    wanted = greedy(NUM_TOKENS, prompt_logprobs=2)
    dense = greedy(NUM_TOKENS, prompt_logprobs=2, **FULL)
    prompt = {"prompt_token_ids": PROMPTS[0]}
    for _ in range(2):
        outputs = llm.generate([prompt] * 2, [wanted, dense], use_tqdm=False)
        mine, theirs = (output.prompt_logprobs for output in outputs)
        assert len(mine) == len(PROMPTS[0])
        for step, expected in zip(mine[1:], theirs[1:], strict=True):
            assert step.keys() == expected.keys()
            for token, found in step.items():
                assert found.logprob == pytest.approx(expected[token].logprob, abs=1e-4)


def finished(llm):
    """Steps until nothing is left to do; answers by request."""
    found = {}
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            found[output.request_id.split("-")[0]] = list(output.outputs[0].token_ids)
    return found


def test_paused_ones_go_on(llm):
    """Whatever state a request is in; also asleep, where nothing is given up."""
    expected = [generate(llm, [prompt], NUM_TOKENS)[0] for prompt in PROMPTS]
    core = llm.llm_engine.engine_core.engine_core
    for at, sleep in ((1, False), (4, True), (12, False)):
        for i, prompt in enumerate(PROMPTS):
            add(llm, f"{i}", prompt, NUM_TOKENS)
        for _ in range(at):
            llm.llm_engine.step()
        if sleep:
            core.sleep(level=0, mode="keep")
        else:
            core.pause_scheduler("keep", clear_cache=False)
        for _ in range(3):
            assert not scheduler(llm).schedule().total_num_scheduled_tokens
        core.resume_scheduler()
        found = finished(llm)
        assert [found[f"{i}"] for i in range(len(PROMPTS))] == expected
        assert_pool_whole(llm)


def test_a_reset_while_requests_run_loses_nothing(llm):
    """They are read again; what was kept of others is gone."""
    (answer,) = generate(llm, PROMPTS[:1], NUM_TOKENS)
    going_on = greedy(4, extra_args={"h2o": {"continue": True}})
    turn = [PROMPTS[0] + answer + PROMPTS[3][:9]]
    for i, prompt in enumerate(PROMPTS):
        add(llm, f"{i}", prompt, NUM_TOKENS)
    for _ in range(12):
        llm.llm_engine.step()
    before = stats(llm)
    assert llm.reset_prefix_cache(reset_running_requests=True)
    assert [len(tokens) for tokens in finished(llm).values()] == [NUM_TOKENS] * 4
    assert_pool_whole(llm)
    answers(llm, turn, going_on)
    gone_on = stats(llm)["continued_tokens"] - before["continued_tokens"]
    assert gone_on == 0, "from what was kept before the reset"
    assert_pool_whole(llm)


def test_events_name_what_others_may_hit(tmp_path):
    """Blocks of prompts, and of what stays dense; never what a request holds, or what
    is kept of one. Who follows them knows the pool."""
    batches, known, stored = [], {}, []
    options = OPTIONS | {"num_gpu_blocks_override": 24, "skip_tokenizer_init": True}
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    with engine(save_llama(tmp_path), kv_events_config=events, **options) as llm:
        scheduler(llm).kv_event_publisher.publish = batches.append
        dense = random_prompts(50, seed=1)
        for prompts in (PROMPTS, dense, PROMPTS[:2], PROMPTS[2:]):
            found = generate(llm, prompts, NUM_TOKENS)
        llm.reset_prefix_cache()
        found = generate(llm, dense, NUM_TOKENS)
        generate(llm, PROMPTS, NUM_TOKENS)
        cached = pool(llm).cached_block_hash_to_block._cache
        held = {maybe_convert_block_hash(get_block_hash(key)) for key in cached}
        assert stats(llm)["kept_requests"] > 4
    follow = [event for batch in batches for event in batch.events]
    for event in follow:
        if isinstance(event, BlockStored):
            for i, name in enumerate(event.block_hashes):
                known[name] = event.token_ids[i * BLOCK : (i + 1) * BLOCK]
                stored.append(known[name])
        elif isinstance(event, BlockRemoved):
            for name in event.block_hashes:
                del known[name]
        else:
            assert isinstance(event, AllBlocksCleared)
            known.clear()
    assert any(isinstance(event, BlockRemoved) for event in follow)
    assert known.keys() == held
    whole = [prompt[: len(prompt) // BLOCK * BLOCK] for prompt in PROMPTS]
    whole += [(dense[0] + found[0])[: (50 + NUM_TOKENS - 1) // BLOCK * BLOCK]]
    blocks = {
        tuple(tokens[i : i + BLOCK])
        for tokens in whole
        for i in range(0, len(tokens), BLOCK)
    }
    assert {tuple(tokens) for tokens in known.values()} <= blocks
    assert whole[-1][BLOCK : 2 * BLOCK] in stored, "generated, by one that stays dense"


@pytest.mark.slow
def test_new_weights_at_run_time(tmp_path):
    """As trainers do it: pause, load, reset, resume. What follows is an engine's that
    has had these weights from the start, and nothing goes on from the old ones."""
    old, new = save_llama(tmp_path / "old"), tmp_path / "new"
    new.mkdir()
    for file in old.iterdir():
        if file.suffix == ".json":
            (new / file.name).write_bytes(file.read_bytes())
    weights = load_file(old / "model.safetensors")
    torch.manual_seed(1)
    # On CPU layers pack the others away, where vLLM does not find them again.
    changed = {
        name: x * (1 + torch.rand_like(x)) if "norm" in name else x
        for name, x in weights.items()
    }
    save_file(changed, new / "model.safetensors", {"format": "pt"})
    options = OPTIONS | {"skip_tokenizer_init": True}
    with engine(new, **options) as llm:
        expected = generate(llm, PROMPTS, NUM_TOKENS)
    # vLLM's loader of new weights holds the layers of an engine in this process.
    with engine(old, **options, distributed_executor_backend="mp") as llm:
        before = generate(llm, PROMPTS, NUM_TOKENS)
        assert before != expected
        core = llm.llm_engine.engine_core.engine_core
        for i, prompt in enumerate(PROMPTS):
            add(llm, f"{i}", prompt, NUM_TOKENS)
        for _ in range(5):
            llm.llm_engine.step()
        core.pause_scheduler("keep", clear_cache=False)
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(new)})
        assert core.reset_prefix_cache(reset_running_requests=True)
        core.resume_scheduler()
        assert [len(tokens) for tokens in finished(llm).values()] == [NUM_TOKENS] * 4
        assert generate(llm, PROMPTS, NUM_TOKENS) == expected
        assert_pool_whole(llm)


def test_images_read_in_both_directions_go_by_the_gate(tmp_path, monkeypatch):
    """Attention of prompts can not be scored as if it were causal."""
    model = save_llama(tmp_path)
    options = OPTIONS | {
        "h2o_keep": "none",
        "skip_tokenizer_init": True,
        "hf_overrides": {"is_mm_prefix_lm": True},
        "h2o_head_budgets": "auto",
    }
    monkeypatch.setenv("VLLM_H2O_CALIBRATE", "0")
    with (
        pytest.raises(ValueError, match="reads images in both.*CALIBRATE is 0: use"),
        engine(model, **options),
    ):
        pass
    save_heads(model)
    with engine(model, **options) as llm:
        generate(llm, PROMPTS, NUM_TOKENS)
        assert stats(llm)["transitions"] == len(PROMPTS)

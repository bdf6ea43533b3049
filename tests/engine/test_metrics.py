"""H2O's metrics of an `LLM`, and none without H2O; test_serve.py has a server's."""

import gc
import logging

import pytest
from prometheus_client import REGISTRY

import vllm_h2o
from tests.engine.helpers import add, engine, generate, greedy
from tests.engine.tiny_models import random_prompts, save_llama

pytestmark = pytest.mark.engine

NAMES = {
    "h2o_transitions_total",
    "h2o_evicted_tokens_total",
    "h2o_freed_dense_blocks_total",
    "h2o_kept_requests_total",
    "h2o_continued_requests_total",
    "h2o_continued_tokens_total",
    "h2o_saved_requests_total",
    "h2o_loaded_requests_total",
    "h2o_failed_loads_total",
    "h2o_kept_snapshots",
    "h2o_kept_blocks",
    "h2o_kept_seconds",
    "h2o_kept_files",
    "h2o_kept_file_bytes",
    "h2o_dense_blocks",
    "h2o_resident_blocks",
    "h2o_requests",
    "h2o_budget_tokens",
    "h2o_evicted_share_bucket",
    "h2o_evicted_share_count",
    "h2o_evicted_share_sum",
    "h2o_held_tokens_bucket",
    "h2o_held_tokens_count",
    "h2o_held_tokens_sum",
    "h2o_policy_info",
    "h2o_transition_seconds_bucket",
    "h2o_transition_seconds_count",
    "h2o_transition_seconds_sum",
}
STATES = {"resident", "prefilling", "dense"}


def names(samples):
    return {
        sample.name
        for sample in samples
        if sample.name.startswith("h2o_") and not sample.name.endswith("_created")
    }


def values(samples, **labels):
    """Values by name of those that have these labels."""
    return {
        sample.name: sample.value
        for sample in samples
        if labels.items() <= sample.labels.items()
    }


def states(samples):
    return {
        sample.labels["state"]: sample.value
        for sample in samples
        if sample.name == "h2o_requests"
    }


def registered():
    return [sample for family in REGISTRY.collect() for sample in family.samples]


OPTIONS = {"skip_tokenizer_init": True, "disable_log_stats": False}


def test_llm_in_one_process(tmp_path):
    """Engines in turns: each starts at zero, the stock one has none."""
    model = save_llama(tmp_path)
    for _ in range(2):
        with engine(model, **OPTIONS, kv_policy="h2o", h2o_budget=64) as llm:
            before = values(registered())
            assert names(registered()) == NAMES
            assert before["h2o_transitions_total"] == 0
            generate(llm, random_prompts(40, 200), 20)
            now, stats = values(registered()), vllm_h2o.stats(llm)
            assert now["h2o_transitions_total"] == stats["transitions"] == 1
            assert now["h2o_evicted_tokens_total"] == stats["tokens_evicted"]
            assert now["h2o_freed_dense_blocks_total"] == stats["blocks_freed"]
            assert now["h2o_evicted_share_count"] == now["h2o_held_tokens_count"] == 2
            # The last token of an answer is not computed.
            assert now["h2o_held_tokens_sum"] == 64 + (40 + 19)
            assert now["h2o_transition_seconds_count"] == 1
            assert 0 < now["h2o_transition_seconds_sum"] < 60


def test_gauges_while_requests_run(tmp_path):
    model = save_llama(tmp_path)
    options = OPTIONS | {"max_num_batched_tokens": 128}
    short, long, longer = random_prompts(20, 100, 1000)
    with engine(model, **options, kv_policy="h2o", h2o_budget=64) as llm:
        for name, prompt in (("a", short), ("b", long), ("c", longer)):
            add(llm, name, prompt, 40)
        for _ in range(3):
            llm.llm_engine.step()
        now = values(registered())
        assert states(registered()) == dict(dense=1, resident=1, prefilling=1)
        assert now["h2o_resident_blocks"] == 64 // 32
        held = vllm_h2o.stats(llm)["blocks_in_use"]
        assert now["h2o_dense_blocks"] == held - 64 // 32
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
        assert states(registered()) == dict.fromkeys(STATES, 0)


def test_line_of_the_log_while_something_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", "1000")  # none but those asked for
    model = save_llama(tmp_path)
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger("vllm.vllm_h2o.plugin.metrics")
    gc.collect()  # engines before say their last line when they go
    logger.addHandler(handler)
    try:
        with engine(model, **OPTIONS, kv_policy="h2o", h2o_budget=64) as llm:
            for _ in range(2):
                llm.llm_engine.do_log_stats()
                generate(llm, random_prompts(200), 20)
                llm.llm_engine.do_log_stats()
                llm.llm_engine.do_log_stats()
    finally:
        logger.removeHandler(handler)
    lines = [record.getMessage() for record in records]
    assert len(lines) == 2
    assert lines[0].startswith("Engine 000: H2O transitions: 1, evicted tokens: 155, ")
    assert lines[1].startswith("Engine 000: H2O transitions: 2, evicted tokens: 310, ")


def test_stats_off_and_stock_engines_have_none(tmp_path):
    """Nor what an engine before them had, where stats are on."""
    model = save_llama(tmp_path)
    policy = {"kv_policy": "h2o", "h2o_budget": 64}
    with engine(model, **OPTIONS | policy):
        assert names(registered()) == NAMES
    inert = {"worker_extension_cls": "tests.engine.inert_probe.InertProbe"}
    with engine(model, **OPTIONS, **inert) as llm:
        llm.generate([{"prompt_token_ids": [1, 2, 3]}], greedy(4), use_tqdm=False)
        assert not names(registered())
    with engine(model, **(OPTIONS | policy | {"disable_log_stats": True})) as llm:
        llm.generate([{"prompt_token_ids": [1, 2, 3]}], greedy(4), use_tqdm=False)
        assert not names(registered())

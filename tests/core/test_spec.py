"""The spec keeps its kind through everything that vLLM does with specs."""

import copy
import pickle
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from tests.core.helpers import config_of, spec_of
from vllm_h2o.core.compat import kv_cache_config
from vllm_h2o.core.manager import H2OManager
from vllm_h2o.core.settings import h2o_config
from vllm_h2o.core.spec import H2OAttentionSpec, register, with_equal_pages
from vllm_h2o.policy.config import H2OConfig

PLAIN = FullAttentionSpec(
    block_size=32, num_kv_heads=3, head_size=64, dtype=torch.float32
)
SPEC = H2OAttentionSpec.of(PLAIN, H2OConfig(budget=100), 1000)


def test_page_holds_keys_values_scores_and_births():
    assert SPEC.page_size_bytes == PLAIN.page_size_bytes + 3 * 32 * (4 + 4)


def test_page_holds_a_bound_where_a_part_is_read_and_a_threshold_where_losses_merge():
    beside = SPEC.page_size_bytes - PLAIN.page_size_bytes
    for options, floats in (({"read": "20%"}, 64), ({"merge": "value"}, 32 + 16)):
        config = H2OConfig(budget=100, **options)
        spec = H2OAttentionSpec.of(PLAIN, config, 1000)
        assert spec.page_size_bytes - PLAIN.page_size_bytes == beside + 3 * 4 * floats


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_counts_follow_the_block_size(block_size):
    spec = SPEC.copy_with_new_block_size(block_size)
    assert spec.page_size_bytes >= spec.unpadded_page_size_bytes + 3 * block_size * 8
    assert spec.dense_columns == -(-1000 // block_size)
    assert spec.layout.budget_blocks == -(-100 // block_size)
    columns = spec.max_num_blocks_per_req(None, 1000)
    assert columns == spec.dense_columns + spec.layout.budget_blocks


def test_memory_is_asked_at_the_length_that_vllm_tries():
    """`--max-model-len auto` looks for the longest that fits."""
    vllm_config = copy.deepcopy(config_of(window=64, budget=128, chunk=64))
    spec = spec_of(vllm_config)
    # What fits the budget has no transition.
    for tokens, resident in ((200, 128), (129, 128), (128, 0), (40, 0)):
        vllm_config.model_config.max_model_len = tokens
        blocks = -(-tokens // spec.block_size) + resident // spec.block_size
        asked = spec.max_memory_usage_bytes(vllm_config)
        assert asked == blocks * spec.page_size_bytes
    assert spec.dense_columns > 200 // spec.block_size, "the table keeps its columns"


@pytest.mark.parametrize(
    ("num_tokens", "budget", "chunk", "dense", "resident"),
    [
        (1000, 128, 0, 32, 4),
        (128, 128, 0, 4, 0),
        (1000, 128, 320, 10, 4),
        (1000, 128, 100, 8, 4),  # two budgets at least
        (200, 128, 320, 7, 4),
        (1000, 1000, 0, 32, 0),  # keeps all
    ],
)
def test_blocks_while_a_prompt_is_read(num_tokens, budget, chunk, dense, resident):
    assert SPEC.block_size == SPEC.block_slots == 32
    blocks = SPEC.blocks_while_reading(num_tokens, budget, chunk)
    assert blocks == dense + resident


def test_memory_of_a_share_is_asked_by_the_length():
    """A request of the length that is found has the budget of its class."""
    vllm_config = copy.deepcopy(config_of(window=64, budget=128, chunk=64))
    config = H2OConfig(budget="25%", min_budget=64)
    spec = H2OAttentionSpec.of(PLAIN, config, 8192)
    ladder, size = spec.limits("cpu").ladder, spec.block_size
    for tokens in (8192, 2000, 300):
        vllm_config.model_config.max_model_len = tokens
        blocks = ladder.budgets[ladder.enters(tokens, tokens)]
        asked = spec.max_memory_usage_bytes(vllm_config)
        assert asked == (-(-tokens // size) + blocks) * spec.page_size_bytes
        assert blocks < 0.25 * tokens / size * 1.2 + 1


def test_merge_keeps_the_kind():
    merged = H2OAttentionSpec.merge([SPEC, replace(SPEC)])
    assert type(merged) is H2OAttentionSpec and merged == SPEC


@pytest.mark.parametrize(
    "other",
    [PLAIN, replace(SPEC, head_size=32), replace(SPEC, h2o=H2OConfig(budget=200))],
)
def test_merge_refuses_foreign_specs(other):
    with pytest.raises(AssertionError):
        H2OAttentionSpec.merge([SPEC, other])


def test_it_travels_by_pickle():
    assert pickle.loads(pickle.dumps(SPEC)) == SPEC


def test_registering_twice_is_fine():
    register()
    register()
    assert KVCacheSpecRegistry.get_manager_class(SPEC) is H2OManager
    base = KVCacheSpecRegistry.get_uniform_type_base_spec(SPEC)
    assert base is FullAttentionSpec


@pytest.mark.process
def test_built_in_specs_stay_registered_when_ours_comes_first():
    code = (
        "import vllm_h2o.core.spec\n"
        "from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec\n"
        "from vllm.v1.kv_cache_spec_registry import _REGISTRY_KVCACHESPEC_LIST as r\n"
        "print(FullAttentionSpec in r, MambaSpec in r)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "True True", done.stderr


@pytest.mark.parametrize("options", [{}, {"read": "20%"}, {"merge": "value"}])
def test_heads_have_pages_of_blocks(options):
    """As many slots, room and requests as without; finer."""
    config = H2OConfig(budget=200, **options)
    plain = replace(PLAIN, block_size=128)
    spec = H2OAttentionSpec.of(plain, config, 1000, most_page_slots=32)
    whole = H2OAttentionSpec.of(plain, config, 1000)
    assert (spec.page_slots, whole.page_slots) == (32, 128)
    assert spec.layout == whole.layout and spec.layout.budget_blocks == 2
    layout = spec.page_layout
    assert (layout.block_size, layout.budget) == (32, spec.layout.budget)
    assert whole.page_layout == whole.layout
    cut = spec.cut
    assert (cut.per_block, cut.unit) == (4, spec.page_size_bytes // 4)
    if not options:
        assert spec.page_size_bytes == whole.page_size_bytes
    # vLLM may make all pages of a hybrid as large as the largest.
    padded = replace(spec, page_size_padded=spec.page_size_bytes + 4096)
    assert padded.cut.block_step * padded.cut.unit == padded.page_size_bytes
    assert padded.cut.page_step * padded.cut.unit == cut.unit
    blocks = H2OConfig(budget=200, eviction_unit="block", head_budgets="uniform")
    spec = H2OAttentionSpec.of(plain, blocks, 1000, most_page_slots=32)
    assert spec.page_slots == 128, "blocks compete as they are"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_blocks_hold_more_slots_than_tokens(dtype):
    config = H2OConfig(budget=500, resident_dtype="int8")
    plain = replace(PLAIN, block_size=128, dtype=dtype)
    spec = H2OAttentionSpec.of(plain, config, 2000, most_page_slots=64)
    assert spec.block_slots == (448 if dtype == torch.float32 else 224)
    assert spec.layout.block_size == spec.block_slots
    assert spec.layout.budget == (896 if dtype == torch.float32 else 672)
    assert spec.page_layout.budget == spec.layout.budget
    assert spec.dense_layout.budget >= spec.layout.budget
    # No row's table has more columns than vLLM's.
    short = H2OAttentionSpec.of(plain, config, 200, most_page_slots=64)
    assert short.dense_layout.budget == 128 * short.dense_columns == 256
    # Their pages fit, and need no room of other blocks.
    assert spec.page_size_bytes == plain.page_size_bytes
    assert not spec.pages_are_blocks
    last = (spec.cut.per_block - 1) * spec.cut.page_step * spec.cut.unit
    page = 3 * spec.page_slots * (2 * 64 + 4 * 4)
    assert last + page <= spec.page_size_bytes
    # vLLM may make pages longer: they hold as many slots then.
    padded = replace(spec, page_size_padded=2 * spec.page_size_bytes)
    assert padded.block_slots == spec.block_slots


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_share_is_of_the_memory_in_stocks_cache(dtype):
    vllm_config = copy.deepcopy(config_of(64, "20%", 64, resident="int8"))
    vllm_config.model_config.dtype = dtype
    head_size = vllm_config.model_config.get_head_size()
    plain = replace(PLAIN, block_size=128, head_size=head_size, dtype=dtype)
    spec = H2OAttentionSpec.of(plain, h2o_config(vllm_config), 100_000)
    held = spec.layout.budget_blocks * spec.page_size_bytes
    share = held / (100_000 / 128 * plain.page_size_bytes)
    if dtype == torch.bfloat16:
        # Blocks are longer than stock's by what makes room for one more page.
        assert 0.2 <= share < 0.21
    else:  # no more than twice its tokens by the share
        assert share < 0.15
        assert 0.4 <= spec.layout.budget / 100_000 < 0.41


def as_vllm_has_them(specs):
    """The specs of layers once vLLM has made all pages as large."""
    config = copy.deepcopy(config_of(20, 64, 48))
    config.cache_config.kv_cache_layout = "LBHNC"
    groups = kv_cache_config(config, specs, 2**40).kv_cache_groups
    return {name: group.kv_cache_spec for group in groups for name in group.layer_names}


@pytest.mark.parametrize("full_is_smaller", [True, False])
def test_pages_of_layers_of_other_shapes_are_as_full(full_is_smaller):
    """As in stock vLLM, but for the state of slots."""
    large = {"num_kv_heads": 4, "head_size": 32}
    small = {"num_kv_heads": 1, "head_size": 64}
    full, window = (small, large) if full_is_smaller else (large, small)
    common = {"block_size": 128, "dtype": torch.float32}
    plain = FullAttentionSpec(**full, **common)
    windowed = SlidingWindowSpec(**window, **common, sliding_window=512)
    ours = H2OAttentionSpec.of(plain, H2OConfig(budget=100), 4096)
    stock = as_vllm_has_them({"full": plain, "window": windowed})
    unified = as_vllm_has_them(with_equal_pages({"full": ours, "window": windowed}))
    for name, spec in stock.items():
        assert unified[name].block_size == spec.block_size
        assert spec.page_size_bytes == 2**17
    (page,) = {spec.page_size_bytes for spec in unified.values()}
    assert page == unified["full"].page_size_bytes <= 1.04 * 2**17
    assert unified["full"].layout.block_size == unified["full"].block_slots
    # Of one shape they are as they were.
    alike = {"full": ours, "window": replace(windowed, **full)}
    assert with_equal_pages(alike) == alike
    assert with_equal_pages({"window": windowed}) == {"window": windowed}
    # Nor where those that are compressed differ, which is refused.
    both = {"full": ours, "other": replace(ours, num_kv_heads=2 * ours.num_kv_heads)}
    assert with_equal_pages(both) == both

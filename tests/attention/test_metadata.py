"""A batch split by row, from the step's plan alone."""

import functools
import pickle

import pytest
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec

from tests.core.helpers import BLOCK_SIZE, MAX_MODEL_LEN, config_of, plan_of
from vllm_h2o.attention.cpu_backend import H2OCPUBuilder
from vllm_h2o.attention.placements import BY_HEAD
from vllm_h2o.attention.prompts import PromptRow
from vllm_h2o.attention.row_placements import RowPlacements
from vllm_h2o.attention.rows import select_rows
from vllm_h2o.attention.step import StepRows
from vllm_h2o.core.settings import h2o_config
from vllm_h2o.core.spec import H2OAttentionSpec
from vllm_h2o.policy.life import RowPlan

WINDOW, BUDGET = 20, 64
ROWS = {
    "old": RowPlan(150, 1, 100, 80, BUDGET),
    "chunk": RowPlan(0, 30, 90, 70, BUDGET),
    "ends": RowPlan(80, 16, 96, 76, BUDGET),
    "read": RowPlan(20, 50, 70, 50, BUDGET),
    "fits": RowPlan(0, 12, 12, BUDGET, BUDGET),
    "whole": RowPlan(40, 1, 30, BUDGET, BUDGET),
    "fills": RowPlan(BUDGET, 1, 10, 0, BUDGET),
    "drafted": RowPlan(200, 4, 100, 80, BUDGET),
    "short": RowPlan(50, 2, 30, 10, BUDGET),
}


class Layer:
    """Stands where vLLM's layers whose heads have budgets of their own do."""

    def __init__(self):
        self.impl = self.params = self.operations = self
        self.kv_cache, self.switched = None, []

    def transition(self, *args):
        self.switched.append(args)

    def scored_layer(self, kv_cache, layout, blocks):
        return self


def build(scheduled, batch, block_size=BLOCK_SIZE, page_slots=0, drafts=0, **given):
    """Metadata of a step scheduled in one order, in a batch of another."""
    config = config_of(WINDOW, BUDGET, 48, drafts=drafts)
    plain = FullAttentionSpec(
        block_size=block_size, num_kv_heads=3, head_size=64, dtype=torch.float32
    )
    spec = H2OAttentionSpec.of(plain, h2o_config(config), MAX_MODEL_LEN, page_slots)
    builder = H2OCPUBuilder(spec, [], config, torch.device("cpu"))
    step, layer = StepRows(), Layer()
    step.request_ids = lambda: batch
    builder.bind(step, [layer], RowPlacements(by_head=True))
    step.begin(plan_of({name: ROWS[name] for name in scheduled}), [])
    counts = torch.tensor([ROWS[name] for name in batch], dtype=torch.int32)
    starts = torch.zeros(len(batch) + 1, dtype=torch.int32)
    starts[1:] = counts[:, 1].cumsum(0)
    columns = spec.max_num_blocks_per_req(config, MAX_MODEL_LEN)
    common = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=counts[:, 0] + counts[:, 1],
        num_reqs=len(batch),
        num_actual_tokens=int(starts[-1]),
        max_query_len=int(counts[:, 1].max()),
        max_seq_len=MAX_MODEL_LEN,
        block_table_tensor=torch.arange(len(batch) * columns, dtype=torch.int32).view(
            len(batch), columns
        ),
        slot_mapping=torch.arange(int(starts[-1])),
        **given,
    )
    metadata = builder.build(0, common)
    if "fills" not in batch:
        assert not layer.switched
        return metadata, common, spec
    ((layers, source, held, first_query, policy),) = layer.switched
    assert layers == [layer] and source is held.pages
    assert source.tolist() == filled_blocks(common, spec, batch)
    assert (held.placement, held.num_tokens) == (BY_HEAD, BUDGET)
    assert (first_query, policy) == (0, spec.h2o)
    return metadata, common, spec


def filled_blocks(common, spec, batch):
    first = spec.dense_columns
    row = common.block_table_tensor[batch.index("fills"), first:]
    return spec.cut.pages(row[: BUDGET // spec.block_size]).tolist()


@pytest.mark.parametrize("scheduled", [("old", "fills"), ("fills", "old")])
def test_resident_rows_alone(scheduled):
    metadata, common, spec = build(scheduled, ["old", "fills"])
    assert metadata.stock is None and metadata.resident_tokens is None
    resident = metadata.resident
    assert resident.positions.tolist() == [150, BUDGET]
    assert resident.first_queries.tolist() == [100 - WINDOW, 0]
    first = spec.dense_columns
    expected = common.block_table_tensor[:, first : first + BUDGET // BLOCK_SIZE]
    assert torch.equal(resident.block_table, expected)
    assert common.slot_mapping.tolist() == [-1, -1]


@pytest.mark.parametrize(
    "batch", [["chunk", "drafted", "old", "short"], ["drafted", "old", "short"]]
)
@pytest.mark.rule("R26")
def test_rows_with_drafts(batch):
    """Where their tokens are, and that vLLM writes none of them."""
    metadata, common, _ = build(batch, batch, drafts=3)
    resident, alone = metadata.resident, len(batch) == 3
    assert resident.positions.tolist() == [200, 150, 50]
    assert resident.counts.tolist() == [4, 1, 2]
    assert resident.starts.tolist() == [0, 4, 5]
    first_row, first = (0, 0) if alone else (1, ROWS["chunk"].num_scheduled_tokens)
    assert metadata.drafted.index.tolist() == [first_row + i for i in range(3)]
    if alone:
        assert metadata.resident_tokens is None
    else:
        assert metadata.resident_tokens.tolist() == [*range(first, first + 7)]
    assert common.slot_mapping.tolist() == [*range(first), *[-1] * 7]


@pytest.mark.rule("R25")
def test_mixed_batch():
    batch = ["chunk", "old", "ends", "fills", "whole", "fits", "read"]
    metadata, common, spec = build(tuple(ROWS), batch)
    resident, table = metadata.resident, common.block_table_tensor
    assert resident.positions.tolist() == [150, BUDGET, 40]
    assert resident.first_queries.tolist() == [100 - WINDOW, 0, BUDGET]
    first, used = spec.dense_columns, BUDGET // BLOCK_SIZE
    expected = [*table[[1, 3], first : first + used], table[4, :used]]
    assert torch.equal(resident.block_table, torch.stack(expected))
    assert metadata.resident_tokens.tolist() == [30, 47, 48]
    assert metadata.dense is None
    # All queries of "ends" score, of "read" less than half.
    assert metadata.stock_tokens.tolist() == [*range(30), *range(49, 111)]
    assert metadata.stock.seq_lens.tolist() == [30, 12, 70]
    # vLLM writes what stays dense, before anybody reads it.
    untouched = [*range(30), -1, *range(31, 47), -1, *range(48, 111)]
    assert common.slot_mapping.tolist() == untouched
    # The chunk ends before its prompt's observation window, and nobody scores where
    # nothing will be evicted.
    observed, read = metadata.prompts
    assert observed.plan == ROWS["ends"] and observed.tokens == slice(31, 47)
    assert observed.attends and not read.attends
    assert observed.plan.first_query == 96 - WINDOW
    assert torch.equal(observed.blocks, table[2, : 96 // BLOCK_SIZE])
    assert torch.equal(observed.resident, table[2, first : first + used])


@pytest.mark.parametrize("batch", [["whole"], ["old", "whole", "chunk", "fills"]])
def test_what_stays_dense_is_apart_where_resident_blocks_are_cut(batch):
    """Its pages are blocks, two of the others' each."""
    metadata, common, spec = build(tuple(batch), batch, block_size=32, page_slots=16)
    table, at = common.block_table_tensor, batch.index("whole")
    assert metadata.dense.positions.tolist() == [40]
    assert metadata.dense.first_queries.tolist() == [BUDGET]
    assert torch.equal(metadata.dense.block_table, table[at : at + 1, : BUDGET // 32])
    if len(batch) == 1:
        assert metadata.resident is None and metadata.dense_tokens is None
        assert common.slot_mapping.tolist() == [0]
        return
    assert metadata.dense_tokens.tolist() == [1]
    assert metadata.resident_tokens.tolist() == [0, 32]
    first = spec.dense_columns
    blocks = table[[0, 3], first : first + BUDGET // 32]
    pages = torch.stack([2 * blocks, 2 * blocks + 1], dim=2).flatten(1)
    assert torch.equal(metadata.resident.block_table, pages)
    assert common.slot_mapping.tolist() == [-1, *range(1, 32), -1]


def test_scores_of_earlier_steps_are_there_for_every_group():
    step = StepRows()
    for layer in ("one", "another"):
        step.transitions.partial_states("r")[layer] = layer
    for layer in ("one", "another"):  # as a row takes them
        assert step.transitions.partial_states("r").pop(layer) == layer
    step.transitions.partial_states("r")["one"] = 1
    step.begin(plan_of({}), ["r"])
    assert step.transitions.partial_states("r") == {}


def test_what_the_last_step_put_off_is_done_once_and_not_for_the_gone():
    step, done = StepRows(), []
    for name in ("stays", "gone", "kept"):
        tokens, blocks = slice(0, 40), torch.zeros(2, dtype=torch.int32)
        row = PromptRow(
            name, step.transitions, RowPlacements(), tokens, ROWS["ends"], 2, blocks
        )
        row.compress = functools.partial(_append, done, name)
        for layer in ("first", "second"):
            row.layers.append(layer)
            step.transitions.collect(row, None)
    plan = plan_of({})
    plan.kept.append("kept")  # has ended too, and others may go on from it
    for name in ("stays", "gone", "kept"):
        step.transitions.partial_states(name)["one"] = 1
    step.begin(plan, ["gone", "kept"])
    step.begin(plan_of({}), [])
    assert done == ["stays", "kept"]
    assert step.transitions.partial_states("kept") == {}


def _append(done, name, config):
    done.append(name)


def test_bidirectional_prompts_are_left_to_stock():
    """Our kernel is causal."""
    metadata, _, _ = build(("ends", "fills"), ["ends", "fills"], causal=False)
    assert not metadata.prompts[0].attends
    assert len(metadata.stock.seq_lens) == 1 and metadata.stock.causal is False


def test_images_ranges_follow_their_rows():
    ranges = {0: [], 1: [(5, 9)], 2: [(20, 50)]}
    batch = ["old", "chunk", "read"]
    causal = torch.tensor([True, False, True])
    _, common, _ = build(tuple(batch), batch, mm_req_doc_ranges=ranges)
    prompts, _ = select_rows(common.replace(causal=causal), torch.tensor([1, 2]))
    assert prompts.mm_req_doc_ranges == {0: [(5, 9)], 1: [(20, 50)]}
    assert prompts.causal.tolist() == [False, True]


def test_a_prompt_that_only_scores_leaves_nothing_to_stock():
    metadata, _, _ = build(("ends", "fills"), ["ends", "fills"])
    assert metadata.stock is None
    assert metadata.resident_tokens.tolist() == [16]
    (observed,) = metadata.prompts
    assert observed.attends


@pytest.mark.parametrize("rows", [ROWS, {}])
def test_a_plan_arrives_as_it_was_sent(rows):
    plan = plan_of(rows)
    plan.stats["transitions"] = 1
    plan.restarted.append("session")
    plan.kept.append("ended")
    plan.copies.append((3, 7))
    received = pickle.loads(pickle.dumps(plan))
    assert received.rows == rows and received.stats == plan.stats
    assert received.restarted == ["session"] and received.kept == ["ended"]
    assert received.copies == [(3, 7)]


@pytest.mark.rule("R24")
def test_rows_of_a_plan_in_any_order():
    plan = plan_of(ROWS)
    assert plan.rows == ROWS
    rows = plan.ordered(["fills", "chunk"])
    assert list(rows.rows) == ["fills", "chunk"]
    assert [rows.row(0), rows.row(1)] == [ROWS["fills"], ROWS["chunk"]]
    assert rows.decodes.tolist() == [True, False]

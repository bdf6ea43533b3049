"""What H2O chooses, reserves and refuses on CUDA, as far as no GPU is needed."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms.interface import DeviceCapability, Platform, PlatformEnum
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as GPUModelRunnerV2
from vllm.v1.worker.gpu_model_runner import GPUModelRunner as GPUModelRunnerV1
from vllm.v1.worker.gpu_worker import Worker

from tests.core.helpers import plan_of
from tests.models import SMOLLM2
from vllm_h2o.attention import cuda_backend
from vllm_h2o.attention.heads import HeadBudgets
from vllm_h2o.attention.ops import SCRATCH_BYTES
from vllm_h2o.attention.ops.triton import (
    DecodeScratch,
    Tuning,
    chunk_end_bytes,
    move_bytes,
    own_observe_bytes,
    read_bytes,
    splitting,
)
from vllm_h2o.attention.request_tables import RequestTables
from vllm_h2o.attention.step import StepRows
from vllm_h2o.calibration.resolve import Resolved
from vllm_h2o.core.settings import h2o_config
from vllm_h2o.core.spec import H2OAttentionSpec
from vllm_h2o.plugin import gpu_worker, runner
from vllm_h2o.plugin.engine_args import WORKER_CLS, needed_worker_cls
from vllm_h2o.plugin.gpu_worker import H2OGPUWorker
from vllm_h2o.plugin.validate import check_cuda_options, check_kernel_block_size
from vllm_h2o.plugin.worker import H2OWorker
from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.life import RowPlan
from vllm_h2o.policy.profile import HeadProfile


class Cuda(Platform):
    _enum = PlatformEnum.CUDA
    device_name = device_type = "cuda"

    @classmethod
    def get_device_capability(cls, device_id=0):
        return DeviceCapability(9, 0)


class Rocm(Cuda):
    _enum = PlatformEnum.ROCM
    device_name = "rocm"


@pytest.fixture
def config():
    """A fresh config of SmolLM2 with H2O, as this machine resolves it."""
    return config_of()


def config_of(**more):
    options = {"kv_policy": "h2o", "h2o_budget": 256, "max_model_len": 1024}
    options |= {"h2o_resident_dtype": "model"} | more
    args = EngineArgs(model=str(SMOLLM2), dtype="float32", **options)
    return args.create_engine_config()


@pytest.fixture
def on_cuda(monkeypatch):
    monkeypatch.setattr(gpu_worker, "current_platform", Cuda())


def test_worker_by_platform(monkeypatch):
    monkeypatch.setattr("vllm.platforms.current_platform", Cuda())
    module, _, name = WORKER_CLS["cuda"].rpartition(".")
    assert needed_worker_cls() == WORKER_CLS["cuda"]
    assert (module, name) == (H2OGPUWorker.__module__, H2OGPUWorker.__name__)
    assert issubclass(H2OGPUWorker, Worker)
    # ROCm calls its device "cuda" too.
    monkeypatch.setattr("vllm.platforms.current_platform", Rocm())
    with pytest.raises(
        ValueError, match="Rocm.*'rocm'.*use vLLM's own for cpu or cuda"
    ):
        needed_worker_cls()


@pytest.mark.parametrize(
    ("dtype", "capability", "expected"),
    [
        (torch.bfloat16, (9, 0), "FLASH_ATTN"),
        (torch.float16, (8, 0), "FLASH_ATTN"),
        (torch.float32, (9, 0), "TRITON_ATTN"),
        (torch.float16, (7, 5), "TRITON_ATTN"),
    ],
)
def test_stock_backend(config, on_cuda, monkeypatch, dtype, capability, expected):
    config.model_config.dtype = dtype
    capability = DeviceCapability(*capability)
    monkeypatch.setattr(
        Cuda, "get_device_capability", classmethod(lambda c: capability)
    )
    assert gpu_worker.stock_backend(config).name == expected


def test_image_prefixes_are_read_by_triton(config, on_cuda, monkeypatch):
    """Their attention is bidirectional, which FlashAttention 2 and 3 have not."""
    config.model_config.dtype = torch.bfloat16
    monkeypatch.setattr(type(config.model_config), "is_mm_prefix_lm", True)
    assert gpu_worker.stock_backend(config).name == "TRITON_ATTN"


def test_heads_too_large_for_flash_attention_are_read_by_triton(
    config, on_cuda, monkeypatch
):
    """Those of Gemma 4's full attention."""
    config.model_config.dtype = torch.bfloat16
    monkeypatch.setattr(type(config.model_config), "get_head_size", lambda _: 512)
    assert gpu_worker.stock_backend(config).name == "TRITON_ATTN"


@pytest.mark.parametrize("supported", [True, False])
def test_softmax_sinks_are_read_by_a_backend_that_has_them(
    config, on_cuda, monkeypatch, supported
):
    """FlashAttention 2 has none."""
    config.model_config.dtype = torch.bfloat16
    monkeypatch.setattr(
        gpu_worker.FlashAttentionBackend, "supports_sink", lambda: supported
    )
    assert gpu_worker.stock_backend(config).name == "FLASH_ATTN"
    expected = "FLASH_ATTN" if supported else "TRITON_ATTN"
    for kind, others in (
        ("gpt_oss", {}),
        ("granite_swa", {"layer_types": ["full_attention"]}),
        ("granite", {"attention_sinks": True}),
        ("laguna", {"swa_attention_sink_enabled": True}),
    ):
        config.model_config.hf_text_config = SimpleNamespace(model_type=kind, **others)
        assert gpu_worker.stock_backend(config).name == expected
    for kind, others in (
        ("granite", {"layer_types": None}),
        ("granite_swa", {"layer_types": ["full_attention"], "attention_sinks": False}),
        ("granitemoehybrid", {"layer_types": ["attention"]}),
        ("laguna", {}),
    ):
        config.model_config.hf_text_config = SimpleNamespace(model_type=kind, **others)
        assert gpu_worker.stock_backend(config).name == "FLASH_ATTN"


def test_a_config_that_had_an_engine_before_makes_another(config, on_cuda):
    config.model_config.dtype = torch.bfloat16
    first = H2OGPUWorker.choose_backend(config)
    assert config.attention_config.backend is AttentionBackendEnum.CUSTOM
    assert H2OGPUWorker.choose_backend(config) == first


@pytest.mark.parametrize("given", ["FLASH_ATTN", "TRITON_ATTN"])
def test_users_choice_reads_the_prompts(config, on_cuda, given):
    config.attention_config.backend = AttentionBackendEnum[given]
    backend = resolve_obj_by_qualname(H2OGPUWorker.choose_backend(config))
    assert config.attention_config.backend is AttentionBackendEnum.CUSTOM
    assert backend.get_name() == "CUSTOM"
    stock = AttentionBackendEnum[given].get_class()
    assert issubclass(backend, stock)
    for get in ("get_impl_cls", "get_builder_cls"):
        assert issubclass(getattr(backend, get)(), getattr(stock, get)())


@pytest.mark.process
def test_no_process_on_cuda_imports_the_worker_of_the_cpu():
    """Which would put placeholders for streams, events and pinned memory in torch."""
    script = """
import sys
sys.modules["vllm.v1.worker.cpu_worker"] = sys.modules["vllm.v1.worker.cpu.shm"] = None
import vllm_h2o.plugin.gpu_worker, vllm_h2o.core.scheduler, vllm_h2o.plugin.validate
import vllm_h2o.attention.cuda_backend
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_kernels_are_warm_before_vllm_watches_for_late_ones(monkeypatch):
    calls = []
    for cls, name in (
        (H2OWorker, "warm_up_kernels"),
        (Worker, "_maybe_activate_jit_monitor"),
    ):
        assert hasattr(cls, name)
        monkeypatch.setattr(cls, name, lambda self, name=name: calls.append(name))
    H2OGPUWorker.__new__(H2OGPUWorker)._maybe_activate_jit_monitor()
    assert calls == ["warm_up_kernels", "_maybe_activate_jit_monitor"]


def test_memory_that_the_user_names_is_not_cut(config, on_cuda, monkeypatch):
    monkeypatch.setattr(Worker, "determine_available_memory", lambda self: 1 << 30)
    monkeypatch.setattr(
        gpu_worker, "scratch_bytes", lambda config, specs, blocks: 1 << 20
    )
    monkeypatch.setattr(gpu_worker, "table_bytes", lambda *_: 1 << 10)
    monkeypatch.setattr(H2OWorker, "get_kv_cache_spec", lambda self: {})
    worker = H2OGPUWorker.__new__(H2OGPUWorker)
    worker._resolved = Resolved(H2OConfig(), "cuda", None)
    worker.vllm_config, worker.cache_config = config, config.cache_config
    # A CPU takes it from VLLM_CPU_KVCACHE_SPACE, which other tests set.
    config.cache_config.kv_cache_memory_bytes = None
    assert worker.determine_available_memory() == (1 << 30) - (1 << 20) - (1 << 10)
    config.cache_config.kv_cache_memory_bytes = 1 << 30
    assert worker.determine_available_memory() == 1 << 30


def test_batch_invariance_is_refused(config, monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(ValueError, match="VLLM_BATCH_INVARIANT=1: unset it"):
        check_cuda_options(config)
    backend = cuda_backend.H2OFlashAttentionBackend
    assert not backend.supports_batch_invariance()
    assert not backend.supports_kv_cache_update_bypass


def test_the_reference_is_refused(config, monkeypatch):
    monkeypatch.setenv("VLLM_H2O_KERNELS", "reference")
    with pytest.raises(ValueError, match="VLLM_H2O_KERNELS on CUDA='reference'.*unset"):
        check_cuda_options(config)


def test_other_backends_are_refused(config):
    config.attention_config.backend = AttentionBackendEnum.FLASHINFER
    with pytest.raises(ValueError, match="--attention-backend='FLASHINFER'.*TRITON"):
        check_cuda_options(config)
    config.attention_config.backend = None
    check_cuda_options(config)
    config.parallel_config.enable_dbo = True
    with pytest.raises(ValueError, match="--enable-dbo=True: drop --enable-dbo"):
        check_cuda_options(config)
    config.parallel_config.enable_dbo = False
    config.parallel_config.ubatch_size = 2
    with pytest.raises(ValueError, match="--ubatch-size=2: drop --ubatch-size"):
        check_cuda_options(config)


def test_a_layout_that_packs_layers_is_refused_of_several_kinds(config, monkeypatch):
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "BLHNC")
    check_cuda_options(config)
    kinds = ["sliding_attention", "full_attention"]
    monkeypatch.setattr(
        config.model_config.hf_text_config, "layer_types", kinds, raising=False
    )
    with pytest.raises(ValueError, match="VLLM_KV_CACHE_LAYOUT='BLHNC': unset it"):
        check_cuda_options(config)


def test_a_layout_in_which_blocks_lie_apart_keeps_nothing(monkeypatch):
    config = config_of(h2o_keep="end")
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "BLNHC")
    with pytest.raises(ValueError, match="VLLM_KV_CACHE_LAYOUT='BLNHC'.*--h2o-keep"):
        check_cuda_options(config)
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "LBNHC")
    check_cuda_options(config)


def spec_of(config):
    """The spec of a layer of the model, by its config."""
    model = config.model_config
    plain = FullAttentionSpec(
        block_size=config.cache_config.block_size,
        num_kv_heads=model.get_num_kv_heads(config.parallel_config),
        head_size=model.get_head_size(),
        dtype=model.dtype,
    )
    return H2OAttentionSpec.of(plain, h2o_config(config), model.max_model_len)


def test_dense_rows_beside_int8_have_scratch_of_their_own(on_cuda, monkeypatch):
    monkeypatch.setattr(Cuda, "device_type", "cpu")
    monkeypatch.setattr(splitting, "num_sms", lambda device: 132)
    config = config_of(h2o_resident_dtype="int8", h2o_budget=336)
    config.scheduler_config.max_num_seqs = 7
    spec, heads = spec_of(config), (7, 9, 3, 64)
    budget, dense, slots = spec.layout.budget, spec.dense_budget, 9999
    assert dense >= budget and not spec_of(config_of()).dense_budget
    scratch = DecodeScratch.allocate(
        *heads, budget, budget, torch.device("cpu"), None, slots, dense
    )
    assert scratch.maxima.numel() == 9 * max(
        rows
        * splitting.num_splits(
            Tuning(), 3 * rows, 64, most, most, scratch.maxima.device
        )
        for most in (budget, dense)
        for rows in range(1, 8)
    )
    taken = DecodeScratch.bytes_of(*heads, budget, budget, slots, "cpu", dense)
    parts = [part for part in vars(scratch).values() if torch.is_tensor(part)]
    assert taken == sum(part.nbytes for part in parts)
    assert taken > DecodeScratch.bytes_of(*heads, budget, budget, slots, "cpu")
    # Where queries read a part of pages of 16.
    sizes = *heads, budget, budget
    cpu = torch.device("cpu")
    scratch = DecodeScratch.allocate(*sizes, cpu, None, slots, dense, page_slots=16)
    parts = [part for part in vars(scratch).values() if torch.is_tensor(part)]
    assert scratch.reads.shape == (3, -(-(slots // 16 + 7 * 3) // 4) * 4)
    taken = DecodeScratch.bytes_of(*sizes, slots, "cpu", dense, page_slots=16)
    assert taken == sum(part.nbytes for part in parts)


@pytest.mark.parametrize(
    "options, fresh",
    [({}, 0), ({"prefill_chunk": 64}, 512), ({"keep": "end"}, 7 * 128)],
)
def test_memory_for_reading_on_is_reserved(config, on_cuda, options, fresh):
    """For a chunk of twice the memory that is held, or all that the pool holds."""
    config.model_config.max_model_len = 2048
    spec = spec_of(config)
    spec = replace(spec, h2o=replace(spec.h2o, **options))
    taken = gpu_worker.reading_bytes(config, {"layer": spec, "other": object()}, 7)
    held, item = spec.largest_budget, spec.dtype.itemsize
    seen = held + fresh
    read = read_bytes(seen, fresh, 9, 3, 64, item)
    end = chunk_end_bytes(held, seen, 3, 64, item)
    rows, states = config.scheduler_config.max_num_seqs, 4 * 3 * seen
    if fresh:
        assert rows * states < SCRATCH_BYTES
        assert taken == (1 + rows) * states + max(read, end)
    else:
        assert taken == 0
    # Where chunks end several layers share the scratch, and several rows wait.
    many = {f"layer {i}": spec for i in range(200)}
    taken = gpu_worker.reading_bytes(config, many, 7)
    assert taken == (fresh and 200 * states + max(read, SCRATCH_BYTES) + SCRATCH_BYTES)
    if "prefill_chunk" in options:
        moves = replace(spec.h2o, positions="cache", trained_length=4096)
        moves = {"layer": replace(spec, h2o=moves)}
        end += move_bytes(held, 64)
        taken = gpu_worker.reading_bytes(config, moves, 7)
        assert taken == (1 + rows) * states + max(read, end)


def test_memory_for_transitions_is_reserved(config, on_cuda):
    """Of all layers, or of as many as are compressed at once."""
    config.model_config.max_model_len = 2048
    specs = {"layer": spec_of(config), "other": object()}
    spec = specs["layer"]
    token = 2 * 64 * spec.dtype.itemsize + 4 + 4 + 16 + 4
    one = max(8 * 2048 + 16 * spec.largest_budget, token * spec.largest_budget) * 3
    assert gpu_worker.transition_bytes(config, specs) == one
    specs |= {str(i): spec for i in range(9)}
    assert gpu_worker.transition_bytes(config, specs) == 10 * one
    config.model_config.max_model_len = 2**21
    scores, scratch = 3 * 4 * 2**21, 3 * (4 * 2**21 + 16 * spec.largest_budget)
    assert scores < SCRATCH_BYTES < 10 * scores
    taken = gpu_worker.transition_bytes(config, specs)
    assert taken == SCRATCH_BYTES + max(scratch, SCRATCH_BYTES)
    assert gpu_worker.transition_bytes(config, {}) == 0


def test_memory_of_requests_that_split_their_slots_is_reserved(on_cuda):
    """Where layers share out a prompt's slots all wait, with what its tokens got."""
    options = {"h2o_budget": "25%", "h2o_min_budget": 64, "block_size": 32}
    config = config_of(kv_policy="cake", max_num_seqs=3, **options)
    plain = spec_of(config)
    resolved = Resolved(plain.h2o, "cuda", None, num_layers=2)
    spec = resolved.spec(plain)
    budget, ladder = spec.layout.budget, resolved.limits(spec).ladder
    assert (budget, spec.largest_budget) == (256, 1024)
    assert spec.most_slots == 2 * 3 * budget < 3 * 1024
    assert spec.most_slots_per_token == 2 * 3
    specs = {"a": spec, "b": spec, "other": object()}
    assert len(ladder.budgets) > 1
    pages, alike = budget // spec.page_slots, 4 * len(ladder.budgets)
    taken = RequestTables.bytes_of(2, 3, pages, alike, 3)
    assert gpu_worker.table_bytes(config, specs, resolved) == taken
    config.model_config.max_model_len = longest = 2**15
    assert 3 * 4 * 3 * longest < SCRATCH_BYTES
    states = 2 * SCRATCH_BYTES
    scratch = 2 * 3 * ((7 + 1 + 1) * 4 * longest + 16 * 1024)
    observed = own_observe_bytes(longest, 3, 64, 4)
    taken = gpu_worker.transition_bytes(config, specs)
    assert taken == states + max(scratch, observed)
    # Blocks of several pages, of which the longest request fills the last in part.
    longer = replace(spec, max_model_len=1100, most_page_slots=64, block_size=256)
    assert (longer.page_slots, longer.block_slots) == (64, 256)
    holds_all = replace(longer, h2o=replace(spec.h2o, budget=1100))
    assert holds_all.layout.budget == holds_all.longest_head == 1280
    assert longer.longest_head == 1152 > longer.layout.budget


def test_scratch_is_reserved(config, on_cuda, monkeypatch):
    monkeypatch.setattr(Cuda, "device_type", "cpu")
    config.scheduler_config.max_num_seqs = 7
    specs = {"layer": spec_of(config)}
    # The pool, or the rows, have no more slots than these, over three KV heads.
    for blocks, slots in ((3, 3 * 3 * config.cache_config.block_size), (999, 7 * 768)):
        scratch = DecodeScratch.allocate(
            7, 9, 3, 64, 256, 256, torch.device("cpu"), logit_slots=slots
        )
        parts = [part for part in vars(scratch).values() if torch.is_tensor(part)]
        total = sum(part.nbytes for part in parts)
        assert gpu_worker.scratch_bytes(config, specs, blocks) == total
    assert gpu_worker.scratch_bytes(config, {}, 999) == 0


SHAPES = {  # layers, query heads, KV heads, head size
    "Llama 3.1 8B": (32, 32, 8, 128),
    "Llama 3.1 70B": (80, 64, 8, 128),
    "Qwen3 8B": (36, 32, 8, 128),
    "Gemma 3 12B": (8, 16, 8, 256),  # the others have sliding windows
}


@pytest.mark.parametrize("name", SHAPES)
def test_scratch_is_small_at_the_settings_that_vllm_defaults_to(name, monkeypatch):
    """1024 rows of 131072 tokens and budgets of 20 %, in 60 GiB of KV cache on 132 SMs.

    The richest head has all tokens, and a layer three times the average.
    """
    monkeypatch.setattr(splitting, "num_sms", lambda device: 132)
    layers, heads, kv_heads, head_size = SHAPES[name]
    budget = 26224
    pool = 60 * 2**30 // (layers * kv_heads * (4 * head_size + 8))
    slots = splitting.slots_with_logits(1024, 3 * kv_heads * budget, pool, 3 * kv_heads)
    taken = DecodeScratch.bytes_of(
        1024, heads, kv_heads, head_size, budget, 131072, slots, "cpu"
    )
    assert slots * heads // kv_heads < 0.03 * 1024 * heads * 131072
    assert taken < 350 * 10**6


def test_blocks_that_fit_are_never_more():
    """Of a hybrid too, whose groups have as many layers as there are of each kind."""
    plain = FullAttentionSpec(
        block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float16
    )
    spec = H2OAttentionSpec.of(plain, H2OConfig(budget=64), 256)
    page = spec.page_size_bytes
    alike = {f"layer {i}": spec for i in range(6)}
    assert gpu_worker.most_blocks(alike, 60 * page) == 10
    hybrid = alike | {"first": plain, "second": plain}
    assert gpu_worker.most_blocks(hybrid, 60 * page) == 30
    window = {"head_size": 64, "dtype": torch.float16, "block_size": 16}
    windows = {
        str(n): SlidingWindowSpec(num_kv_heads=2, sliding_window=n, **window)
        for n in (128, 256, 512)
    }
    assert gpu_worker.most_blocks(alike | windows, 60 * page) == 60
    state = MambaSpec(block_size=16, shapes=((2, 64),), dtypes=(torch.float16,))
    states = {f"state {i}": state for i in range(4)}
    assert gpu_worker.most_blocks(alike | states, 60 * page) == 15
    states["other"] = replace(state, shapes=((3, 64),))
    assert gpu_worker.most_blocks(alike | states, 60 * page) == 60
    assert gpu_worker.most_blocks({"first": plain}, 60 * page) == 0
    assert gpu_worker.most_blocks(alike, -1) == 0


def test_scratch_grows_with_the_richest_head(config):
    config.cache_config.block_size = 32
    spec = spec_of(config)
    assert (spec.largest_budget, spec.most_slots) == (256, 3 * 256)
    profile = HeadProfile.load(Path("tests/models/smollm2/h2o_heads.json"))
    resolved = Resolved(spec.h2o, "cuda", profile, by_head=True)
    spec = resolved.spec(spec)
    assert spec.layout.budget == 256 < spec.largest_budget <= 1024
    # Of one head of a rank, and of all of a layer's.
    one = resolved.spec(replace(spec, num_kv_heads=1))
    assert one.most_slots == spec.largest_budget
    assert spec.largest_budget < spec.most_slots <= 3 * spec.largest_budget
    longer = resolved.spec(replace(spec, max_model_len=2048))
    assert longer.largest_budget > spec.largest_budget
    assert spec.most_slots_per_token == spec.most_slots / 256
    assert replace(spec, slots_per_token=0).most_slots_per_token == 3


@pytest.mark.parametrize("num_kv_heads", [1, 3])
def test_a_layer_has_no_more_slots_for_a_token_of_any_budget(config, num_kv_heads):
    """Of the richest layer, which may be another, and relatively richer, of each."""
    policy = replace(h2o_config(config), budget="20%", min_budget=64)
    profile = HeadProfile.load(Path("tests/models/smollm2/h2o_heads.json"))
    resolved = Resolved(policy, "cuda", profile, by_head=True)
    spec = replace(spec_of(config), num_kv_heads=num_kv_heads, max_model_len=8192)
    spec = resolved.spec(spec)
    ladder = resolved.limits(spec).ladder
    budgets = HeadBudgets(profile, policy, ladder, spec.page_slots)
    own = [
        sum(sorted(layer)[-num_kv_heads:]) / blocks
        for blocks in ladder.budgets
        for layer in budgets.split(blocks)
    ]
    assert len(ladder.budgets) > 10 and spec.most_slots_per_token == max(own)
    # Nor for a token of a budget that a request asks for.
    assert resolved.limits(spec).rounds
    asked = HeadBudgets(profile, policy, ladder, spec.page_slots, rounds=True)
    for blocks in ladder.budgets:
        assert asked.split(blocks, False) == budgets.split(blocks)
        held = asked.placement(blocks, False).layouts
        for layer in held:
            richest = sorted(layout.budget for layout in layer)[-num_kv_heads:]
            assert sum(richest) <= spec.richest_layer_slots


@pytest.mark.parametrize(
    "builder",
    [cuda_backend.H2OFlashAttentionBuilder, cuda_backend.H2OTritonAttentionBuilder],
)
def test_full_graphs_hold_decodes_only(builder):
    plain = FullAttentionSpec(
        block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float16
    )
    spec = H2OAttentionSpec.of(plain, H2OConfig(budget=64), 256)
    only = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    plainly, drafting = (SimpleNamespace(num_speculative_tokens=n) for n in (0, 3))
    assert builder.get_cudagraph_support(plainly, spec) is only
    with_drafts = AttentionCGSupport.UNIFORM_BATCH
    assert builder.get_cudagraph_support(drafting, spec) is with_drafts
    assert builder.get_cudagraph_support(plainly, plain) is not only


def test_blocks_that_are_cut_are_refused():
    spec = FullAttentionSpec(
        block_size=64, num_kv_heads=2, head_size=256, dtype=torch.float16
    )
    check_kernel_block_size(spec, spec)
    with pytest.raises(ValueError, match="--block-size 64 is cut.*--block-size 32"):
        check_kernel_block_size(spec, spec.copy_with_new_block_size(32))


def test_runners_have_what_is_wrapped():
    for name in (runner._V1, runner._SAMPLED_V1):
        assert callable(getattr(GPUModelRunnerV1, name))
    for name in (runner._V2, runner._SAMPLED_V2):
        assert callable(getattr(GPUModelRunnerV2, name))
    with pytest.raises(RuntimeError, match="object.*install vllm==0.32.0 or"):
        runner.follow(object(), StepRows(), is_v2=True)


def test_wrapping_twice_is_wrapping_once():
    class Runner:
        input_batch, speculative_config = None, object()

        def _determine_batch_execution_and_padding(self, **kwargs):
            return kwargs

        def _update_states_after_model_execute(self, output_token_ids):
            return output_token_ids

    stock, step = Runner(), StepRows()
    runner.follow(stock, step, is_v2=False)
    wrapped = stock._determine_batch_execution_and_padding
    runner.follow(stock, step, is_v2=False)
    assert stock._determine_batch_execution_and_padding is wrapped
    sampled = torch.tensor([[3, -1, -1], [5, 7, 2]])
    settled = []
    step.settle = lambda counts: settled.append(counts.tolist())
    assert stock._update_states_after_model_execute(sampled) is sampled
    assert settled == [[1, 3]]
    assert wrapped() == {}
    step.begin(
        plan_of({"a": RowPlan(9, 1, 9, 0, 64), "b": RowPlan(3, 1, 9, 0, 64)}), []
    )
    assert wrapped() == {"force_uniform_decode": False}
    step.begin(plan_of({"a": RowPlan(9, 1, 9, 0, 64)}), [])
    assert wrapped() == {}

"""Bad options and refused combinations fail before weights load, and say why."""

import copy
import json
import subprocess
import sys
from dataclasses import fields, replace
from importlib.metadata import EntryPoint, EntryPoints
from types import SimpleNamespace

import pytest
import vllm
from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import (
    ExampleConnector,
)
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.models import SMOLLM2
from vllm_h2o.attention import cpu_backend, ops
from vllm_h2o.attention.ops import Capability, cpu, triton
from vllm_h2o.calibration.head_profiles import why_not_measured
from vllm_h2o.core.settings import (
    TRAINED_KEY,
    h2o_config,
    parse_settings,
    uses_profile_cache,
)
from vllm_h2o.plugin.connectors import (
    EXAMPLE,
    MULTI,
    OFFLOADING,
    SIMPLE,
    check_connector,
)
from vllm_h2o.plugin.engine_args import extend, translate
from vllm_h2o.plugin.long_texts import lengthened
from vllm_h2o.plugin.requests import limits_of
from vllm_h2o.plugin.validate import check_kernels, check_vllm_config
from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.layout import SlotLayout
from vllm_h2o.policy.methods import METHODS, Method
from vllm_h2o.policy.presets import PRESETS, resolve_config
from vllm_h2o.policy.profile import FILE_NAME, HeadProfile

MODEL = str(SMOLLM2)


@pytest.mark.parametrize(
    "option, value, fix",
    [
        ("budget", 0, "512"),
        ("budget", "-5", "512"),
        ("budget", "much", "20%"),
        ("budget", "0%", "20%"),
        ("budget", "101%", "20%"),
        ("budget", True, "512"),
        ("recent_ratio", 1.5, "from 0.0 to 1.0"),
        ("recent_ratio", -0.1, "from 0.0 to 1.0"),
        ("recent_ratio", "half", "from 0.0 to 1.0"),
        ("sinks", -1, "from 0 to 2147483648"),
        ("sinks", 2.5, "whole number"),
        ("observation_window", 0, "'all'"),
        ("observation_window", "some", "'all'"),
        ("observation_window", 1.5, "'all'"),
        ("observation_window", "0%", "'20%'"),
        ("observation_window", "101%", "'20%'"),
        ("prefill_chunk", -1, "from 0 to 2147483648"),
        ("keep", "all", "none, end, prompt"),
        ("keep_folder", 3, "the path of a folder"),
        ("keep_size", 0, "a number from"),
        ("keep_size", float("nan"), "a number from"),
        ("prefill_chunk", 2.5, "whole number"),
        ("read", "0%", "'20%'"),
        ("read", 20, "'20%'"),
        ("merge", "key", "none, value"),
        ("resident_dtype", "fp8", "auto, model, int8"),
        ("pooling", 0, "from 1 to 1023"),
        ("pooling", 4, "odd"),
        ("score", "max", "sum, mean"),
        ("score_decay", 1.1, "from 0.0 to 1.0"),
        ("score_decay", -1, "from 0.0 to 1.0"),
        ("eviction_unit", "page", "token, block"),
        ("head_budgets", "", "'uniform', 'auto'"),
    ],
)
def test_bad_value_names_option_value_and_fix(option, value, fix):
    with pytest.raises(ValueError) as error:
        EngineArgs(model=MODEL, kv_policy="h2o", **{f"h2o_{option}": value})
    for part in (
        f"h2o_{option}",
        f"--h2o-{option.replace('_', '-')}",
        repr(value),
        fix,
    ):
        assert part in str(error.value)


def nested(depth):
    """A dictionary that Python can not write."""
    value = {}
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize("option", [f.name for f in fields(H2OConfig)])
def test_any_value_is_named_in_a_short_message(option):
    """Or right: a file may have any name."""
    absurd = [nested(2000), 10**5000, 10**30, 2**64, float("inf"), float("nan")]
    absurd += ["9" * 5000, "x" * 5000, [1], b"512", None, {}]
    for value in absurd:
        try:
            parse_settings({option: value})
        except ValueError as error:
            assert option in str(error) and len(str(error)) < 500
        else:
            assert option == "head_budgets" and isinstance(value, str)


@pytest.mark.parametrize("settings", [{1: 2}, {2.5: 1}, {None: 1}, 5])
def test_settings_that_have_no_names_are_refused(settings):
    with pytest.raises(ValueError, match=r"additional_config\['h2o'\].*use"):
        parse_settings(settings)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--h2o-sinks four", "h2o_sinks (--h2o-sinks) is 'four': use a whole number"),
        ("--h2o-sinks 1.5", "h2o_sinks (--h2o-sinks) is '1.5': use a whole number"),
        ("--h2o-recent-ratio half", "(--h2o-recent-ratio) is 'half': use a number"),
        ("--h2o-pooling 99999999", "(--h2o-pooling) is 99999999: use a whole number"),
        ("--h2o-budget much", "h2o_budget (--h2o-budget) is 'much': use a number of"),
    ],
)
def test_the_command_line_names_option_value_and_fix(arguments, said, capsys):
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    command = ["--kv-policy", "h2o", "--model", MODEL, *arguments.split()]
    try:
        EngineArgs.from_cli_args(parser.parse_args(command))
    except (SystemExit, ValueError) as error:
        assert said in f"{error} {capsys.readouterr().err}"
    else:
        raise AssertionError(f"{arguments} passes")


def test_sinks_leave_a_recent_token():
    streaming = resolve_config("streaming", None, {"budget": 64, "sinks": 63})
    assert SlotLayout.from_config(streaming, 32, 2048).recent_slots == 1
    with pytest.raises(
        ValueError, match="h2o_sinks .* is 64: of the 64 slots.* 63; use"
    ):
        SlotLayout.from_config(replace(streaming, sinks=64), 32, 2048)


@pytest.mark.parametrize(
    ("said", "uses"),
    [
        ("", True),
        ("1", True),
        ("True", True),
        ("0", False),
        ("false", False),
        ("no", False),
    ],
)
def test_calibrate_is_on_or_off(monkeypatch, said, uses):
    monkeypatch.setenv("VLLM_H2O_CALIBRATE", said)
    assert uses_profile_cache() is uses


def test_calibrate_is_nothing_else(monkeypatch):
    monkeypatch.setenv("VLLM_H2O_CALIBRATE", "never")
    args = EngineArgs(model=MODEL, kv_policy="h2o", dtype="float32")
    with pytest.raises(ValueError, match="VLLM_H2O_CALIBRATE is 'never': use 0 or 1"):
        args.create_engine_config()


def test_an_option_that_the_method_lacks_is_refused(monkeypatch):
    class Other(Method):
        name = "other"

    monkeypatch.setitem(METHODS, "other", Other)
    assert resolve_config("h2o", None, {"score": "other"}).method == Other()
    with pytest.raises(ValueError, match="h2o_score_decay=0.5 .*h2o_score='other'"):
        resolve_config("h2o", None, {"score": "other", "score_decay": 0.5})
    # Given by the preset: without it, this would be no TOVA.
    with pytest.raises(ValueError, match="h2o_score_decay=0.0 .* of tova"):
        resolve_config("tova", None, {"score": "other"})


@pytest.mark.parametrize(
    "options, parts",
    [
        ({"kv_policy": "lru"}, ["kv_policy", "--kv-policy", "'lru'", "snapkv"]),
        (
            {"enable_h2o": True, "kv_policy": "snapkv"},
            ["enable_h2o=True", "kv_policy='snapkv'", "drop one"],
        ),
        (
            {"enable_h2o": True, "kv_policy": "full"},
            ["enable_h2o=True", "kv_policy='full'", "drop one"],
        ),
        (
            {"enable_h2o": False, "kv_policy": "h2o"},
            ["enable_h2o=False", "kv_policy='h2o'", "drop one"],
        ),
        ({"enable_h2o": "yes"}, ["enable_h2o", "'yes'", "use True or False"]),
        ({"h2o_budget": 512}, ["h2o_budget=512", "no kv_policy", "--kv-policy h2o"]),
        (
            {"kv_policy": "full", "h2o_sinks": 4},
            ["h2o_sinks=4", "kv_policy='full'", "drop the option"],
        ),
        (
            {"enable_h2o": False, "h2o_budget": 64},
            ["h2o_budget=64", "enable_h2o=False"],
        ),
        (
            {
                "kv_policy": "h2o",
                "h2o_head_budgets": "heads.json",
                "h2o_eviction_unit": "block",
            },
            ["h2o_head_budgets='heads.json'", "h2o_eviction_unit='token'", "'uniform'"],
        ),
        (
            {"kv_policy": "streaming", "h2o_score": "mean"},
            ["h2o_score='mean'", "recent_ratio=1.0", "--h2o-recent-ratio"],
        ),
        (
            {"kv_policy": "h2o", "scheduler_cls": "my.Scheduler"},
            ["scheduler_cls='my.Scheduler'", "--scheduler-cls", "kv_policy"],
        ),
        (
            {"kv_policy": "h2o", "worker_cls": "my.Worker"},
            ["worker_cls='my.Worker'", "--worker-cls", "kv_policy"],
        ),
        (
            {"enable_h2o": False, "additional_config": {"h2o": {"policy": "tova"}}},
            ["additional_config['h2o']", "tova", "enable_h2o=False"],
        ),
        (
            {"kv_policy": "h2o", "additional_config": {"h2o": {"policy": "tova"}}},
            ["additional_config['h2o']", "tova", "kv_policy='h2o'"],
        ),
    ],
)
def test_contradictions_name_both_sides(options, parts):
    with pytest.raises(ValueError) as error:
        EngineArgs(model=MODEL, **options)
    for part in parts:
        assert part in str(error.value)


@pytest.fixture
def model_of(tmp_path):
    """Write a model's config.json, without weights; returns EngineArgs options."""

    def write(architecture, **config):
        config |= {"architectures": [architecture]}
        (tmp_path / "config.json").write_text(json.dumps(config))
        return {"model": str(tmp_path), "skip_tokenizer_init": True}

    return write


LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 128,
    "max_position_embeddings": 1024,
}


def refused(options, *parts):
    args = EngineArgs(**({"kv_policy": "h2o", "dtype": "float32"} | options))
    with pytest.raises(ValueError) as error:
        args.create_engine_config()
    for part in (*parts, "--kv-policy"):
        assert part in str(error.value)


NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}


@pytest.mark.parametrize(
    ("speculation", "options", "said", "fix"),
    [
        ({"method": "ngram_gpu"}, {}, "method='ngram_gpu'", "use ngram"),
        ({}, {"h2o_merge": "value"}, "--h2o-merge='value'", "use 'none'"),
        ({}, {"h2o_read": "50%"}, "--h2o-read='50%'", "use 100%"),
        ({}, {"h2o_eviction_unit": "block"}, "--h2o-eviction-unit='block'", "'token'"),
        ({}, {"h2o_score": "norm"}, "--h2o-score='norm'", "use sum"),
        ({}, {"pipeline_parallel_size": 2}, "--pipeline-parallel-size=2", "use 1"),
    ],
)
def test_what_drafts_can_not_be_taken_back_from_is_refused(
    model_of, speculation, options, said, fix
):
    options |= model_of("LlamaForCausalLM", **LLAMA)
    options |= {"speculative_config": NGRAM | speculation}
    refused(options, "--speculative-config with", said, fix, "or drop --speculative")


def test_drafts_need_kernels_that_take_them_back(model_of, monkeypatch):
    able = cpu.CAPABILITIES - {Capability.DRAFTS}
    monkeypatch.setattr(cpu, "CAPABILITIES", able)
    options = model_of("LlamaForCausalLM", **LLAMA) | {"speculative_config": NGRAM}
    refused(options, "--speculative-config='ngram'", "no kernel on CPU", "drop")


def test_drafts_of_the_text_are_scheduled_synchronously(model_of):
    options = model_of("LlamaForCausalLM", **LLAMA) | {"speculative_config": NGRAM}
    args = EngineArgs(kv_policy="h2o", dtype="float32", **options)
    assert translate(args)["async_scheduling"] is False
    config = args.create_engine_config()
    assert config.num_speculative_tokens == 2
    # As vLLM 0.33 would have it with runner V2, if nobody said otherwise.
    config.scheduler_config.async_scheduling = True
    said = "--speculative-config with --async-scheduling=True: use --no-async"
    with pytest.raises(ValueError, match=said):
        check_vllm_config(config)
    for given in ({"async_scheduling": True}, {"speculative_config": None}):
        args = EngineArgs(kv_policy="h2o", **options | given)
        assert "async_scheduling" not in translate(args)


def test_quantized_kv_cache_is_refused(model_of):
    options = model_of("LlamaForCausalLM", **LLAMA) | {"kv_cache_dtype": "fp8"}
    refused(options, "--kv-cache-dtype", "fp8", "--kv-cache-dtype auto")


def test_checkpoint_with_a_quantized_kv_cache_is_refused(model_of):
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    quantization = {
        "quant_method": "compressed-tensors",
        "config_groups": {},
        "kv_cache_scheme": scheme,
    }
    options = model_of(
        "LlamaForCausalLM", **LLAMA, quantization_config=quantization
    ) | {"dtype": "bfloat16"}
    refused(options, "quantized KV cache", "use --kv-cache-dtype bfloat16")
    # float32 has no name there.
    options["dtype"] = "float32"
    refused(options, "quantized KV cache", "--dtype bfloat16 --kv-cache-dtype bfloat16")


def test_routed_experts_are_refused(model_of):
    # On a CPU vLLM itself stops earlier: change a config that it made.
    config = resolved(model_of("LlamaForCausalLM", **LLAMA))
    config.aux_output_config.enable_return_routed_experts = True
    with pytest.raises(ValueError, match="--enable-return-routed-experts.*=True: drop"):
        check_vllm_config(config)


def test_a_hybrid_with_states_is_served(model_of):
    config = LLAMA | {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]}
    hybrid = resolved(model_of("Lfm2ForCausalLM", **config))
    assert hybrid.model_config.is_hybrid
    assert hybrid.cache_config.mamba_cache_mode == "align"


def test_diffusion_model_is_refused(model_of):
    config = resolved(model_of("LlamaForCausalLM", **LLAMA))
    config.model_config.is_diffusion = True  # on CPU vLLM itself would stop
    with pytest.raises(ValueError, match="diffusion model.*autoregressive"):
        check_vllm_config(config)


def test_chunks_of_a_model_that_reads_images_both_ways_are_refused(model_of):
    """A chunk's end may lie within an image."""
    options = model_of("LlamaForCausalLM", **LLAMA)
    config = resolved(options | {"h2o_prefill_chunk": 1024})
    config.model_config.is_mm_prefix_lm = True  # as Gemma 3 with images says
    with pytest.raises(ValueError, match="--h2o-prefill-chunk=1024: this.*use 0"):
        check_vllm_config(config)


def test_what_does_not_go_on_is_not_kept(model_of):
    options = model_of("LlamaForCausalLM", **LLAMA) | {"h2o_keep": "end"}
    check_vllm_config(resolved(options))
    refused(
        options | {"enable_prefix_caching": False},
        "--h2o-keep='end': it needs --enable-prefix-caching: use 'none'",
    )
    config = resolved(options)
    config.model_config.is_mm_prefix_lm = True
    with pytest.raises(ValueError, match="--h2o-keep='end': this model reads images"):
        check_vllm_config(config)
    shape = LLAMA | {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]}
    hybrid = model_of("Lfm2ForCausalLM", **shape) | {"h2o_keep": "end"}
    refused(hybrid, "--h2o-keep='end'", "a window or a state of their own: use 'none'")


def test_attention_of_images_read_both_ways_is_refused(model_of):
    """It was scored as if it were causal. What `auto` comes to the worker knows."""
    options = model_of("LlamaForCausalLM", **LLAMA)
    for given, holds in (
        ({"h2o_prompt_score": "attention"}, True),
        ({"h2o_score": "sum"}, True),
        ({}, False),
        ({"h2o_recent_ratio": 1.0}, False),
    ):
        config = resolved(options | given)
        config.model_config.is_mm_prefix_lm = True
        if not holds:
            check_vllm_config(config)
            continue
        with pytest.raises(ValueError, match="-score='attention': this.*use 'gate'"):
            check_vllm_config(config)


def test_a_folder_for_what_is_kept(model_of, tmp_path):
    """Private, there, with room; and tokens need a hash that all processes have."""
    own = tmp_path / "own"
    own.mkdir(mode=0o700)
    options = model_of("LlamaForCausalLM", **LLAMA)
    options |= {"h2o_keep": "end", "h2o_keep_size": 0.01}
    for folder in (own, tmp_path / "new"):
        check_vllm_config(resolved(options | {"h2o_keep_folder": str(folder)}))
    assert not (tmp_path / "new").exists()
    tmp_path.chmod(0o755)
    named = {"h2o_keep_folder": str(own)}
    for given, said in (
        ({"h2o_keep_folder": "kept"}, "'kept': use an absolute path"),
        ({"h2o_keep_folder": str(tmp_path / "no" / "such")}, "is no folder: make it"),
        ({"h2o_keep_folder": str(tmp_path)}, "others may use it.*chmod 700 "),
        (named | {"h2o_keep_size": 2.0**19}, "it has room for .* GiB, and --h2o-keep-"),
        (named | {"h2o_keep": "none"}, "needs h2o_keep='end' or 'prompt'"),
    ):
        with pytest.raises(ValueError, match=f"h2o_keep_folder.*{said}"):
            resolved(options | given)
    config = resolved(options | named)
    config.cache_config.prefix_caching_hash_algo = "xxhash"
    with pytest.raises(ValueError, match="h2o_keep_folder.*'xxhash', which differs"):
        check_vllm_config(config)


MOVING = {"h2o_positions": "cache", "h2o_prefill_chunk": 96, "max_model_len": 8192}


def moving(options):
    return EngineArgs(kv_policy="h2o", h2o_budget=96, dtype="float32", **options)


def test_requests_may_be_longer_than_the_model_was_trained_for(model_of):
    """Again of the same arguments, which stay as they are given."""
    args = moving(model_of("LlamaForCausalLM", **LLAMA) | MOVING)
    for _ in range(2):
        config = args.create_engine_config()
        assert config.model_config.max_model_len == 8192
        assert config.model_config.hf_config.max_position_embeddings == 8192
        assert h2o_config(config).trained_length == 1024
        assert not args.hf_overrides and not args.additional_config


def test_what_the_user_says_of_the_model_holds(model_of):
    """So one may say that it is good for fewer tokens than its config has."""
    own = {"max_position_embeddings": 640, "rope_theta": 777.0}
    options = model_of("LlamaForCausalLM", **LLAMA) | MOVING | {"hf_overrides": own}
    config = moving(options).create_engine_config()
    assert h2o_config(config).trained_length == 640
    assert config.model_config.hf_config.max_position_embeddings == 8192
    assert config.model_config.hf_config.rope_theta == 777.0


def test_the_language_models_length_is_what_counts(model_of):
    """Beside what else is said of its config."""
    vision = {"model_type": "clip_vision_model"}
    shape = {"model_type": "llava", "text_config": LLAMA, "vision_config": vision}
    options = model_of("LlavaForConditionalGeneration", **shape) | MOVING
    args = moving(options | {"hf_overrides": {"text_config": {"rope_theta": 7.0}}})
    translated = lengthened(args, translate(args)["additional_config"])
    text = {"rope_theta": 7.0, "max_position_embeddings": 8192}
    assert translated["hf_overrides"] == {"text_config": text}
    assert translated["additional_config"][TRAINED_KEY] == 1024


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (
            {"max_model_len": 1024},
            ["max_model_len=1024", "1024 tokens: use a"],
        ),
        ({"max_model_len": None}, ["max_model_len=None", "of more, or 'text'"]),
        ({"hf_overrides": lambda config: config}, ["--hf-overrides as a dictionary"]),
        (
            {"h2o_prefill_chunk": 480},
            ["512 tokens", "twice the budget", "trained for 1024 may have 438"],
        ),
        ({"h2o_budget": "20%"}, ["3328 tokens", "trained for 1024 may have 438"]),
    ],
)
def test_keys_that_can_not_move_are_refused(model_of, options, parts):
    given = model_of("LlamaForCausalLM", **LLAMA) | MOVING | {"h2o_budget": 96}
    args = EngineArgs(kv_policy="h2o", dtype="float32", **(given | options))
    with pytest.raises(ValueError) as error:
        args.create_engine_config()
    for part in ("h2o_positions", "--h2o-positions", "'cache'", *parts):
        assert part in str(error.value)


def test_a_model_that_does_not_say_its_length_is_refused(model_of):
    shape = {"model_type": "mpt", "rope_theta": 1e4}
    args = moving(model_of("MptForCausalLM", **shape) | MOVING)
    with pytest.raises(ValueError, match="'cache': this model's.*use 'text'"):
        args.create_engine_config()


def test_a_model_with_positions_of_its_own_is_refused(model_of):
    """It has 1024, and no keys to rotate."""
    args = moving(model_of("GPT2LMHeadModel", model_type="gpt2") | MOVING)
    with pytest.raises(ValueError, match="'cache': the keys.*not rotated: use 'text'"):
        args.create_engine_config()


def test_kv_cache_of_another_dtype_is_refused(model_of):
    options = model_of("LlamaForCausalLM", **LLAMA) | {"kv_cache_dtype": "bfloat16"}
    args = EngineArgs(kv_policy="h2o", dtype="float32", **options)
    # From 0.33 on by vLLM itself, which comes first.
    with pytest.raises(ValueError, match="kv.cache.dtype.*bfloat16.*auto"):
        args.create_engine_config()
    options["dtype"] = "bfloat16"  # the model's own: nothing to refuse
    EngineArgs(kv_policy="h2o", h2o_budget=512, **options).create_engine_config()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"kv_policy": "h2o", "h2o_score": "norm"}, "h2o_score='norm'.*mean, sum"),
        (
            {"kv_policy": "d2o", "h2o_read": "20%"},
            "h2o_read='20%'.*beside h2o_merge.*on CPU.*'100%'",
        ),
    ],
)
def test_what_has_no_kernel_is_refused(model_of, monkeypatch, options, complaint):
    options = model_of("LlamaForCausalLM", **LLAMA) | {"dtype": "float32"} | options
    with pytest.raises(ValueError, match=complaint):
        EngineArgs(**options).create_engine_config()
    monkeypatch.setenv("VLLM_H2O_KERNELS", "reference")
    EngineArgs(**options).create_engine_config()


@pytest.mark.parametrize(
    ("preset", "options", "complaint"),
    [
        ("h2o", {"merge": "value"}, "h2o_merge='value'.*on CUDA.*'none'"),
        ("d2o", {}, "h2o_merge='value'.*on CUDA.*'none'"),
        (
            "cake",
            {"prefill_chunk": 512},
            "h2o_prefill_chunk=512.*beside h2o_score='cake'.*on CUDA.*prefill_chunk=0",
        ),
        (
            "cake",
            {"keep": "end", "head_budgets": "uniform"},
            "h2o_keep='end'.*beside h2o_score='cake'.*on CUDA.*keep='none'",
        ),
    ],
)
def test_an_option_without_a_kernel_is_refused(preset, options, complaint):
    config = replace(PRESETS[preset], **options)
    with pytest.raises(ValueError, match=complaint):
        check_kernels(config, triton, "CUDA")
    check_kernels(config, cpu, "CPU")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"prefill_chunk": 512}, "h2o_prefill_chunk=512.*on CUDA.*=0"),
        ({"keep": "end"}, "h2o_keep='end'.*on CUDA.*='none'"),
        ({"resident_dtype": "int8"}, "h2o_resident_dtype='int8'.*on CUDA.*'model'"),
        ({"score": "cake"}, "h2o_score='cake'.*on CUDA.*mean, sum"),
        (
            {"score": "d2o", "head_budgets": "request"},
            "h2o_head_budgets='request'.*on CUDA.*'uniform'",
        ),
    ],
)
def test_kernels_of_another_package_say_what_they_have(options, complaint):
    theirs = SimpleNamespace(**vars(triton) | {"CAPABILITIES": frozenset()})
    config = replace(PRESETS["h2o"], **options)
    with pytest.raises(ValueError, match=complaint):
        check_kernels(config, theirs, "CUDA")
    check_kernels(config, triton, "CUDA")
    check_kernels(config, cpu, "CPU")


@pytest.mark.parametrize("head_dim", [24, 40])
def test_head_size_without_a_kernel_is_refused(model_of, head_dim):
    options = model_of("LlamaForCausalLM", **LLAMA | {"head_dim": head_dim})
    args = EngineArgs(kv_policy="h2o", dtype="float32", **options)
    with pytest.raises(ValueError, match=f"head size .{head_dim}"):
        args.create_engine_config()


def test_model_without_full_attention_is_refused(model_of):
    config = LLAMA | {
        "model_type": "gemma3_text",
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "sliding_attention"],
        "query_pre_attn_scalar": 32,
    }
    refused(model_of("Gemma3ForCausalLM", **config), "nothing to compress")


OFFICIAL = {
    "scheduler_cls": "vllm_h2o.core.scheduler.H2OScheduler",
    "worker_cls": "vllm_h2o.plugin.cpu_worker.H2OCPUWorker",
}
SETTINGS = {"additional_config": {"h2o": {"policy": "h2o", "budget": 512}}}


@pytest.mark.parametrize("option", ["scheduler_cls", "worker_cls"])
def test_half_of_the_official_spelling_is_refused(model_of, option):
    options = model_of("LlamaForCausalLM", **LLAMA) | {"dtype": "float32"}
    # The class alone, without a policy.
    args = EngineArgs(**options, **{option: OFFICIAL[option]})
    with pytest.raises(ValueError, match=f"{option}=.*--kv-policy h2o"):
        args.create_engine_config()
    # The policy, without the other class.
    args = EngineArgs(**options, **SETTINGS, **{option: OFFICIAL[option]})
    with pytest.raises(ValueError, match="evicts nothing: use --kv-policy"):
        args.create_engine_config()


def asked(config):
    """What a user has asked for, without what the engine fills in."""
    if config.resident_why:
        config = replace(config, resident_dtype="auto", resident_why="")
    return replace(config, slots_per_token=1.0)


def test_fields_assigned_later_count():
    args = EngineArgs(model=MODEL, dtype="float32", max_model_len=1024)
    for policy, budget in (("h2o", 512), ("h2o", 256), ("tova", 256)):
        args.kv_policy, args.h2o_budget = policy, budget
        config = args.create_engine_config()
        assert asked(h2o_config(config)) == replace(PRESETS[policy], budget=budget)
        assert config.scheduler_config.scheduler_cls.endswith("H2OScheduler")
    config = replace(args, kv_policy="h2o", h2o_budget=384).create_engine_config()
    assert asked(h2o_config(config)) == replace(PRESETS["h2o"], budget=384)
    args.kv_policy = args.h2o_budget = None
    config = args.create_engine_config()
    assert h2o_config(config) is None and config.scheduler_config.scheduler_cls is None


def head_profile(path, layers, heads):
    curve = [0.1, 0.01]
    HeadProfile([64, 512], [[curve] * heads] * layers).save(path)
    return str(path)


def test_head_profile_of_another_model_is_refused(model_of, tmp_path):
    options = model_of("LlamaForCausalLM", **LLAMA) | {"h2o_budget": 256}
    right = head_profile(tmp_path / "right.json", layers=2, heads=2)
    args = EngineArgs(
        kv_policy="h2o", h2o_head_budgets=right, dtype="float32", **options
    )
    assert h2o_config(args.create_engine_config()).head_budgets == right
    for layers, heads in ((3, 2), (2, 4)):
        # What the model's own folder holds is found without being named.
        head_profile(tmp_path / FILE_NAME, layers, heads)
        args = EngineArgs(kv_policy="h2o", dtype="float32", **options)
        with pytest.raises(ValueError) as error:
            args.create_engine_config()
        for part in ("--h2o-head-budgets", f"{layers} layers of {heads}", "uniform"):
            assert part in str(error.value)


def test_missing_head_profile_is_named(model_of):
    options = model_of("LlamaForCausalLM", **LLAMA) | {"h2o_head_budgets": "no.json"}
    args = EngineArgs(kv_policy="h2o", dtype="float32", **options)
    with pytest.raises(ValueError, match="no.json is no head profile.*calibrate"):
        args.create_engine_config()


@pytest.mark.parametrize(
    "option, flag",
    [
        ({"max_model_len": 256}, "--max-model-len=256"),
        ({"max_num_batched_tokens": 256}, "--max-num-batched-tokens=256"),
    ],
)
def test_texts_too_short_to_measure_heads_are_refused(model_of, option, flag):
    options = model_of("LlamaForCausalLM", **LLAMA) | {"block_size": 32} | option
    args = EngineArgs(
        kv_policy="h2o",
        h2o_head_budgets="measure",
        h2o_budget=128,
        dtype="float32",
        **options,
    )
    with pytest.raises(ValueError, match=f"measure with {flag}: use at least 512"):
        args.create_engine_config()


@pytest.mark.parametrize(
    "options, why",
    [
        ({}, ""),
        ({"load_format": "dummy"}, "--load-format is dummy"),
        ({"max_num_batched_tokens": 300}, "--max-num-batched-tokens is 300"),
        ({"h2o_budget": 1024}, "the budget holds the longest request"),
    ],
)
def test_heads_are_not_measured_where_it_is_of_no_use(
    model_of, monkeypatch, options, why
):
    options = {"h2o_budget": 512, "dtype": "float32"} | options
    args = EngineArgs(
        kv_policy="h2o", **model_of("LlamaForCausalLM", **LLAMA), **options
    )
    config = args.create_engine_config()
    policy = h2o_config(config)
    assert policy.head_budgets == "auto"
    assert "VLLM_H2O_CALIBRATE is 0" in why_not_measured(config, policy)
    monkeypatch.delenv("VLLM_H2O_CALIBRATE")
    assert why_not_measured(config, policy).startswith(why)
    assert bool(why_not_measured(config, policy)) == bool(why)


def test_heads_of_a_hybrid_are_measured(model_of, monkeypatch):
    hybrid = LLAMA | {
        "model_type": "gemma3_text",
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 512,
    }
    monkeypatch.delenv("VLLM_H2O_CALIBRATE")
    config = resolved(model_of("Gemma3ForCausalLM", **hybrid))
    assert not why_not_measured(config, h2o_config(config))


def test_a_pipeline_of_requests_that_split_their_budget_is_refused(model_of):
    config = EngineArgs(
        kv_policy="cake",
        h2o_budget=512,
        dtype="float32",
        **model_of("LlamaForCausalLM", **LLAMA),
    ).create_engine_config()
    config.parallel_config.pipeline_parallel_size = 2
    config.scheduler_config.async_scheduling = True
    with pytest.raises(ValueError, match="--h2o-head-budgets with --pipeline"):
        check_vllm_config(config)


def test_heads_of_a_pipeline_are_not_measured(model_of, monkeypatch):
    """vLLM on CPU has no pipeline: change a config that it made."""
    options = model_of("LlamaForCausalLM", **LLAMA) | {"h2o_head_budgets": "measure"}
    config = resolved(options)
    config.parallel_config.pipeline_parallel_size = 2
    config.scheduler_config.async_scheduling = True
    with pytest.raises(ValueError, match="--h2o-head-budgets with --pipeline"):
        check_vllm_config(config)
    monkeypatch.delenv("VLLM_H2O_CALIBRATE")
    assert "no worker has all layers" in why_not_measured(config, h2o_config(config))


ELSEWHERE = ExampleConnector.__module__


def transfer(name, path=None, **extra):
    """vLLM's `kv_transfer_config`."""
    return {
        "kv_connector": name,
        "kv_role": "kv_both",
        "kv_connector_module_path": path,
        "kv_connector_extra_config": extra,
    }


@pytest.mark.parametrize(
    ("given", "options", "said", "fix"),
    [
        (transfer("NixlConnector"), {}, "='NixlConnector'", "blocks of what is held"),
        (transfer(EXAMPLE, ELSEWHERE), {}, f"={EXAMPLE!r}", "not vLLM's own"),
        (transfer("DecodeBenchConnector"), {}, "='DecodeBenchConnector'", SIMPLE),
        (
            transfer(
                MULTI, connectors=[transfer(SIMPLE), transfer(EXAMPLE, ELSEWHERE)]
            ),
            {},
            f"={EXAMPLE!r}",
            "not vLLM's own",
        ),
        (
            transfer(OFFLOADING, offload_prompt_only=False),
            {},
            "offload_prompt_only=False",
            "use true",
        ),
        (
            transfer(OFFLOADING, spec_name="TieringOffloadingSpec"),
            {},
            "spec_name='TieringOffloadingSpec'",
            "'CPUOffloadingSpec'",
        ),
        (transfer(EXAMPLE), {"h2o_keep": "end"}, "with --h2o-keep='end'", "use 'none'"),
        (transfer(EXAMPLE), {"h2o_prefill_chunk": 64}, "-prefill-chunk=64", "use 0"),
        (
            transfer(EXAMPLE),
            {"h2o_prompt_score": "attention"},
            "with --h2o-prompt-score='attention'",
            "use 'gate'",
        ),
        (
            transfer(EXAMPLE),
            {"kv_policy": "h2o-paper"},
            "with --h2o-prompt-score='attention'",
            "use a preset with a gate",
        ),
        (
            transfer(EXAMPLE),
            {"max_num_batched_tokens": 512},
            "with --max-num-batched-tokens=512",
            "use 1024",
        ),
        (
            transfer(SIMPLE, kv_offload_backend="disk", disk_path="/tmp/x"),
            {},
            "use_page_cache=False",
            "use true",
        ),
        (transfer(SIMPLE), {}, f"={SIMPLE!r}", "on GPUs only"),
    ],
)
def test_kv_connectors_that_can_not_be_served_are_refused(
    given, options, said, fix, model_of
):
    options = model_of("LlamaForCausalLM", **LLAMA) | options
    refused(options | {"kv_transfer_config": given}, "--kv-transfer-config", said, fix)


def test_offloading_is_refused_by_its_option(model_of):
    options = model_of("LlamaForCausalLM", **LLAMA) | {"kv_offloading_size": 1.0}
    refused(options, f"--kv-offloading-size={OFFLOADING!r}", "on GPUs only")


def test_a_hybrid_with_a_kv_connector_is_refused(model_of):
    config = LLAMA | {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]}
    options = model_of("Lfm2ForCausalLM", **config)
    refused(options | {"kv_transfer_config": transfer(SIMPLE)}, f"={SIMPLE!r}", "state")


@pytest.mark.parametrize(
    ("given", "ranks", "why"),
    [
        (transfer(EXAMPLE), 1, None),
        (transfer(SIMPLE), 1, None),
        (transfer(OFFLOADING), 2, None),
        (
            transfer(MULTI, connectors=[transfer(OFFLOADING), transfer(EXAMPLE)]),
            1,
            None,
        ),
        (transfer(EXAMPLE), 2, "--tensor-parallel-size=2: its ranks share files"),
        (
            transfer(MULTI, connectors=[transfer(OFFLOADING), transfer(SIMPLE)]),
            1,
            "MultiConnector with both=",
        ),
        (transfer(SIMPLE) | {"kv_role": "kv_producer"}, 1, "kv_role='kv_producer'"),
    ],
)
def test_kv_connectors_on_a_gpu(given, ranks, why, model_of, monkeypatch):
    """vLLM makes no config of a GPU here: change one that it made."""
    config = resolved(model_of("LlamaForCausalLM", **LLAMA))
    config.kv_transfer_config = KVTransferConfig(**given)
    config.parallel_config.tensor_parallel_size = ranks
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    policy = h2o_config(config)
    if why is None:
        check_connector(config, policy)
        return
    with pytest.raises(ValueError, match=why):
        check_connector(config, policy)


def test_pooling_is_refused(model_of):
    options = model_of("LlamaForCausalLM", **LLAMA) | {"runner": "pooling"}
    refused(options, "--runner='pooling'", "--runner generate")


def test_mla_is_refused(model_of):
    config = LLAMA | {
        "model_type": "deepseek_v2",
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    }
    refused(model_of("DeepseekV2ForCausalLM", **config), "MLA")


def test_encoder_decoder_is_refused(model_of):
    # The flag of vLLM's own config; a real one would want an audio stack.
    config = resolved(model_of("LlamaForCausalLM", **LLAMA))
    config.model_config.is_encoder_decoder = True
    with pytest.raises(ValueError, match="encoder-decoder.*decoder-only"):
        check_vllm_config(config)


def resolved(options):
    args = EngineArgs(kv_policy="h2o", h2o_budget=512, dtype="float32", **options)
    return args.create_engine_config()


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_context_parallel_is_refused(model_of, kind):
    # On a CPU vLLM itself stops earlier: change a config that it made.
    config = resolved(model_of("LlamaForCausalLM", **LLAMA))
    check_vllm_config(config)
    setattr(config.parallel_config, f"{kind}_context_parallel_size", 2)
    with pytest.raises(ValueError, match=f"--{kind}-context-parallel-size=2: use 1"):
        check_vllm_config(config)


def test_pipeline_without_async_scheduling_is_refused(model_of):
    """vLLM on CPU has neither: change a config that it made."""
    config = resolved(model_of("LlamaForCausalLM", **LLAMA))
    config.parallel_config.pipeline_parallel_size = 2
    config.scheduler_config.async_scheduling = True
    check_vllm_config(config)
    config.scheduler_config.async_scheduling = False
    with pytest.raises(ValueError, match="--pipeline-parallel-size.*async"):
        check_vllm_config(config)
    moving_keys = moving(model_of("LlamaForCausalLM", **LLAMA) | MOVING)
    config = moving_keys.create_engine_config()
    config.parallel_config.pipeline_parallel_size = 2
    with pytest.raises(ValueError, match="--h2o-positions.*2: use --h2o-pos"):
        check_vllm_config(config)


def test_cache_layout_without_a_kernel_is_refused(model_of, monkeypatch):
    options = model_of("LlamaForCausalLM", **LLAMA)
    for isa in ("amx", "vec16"):
        monkeypatch.setattr(cpu_backend, "_get_attn_isa", lambda *_, isa=isa: isa)
        resolved(options)
    monkeypatch.setattr(cpu_backend, "_get_attn_isa", lambda *_: "neon")
    refused(options, "'neon'", "x86-64")


def test_a_budget_is_checked_by_the_block_size_that_cpus_get(model_of):
    options = model_of("LlamaForCausalLM", **LLAMA)
    assert resolved(options).cache_config.block_size == 128
    blocks = BLOCKS | {"block_size": None, "h2o_budget": 128}
    args = EngineArgs(kv_policy="h2o", dtype="float32", **options, **blocks)
    with pytest.raises(ValueError, match="--h2o-budget.*128 tokens.*blocks of 128"):
        args.create_engine_config()


def test_another_vllm_is_refused_where_a_policy_is_asked_for(monkeypatch):
    monkeypatch.setattr(vllm, "__version__", "0.34.1+cpu")
    with pytest.raises(ValueError, match=r"0\.34\.1.*vllm==0\.33\.0.*--kv-policy"):
        EngineArgs(MODEL, kv_policy="h2o")
    EngineArgs(MODEL, kv_policy="full")


def test_another_vllm_is_refused_in_the_official_spelling(model_of, monkeypatch):
    options = model_of("LlamaForCausalLM", **LLAMA) | {"dtype": "float32"}
    args = EngineArgs(**options, **OFFICIAL, **SETTINGS)
    args.create_engine_config()
    monkeypatch.setattr(vllm, "__version__", "0.34.1+cpu")
    with pytest.raises(ValueError, match=r"0\.34\.1.*vllm==0\.33\.0"):
        args.create_engine_config()


def test_a_vllm_without_what_is_wrapped_is_left_alone():
    class Unknown:
        __dataclass_fields__ = {}

    before = dict(vars(Unknown))
    with pytest.warns(UserWarning, match="lacks .*scheduler_cls.*install vllm==0.32"):
        extend(SimpleNamespace(EngineArgs=Unknown, AsyncEngineArgs=Unknown))
    assert dict(vars(Unknown)) == before and not Unknown.__dataclass_fields__


def test_full_is_the_off_switch(model_of):
    options = model_of("LlamaForCausalLM", **LLAMA) | {"dtype": "float32"}
    plain, full = EngineArgs(**options), EngineArgs(**options, kv_policy="full")
    for config in (plain.create_engine_config(), full.create_engine_config()):
        assert config.scheduler_config.scheduler_cls is None
        assert "h2o" not in config.parallel_config.worker_cls
        assert config.additional_config == {}


def test_a_window_that_never_binds_is_none(model_of):
    config = LLAMA | {"model_type": "phi3", "sliding_window": 1000}
    config |= {"head_dim": 16, "pad_token_id": 0}
    options = model_of("Phi3ForCausalLM", **config)
    stock = EngineArgs(**options, max_model_len=1000).create_engine_config()
    assert stock.cache_config.sliding_window == 1000
    ours = resolved(options | {"max_model_len": 1000})
    assert ours.cache_config.sliding_window is None
    refused(options, "window=1000", "--max-model-len 1000")


def test_hybrid_model_without_its_manager_is_refused(model_of):
    config = LLAMA | {
        "model_type": "gemma3_text",
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 32,
    }
    options = model_of("Gemma3ForCausalLM", **config)
    options["disable_hybrid_kv_cache_manager"] = True
    refused(options, "--disable-hybrid-kv-cache-manager", "a window or a state")


OF_32 = {"block_size": 32, "h2o_resident_dtype": "model"}
BLOCKS = {
    "block_size": 32,
    "h2o_eviction_unit": "block",
    "h2o_head_budgets": "uniform",
}


@pytest.mark.parametrize(
    "options, parts",
    [
        (BLOCKS | {"h2o_budget": 32}, ["h2o_budget", "32", "33", "a heavy and a"]),
        (BLOCKS | {"h2o_budget": "1%"}, ["h2o_budget", "'1%'", "11 tokens"]),
        (BLOCKS | {"max_model_len": 32}, ["--block-size, as --max-model-len is 32"]),
        (OF_32 | {"h2o_budget": 64, "h2o_sinks": 33}, ["h2o_sinks", "33"]),
        (OF_32 | {"h2o_budget": 9, "h2o_sinks": 17}, ["17 sinks", "33 or"]),
        ({"block_size": 16}, ["--block-size is 16", "use --block-size 32"]),
        ({"block_size": 48}, ["--block-size is 48", "use --block-size 32"]),
    ],
)
def test_budget_that_leaves_no_room_is_refused(model_of, options, parts):
    args = EngineArgs(
        kv_policy="h2o",
        dtype="float32",
        **model_of("LlamaForCausalLM", **LLAMA),
        **options,
    )
    with pytest.raises(ValueError) as error:
        args.create_engine_config()
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize(
    "feature, options",
    [
        ("ALiBi", {"alibi_slopes": [0.5, 0.25]}),
        ("KV sharing", {"kv_sharing_target_layer_name": "layers.0"}),
    ],
)
def test_layer_features_are_refused_when_the_layer_is_made(model_of, feature, options):
    from vllm_h2o.attention.cpu_backend import H2OCPUImpl

    options = {"alibi_slopes": None} | options
    config = resolved(model_of("LlamaForCausalLM", **LLAMA))
    with (
        set_current_vllm_config(config),
        pytest.raises(ValueError, match=f"{feature}.*drop --kv-policy"),
    ):
        H2OCPUImpl(2, 64, 1.0, 1, sliding_window=None, kv_cache_dtype="auto", **options)


def test_config_reaches_the_engine_config(model_of):
    options = model_of("LlamaForCausalLM", **LLAMA)
    options |= {"additional_config": {"mine": [1]}, "h2o_budget": "25%"}
    args = EngineArgs(kv_policy="snapkv", h2o_score="mean", dtype="float32", **options)
    config = args.create_engine_config()
    assert config.additional_config["mine"] == [1]
    expected = H2OConfig(
        policy="snapkv",
        budget="25%",
        recent_ratio=0.5,
        sinks=0,
        observation_window=32,
        pooling=7,
        resident_dtype="model",
        score="mean",
        prompt_score="attention",
        head_budgets="uniform",
    )
    assert h2o_config(config) == expected
    layout = SlotLayout.from_config(expected, 32, 1024)
    assert (layout.budget, layout.heavy_slots, layout.recent_slots) == (256, 128, 128)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "int8"),
        ({"kv_policy": "gate"}, "int8"),
        ({"h2o_resident_dtype": "model"}, "model"),
        ({"h2o_merge": "value"}, "model"),
        ({"kv_policy": "h2o-paper"}, "model"),
    ],
)
def test_what_requests_hold_is_in_int8_on_cpu(model_of, options, expected):
    model = model_of("LlamaForCausalLM", **LLAMA)
    args = EngineArgs(**{"kv_policy": "h2o", "dtype": "bfloat16"} | model | options)
    vllm_config = args.create_engine_config()
    config = h2o_config(vllm_config)
    assert config.resident_dtype == expected
    assert (config.slots_per_token > 1.5) == (expected == "int8")
    # Processes that get the config decide nothing anew; another engine does.
    assert h2o_config(copy.deepcopy(vllm_config)) == config
    of_it = dict(vllm_config.additional_config, h2o={"merge": "value"})
    args = EngineArgs(
        dtype="bfloat16",
        scheduler_cls="vllm_h2o.core.scheduler.H2OScheduler",
        worker_cls="vllm_h2o.plugin.cpu_worker.H2OCPUWorker",
        additional_config=of_it,
        **model,
    )
    other = h2o_config(args.create_engine_config())
    assert (other.resident_dtype, other.resident_why) == (
        "model",
        "as int8 does not go with h2o_merge='value'",
    )


def test_kernels_without_int8_hold_what_the_model_has(model_of, monkeypatch):
    theirs = SimpleNamespace(**vars(cpu) | {"CAPABILITIES": frozenset()})
    monkeypatch.setitem(sys.modules, "their_kernels", theirs)
    points = EntryPoints([EntryPoint("theirs", "their_kernels", ops.ENTRY_POINTS)])
    monkeypatch.setattr(ops, "entry_points", lambda group: points)
    monkeypatch.setenv("VLLM_H2O_KERNELS", "theirs")
    model = model_of("LlamaForCausalLM", **LLAMA)
    args = EngineArgs(kv_policy="h2o", dtype="float32", **model)
    config = h2o_config(args.create_engine_config())
    assert not config.quantizes and config.resident_why == "as the kernels have no int8"


def test_a_share_of_a_length_that_vllm_finds(model_of):
    """With --max-model-len auto processes learn of the length at different times."""
    model = model_of("LlamaForCausalLM", **LLAMA)
    args = EngineArgs(kv_policy="h2o", dtype="float32", **model)
    assert h2o_config(args.create_engine_config()).budget == "20%"
    args.max_model_len = -1
    config = args.create_engine_config()
    longest = config.model_config.max_model_len
    assert h2o_config(config).budget == "20%"
    before = limits_of(config)
    config.model_config.max_model_len = longest // 2
    assert limits_of(config) == before


def test_official_spelling_gives_the_same_config(model_of):
    settings = {"policy": "h2o", "budget": 512}
    args = EngineArgs(
        **model_of("LlamaForCausalLM", **LLAMA),
        dtype="float32",
        scheduler_cls="vllm_h2o.core.scheduler.H2OScheduler",
        worker_cls="vllm_h2o.plugin.cpu_worker.H2OCPUWorker",
        additional_config={"h2o": settings},
    )
    config = h2o_config(args.create_engine_config())
    assert asked(config) == replace(PRESETS["h2o"], budget=512)


def test_presets_and_overrides():
    assert resolve_config(None, None, {}) is None
    assert resolve_config("full", None, {}) is None
    assert resolve_config(None, True, {}) == PRESETS["h2o"] == H2OConfig()
    assert resolve_config("h2o", True, {"sinks": 2}).sinks == 2
    for name, preset in PRESETS.items():
        assert preset.policy == name
        assert resolve_config(name, None, {"budget": "512"}).budget == 512


def parser():
    return AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())


def config_of(line):
    """What reaches the processes of an engine."""
    args = AsyncEngineArgs.from_cli_args(parser().parse_args(line.split()))
    return parse_settings(translate(args)["additional_config"]["h2o"])


def test_command_line():
    line = (
        f"--model {MODEL} --kv-policy h2o --h2o-budget 20% --h2o-recent-ratio 0.25 "
        "--h2o-sinks 3 --h2o-observation-window all --h2o-pooling 1 --h2o-score sum "
        "--h2o-prompt-score attention --h2o-score-decay 0.9 --h2o-read 50% "
        "--h2o-merge none --h2o-prefill-chunk 0 "
        "--h2o-eviction-unit block "
        "--h2o-head-budgets uniform"
    )
    assert config_of(line) == H2OConfig(
        budget="20%", recent_ratio=0.25, sinks=3, observation_window="all", pooling=1,
        score="sum", score_decay=0.9, read="50%", merge="none", eviction_unit="block",
        prompt_score="attention", head_budgets="uniform",
    )  # fmt: skip
    line = f"--model {MODEL} --kv-policy h2o --h2o-prefill-chunk 2048"
    assert config_of(line) == H2OConfig(prefill_chunk=2048)
    for options, prompt_score in (
        ("", "auto"),
        ("--h2o-prompt-score gate", "gate"),
        # What says how attention is to be seen, or is in the gate's way, settles it.
        ("--h2o-pooling 3", "attention"),
        ("--h2o-observation-window 64", "attention"),
        ("--h2o-head-budgets uniform", "attention"),
        ("--h2o-eviction-unit block", "attention"),
    ):
        config = config_of(f"--model {MODEL} --kv-policy h2o {options}")
        assert config.prompt_score == prompt_score
    for option, on in (("", False), ("--no-enable-h2o", False), ("--enable-h2o", True)):
        args = parser().parse_args(f"--model {MODEL} {option}".split())
        assert bool(translate(AsyncEngineArgs.from_cli_args(args))) == on


@pytest.mark.parametrize("line", ["--h2o-budget x", "--kv-policy y", "--h2o-score z"])
def test_command_line_stops_at_bad_values(line, capsys):
    with pytest.raises(SystemExit):
        parser().parse_args(["--model", MODEL, *line.split()])
    option, value = line.split()
    assert option in capsys.readouterr().err


@pytest.mark.process
def test_installed_add_on_is_inert():
    code = (
        "import sys; from vllm.engine.arg_utils import EngineArgs\n"
        "from vllm.v1.attention.backends.registry import AttentionBackendEnum as E\n"
        f"c = EngineArgs(model={MODEL!r}).create_engine_config()\n"
        "print(c.additional_config, c.scheduler_config.scheduler_cls,"
        " c.parallel_config.worker_cls, E.CPU_ATTN.is_overridden(),"
        " [m for m in sys.modules if m.startswith('vllm_h2o.attention')])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    expected = "{} None vllm.v1.worker.cpu_worker.CPUWorker False []"
    assert done.stdout.splitlines()[-1] == expected, done.stderr

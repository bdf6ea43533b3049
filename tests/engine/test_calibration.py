"""An engine that measures its own heads."""

import json
from dataclasses import asdict

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.smollm2 import ensure_model
from tests.engine.helpers import engine, generate, outcome, scheduler
from tests.engine.tiny_models import (
    ROTATES_ALL_HEADS,
    random_prompts,
    save_gpt_oss,
    save_hybrid,
    save_lfm2,
    save_llama,
    save_reading_llama,
    save_trinity,
)
from tests.reference import gate_by_transformers
from tests.reference.heads_by_transformers import measure
from vllm_h2o.calibration import head_profiles
from vllm_h2o.calibration import measure as measuring
from vllm_h2o.calibration.gate_fit import Examples
from vllm_h2o.calibration.loaded_model import LoadedModel
from vllm_h2o.calibration.texts import digest
from vllm_h2o.calibration.token_ids import seeded_texts
from vllm_h2o.core.folders import cache_root
from vllm_h2o.core.settings import most_seconds
from vllm_h2o.policy.profile import FILE_NAME, HeadProfile
from vllm_h2o.policy.trials import SHARES, Way

pytestmark = pytest.mark.engine

MAX_MODEL_LEN = 1024
OPTIONS = {
    "kv_policy": "h2o",
    "h2o_budget": 256,
    "h2o_head_budgets": "measure",
    "max_model_len": MAX_MODEL_LEN,
    "max_num_batched_tokens": MAX_MODEL_LEN,
    "skip_tokenizer_init": True,
}
AUTO = {"h2o_head_budgets": "auto"}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def measured(llama):
    """Errors of the llama, as an engine of one rank measures them."""
    return errors_of(llama)


def errors_of(model, **options):
    """What an engine measures, `[layers, KV heads, grid]`; of all ranks the same."""
    with engine(model, **(OPTIONS | options)) as llm:
        first, *others = llm.collective_rpc("h2o_profile")
    assert all(other == first for other in others)
    return torch.tensor(first.errors)


@pytest.fixture
def cache(tmp_path_factory, monkeypatch):
    """A cache without profiles; `auto` measures, as it does by default."""
    folder = tmp_path_factory.mktemp("cache")
    for made in ("kernels", ensure_model().name):  # Neither is made again.
        (folder / made).symlink_to(cache_root() / made)
    monkeypatch.setenv("VLLM_H2O_CACHE", str(folder))
    monkeypatch.delenv("VLLM_H2O_CALIBRATE")
    return folder / "heads"


@pytest.mark.parametrize(
    "save",
    [
        *(save_llama, save_trinity, save_lfm2),
        pytest.param(save_gpt_oss, marks=pytest.mark.slow),
        pytest.param(save_hybrid, marks=pytest.mark.slow),
    ],
)
def test_curves_are_those_of_transformers_and_heads_get_budgets_by_them(tmp_path, save):
    from transformers import AutoModelForCausalLM

    model = save(tmp_path)
    options = OPTIONS | {"compilation_config": ROTATES_ALL_HEADS}
    with engine(model, **options) as llm:
        (profile,) = llm.collective_rpc("h2o_profile")
        texts = seeded_texts(llm.llm_engine.model_config, MAX_MODEL_LEN)
        _, survivors = outcome(llm, random_prompts(700)[0], 8)
        by_head = "heads by profile: " in scheduler(llm)._spec.h2o.chosen
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    expected = measure(theirs, texts, "tiny")
    assert profile.grid_tokens == expected.grid_tokens
    assert profile.context_tokens == MAX_MODEL_LEN
    found, wanted = (torch.tensor(p.errors) for p in (profile, expected))
    torch.testing.assert_close(found, wanted, rtol=0.02, atol=1e-7)
    assert (len({len(head) for layer in survivors for head in layer}) > 1) == by_head


def test_the_gate_is_that_of_transformers(llama):
    from transformers import AutoModelForCausalLM

    with engine(llama, **OPTIONS) as llm:
        (profile,) = llm.collective_rpc("h2o_profile")
        texts = seeded_texts(llm.llm_engine.model_config, MAX_MODEL_LEN)
    theirs = AutoModelForCausalLM.from_pretrained(
        llama, dtype=torch.float32, attn_implementation="eager"
    )
    by_text = [gate_by_transformers.examples(theirs, ids) for ids in texts]
    found, r2 = torch.tensor(profile.gate_weights()), []
    assert found.shape == (4, 4, 2 * 32 + 4)
    for layer in range(4):
        for head in range(4):
            parts = [text[layer][head] for text in by_text]
            expected = gate_by_transformers.weights(parts).float()
            torch.testing.assert_close(
                found[layer, head], expected, rtol=0.02, atol=2e-4
            )
            for left_out, part in enumerate(parts):
                others = parts[:left_out] + parts[left_out + 1 :]
                weight = gate_by_transformers.weights(others)
                r2.append(max(gate_by_transformers.explained(weight, part), 0.0))
    assert profile.gate["explained"] == pytest.approx(sum(r2) / len(r2), abs=1e-3)


REAL = OPTIONS | {"skip_tokenizer_init": False, "max_model_len": 512}
"""SmolLM2 reads four texts of 512 tokens, as far as they are more than its budget."""


def chosen():
    """What SmolLM2 goes by after it has measured itself, and why."""
    with engine(ensure_model(), **REAL) as llm:
        (profile,) = llm.collective_rpc("h2o_profile")
        return profile, scheduler(llm)._spec.h2o


def test_a_real_model_goes_by_its_gate_and_its_profile():
    profile, config = chosen()
    assert profile.gate_weights().shape == (30, 3, 2 * 64 + 4)
    assert profile.gate["explained"] > 0.5
    assert config.gated
    said = "gate and heads by profile: regrets on texts left out are"
    assert config.chosen.startswith(said)


@pytest.mark.slow
def test_a_gate_that_loses_more_than_attention_is_not_used(monkeypatch):
    """One that knows nothing."""
    generator = torch.Generator().manual_seed(0)

    def weights(examples):
        return torch.randn(examples.targets.shape, generator=generator)

    monkeypatch.setattr(Examples, "weights", weights)
    profile, config = chosen()
    assert profile.gate is not None
    assert config.prompt_score == "attention"
    assert config.chosen.startswith("attention and heads by profile: regrets")


@pytest.mark.parametrize("by_head", [True, False])
def test_heads_are_alike_where_a_profile_loses_more(llama, tmp_path, by_head):
    """As a file beside the weights says; one that is asked for by name is used."""
    model = copied(llama, tmp_path)
    lost = {True: [[1.0, 2.0]] * len(SHARES), False: [[3.0, 1.0]] * len(SHARES)}
    trials = {Way("attention", way).name: lost[way == by_head] for way in (True, False)}
    errors = [[[layer + 1.0, 0.1]] * 4 for layer in range(4)]
    HeadProfile([16, 512], errors, trials={"errors": trials}).save(model / FILE_NAME)
    file = {"h2o_head_budgets": str(model / FILE_NAME)}
    for asked, differ in ((AUTO, by_head), (file, True)):
        with engine(model, **(OPTIONS | asked)) as llm:
            said = scheduler(llm)._spec.h2o.chosen
            _, survivors = outcome(llm, random_prompts(700)[0], 8)
        assert ("attention and heads by profile:" in said) == differ
        sizes = {len(head) for layer in survivors for head in layer}
        assert (len(sizes) > 1) == differ


def test_a_model_with_a_tokenizer_reads_texts(tmp_path, cache):
    """One without, as the others here, random ids."""
    model = save_reading_llama(tmp_path)
    with engine(model, **(OPTIONS | AUTO | {"skip_tokenizer_init": False})) as llm:
        (profile,) = llm.collective_rpc("h2o_profile")
    of = f"1024 tokens (vllm-h2o's, {digest()})"
    assert profile.measured_on == f"4 texts of {of}, read by an engine"
    assert profile.context_tokens == MAX_MODEL_LEN


def test_two_ranks_measure_what_one_does(llama, measured, cache, monkeypatch):
    """And one takes it from them."""
    with monkeypatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
        errors = errors_of(llama, **AUTO, **ranks)
    torch.testing.assert_close(errors, measured, rtol=0.02, atol=1e-7)
    monkeypatch.setattr(head_profiles, "measure", must_not_measure)
    assert errors_of(llama, **AUTO).equal(errors)


def test_auto_measures_once(llama, measured, cache, tmp_path, monkeypatch):
    """Whatever the path and the dtype; other weights are another model."""
    assert errors_of(llama, **AUTO).equal(measured)
    (file,) = cache.iterdir()
    other = copied(llama, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(head_profiles, "measure", must_not_measure)
        assert errors_of(other, **AUTO, dtype="bfloat16").equal(measured)
    weights = load_file(other / "model.safetensors")
    for weight in weights.values():
        weight += 0.1 * weight.std() * torch.randn_like(weight)
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    changed = errors_of(other, **AUTO)
    assert not changed.equal(measured)
    assert len(list(cache.iterdir())) == 2
    # What is asked for is measured anew, and kept.
    file.unlink()
    assert errors_of(llama).equal(measured)
    assert file.exists()


def test_a_gate_is_measured_where_the_cache_has_none(llama, cache, monkeypatch):
    """And where there is none to be had, the engine says so and does not start."""
    with monkeypatch.context() as patch:
        patch.setattr(measuring, "MOST_BYTES", 0)
        assert errors_of(llama, **AUTO).numel()
        (file,) = cache.iterdir()
        assert json.loads(file.read_text())["profile"]["gate"] is None
    gated = OPTIONS | AUTO | {"kv_policy": "gate"}
    with engine(llama, **gated) as llm:
        (profile,) = llm.collective_rpc("h2o_profile")
    assert profile.gate is not None
    assert json.loads(file.read_text())["profile"]["gate"] == profile.gate
    # A budget that holds the longest request needs none.
    with engine(llama, **(gated | {"h2o_budget": MAX_MODEL_LEN})) as llm:
        assert len(generate(llm, random_prompts(40), 4)[0]) == 4
    file.unlink()
    monkeypatch.setattr(measuring, "MOST_BYTES", 0)
    short = "--max-num-batched-tokens"
    for options, why, fix in (
        (
            {"max_num_batched_tokens": 256},
            f"{short} is 256",
            f"{short} of at least 512",
        ),
        ({}, "the head profile in force has no gate", "'measure'"),
    ):
        said = f"h2o_prompt_score.*{why}.*{fix}.*'attention'"
        with pytest.raises(ValueError, match=said), engine(llama, **(gated | options)):
            pass


def test_auto_measures_the_layers_of_a_hybrid_that_have_no_window(tmp_path, cache):
    assert errors_of(save_hybrid(tmp_path), **AUTO).shape[:2] == (2, 4)
    assert len(list(cache.iterdir())) == 1


def must_not_measure(*_, **__):
    raise AssertionError("measured what the cache has")


@pytest.mark.parametrize("case", ["unwritable", "broken"])
def test_auto_starts_where_it_can_not_measure_or_keep(
    llama, measured, cache, tmp_path, logged, case
):
    model = llama
    if case == "unwritable":
        cache.write_text("no folder")
    else:
        model = without_output(llama, tmp_path)
    with engine(model, **(OPTIONS | AUTO)) as llm:
        (profile,) = llm.collective_rpc("h2o_profile")
        generate(llm, random_prompts(700), 8)
    said = {"unwritable": "set VLLM_H2O_CACHE", "broken": "all zero"}[case]
    assert {name for name, message in logged() if said in message} == {"WARNING"}
    if case == "unwritable":
        assert torch.tensor(profile.errors).equal(measured)
    else:
        assert profile is None and not [*cache.glob("*.json")]


def test_what_was_cut_short_is_completed(llama, cache, monkeypatch, logged):
    """By an interrupt, or by a user's limit: no text is read again, and in the end all
    is as if it had been read at once, bit for bit."""
    with engine(llama, **OPTIONS) as llm:
        (whole,) = llm.collective_rpc("h2o_profile")
    for file in cache.iterdir():
        file.unlink()
    real, readings = LoadedModel.read, []

    def read(model, dense_pass, ids):
        if len(ids) == MAX_MODEL_LEN:
            readings.append(ids)
            if len(readings) == 3:
                raise KeyboardInterrupt
        return real(model, dense_pass, ids)

    monkeypatch.setattr(LoadedModel, "read", read)
    with pytest.raises(KeyboardInterrupt), engine(llama, **(OPTIONS | AUTO)):
        pass
    (folder,) = cache.iterdir()
    assert sorted(file.name for file in folder.iterdir()) == [
        "read-0.npz",
        "read-1.npz",
    ]
    # A damaged file is read again; a start that has no time reads one text.
    (folder / "read-0.npz").write_bytes(b"")
    monkeypatch.setenv("VLLM_H2O_CALIBRATE_SECONDS", "0.001")
    with engine(llama, **(OPTIONS | AUTO)) as llm:
        (part,) = llm.collective_rpc("h2o_profile")
    assert part.measured_on.startswith("2 of 4 texts of 1024 random token ids")
    assert part.gate is None
    said = [text for level, text in logged() if level == "WARNING"]
    assert any("VLLM_H2O_CALIBRATE_SECONDS is 0.001: the next start" in x for x in said)
    assert [*cache.iterdir()] == [folder]
    # Who insists on a gate waits for it, whatever the limit.
    with engine(llama, **(OPTIONS | AUTO | {"kv_policy": "gate"})) as llm:
        assert llm.collective_rpc("h2o_profile") == [whole]
    assert len(readings) == 4 + 2 + 4, "each text twice; two once more"
    (file,) = cache.iterdir()
    assert json.loads(file.read_text())["profile"] == asdict(whole)


def test_a_limit_that_is_no_time_is_refused(monkeypatch):
    for said in ("0", "-1", "soon", "nan"):
        monkeypatch.setenv("VLLM_H2O_CALIBRATE_SECONDS", said)
        with pytest.raises(ValueError, match=f"CALIBRATE_SECONDS is '{said}': use a n"):
            most_seconds()


@pytest.mark.slow
def test_longer_texts_are_read_when_a_step_takes_them(
    llama, measured, cache, monkeypatch
):
    errors = errors_of(llama, **AUTO, max_num_batched_tokens=512)
    assert not errors.equal(measured)
    assert errors_of(llama, **AUTO, max_num_batched_tokens=512).equal(errors)
    # What is whole serves until longer texts are, too.
    with monkeypatch.context() as patch:
        patch.setenv("VLLM_H2O_CALIBRATE_SECONDS", "0.001")
        assert errors_of(llama, **AUTO).equal(errors)
    assert errors_of(llama, **AUTO).equal(measured)
    assert len(list(cache.iterdir())) == 1


@pytest.mark.slow
def test_models_of_transformers_are_measured(llama, measured):
    # In a process of its own: vLLM changes classes of transformers for that.
    apart = {"distributed_executor_backend": "mp"}
    errors = errors_of(llama, model_impl="transformers", **apart)
    torch.testing.assert_close(errors, measured, rtol=0.02, atol=1e-7)


@pytest.mark.slow
def test_ranks_that_share_a_head_measure_it_together(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    errors = errors_of(save_llama(tmp_path, num_key_value_heads=1), **ranks)
    assert errors.shape[:2] == (4, 1)
    assert (errors[..., 0] > errors[..., -1]).all()


@pytest.mark.parametrize(
    "save", [save_llama, pytest.param(save_hybrid, marks=pytest.mark.slow)]
)
def test_with_lora_the_base_model_is_measured(tmp_path, save):
    model = save(tmp_path)
    errors = errors_of(model, enable_lora=True, max_lora_rank=8)
    torch.testing.assert_close(errors, errors_of(model), rtol=1e-3, atol=1e-7)


def test_quantized_weights_are_measured_as_they_are(llama, measured, tmp_path):
    """int8 weights change the curves by little; a weight that is not read, by much."""
    options = OPTIONS
    if torch.cpu._is_amx_tile_supported():  # vLLM's kernels for them have no float32
        options = OPTIONS | {"dtype": "bfloat16"}
    with engine(save_quantized(llama, tmp_path), **options) as llm:
        (profile,) = llm.collective_rpc("h2o_profile")
        tokens, survivors = outcome(llm, random_prompts(700)[0], 8)
    difference = (torch.tensor(profile.errors) - measured).norm() / measured.norm()
    assert 0 < difference < 0.1
    assert len(tokens) == 8
    assert len({len(head) for layer in survivors for head in layer}) > 1


@pytest.mark.slow
def test_a_compiled_engine_measures_as_an_eager_one(llama, measured):
    """And serves, compiled: its code is not traced while the heads are measured."""
    prompt = random_prompts(700)[0]
    with engine(llama, **OPTIONS) as llm:
        eager = outcome(llm, prompt, 8)
    # In a process of its own, since compiled code does not go with its engine.
    compiled = {"enforce_eager": False, "distributed_executor_backend": "mp"}
    with engine(llama, **(OPTIONS | compiled)) as llm:
        (profile,) = llm.collective_rpc("h2o_profile")
        assert outcome(llm, prompt, 8) == eager
    torch.testing.assert_close(
        torch.tensor(profile.errors), measured, rtol=1e-3, atol=1e-7
    )


def test_heads_in_several_groups_keep_equal_budgets(tmp_path, logged):
    """What one group's heads want can not be lent from another's."""
    model = save_hybrid(tmp_path, windowed=1, full=3)
    with engine(model, **OPTIONS) as llm:
        _, survivors = outcome(llm, random_prompts(700)[0], 8)
    assert {len(head) for layer in survivors for head in layer} == {256}
    said = [level for level, message in logged() if "several KV cache gr" in message]
    assert said == ["WARNING"]


def test_heads_that_write_nothing_are_refused(llama, tmp_path):
    with (
        pytest.raises(ValueError, match="can not be measured.*all zero.*'uniform'"),
        engine(without_output(llama, tmp_path), **OPTIONS),
    ):
        pass


def without_output(model, folder):
    """The model with heads whose outputs go nowhere."""
    copied(model, folder)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if "o_proj" in name:
            weight.zero_()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def copied(model, folder):
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def save_quantized(model, folder):
    """The model with int8 weights, a scale per output channel."""
    copied(model, folder)
    weights = load_file(model / "model.safetensors")
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        weight = weights[name]
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        weights[name] = (weight / scale).round().to(torch.int8)
        weights[f"{name}_scale"] = scale
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    channels = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    tokens = channels | {"strategy": "token", "dynamic": True}
    scheme = {
        "targets": ["Linear"],
        "weights": channels,
        "input_activations": tokens,
    }
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder

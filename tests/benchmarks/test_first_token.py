"""Time to first token, both sides in one engine; here in the test's process."""

import json

import pytest

import tests.engine.helpers  # noqa: F401  the engine runs in this process
from benchmarks import first_token
from tests.engine.tiny_models import save_reading_llama


@pytest.fixture
def here(monkeypatch):
    options = {**first_token.ENGINE_ARGS, "distributed_executor_backend": "uni"}
    monkeypatch.setattr(first_token, "ENGINE_ARGS", options)
    # The benchmark takes it away, from its process: this one gets it back.
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE")

    def call(target, job, env):
        assert target == "benchmarks.first_token:turns"
        return json.loads(json.dumps(first_token.turns(json.loads(json.dumps(job)))))

    monkeypatch.setattr(first_token, "run_in_process", call)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "engines"), [("--prompts", 1), ("--cached", 2)])
def test_scored_prompts_against_those_that_stay_dense(here, tmp_path, kind, engines):
    """That the ones are scored and the others are not is asserted inside."""
    other = ({"--prompts", "--cached"} - {kind}).pop()
    output = tmp_path / "first_token.json"
    model = save_reading_llama(tmp_path / "model")
    options = [kind, "96", other, "--rounds", "2", "--output", str(output)]
    first_token.main([*options, "--model", str(model), "--engines", str(engines)])
    (cell,) = json.loads(output.read_text())["cells"]
    assert (cell["prompt"], cell["cached"]) == (96, kind == "--cached")
    assert cell["budget_tokens"] == 64
    assert cell["ttft_dense_ms"]["min"] > 0
    assert cell["ratio_ttft"]["min"] > 0
    lag = cell["second_token_late_ms"]["median"] / cell["ttft_dense_ms"]["median"]
    expected = cell["ratio_ttft"]["median"] + lag
    assert cell["ratio_ttft_and_transition"] == pytest.approx(expected)
    assert len(cell["ratio_ttft_and_transition_by_engine"]) == engines
    if engines == 1:
        assert cell["ratio_ttft_and_transition_by_engine"] == [pytest.approx(expected)]


def test_the_second_token_is_late_by_what_the_others_do_not_take():
    assert first_token.late([1.0, 1.5, 1.7, 1.9, 2.1]) == pytest.approx(0.3)

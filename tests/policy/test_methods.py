"""How tokens are scored: formulas, and what holds for every method."""

import pytest
import torch

from tests.policy.packages import install_method
from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.methods import (
    D2O,
    METHODS,
    Bounds,
    Cake,
    Mean,
    Norm,
    Queries,
    Sum,
    add_from_packages,
    fused_form_of,
    fused_prompt_form_of,
)
from vllm_h2o.policy.prompt_attention import tiles

VARIANTS = [*(cls() for cls in METHODS.values()), Sum(0.5), Sum(0.0), Mean(0.9)]
IMPORT = "from vllm_h2o.policy.methods import Mean\n"
OPTIONS = {"scale": 0.25, "softcap": 3.0}


def started(method, keys):
    """The state of a prompt before anybody looked."""
    generator = torch.Generator().manual_seed(1)
    keys = keys.transpose(1, 2)
    values = torch.randn(keys.shape, generator=generator)
    of_prompt = {name: torch.zeros(keys.shape[:2]) for name in method.prompt_fields}
    return method.start(keys, values, torch.arange(keys.shape[1])) | of_prompt


def observed(method, query, keys, cuts):
    """The state of a prompt whose queries come in parts."""
    state = started(method, keys)
    for start, stop in zip([0, *cuts], [*cuts, len(query)], strict=True):
        for probs in tiles(query[start:stop], keys[:, :, :stop], start, **OPTIONS):
            visible = probs.shape[-1]
            seen = {name: mine[:, :visible] for name, mine in state.items()}
            method.observe_prompt(seen, probs)
    return state


@pytest.fixture(scope="module")
def prompt():
    """Queries of six heads, keys of two."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(300, 6, 16, generator=generator)
    return query, torch.randn(2, 16, 300, generator=generator)


@pytest.mark.parametrize("method", VARIANTS, ids=str)
def test_observing_in_parts_equals_observing_at_once(method, prompt):
    at_once = observed(method, *prompt, [])
    assert tuple(at_once) == method.fields + method.prompt_fields
    torch.testing.assert_close(observed(method, *prompt, [1, 130, 299]), at_once)


@pytest.mark.parametrize("method", VARIANTS, ids=str)
def test_heads_are_observed_alone_as_side_by_side(method, prompt):
    query, keys = prompt
    probs = next(tiles(query[:90], keys[:, :, :90], 0, **OPTIONS))
    state = started(method, keys[:, :, :90])
    heads = [{name: mine[i].clone() for name, mine in state.items()} for i in (0, 1)]
    method.observe(state, probs)
    queries = Queries(torch.arange(90), 7, 90)
    values = method.score(state, queries)
    assert values.shape == (2, 90)
    for head, alone in enumerate(heads):
        method.observe(alone, probs[head])
        value = method.score(alone, queries)
        torch.testing.assert_close(value, values[head])


def test_every_query_gives_each_of_its_heads_a_mass_of_one(prompt):
    total = observed(Sum(), *prompt, [])["attention"].sum()
    torch.testing.assert_close(total, torch.tensor(300.0 * 6))


def test_without_memory_the_newest_query_counts(prompt):
    query, keys = prompt
    logits = query[-1].view(2, 3, 16) @ keys * OPTIONS["scale"]
    capped = OPTIONS["softcap"] * torch.tanh(logits / OPTIONS["softcap"])
    last = capped.softmax(-1).sum(1)
    newest = observed(Sum(0.0), query, keys, [5])["attention"]
    torch.testing.assert_close(newest, last)


def test_mean_takes_away_the_head_start_of_old_tokens():
    scores = torch.tensor([3.0, 3.0, 2.9, 2.9, 0.0])
    queries = Queries(torch.arange(5), 0, 5)
    assert Sum().score({"attention": scores}, queries).argmax() == 0
    expected = scores / torch.tensor([5, 4, 3, 2, 1])
    assert torch.equal(Mean().score({"attention": scores}, queries), expected)


def test_queries_that_scored_are_counted():
    """Those from position 3 to 5; a token counts from its own on."""
    positions = torch.tensor([0, 3, 4, 5, 9])
    assert Queries(positions, 3, 6).count().tolist() == [3, 3, 2, 1, 1]


def test_norm_is_the_mean_times_the_length_of_the_value():
    keys, values = torch.zeros(2, 1, 3, 4)
    values[0, 1] = torch.tensor([1.0, -2.0, 0.0, 3.0])
    state = Norm().start(keys, values, torch.arange(3))
    state["attention"] += 0.5
    queries = Queries(torch.arange(3), 0, 3)
    assert Norm().score(state, queries).tolist() == [[0.0, 0.5 / 2 * 6.0, 0.0]]


def test_fields_that_nothing_could_keep_are_refused():
    for fields in (("norm",), ("attention", "keys")):
        with pytest.raises(TypeError, match="fields"):
            type("Other", (Mean,), {"fields": fields})
    with pytest.raises(TypeError, match="fused form"):
        type("Other", (Mean,), {"fields": ("attention", "more"), "fused_form": "mean"})
    with pytest.raises(TypeError, match="fused form"):
        type("Other", (Mean,), {"start": Norm.start, "fused_form": "mean"})


def test_a_subclass_has_no_kernel_of_its_base():
    class Other(Mean):
        name = "other"

    assert [fused_form_of(cls()) for cls in (Sum, Mean, Other)] == ["sum", "mean", None]


def test_a_method_of_rules_of_its_own_for_prompts_has_a_kernel_while_it_generates():
    assert (fused_form_of(Cake()), fused_prompt_form_of(Cake())) == ("sum", None)
    assert [fused_prompt_form_of(cls()) for cls in (Sum, Mean)] == ["sum", "mean"]


@pytest.fixture(scope="module")
def attention():
    """`[2 KV heads, 3 query heads, 32 queries, 90 tokens]`, and CAKE's state of it."""
    generator = torch.Generator().manual_seed(3)
    query, keys = torch.randn(32, 6, 16, generator=generator), torch.randn(2, 16, 90)
    probs = torch.cat([*tiles(query, keys, 58, **OPTIONS)])
    state = {name: torch.zeros(2, 90) for name in Cake.fields + Cake.prompt_fields}
    Cake().observe_prompt(state, probs)
    return probs, state, Queries(torch.arange(90), 58, 90, group=3)


def test_cake_values_the_mean_and_the_variance_of_attention(attention):
    probs, state, queries = attention
    values = Cake(gamma=7.0).score_prompt(state, queries)
    for token in (0, 57, 58, 70, 88):
        seen = probs[:, :, max(token - 58, 0) :, token].flatten(1)
        expected = seen.mean(dim=1) + 7 * seen.var(dim=1)
        torch.testing.assert_close(values[:, token], expected)


def test_cake_prefers_layers_of_wide_and_changing_attention(attention):
    probs, state, queries = attention
    old = probs[:, :, :, :58].flatten(1, 2)
    entropy = -(old * old.log()).sum(dim=(1, 2))
    spread = old.var(dim=1).sum(dim=1)
    flat = state | {name: state[name] / 3 for name in ("attention", "entropy")}
    flat["square"] = state["square"] / 9
    for t1, t2 in ((1.0, 1.0), (2.0, 0.5)):
        method = Cake(t1=t1, t2=t2)
        shares = method.split([state, flat], queries, Bounds(1000, 1, 999))
        # A third of the attention: a third of the entropy (as it is summed here), a
        # ninth of the variance.
        ratio = 3 ** (1 / t1) * 9 ** (1 / t2)
        expected = round(1000 * ratio / (1 + ratio))
        assert shares == [[expected] * 2, [1000 - expected] * 2]
        for head in range(2):
            mine = entropy[head] ** (1 / t1) * spread[head] ** (1 / t2)
            log = method.log_preference(state, queries)[head]
            assert mine.log() == pytest.approx(float(log), rel=1e-4)


def test_cake_knows_no_power_that_is_too_high(attention):
    _, state, queries = attention
    low = state | {name: state[name] / 1.01 for name in ("attention", "entropy")}
    low["square"] = state["square"] / 1.01**2
    for t1, t2 in ((0.01, 1.0), (1.0, 0.01)):
        split = Cake(t1=t1, t2=t2).split
        (more, _), (less, _) = split([state, low], queries, Bounds(1000, 1, 999))
        exponent = 1 / t1 + 2 / t2
        assert more == round(1000 / (1 + 1.01**-exponent)) and more + less == 1000


def test_cake_shares_equally_what_nobody_has_looked_at():
    state = {name: torch.zeros(2, 9) for name in Cake.fields + Cake.prompt_fields}
    shares = Cake().split([state] * 3, Queries(torch.arange(9), 0, 9), Bounds(6, 1, 5))
    assert shares == [[2, 2]] * 3


def test_d2o_gives_more_to_layers_whose_attention_is_spread_evenly():
    """The first two layers and the last get the average at least."""
    even, half, uneven = torch.ones(2, 8), torch.ones(2, 8), torch.ones(2, 8)
    uneven[:, 0] = 5.0
    half[:, 0] = 1.0 + 8**0.5  # half the variance
    states = [{"attention": x} for x in (uneven, even, even, half, uneven, uneven)]
    queries, bounds = Queries(torch.arange(8), 0, 8), Bounds(600, 1, 600)
    shares = D2O().split(states, queries, bounds)
    assert all(first == second for first, second in shares)
    firsts = [first for first, _ in shares]
    assert firsts[0] == firsts[5] == 100
    weights = torch.tensor([0.0, 0.0, 0.5, 1.0]).neg().exp()
    torch.testing.assert_close(
        torch.tensor(firsts[1:5]).float(), 400 * weights / weights.sum(), rtol=0, atol=1
    )
    assert D2O().split(states[:1], queries, Bounds(7, 1, 9)) == [[7, 7]]


def test_cake_pools_by_the_mean():
    value = torch.tensor([[5.0, 0.0, 1.0, 0.0, 0.0, 10.0]])
    expected = [[1.2, 1.2, 1.2, 2.2, 2.2, 2.0]]
    torch.testing.assert_close(Cake().pool(value, 5), torch.tensor(expected))


def test_the_config_gives_a_method_its_options():
    assert H2OConfig(score="sum", score_decay=0.5).method == Sum(0.5)
    assert H2OConfig().method == Mean()


@pytest.mark.parametrize(
    "code, said",
    [
        ("import nowhere", "ModuleNotFoundError: No module named 'nowhere'"),
        ("Odd = 3", "3 is no subclass of vllm_h2o.policy.methods.base.Method"),
        (f"{IMPORT}class Odd(Mean):\n    name = 'other'", "its name is 'other'"),
    ],
)
def test_an_entry_point_that_can_not_be_used_is_left_out(
    code, said, tmp_path, monkeypatch
):
    install_method(tmp_path, monkeypatch, "odd", code, "Odd")
    with pytest.warns(UserWarning, match=f"'odd' of the entry point 'odd:Odd'.*{said}"):
        add_from_packages()
    assert "odd" not in METHODS


def test_a_package_can_not_replace_a_method(tmp_path, monkeypatch):
    code = f"{IMPORT}class Odd(Mean):\n    name = 'mean'"
    install_method(tmp_path, monkeypatch, "mean", code, "Odd")
    with pytest.warns(UserWarning, match="there is another method of that name"):
        add_from_packages()
    assert METHODS["mean"] is Mean


def test_a_package_brings_a_method_by_its_entry_point(tmp_path, monkeypatch):
    code = f"{IMPORT}class Odd(Mean):\n    name = 'odd'"
    install_method(tmp_path, monkeypatch, "odd", code, "Odd")
    for _ in range(2):
        add_from_packages()
    assert issubclass(METHODS.pop("odd"), Mean)

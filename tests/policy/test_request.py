"""What one request may ask for."""

from dataclasses import replace

import pytest

from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.layout import SlotLayout
from vllm_h2o.policy.options import END, NONE
from vllm_h2o.policy.presets import PRESETS
from vllm_h2o.policy.request import (
    DEFAULTS,
    RequestLimits,
    RequestOptions,
    asks_anything,
)

BLOCK, BUDGET, MOST, LONGEST = 32, 256, 800, 8192


def limits_of(config, device="cpu", budget=BUDGET):
    """Of an engine with blocks of 32 and so many slots."""
    config = replace(config, budget=budget)
    layout = SlotLayout.of_blocks(config, BLOCK, budget // BLOCK)
    return RequestLimits.of(config, layout, device, LONGEST)


def limits_of_share(share="20%", longest=LONGEST, device="cpu", slots_per_token=1.0):
    """Of an engine whose requests keep a share of what they have."""
    config = replace(PRESETS["h2o"], budget=share, slots_per_token=slots_per_token)
    layout = SlotLayout.from_config(config, BLOCK, longest)
    return RequestLimits.of(config, layout, device, longest)


@pytest.mark.parametrize(
    "extra_args, expected",
    [
        (None, DEFAULTS),
        ({}, DEFAULTS),
        ({"h2o": {}}, DEFAULTS),
        ({"h2o": None, "other": 3, "h2other": 1}, DEFAULTS),
        ({"h2o": {"policy": "full"}}, RequestOptions("full")),
        ({"h2o_policy": "full"}, RequestOptions("full")),
        ({"h2o": {"policy": "h2o"}}, RequestOptions("h2o")),
        ({"h2o": {"policy": None}}, DEFAULTS),
        ({"h2o_observation_window": 64}, RequestOptions(observation_window=64)),
        ({"h2o_observation_window": 64.0}, RequestOptions(observation_window=64)),
        ({"h2o_observation_window": "64"}, RequestOptions(observation_window=64)),
        (
            {"h2o": {"observation_window": "20 %"}},
            RequestOptions(observation_window="20%"),
        ),
        (
            {"h2o": {"observation_window": "ALL"}},
            RequestOptions(observation_window="all"),
        ),
        ({"h2o_prefill_chunk": 512.0}, RequestOptions(prefill_chunk=512)),
        ({"h2o": {"prefill_chunk": "0"}}, RequestOptions(prefill_chunk=0)),
        ({"h2o_keep": "none"}, RequestOptions(keep="none")),
        ({"h2o": {"continue": True}}, RequestOptions(continue_=True)),
        ({"h2o_continue": 1}, RequestOptions(continue_=True)),
        ({"h2o": {"report": True}}, RequestOptions(report=True)),
        ({"h2o_report": 1}, RequestOptions(report=True)),
        ({"h2o_report": 1.0}, RequestOptions(report=True)),
        ({"h2o_report": "false"}, DEFAULTS),
        ({"h2o_budget": 33}, RequestOptions(budget=33)),
        ({"h2o_budget": 64.0}, RequestOptions(budget=64)),
        ({"h2o_budget": "256"}, RequestOptions(budget=256)),
        ({"h2o": {"budget": "25 %"}}, RequestOptions(budget="25%")),
        ({"h2o": {"budget": "0.1%"}}, RequestOptions(budget="0.1%")),
        (
            {"h2o": {"policy": "h2o"}, "h2o_observation_window": 8},
            RequestOptions("h2o", observation_window=8),
        ),
    ],
)
def test_is_read(extra_args, expected):
    config = H2OConfig(prompt_score="attention", prefill_chunk=1024, keep="end")
    limits = limits_of(config)
    assert RequestOptions.parse(extra_args, limits, MOST) == expected


def nested(depth):
    """A dictionary that Python can not write."""
    value = {}
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    "option",
    ["policy", "budget", "observation_window", "prefill_chunk", "keep"]
    + ["continue", "report"],
)
def test_any_wish_is_named_in_a_short_message(option):
    limits = limits_of(H2OConfig(prompt_score="attention"))
    absurd = [nested(2000), 10**5000, 10**30, 2**64, float("inf"), float("nan")]
    for value in (*absurd, "9" * 5000, "x" * 5000, [1], b"512", {}):
        for extra_args in ({"h2o": {option: value}}, {f"h2o_{option}": value}):
            with pytest.raises(ValueError, match=f"^h2o_{option} of this") as error:
                RequestOptions.parse(extra_args, limits, MOST)
            assert len(str(error.value)) < 500


def test_any_name_of_a_wish_is_named_in_a_short_message():
    limits = limits_of(H2OConfig())
    for name in (10**5000, "x" * 5000, None, 2.5, "", "\0"):
        with pytest.raises(ValueError, match="request is 1: .*use h2o_") as error:
            RequestOptions.parse({"h2o": {name: 1}}, limits, MOST)
        assert len(str(error.value)) < 500
        assert not asks_anything({name: 1})
    name = "x" * 5000
    with pytest.raises(ValueError, match="drop one of them") as error:
        RequestOptions.parse({"h2o": {name: 1}, f"h2o_{name}": 1}, limits, MOST)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    "policy, extra_args, said",
    [
        (
            "h2o",
            {"h2o": "full"},
            ["h2o of this request is 'full'", '{"policy": "full"}'],
        ),
        ("h2o", {"h2o": ["full"]}, ["h2o of this request is ['full']", "dictionary"]),
        ("h2o", {"h2o_policies": "full"}, ["h2o_policies", "'full'", "use h2o_policy"]),
        ("h2o", {"h2o_": 1}, ["h2o_ of", "h2o_policy or h2o_budget or h2o_obs"]),
        ("h2o", {"h2o": {3: 1}}, ["h2o_3", "h2o_policy"]),
        ("h2o", {"h2o_policy": "tova"}, ["'tova'", "'full'", "'h2o'"]),
        ("tova", {"h2o_policy": "h2o"}, ["'h2o'", "'full'", "'tova'"]),
        ("h2o", {"h2o_policy": ["full"]}, ["['full']", "'full'"]),
        ("h2o", {"h2o_policy": ""}, ["h2o_policy", "''", "'full'"]),
        ("h2o", {"h2o_policy": "x" * 1000}, ["xxx...", "'full'"]),
        ("h2o", {"h2o_" + "x" * 1000: 1}, ["xxx...", "h2o_policy"]),
        ("h2o", {"h2o": "x" * 1000}, ["xxx...", "h2o_policy"]),
        ("h2o", {"h2o": {"policy": "x" * 1000}, "h2o_policy": 1}, ["xxx...", "drop"]),
        *(
            ("h2o", {"h2o_observation_window": bad}, [repr(bad), "such as 32"])
            for bad in (0, -1, 1.5, True, "half", "0%", "101%", [32], float("nan"))
        ),
        ("h2o", {"h2o_observation_window": 10**400}, ["1000", "such as 32"]),
        *(
            ("h2o", {"h2o_budget": bad}, [repr(bad), "such as 512", "'20%'"])
            for bad in (0, -1, 64.5, True, "half", "0%", "101%", [64], float("nan"))
        ),
        ("h2o", {"h2o_report": 2}, ["h2o_report", "2", "true or false"]),
        ("h2o", {"h2o_report": [True]}, ["h2o_report", "[True]", "true or false"]),
        ("h2o", {"h2o_budget": 10**400}, ["1000", "such as 512"]),
        ("h2o", {"h2o_budget": 257}, ["257", "--h2o-budget", "use 256 or less"]),
        ("h2o", {"h2o_budget": "33%"}, ["264 of its 800 tokens", "use 256 or less"]),
        (
            "h2o",
            {"h2o": {"policy": "full", "budget": 64}},
            ["h2o_budget", "64", "h2o_policy='full'", "leave it out"],
        ),
        (
            "h2o",
            {"h2o": {"policy": "full", "observation_window": 8}},
            ["h2o_observation_window", "8", "h2o_policy='full'", "leave it out"],
        ),
        (
            "streaming",
            {"h2o_observation_window": 8},
            ["h2o_observation_window", "8", "'streaming'", "leave it out"],
        ),
        *(
            (
                preset,
                {"h2o_observation_window": 8},
                ["h2o_observation_window", "8", "--h2o-prompt-score", "leave it out"],
            )
            for preset in ("gate", "h2o")
        ),
        *(
            ("h2o", {"h2o_prefill_chunk": bad}, [repr(bad), "such as 2048"])
            for bad in (-1, 1.5, True, "half", [512], float("nan"))
        ),
        (
            "h2o",
            {"h2o_keep": "end"},
            ["h2o_keep", "'end'", "no effect", "--h2o-keep end", "leave it out"],
        ),
        (
            "h2o",
            {"h2o_continue": True},
            ["h2o_continue", "True", "--h2o-keep end", "leave it out"],
        ),
        ("h2o", {"h2o_keep": "all"}, ["h2o_keep", "'all'", "'prompt' or 'none'"]),
        ("h2o", {"h2o_continue": "often"}, ["h2o_continue", "true or false"]),
        (
            "h2o",
            {"h2o_prefill_chunk": 512},
            ["h2o_prefill_chunk", "512", "--h2o-prefill-chunk", "leave it out"],
        ),
        (
            "h2o",
            {"h2o": {"policy": "full", "prefill_chunk": 0}},
            ["h2o_prefill_chunk", "0", "h2o_policy='full'", "leave it out"],
        ),
        (
            "h2o",
            {"h2o": {"policy": "full"}, "h2o_policy": "full"},
            ["h2o_policy", "'full'", "given too", "drop one"],
        ),
    ],
)
def test_is_refused(policy, extra_args, said):
    with pytest.raises(ValueError) as error:
        RequestOptions.parse(extra_args, limits_of(PRESETS[policy]), MOST)
    assert all(part in str(error.value) for part in said), error.value
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    "options, device, why",
    [
        ({}, "cuda", "on cuda they differ only where --h2o-budget is a share"),
        ({"eviction_unit": "block", "head_budgets": "uniform"}, "cpu", "unit block"),
    ],
)
def test_where_all_have_the_engines_budget(options, device, why):
    limits = limits_of(H2OConfig(prompt_score="attention", **options), device)
    with pytest.raises(ValueError, match=f"h2o_budget.*64.*{why}.*leave it out"):
        RequestOptions.parse({"h2o_budget": 64}, limits, MOST)
    assert RequestOptions.parse({"h2o_policy": "full"}, limits, MOST).is_full


def test_a_budget_without_room_for_the_sinks_is_refused():
    limits = limits_of(replace(PRESETS["h2o"], sinks=20))
    with pytest.raises(
        ValueError, match="32: less than 2 blocks of 32, use 33 or more"
    ):
        RequestOptions.parse({"h2o_budget": 32}, limits, MOST)
    assert RequestOptions.parse({"h2o_budget": 33}, limits, MOST).budget == 33


@pytest.mark.parametrize(
    "asked, most, slots",
    [
        (None, 10, 256),
        (33, 10, 64),
        (64, 10**6, 64),
        (65, 10, 96),
        ("25%", 512, 128),
        ("25%", 513, 160),
        # One block at least; of what a session has by now, at most the engine's.
        ("1%", 100, 32),
        ("90%", 1000, 256),
    ],
)
def test_a_budget_is_whole_blocks(asked, most, slots):
    climb = limits_of(PRESETS["h2o"]).climb(asked, 10, most)
    assert climb.budget == slots and climb.is_last


@pytest.mark.parametrize(
    "asked, prompt, most, slots",
    [
        (None, 700, 800, 256),
        (None, 2048, 2560, 512),
        # Its end is far: the budget grows.
        (None, 2048, 8192, 512),
        (None, 8000, 8192, 1664),
        ("10%", 2048, 2560, 256),
        ("10%", 8000, 8192, 832),
        (100, 8000, 8192, 128),
    ],
)
def test_the_budget_of_a_share(asked, prompt, most, slots):
    climb = limits_of_share().climb(asked, prompt, most)
    assert slots <= climb.budget <= 1.125 * slots
    assert climb.serves >= most or climb.serves >= 1.25 * prompt
    assert climb.is_last == (isinstance(asked, int) or climb.budget == 1664)


def test_a_request_climbs_to_the_engines_budget():
    climb = limits_of_share("10%", 2048).climb(None, 20, 2048)
    assert climb.budget == 224 and climb.is_last, "no more than the engine's"
    climb = limits_of_share("15%", 4096).climb(None, 20, 4096)
    budgets = []
    while not climb.is_last:
        assert climb.serves > climb.budget
        before, climb = climb, climb.grown(climb.serves)
        assert climb.grown_at == before.serves
        assert climb.grown_before == before.grown_at
        assert climb.grown_from == before.budget < climb.budget
        budgets.append(climb.budget)
    assert len(budgets) > 5 and budgets[-1] == 640


def test_what_goes_on_grows_at_once_where_heads_are_full():
    begun = limits_of_share("15%", 4096).climb(None, 2048, 2560)
    ends = begun.serves
    assert begun.ahead_of(ends - 100, ends) is begun, "its budget serves it"
    early = begun.ahead_of(ends - 100, ends + 1)
    assert (early.step, early.grown_at) == (begun.step + 1, ends - 100)
    assert early.serves == begun.grown(ends).serves
    # Heads have filled it once as many tokens have come as lie between both.
    between = early.serves - ends
    assert early.ahead_of(ends - 101 + between, early.serves + 1) is early
    again = early.ahead_of(ends - 100 + between, early.serves + 1)
    assert (again.step, again.grown_before) == (early.step + 1, early.grown_at)


def test_where_a_request_stands_that_reads_much():
    begun = limits_of_share("15%", 4096).climb(None, 100, 4096)
    assert begun.at(begun.serves) is begun
    climb, grown = begun.at(4096), begun
    while not grown.is_last:
        grown = grown.grown(grown.serves)
    assert climb == grown


@pytest.mark.parametrize(
    "asked, suits",
    [
        ((None, None), True),
        (("10%", "10%"), True),
        (("10%", None), False),
        ((64, 64), True),
        ((64, 96), False),
        ((256, None), False),
    ],
)
def test_who_goes_on_from_whom(asked, suits):
    """Any length of the same share, and the same number."""
    limits = limits_of_share()
    one, other = (
        limits.climb(budget, tokens, 2 * tokens)
        for budget, tokens in zip(asked, (1000, 4000), strict=True)
    )
    assert one.suits(other) == other.suits(one) == suits


def test_a_share_of_a_requests_own_is_no_larger_than_the_engines():
    limits = limits_of_share()
    assert RequestOptions.parse({"h2o_budget": "20%"}, limits, 9).budget == "20%"
    with pytest.raises(ValueError, match="h2o_budget.*'21%'.*use '20%' or less"):
        RequestOptions.parse({"h2o_budget": "21%"}, limits, 9)


def test_a_share_of_one_budget_leaves_requests_their_own_shares():
    """The server's only budget is not what a smaller share is rounded up to."""
    config = replace(PRESETS["h2o"], budget="50%", slots_per_token=2.0, min_budget=64)
    layout = SlotLayout.of_blocks(config, 112, 11)
    limits = RequestLimits.of(config, layout, "cpu", 1536)
    assert limits.climb(None, 900, 940).budget == 11 * 112
    assert RequestOptions.parse({"h2o_budget": "10%"}, limits, 940).budget == "10%"
    climb = limits.climb("10%", 900, 940)
    assert climb.budget == 2 * 112 and climb.is_fixed  # 188 tokens
    with pytest.raises(ValueError, match="'60%'.*use '50%' or less"):
        RequestOptions.parse({"h2o_budget": "60%"}, limits, 940)
    limits = RequestLimits.of(config, layout, "cuda", 1536)
    assert limits.climb(None, 900, 940).budget == 11 * 112
    with pytest.raises(ValueError, match="all have the engine's.*--max-model-len"):
        RequestOptions.parse({"h2o_budget": "10%"}, limits, 940)


@pytest.mark.parametrize(
    "limits", [limits_of_share("100%"), limits_of_share(512, device="cuda")]
)
def test_where_all_requests_have_one_budget(limits):
    assert limits.climb(None, 10, 20).budget == limits.layout.budget


def test_on_a_device_budgets_are_the_ladders():
    """Numbers are rounded up to them, as its tables are made once."""
    limits, on_cpu = limits_of_share(device="cuda"), limits_of_share()
    assert limits.has_several and limits.ladder == on_cpu.ladder
    assert limits.are_known and not on_cpu.are_known
    assert RequestOptions.parse({"h2o_budget": "10%"}, limits, 900).budget == "10%"
    assert RequestOptions.parse({"h2o_budget": 512}, limits, 900).budget == 512
    budgets = [blocks * BLOCK for blocks in limits.ladder.budgets]
    for asked in (1 + BLOCK, budgets[0], budgets[1] - 1, budgets[-1]):
        climb = limits.climb(asked, 900, 1000)
        assert climb.is_fixed and climb.length_class == 0
        assert climb.budget == min(x for x in budgets if x >= asked)
        exact = on_cpu.climb(asked, 900, 1000).budget
        assert asked <= exact <= climb.budget
    limits = limits_of_share(512, device="cuda")
    assert not limits.has_several
    for asked in (256, "10%"):
        with pytest.raises(ValueError, match="all have the engine's, on cuda.*share"):
            RequestOptions.parse({"h2o_budget": asked}, limits, 900)


def test_what_a_model_was_trained_for_is_not_exceeded():
    """By what is read at once, or by a request that keeps all of its tokens."""
    config = replace(
        PRESETS["h2o"], positions="cache", prefill_chunk=600, trained_length=2048
    )
    limits = limits_of(config)

    def parse(options, most_tokens=3000):
        return RequestOptions.parse({"h2o": options}, limits, most_tokens)

    assert parse({"prefill_chunk": 608}).prefill_chunk == 608
    full = parse({"policy": "full"})
    full.check_length(config, 2048)
    parse({}).check_length(config, 2049)
    for chunk in (0, 609):
        with pytest.raises(ValueError, match=rf"chunk.* {chunk}: use 1 to 608"):
            parse({"prefill_chunk": chunk})
    with pytest.raises(ValueError, match=r"'full'.*2048 tokens.*2049: use"):
        full.check_length(config, 2049)


@pytest.mark.parametrize("policy, fewest", [("h2o", 3), ("streaming", 2)])
def test_a_budget_holds_the_sinks(policy, fewest):
    config = replace(PRESETS[policy], sinks=40)
    limits = limits_of(config)
    assert limits.fewest_blocks == fewest
    assert SlotLayout.of_blocks(config, BLOCK, fewest).heavy_slots >= 40
    least = (fewest - 1) * BLOCK
    with pytest.raises(ValueError, match=f"{fewest} blocks of 32, use {least + 1} or"):
        RequestOptions.parse({"h2o_budget": least}, limits, MOST)
    assert RequestOptions.parse({"h2o_budget": least + 1}, limits, MOST).budget


@pytest.mark.parametrize("sinks", [0, 4, 33, 64, 128, 200])
@pytest.mark.parametrize("ratio", [0.35, 0.9])
@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_what_a_request_may_ask_for_holds_the_sinks_in_pages_too(
    sinks, ratio, block_size
):
    """Limits count blocks, and heads have pages of them."""
    config = H2OConfig(sinks=sinks, recent_ratio=ratio, budget=1024)
    layout = SlotLayout.from_config(config, block_size, 2048)
    limits = RequestLimits.of(config, layout, "cpu", 2048)
    for blocks in range(limits.fewest_blocks, 8):
        pages = blocks * block_size // 32
        assert SlotLayout.of_blocks(config, 32, pages).heavy_slots >= sinks
        # A head may get no less than what the average head has.
        assert SlotLayout.fewest_blocks(config, 32) <= pages


def test_a_share_is_of_the_memory():
    limits, of_tokens = limits_of_share(slots_per_token=1.75), limits_of_share("35%")
    assert limits.ladder.budgets == of_tokens.ladder.budgets
    assert limits.layout == of_tokens.layout
    assert limits.climb("10%", 4000, 8000).share == pytest.approx(0.175)
    assert RequestOptions.parse({"h2o_budget": "20%"}, limits, 4000).budget == "20%"
    with pytest.raises(ValueError, match="h2o_budget.*'20.5%'.*use '20%' or less"):
        RequestOptions.parse({"h2o_budget": "20.5%"}, limits, 4000)
    # Of a number's engine too; a number is of tokens.
    config = replace(limits.config, budget=4096)
    layout = SlotLayout.of_blocks(config, BLOCK, 4096 // BLOCK)
    limits = RequestLimits.of(config, layout, "cpu", LONGEST)
    assert layout.budget == 4096 and limits.ladder.share is None
    assert limits.climb("10%", 4000, 8000).budget == 1408  # 1400, in whole blocks
    assert limits.climb(1024, 4000, 8000).budget == 1024


@pytest.mark.parametrize(
    ("share", "of_tokens"), [("40%", 0.75), ("60%", 0.75), ("75%", 0.75), ("90%", 0.9)]
)
def test_a_share_of_the_memory_leaves_something_to_compress(share, of_tokens):
    """Who can hold all of its tokens takes as much memory as without H2O."""
    limits = limits_of_share(share, slots_per_token=1.9)
    assert limits.ladder.share == of_tokens and len(limits.ladder.budgets) > 1
    assert limits.layout.budget == pytest.approx(of_tokens * LONGEST, abs=BLOCK)
    assert limits.climb(None, 5000, 5100).budget < 5000
    assert limits.config.share_of_tokens("100%") == 1.0


@pytest.mark.parametrize("keep", [NONE, END])
def test_a_chunk_on_a_gpu_is_one_that_there_is_memory_for(keep):
    """Where turns go on there is for any; `0` reads the prompt whole."""
    config = replace(PRESETS["h2o"], prefill_chunk=1024, keep=keep)
    for device in ("cpu", "cuda"):
        limits = limits_of(config, device)
        for asked in (0, 512, 1024):
            options = RequestOptions.parse({"h2o_prefill_chunk": asked}, limits, MOST)
            assert options.prefill_chunk == asked
        longer = {"h2o_prefill_chunk": 1025}
        if device == "cpu" or keep == END:
            RequestOptions.parse(longer, limits, MOST)
            continue
        with pytest.raises(ValueError, match="1025.*at most 1024.*--h2o-prefill-chunk"):
            RequestOptions.parse(longer, limits, MOST)
    # A chunk has at least twice the memory of what is held.
    limits = limits_of(config, "cuda", budget=1024)
    assert limits.most_chunk == (0 if keep == END else 2048)

"""What one request may ask for."""

import pytest

from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.presets import PRESETS
from vllm_h2o.policy.request import DEFAULTS, RequestOptions


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
        ({"h2o_observation_window": 64}, RequestOptions(None, 64)),
        ({"h2o_observation_window": 64.0}, RequestOptions(None, 64)),
        ({"h2o_observation_window": "64"}, RequestOptions(None, 64)),
        ({"h2o": {"observation_window": "20 %"}}, RequestOptions(None, "20%")),
        ({"h2o": {"observation_window": "ALL"}}, RequestOptions(None, "all")),
        (
            {"h2o": {"policy": "h2o"}, "h2o_observation_window": 8},
            RequestOptions("h2o", 8),
        ),
    ],
)
def test_is_read(extra_args, expected):
    config = H2OConfig(prompt_score="attention")
    assert RequestOptions.parse(extra_args, config) == expected


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
        ("h2o", {"h2o_": 1}, ["h2o_ of", "h2o_policy or h2o_observation_window"]),
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
        (
            "h2o",
            {"h2o": {"policy": "full"}, "h2o_policy": "full"},
            ["h2o_policy", "'full'", "given too", "drop one"],
        ),
    ],
)
def test_is_refused(policy, extra_args, said):
    with pytest.raises(ValueError) as error:
        RequestOptions.parse(extra_args, PRESETS[policy])
    assert all(part in str(error.value) for part in said), error.value
    assert len(str(error.value)) < 500

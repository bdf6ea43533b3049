"""Prints which options go with which, and what has a kernel where, as docs/options.md.

python -m vllm_h2o.option_table
"""

from __future__ import annotations

from collections.abc import Iterable

from vllm_h2o.attention.ops import Kernels, cpu, triton
from vllm_h2o.policy.methods import METHODS
from vllm_h2o.policy.options import flag
from vllm_h2o.policy.presets import OPTION_NAMES
from vllm_h2o.policy.rules import KERNELS, NEEDS, Values, have_method, idle_rows

HEAD = "| option | needs | on CPU | on GPUs |", "|---|---|---|---|"
_KERNELS: tuple[Kernels, ...] = cpu, triton
IDLE_HEAD = "| option | has no effect with |", "|---|---|"


def lines() -> list[str]:
    """Both tables."""
    return [*HEAD, *_of_needs(), "", *IDLE_HEAD, *_of_idle()]


def _of_needs() -> Iterable[str]:
    named: dict[str, list[str]] = {}
    for need in NEEDS:
        named.setdefault(_said(need.option, need.when), []).append(
            _said(need.other, need.allowed)
        )
    lacking = {}
    for row in KERNELS:
        text = _said(row.option, row.when)
        named.setdefault(text, [])
        lacking[text] = [row.capability not in k.CAPABILITIES for k in _KERNELS]
    for name, cls in METHODS.items():
        text = f"`{flag('score')} {name}`"
        named[text] = []
        lacking[text] = [
            not have_method(cls(), k.FORMS, k.CAPABILITIES) for k in _KERNELS
        ]
    for text, needs in named.items():
        if not needs and not any(lacking[text]):
            continue
        where = ["no kernel" if no else "" for no in lacking.get(text, (False, False))]
        yield f"| {text} | {', '.join(needs)} | {' | '.join(where)} |"


def _of_idle() -> Iterable[str]:
    for row in idle_rows(OPTION_NAMES):
        if row.other == "score" and not any(map(row.when.hold, METHODS)):
            continue
        options = ", ".join(f"`{flag(option)}`" for option in row.options)
        yield f"| {options} | {_said(row.other, row.when)} |"


def _said(option: str, values: Values) -> str:
    if len(values.like) == 1 and values.text == str(values.like[0]):
        return f"`{flag(option)} {values.text}`"
    return f"`{flag(option)}` {values.text}"


if __name__ == "__main__":
    print("\n".join(lines()))

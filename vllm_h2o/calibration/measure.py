"""A loaded model measures itself: what its heads lose, a gate, and which way is best.

Each text is read twice. The first reading shows what its KV heads lose under each
budget of a grid, and what a gate learns; the second what they lose by a gate that has
learned from all other texts. The first rank puts together what all ranks have read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from tqdm import tqdm
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index

from vllm_h2o.calibration.dense_pass import DensePass, output_projection
from vllm_h2o.calibration.gate_fit import Examples, total
from vllm_h2o.calibration.loaded_model import LoadedModel
from vllm_h2o.calibration.progress import Arrays, Progress
from vllm_h2o.calibration.ranks import of_all_ranks, of_first_rank, own_kv_heads
from vllm_h2o.calibration.sensitivity import grid_of
from vllm_h2o.calibration.trying import trials_of
from vllm_h2o.policy.gate import num_features
from vllm_h2o.policy.options import ATTENTION, GATE
from vllm_h2o.policy.profile import HeadProfile, gate_in_json

logger = init_logger(f"vllm.{__name__}")

MOST_BYTES = 2**31
"""Of the first rank's memory, on the host, for what a gate is learned from."""
_T = TypeVar("_T")
_READ, _TRIED = "read", "tried"
"""The two readings of a text."""


class Measured(NamedTuple):
    """What a measurement has come to.

    Attributes:
        profile: By the texts that were read.
        complete: Whether these are all, each of them twice where there is a gate.
    """

    profile: HeadProfile
    complete: bool


def measure(
    model: LoadedModel,
    texts: Sequence[list[int]],
    kind: str,
    progress: Progress | None = None,
    seconds: float = float("inf"),
) -> Measured:
    """Measure the profile of a model whose weights are loaded.

    Args:
        model: The model.
        texts: Token ids, all of one length, at least `FEWEST_TOKENS`; on all ranks the
            same.
        kind: What these are, for the profile's `measured_on`.
        progress: Where what is read is kept, and what was read is found.
        seconds: After so many no reading is begun, but the first.

    Raises:
        ValueError: The model's modules are not those that its layers should have, or
            what was measured is of no use.
    """
    learns = len(texts) > 1 and _can_learn(model, len(texts))
    reader = _Reader(model, texts, learns, progress or Progress(), seconds)
    read, tried = reader.read_all(_READ), []
    if learns and reader.num_read == len(texts):
        gates = _on_first_rank(lambda: _others(read))
        tried = reader.read_all(_TRIED, gates) if gates else []
    reader.close()
    length = len(texts[0])
    found = _on_first_rank(lambda: _profile(read, tried, len(texts), length, kind))
    return Measured(found, not reader.is_late)


def _on_first_rank(compute: Callable[[], _T]) -> _T:
    """What the first rank computes, on all.

    Raises:
        ValueError: It fails there; all ranks raise it, or the others would wait.
    """
    result: _T | None = None
    why = ""
    if get_tensor_model_parallel_rank() == 0:
        try:
            result = compute()
        except Exception as error:
            logger.debug("H2O could not put together what it read", exc_info=True)
            is_ours = isinstance(error, ValueError)
            why = str(error) if is_ours else f"{type(error).__name__}: {error}"
    result, why = of_first_rank((result, why))
    if why:
        raise ValueError(why)
    return cast(_T, result)


class _Reader:
    """Reads texts with all ranks: what was not read yet, as long as there is time."""

    def __init__(
        self,
        model: LoadedModel,
        texts: Sequence[list[int]],
        learns: bool,
        progress: Progress,
        seconds: float,
    ) -> None:
        """Begin; arguments as of `measure`; `learns`: whether a gate is learned."""
        self._model, self._texts, self._progress = model, texts, progress
        self._rotations = model.rotations if learns else None
        self._is_first = get_tensor_model_parallel_rank() == 0
        self._start, self._seconds, self._made = time.perf_counter(), seconds, 0
        self._bar = tqdm(
            desc="H2O measures this model",
            total=len(texts) * (2 if learns else 1),
            unit="text",
            disable=not self._is_first,
        )
        self.num_read = 0
        """Texts of the last reading."""
        self.is_late = False
        """Whether there was no time for all of them."""

    def read_all(
        self, reading: str, gates: Sequence[np.ndarray | None] = ()
    ) -> list[Arrays]:
        """What was found in each text, on the first rank.

        Args:
            reading: `_READ` or `_TRIED`.
            gates: `[layers, KV heads, F]` weights to try on each text.
        """
        found: list[Arrays] = []
        self.num_read = 0
        for number, ids in enumerate(self._texts):
            name = f"{reading}-{number}"
            known = self._progress.load(name) if self._is_first else None
            if of_first_rank(known is None):
                spent = time.perf_counter() - self._start
                if of_first_rank(self._made and spent > self._seconds):
                    self.is_late = True
                    break
                known = self._read(ids, gates[number] if gates else None)
                self._made += 1
                if self._is_first:
                    self._progress.save(name, known)
            if self._is_first:
                assert known is not None
                found.append(known)
            self.num_read += 1
            self._bar.update()
        return found

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()

    def _read(self, ids: list[int], gate: np.ndarray | None) -> Arrays:
        """What one text shows of all ranks' heads: `errors` `[rules, layers, KV heads,
        grid]`, and the fields of `Examples`, by layer, where a gate learns."""
        model, modules = self._model, self._model.runner.get_model()
        names = sorted(model.layers, key=extract_layer_index)
        projections = {
            name: output_projection(modules, model.layers[name]) for name in names
        }
        gates = None
        if gate is not None:
            gates = {
                name: torch.from_numpy(weights[self._own_heads(name)]).to(
                    model.runner.device
                )
                for name, weights in zip(names, gate, strict=True)
            }
        dense_pass = DensePass(projections, grid_of(len(ids)), self._rotations, gates)
        model.read(dense_pass, ids)
        if missing := set(names) - set(dense_pass.errors):
            raise ValueError(f"its layer {min(missing)} has not attended")
        count = model.vllm_config.model_config.get_total_num_kv_heads()
        errors = torch.stack([dense_pass.errors[name] for name in names], dim=1)
        arrays = {"errors": of_all_ranks(errors, 2, count).numpy()}
        if dense_pass.examples:
            examples = [dense_pass.examples[name] for name in names]
            for field in Examples.ARRAYS:
                mine = torch.stack([getattr(each, field) for each in examples])
                arrays[field] = of_all_ranks(mine, 1, count).numpy()
            arrays["count"] = np.array(examples[0].count)
        return arrays

    def _own_heads(self, name: str) -> slice:
        count = self._model.layers[name].impl.num_kv_heads
        return own_kv_heads(self._model.vllm_config, count)


def _can_learn(model: LoadedModel, num_texts: int) -> bool:
    """Whether a gate can be learned; what is in the way is said."""
    layers = model.layers.values()
    sizes = {num_features(layer.head_size, layer.head_size_v) for layer in layers}
    count = model.vllm_config.model_config.get_total_num_kv_heads()
    held = (num_texts + 1) * 4 * len(layers) * count * max(sizes) ** 2
    if len(sizes) > 1:
        logger.info_once("H2O has no gate: the layers' heads are of several sizes")
    elif held > MOST_BYTES:
        logger.info_once(
            "H2O has no gate: to learn it would take %d MiB", held // 1024**2
        )
    return len(sizes) == 1 and held <= MOST_BYTES


def _examples(read: Sequence[Arrays], layer: int) -> list[Examples]:
    """What the texts say of a layer."""
    fields = [
        {name: torch.from_numpy(text[name][layer]) for name in Examples.ARRAYS}
        for text in read
    ]
    counts = [int(text["count"]) for text in read]
    return [Examples(**x, count=n) for x, n in zip(fields, counts, strict=True)]


def _others(read: Sequence[Arrays]) -> list[np.ndarray]:
    """For each text `[layers, KV heads, F]` weights learned from all others.

    None of them, and the log says so, where some are not finite.
    """
    gates: list[np.ndarray] = []
    num_layers = len(read[0]["targets"])
    for number in range(len(read)):
        others = [*read[:number], *read[number + 1 :]]
        weights = [
            total(_examples(others, layer)).weights() for layer in range(num_layers)
        ]
        gates.append(torch.stack(weights).numpy())
    if not all(np.isfinite(weights).all() for weights in gates):
        logger.warning_once("H2O has no gate: its weights are not finite")
        return []
    return gates


def _profile(
    read: Sequence[Arrays], tried: Sequence[Arrays], num_texts: int, length: int,
    kind: str,
) -> HeadProfile:  # fmt: skip
    """The profile by what was read.

    Raises:
        ValueError: What was measured is of no use.
    """
    grid = grid_of(length)
    past, last = np.stack([text["errors"] for text in read], axis=1).astype(float)
    errors = past.mean(axis=0)
    if not np.isfinite(errors).all() or not errors.any():
        raise ValueError("the errors of its heads are not finite, or all zero")
    rounded = [
        [[float(f"{e:.4g}") for e in head] for head in layer]
        for layer in errors.tolist()
    ]
    number = f"{len(read)}" if len(read) == num_texts else f"{len(read)} of {num_texts}"
    source = f"{number} texts of {length} {kind}, read by an engine"
    by_rule, gate = {ATTENTION: last}, None
    if len(tried) == num_texts:
        by_rule[GATE] = np.stack([text["errors"][0] for text in tried]).astype(float)
        gate = _gate(read)
    trials = None
    if len(read) > 1:
        trials = trials_of(grid, length, past, by_rule).as_json()
    return HeadProfile(grid, rounded, source, length, gate, trials)


def _gate(read: Sequence[Arrays]) -> dict[str, Any]:
    """What all texts teach, and how well that of the others explains each."""
    weights, explained = [], []
    for layer in range(len(read[0]["targets"])):
        texts = _examples(read, layer)
        weights.append(total(texts).weights())
        for number, text in enumerate(texts):
            others = total([*texts[:number], *texts[number + 1 :]]).weights()
            explained.append(text.explained(others))
    r2 = float(torch.stack(explained).mean())
    logger.info_once(
        "H2O's gate explains %.2f of the variance of what tokens of another text get",
        r2,
    )
    return gate_in_json(torch.stack(weights).numpy(), r2)

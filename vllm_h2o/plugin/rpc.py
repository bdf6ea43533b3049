"""What is asked of a worker by `collective_rpc`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from vllm.model_executor.models.utils import extract_layer_index

from vllm_h2o.attention.step import StepRows
from vllm_h2o.attention.watch import Losses, Recorder, Watch
from vllm_h2o.calibration.loaded_model import LoadedModel
from vllm_h2o.calibration.measure import measure
from vllm_h2o.calibration.ranks import own_kv_heads
from vllm_h2o.calibration.resolve import Resolved
from vllm_h2o.calibration.token_ids import texts_to_read
from vllm_h2o.core.plan import ResidencyPlan
from vllm_h2o.policy.profile import HeadProfile

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class H2OCalls:
    """Methods of H2O's workers that are called by their names."""

    vllm_config: VllmConfig
    _plan: ResidencyPlan
    _step: StepRows
    _resolved: Resolved | None
    _recorder: Recorder | None

    def _loaded_model(self) -> LoadedModel:
        raise NotImplementedError

    def h2o_profile(self) -> HeadProfile | None:
        """The head profile in force."""
        assert self._resolved is not None
        return self._resolved.profile

    def h2o_measure(self, texts: list[list[int]] | None, length: int) -> dict[str, Any]:
        """Measure the heads, for `vllm_h2o.calibrate`.

        Args:
            texts: Token ids, all of one length; None: the package's texts.
            length: Of those, in tokens.

        Returns:
            The fields of a `HeadProfile`, on all ranks the same.
        """
        kind = "tokens"
        if texts is None:
            texts, kind = texts_to_read(self.vllm_config.model_config, length)
        return asdict(measure(self._loaded_model(), texts, kind).profile)

    def h2o_record(self) -> None:
        """Record what KV heads lose, step by step, from now on."""
        if self._recorder:
            self._recorder.stop()
        self._recorder = Recorder(Watch(self._step, self._evicting_layers))

    def _evicting_layers(self) -> dict[str, Any]:
        """vLLM's attention modules that evict, by name, in their order."""
        layers = self._loaded_model().layers
        return {name: layers[name] for name in sorted(layers, key=extract_layer_index)}

    def h2o_recorded(self) -> list[dict[str, Any]]:
        """Record no longer.

        Returns:
            For each request that was compressed since `h2o_record`: `ends`, see
            `attention.watch.Losses`, and `heads`, a list of `layer` (as the model
            counts), `head` (likewise) and `lost_at`.
        """
        assert self._recorder is not None
        names = list(self._evicting_layers())
        recorder, self._recorder = self._recorder, None
        return [self._as_the_model_counts(x, names) for x in recorder.stop().values()]

    def _as_the_model_counts(self, losses: Losses, names: list[str]) -> dict[str, Any]:
        heads = [
            {
                "layer": extract_layer_index(names[number]),
                "head": own_kv_heads(self.vllm_config, 1).start + head,
                "lost_at": lost_at.tolist(),
            }
            for (number, head), lost_at in losses.lost_at.items()
        ]
        return {"ends": losses.ends, "heads": heads}

    def h2o_stats(self) -> dict[str, int]:
        """The scheduler's counters up to the last executed step."""
        return self._plan.stats

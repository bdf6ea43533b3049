"""How a layer rotates its keys (RoPE), told from vLLM's table of angles.

The pair i of a key at position p is rotated by `p * frequencies[i]`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

_MOST_OFF = 0.1
"""Radians that a table may be off what rows before have told: bfloat16 is .004 off."""


def has_rotation(text_config: Any) -> bool:
    """Whether keys of a language model with this Hugging Face config are rotated."""
    return any(getattr(text_config, x, None) for x in ("rope_parameters", "rope_theta"))


@dataclass(frozen=True)
class Rotation:
    """How a layer rotates its keys.

    Attributes:
        angles: `[positions, rotary_dim]` cosines, then sines, of each pair's angle;
            None: it is not known how, and nothing is told from the keys' directions.
        neox: Whether pairs are `(i, i + rotary_dim / 2)`, or neighbours.
    """

    angles: torch.Tensor | None
    neox: bool = True

    @classmethod
    def of(cls, module: Any) -> Rotation:
        """That of a rotary embedding of vLLM's, by its table.

        Of several tables, or of positions that are no single number, it is not known.
        """
        table = getattr(module, "cos_sin_cache", None)
        size, whole = (getattr(module, x, 0) for x in ("rotary_dim", "head_size"))
        several = getattr(module, "mrope_section", None) is not None
        if several or not isinstance(table, torch.Tensor) or table.ndim != 2:
            return cls(None)
        if table.shape[1] != size or size > whole:
            return cls(None)
        return cls(table, bool(module.is_neox_style))

    def undone(self, key: torch.Tensor, first: int = 0) -> torch.Tensor:
        """The keys of a text before they were rotated, but for a constant factor.

        Args:
            key: `[n, num_kv_heads, head_size]` after RoPE, of the positions from
                `first` on.
            first: A position.

        Returns:
            The same in float32; where it is not known how, keys of the same norms that
            have one direction.
        """
        if self.angles is None or len(self.angles) < first + len(key):
            alike = torch.zeros_like(key, dtype=torch.float32)
            alike[..., 0] = key.float().norm(dim=-1)
            return alike
        angles = self.angles[first : first + len(key), None]
        angles = angles.to(key.device, torch.float32)
        cos, sin = angles.chunk(2, dim=-1)
        return rotated(key.float(), cos, -sin, self.neox)

    @cached_property
    def frequencies(self) -> torch.Tensor:
        """`[rotary_dim / 2]` float64 radians of a position, on CPU.

        Row 1 of the table tells them as exactly as its dtype is; each doubling of the
        position halves what they are off.

        Raises:
            ValueError: The table is not known, or its angles are no multiples of the
                position.
        """
        if self.angles is None or len(self.angles) < 2:
            raise ValueError("how its keys are rotated is not known")
        told = torch.zeros(self.angles.shape[1] // 2, dtype=torch.float64)
        position = 1
        while position < len(self.angles):
            cos, sin = self.angles[position].double().cpu().chunk(2)
            off = torch.atan2(sin, cos) - position * told
            off = torch.remainder(off + math.pi, 2 * math.pi) - math.pi
            if position > 1 and off.abs().max() > _MOST_OFF:
                raise ValueError("its angles are no multiples of the position")
            told += off / position
            position *= 2
        return told


def rotated(
    key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, neox: bool
) -> torch.Tensor:
    """Rotate keys by angles.

    Args:
        key: `[.., head_size]` float32.
        cos: `[.., rotary_dim / 2]` of each pair's angle, float32.
        sin: The same.
        neox: See `Rotation`.
    """
    size = 2 * cos.shape[-1]
    pairs, rest = key.split([size, key.shape[-1] - size], dim=-1)
    if neox:
        x, y = pairs.chunk(2, dim=-1)
    else:
        x, y = pairs[..., ::2], pairs[..., 1::2]
    turned = x * cos - y * sin, y * cos + x * sin
    join = torch.cat if neox else torch.stack
    return torch.cat([join(turned, dim=-1).flatten(key.ndim - 1), rest], dim=-1)

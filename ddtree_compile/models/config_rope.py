"""Rope and YaRN parameters in both spellings: `rope_theta` + `rope_scaling`, or `rope_parameters`.

The numbers follow transformers (`modeling_rope_utils._compute_yarn_parameters`, DeepseekV3's `yarn_apply_mscale`),
which follow arXiv 2309.00071 and DeepSeek-V2.
"""

from __future__ import annotations

import math
from typing import Final

from ddtree_compile.errors import SpecError
from ddtree_compile.models.config_fields import Fields
from ddtree_compile.models.config_types import Rope

ROPE_TYPES: Final = ("default", "yarn")


def read_rope(
    fields: Fields, dim: int, max_positions: int, *, interleaved: bool, amplitude: float | None = None
) -> tuple[Rope, float]:
    """The rope of `dim` features, and what the softmax scale is multiplied by where a model applies `mscale_all_dim`
    to it (1 for plain rope). `amplitude` replaces the config's factor on cos and sin."""
    if dim % 2:
        raise SpecError(f"{fields.where}: the rotary dimension {dim} is odd; pairs are rotated")
    fields.only("partial_rotary_factor", (1.0,))
    rope = _table(fields)
    outer_theta = fields.raw("rope_theta", None) is not None
    theta = (rope if rope.has("rope_theta") or not outer_theta else fields).number("rope_theta")
    rope.seen.add("rope_theta")
    rope.only("partial_rotary_factor", (1.0,))
    kind = _kind(rope)
    if kind == "default":
        rope.done(harmless=("factor",))
        return Rope(dim, theta, interleaved, amplitude=1.0 if amplitude is None else amplitude), 1.0
    factor = rope.number("factor")
    mscale = rope.number("mscale", 0.0) if rope.raw("mscale", 0) else 0.0
    mscale_all = rope.number("mscale_all_dim", 0.0) if rope.raw("mscale_all_dim", 0) else 0.0
    attention_factor = rope.number("attention_factor") if rope.has("attention_factor") else None
    rope.seen.add("attention_factor")
    rope.only("truncate", (True,))
    if amplitude is None:
        amplitude = attention_factor
    if amplitude is None:
        both = mscale and mscale_all
        amplitude = yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all) if both else yarn_mscale(factor)
    record = Rope(
        dim=dim,
        theta=theta,
        interleaved=interleaved,
        factor=factor,
        original_max=rope.integer("original_max_position_embeddings", max_positions),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        amplitude=amplitude,
    )
    rope.done()
    return record, yarn_mscale(factor, mscale_all) ** 2 if mscale_all else 1.0


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """0.1 * mscale * ln(factor) + 1, and 1 without extension."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _table(fields: Fields) -> Fields:
    scaling, parameters = fields.raw("rope_scaling", None), fields.raw("rope_parameters", None)
    if scaling and parameters and scaling != parameters:
        raise fields.fail("rope_scaling", "contradicts rope_parameters; keep one of them")
    if scaling:
        return fields.table("rope_scaling")
    if parameters:
        return fields.table("rope_parameters")
    return Fields({}, f"{fields.where}: rope_parameters")


def _kind(rope: Fields) -> str:
    kinds = {key: rope.text(key) for key in ("rope_type", "type") if rope.has(key)}
    rope.seen.update(("rope_type", "type"))
    if not kinds:
        return "default"
    if len(set(kinds.values())) > 1:
        raise rope.fail("type", f"contradicts rope_type = {kinds['rope_type']!r}; keep one of them")
    key, kind = next(iter(kinds.items()))
    if kind not in ROPE_TYPES:
        raise rope.fail(key, f"is not supported (supported: {', '.join(ROPE_TYPES)})")
    return kind

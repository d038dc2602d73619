"""The corridor: a spec enters, a Plan leaves. Read this first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ddtree_compile.errors import SpecError
from ddtree_compile.ir.layouts import Parts
from ddtree_compile.models.config import DFlashConfig, TargetConfig, load_config, read_drafter, read_target
from ddtree_compile.models.round import Program, build_program
from ddtree_compile.passes import Observer
from ddtree_compile.place import place_segment, place_spaces
from ddtree_compile.plan import Plan
from ddtree_compile.price import price
from ddtree_compile.runtime.checkpoint import Checkpoint
from ddtree_compile.runtime.weights import check_consumed, load_weights
from ddtree_compile.spec import CompileSpec
from ddtree_compile.text import load_defaults, load_tokenizer


@dataclass(frozen=True, slots=True)
class Models:
    """The two configs that a spec names."""

    target: TargetConfig
    drafter: DFlashConfig


def read_models(spec: CompileSpec) -> Models:
    """Read both configs. SpecError names what they ask for that we lack."""
    target = read_target(spec.target_dir)
    if spec.cache.max_seq_len > target.max_positions:
        raise SpecError(
            f"cache.max_seq_len = {spec.cache.max_seq_len}, but the target is made for {target.max_positions} positions"
            f" ({spec.target_dir / 'config.json'}: max_position_embeddings): choose at most that"
        )
    drafter = read_drafter(
        spec.drafter_dir, target, rope_amplitude=spec.drafter.rope_attention_factor, window=spec.drafter.window
    )
    return Models(target, drafter)


def compile_spec(spec: CompileSpec, observe: Observer | None = None) -> Plan:
    """Lower a spec to a Plan: read the configs, build every segment's graph, run the passes, place, price."""
    models = read_models(spec)
    program = build_program(spec, models.target, models.drafter)
    return plan_program(spec, models, program, observe)


def plan_program(spec: CompileSpec, models: Models, program: Program, observe: Observer | None = None) -> Plan:
    """The second half of the corridor, for graphs already built."""
    segments = tuple(place_segment(graph, spec, observe) for graph in program.segments)
    spaces = place_spaces(segment.graph for segment in segments)
    arena = max(segment.temp_bytes for segment in segments)
    return Plan(
        spec=spec.to_dict(),
        model=describe(models),
        segments=segments,
        weights=program.weights,
        spaces=spaces,
        arena=arena,
        report=price(spec, models.target, models.drafter, program, segments, spaces, arena),
    )


def describe(models: Models) -> dict[str, object]:
    """What a runtime must know of the models beside the graphs."""
    target, drafter = models.target, models.drafter
    return {
        "family": type(target).__name__.removesuffix("Config").lower(),
        "vocab": target.vocab,
        "max_positions": target.max_positions,
        "dtype": target.dtype,
        "skip": list(target.skip),
        "tied": target.tied,
        "head": target.head,
        "fp8": target.fp8,
        "block": drafter.block,
        "mask_token": drafter.mask_token,
    }


def load(
    spec: CompileSpec, plan: Plan, progress: Callable[[int, int], None] | None = None
) -> tuple[dict[str, Parts], tuple[int, ...]]:
    """A plan's weights, packed, and the checkpoint's stop tokens.

    Each tensor of both checkpoints is consumed exactly once or known to be skipped; CheckpointError names the others.
    """
    checkpoints: dict[str, Checkpoint] = {}
    if spec.model.weights == "checkpoint":
        checkpoints = {"target": Checkpoint(spec.target_dir), "drafter": Checkpoint(spec.drafter_dir)}
        skip = tuple(f"target:{prefix}" for prefix in plan.model["skip"])
        check_consumed(plan.weights, checkpoints, skip)
    weights = load_weights(plan.weights, checkpoints, progress)
    tokenizer = load_tokenizer(spec.target_dir)
    defaults = load_defaults(spec.target_dir, load_config(spec.target_dir / "config.json"), tokenizer)
    return weights, defaults.stop_token_ids

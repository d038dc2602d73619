"""A Plan as a file: `to_json` writes it, `from_json` reads it back and checks it; `to_json(from_json(x)) == x`.

One row a line, so that a diff shows what changed. Graphs are IR text. What repeats from layer to layer is written
once: weights in blocks with `{l}` for the layer's number, offsets with the list of layers that share them. Nothing in
the file depends on the machine that wrote it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

from ddtree_compile.errors import BundleError, DdtreeError
from ddtree_compile.ir.graph import DTYPE_BYTES, Graph, Space, TensorType, Value
from ddtree_compile.ir.layouts import LAYOUTS
from ddtree_compile.ir.text import parse_graph, print_graph
from ddtree_compile.ir.weights import Cat, Cut, Int4, Random, Recipe, Stack, Take, View, Weight
from ddtree_compile.passes.buffers import lifetimes
from ddtree_compile.plan import FORMAT, Layout, Place, Plan, Segment
from ddtree_compile.plan_check import check_plan
from ddtree_compile.spec import CompileSpec

# Keys in the order of the file, and how many levels below each are spread over lines
LEVELS = {"format": 0, "spec": 1, "model": 1, "arena": 0, "spaces": 3, "weights": 3, "segments": 3, "report": 2}
MOST_LAYERS = 10_000  # of a block of weights
_weight_layer = re.compile(r"(target|drafter)\.l(\d{2,})\.").match
_value_layer = re.compile(r"([a-z]\d{2,})\.").match
_type = re.compile(r"([a-z]\w*)\[((?:\d+(?:,\d+)*)?)\]", re.ASCII).fullmatch


# Writing


def to_json(plan: Plan) -> str:
    """The file's text. Equal plans give equal text, whatever order their mappings were filled in."""
    data = {
        "format": FORMAT,
        "spec": plan.spec,
        "model": plan.model,
        "arena": plan.arena,
        "spaces": {
            str(space): {
                "size": layout.size,
                "places": {name: [place.offset, str(place.type)] for name, place in layout.places.items()},
            }
            for space, layout in plan.spaces.items()
        },
        "weights": _weight_blocks(plan.weights),
        "segments": [_segment_data(segment) for segment in plan.segments],
        "report": plan.report,
    }
    rows = [f"  {json.dumps(key)}: {_spread(data[key], levels, 2)}" for key, levels in LEVELS.items()]
    return "{\n" + ",\n".join(rows) + "\n}\n"


def _spread(value: Any, levels: int, indent: int) -> str:
    """`value` as JSON, its outer `levels` with an item a line."""
    if levels == 0 or not isinstance(value, (dict, list)) or not value:
        return json.dumps(value, ensure_ascii=False)
    pad = " " * indent
    if isinstance(value, dict):
        rows = [f"{pad}  {json.dumps(k)}: {_spread(v, levels - 1, indent + 2)}" for k, v in value.items()]
        return "{\n" + ",\n".join(rows) + f"\n{pad}}}"
    return "[\n" + ",\n".join(f"{pad}  {_spread(item, levels - 1, indent + 2)}" for item in value) + f"\n{pad}]"


def _segment_data(segment: Segment) -> dict[str, Any]:
    return {
        "temp_bytes": segment.temp_bytes,
        "lower_bound": segment.lower_bound,
        "graph": print_graph(segment.graph).splitlines(),
        "offsets": _offset_rows(segment.graph, segment.offsets),
    }


def _offset_rows(graph: Graph, offsets: Mapping[str, int]) -> list[dict[str, Any]]:
    """Offsets by layer; layers whose offsets are equal share a row."""
    by_layer: dict[str, dict[str, int]] = {}
    for buffer in lifetimes(graph):
        match = _value_layer(buffer.name)
        layer, name = (match[1], buffer.name[match.end() :]) if match else ("", buffer.name)
        by_layer.setdefault(layer, {})[name] = offsets[buffer.name]
    shared: dict[str, list[str]] = {}
    for layer, placed in by_layer.items():
        shared.setdefault(json.dumps(placed), []).append(layer)
    return [{"layers": layers, "at": json.loads(placed)} for placed, layers in shared.items()]


def _weight_blocks(weights: tuple[Weight, ...]) -> list[dict[str, Any]]:
    """Runs of weights; a block stands for each of its layers in turn."""
    blocks: list[dict[str, Any]] = []
    for layer, run in groupby(weights, key=lambda weight: _layer_of(weight.value.name)):
        rows = [_weight_row(weight, layer) for weight in run]
        last = blocks[-1] if blocks else None
        if layer is not None and last and last["layers"] and last["layers"][1] == layer - 1 and last["weights"] == rows:
            last["layers"][1] = layer
        else:
            blocks.append({"layers": None if layer is None else [layer, layer], "weights": rows})
    return blocks


def _layer_of(name: str) -> int | None:
    match = _weight_layer(name)
    return int(match[2]) if match else None


def _weight_row(weight: Weight, layer: int | None) -> dict[str, Any]:
    row = {
        "name": weight.value.name,
        "type": str(weight.value.type),
        "layout": weight.layout,
        "split": weight.split,
        "recipe": _recipe_data(weight.recipe),
    }
    if layer is None:
        return row
    text = json.dumps(row).replace(f".l{layer:02d}.", ".l{l}.").replace(f"layers.{layer}.", "layers.{l}.")
    return json.loads(text)


def _recipe_data(recipe: Recipe) -> dict[str, Any]:
    match recipe:
        case Take():
            return {"take": recipe.tensor}
        case Int4():
            return {"int4": recipe.module, "group": recipe.group}
        case Random():
            return {
                "random": recipe.name, "shape": list(recipe.shape), "seed": recipe.seed, "std": recipe.std,
                "mean": recipe.mean,
            }  # fmt: skip
        case Cut():
            return {"cut": [recipe.dim, recipe.start, recipe.stop], "of": _recipe_data(recipe.of)}
        case Cat():
            return {"cat": recipe.dim, "parts": [_recipe_data(part) for part in recipe.parts]}
        case Stack():
            return {"stack": recipe.count, "of": _recipe_data(recipe.of)}
        case View():
            return {"view": list(recipe.shape), "of": _recipe_data(recipe.of)}


# Reading


def from_json(text: str, where: str) -> Plan:
    """The plan whose text this is. BundleError, one line that starts with `where`, names what is wrong: no JSON,
    another format, a missing key, or a change by hand that leaves it illegal (an offset outside the arena, say)."""
    try:
        data = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise BundleError(f"{where}: not JSON: {error}; compile the plan again") from None
    if not isinstance(data, dict) or "format" not in data:
        raise BundleError(f"{where}: not a plan (no format number); name a file that `plan -o` wrote")
    if data["format"] != FORMAT:
        raise BundleError(
            f"{where}: format {data['format']!r} is not {FORMAT}, the one of this version; compile the plan again"
        )
    try:
        plan = _plan(data)
        check_plan(plan)
    except KeyError as error:
        raise BundleError(f"{where}: {error.args[0]} is missing; compile the plan again") from None
    except (DdtreeError, ValueError, TypeError, AttributeError) as error:
        raise BundleError(f"{where}: {' '.join(str(error).split())}; compile the plan again") from None
    return plan


def _plan(data: Mapping[str, Any]) -> Plan:
    CompileSpec.parse(_dict(data, "spec"), "spec")
    return Plan(
        spec=data["spec"],
        model=_dict(data, "model"),
        segments=tuple(_segment(item, f"segments[{i}]") for i, item in enumerate(_list(data, "segments"))),
        weights=tuple(_weights(data)),
        spaces={Space(name): _layout(layout, f"spaces.{name}") for name, layout in _dict(data, "spaces").items()},
        arena=_int(data, "arena"),
        report=_dict(data, "report"),
    )


def _segment(item: Mapping[str, Any], at: str) -> Segment:
    lines = _list(item, "graph", at)
    try:
        graph = parse_graph("\n".join(map(str, lines)))
    except DdtreeError as error:
        raise BundleError(f"{at}.graph: {error}") from None
    offsets: dict[str, int] = {}
    for row in _list(item, "offsets", at):
        for layer in _list(row, "layers", f"{at}.offsets"):
            named = _dict(row, "at", f"{at}.offsets")
            offsets |= {f"{layer}.{name}" if layer else name: offset for name, offset in named.items()}
    for name, offset in offsets.items():
        _whole(offset, f"{at}.offsets: {name}")
    order = [buffer.name for buffer in lifetimes(graph)]
    offsets = {name: offsets[name] for name in order if name in offsets} | offsets
    return Segment(graph, offsets, _int(item, "temp_bytes", at), _int(item, "lower_bound", at))


def _layout(item: Mapping[str, Any], at: str) -> Layout:
    places: dict[str, Place] = {}
    for name, place in _dict(item, "places", at).items():
        if not isinstance(place, list) or len(place) != 2:
            raise TypeError(f"{at}.places: {name} must be an offset and a type")
        offset, type_ = place
        places[name] = Place(_whole(offset, f"{at}.places: {name}"), _tensor_type(type_, f"{at}.places: {name}"))
    return Layout(_int(item, "size", at), places)


def _weights(data: Mapping[str, Any]) -> Iterator[Weight]:
    for i, block in enumerate(_list(data, "weights")):
        at = f"weights[{i}]"
        rows = json.dumps(_list(block, "weights", at))
        for layer in _layers(block, at):
            text = rows if layer is None else rows.replace(".l{l}.", f".l{layer:02d}.").replace("{l}", str(layer))
            yield from (_weight(row, at) for row in json.loads(text))


def _layers(block: Mapping[str, Any], at: str) -> Iterable[int | None]:
    """The layers that a block stands for; None alone where it stands for no layer."""
    match block:
        case {"layers": None}:
            return (None,)
        case {"layers": [int(first), int(last)]} if 0 <= first <= last < MOST_LAYERS:
            return range(first, last + 1)
        case _:
            raise ValueError(f"{at}.layers must be the first and the last layer, or null")


def _weight(row: Any, at: str) -> Weight:
    if not isinstance(row, dict) or not isinstance(row.get("name"), str):
        raise TypeError(f"{at} holds something that is no weight with a name")
    if missing := [key for key in ("type", "layout", "split", "recipe") if key not in row]:
        raise KeyError(f"{at}: {missing[0]} of {row['name']}")
    value = Value(row["name"], _tensor_type(row["type"], at), Space.WEIGHT)
    if str(row["layout"]) not in LAYOUTS:
        raise ValueError(f"{at}: {value.name} has an unknown layout {row['layout']!r}")
    split = row["split"]
    if split is not None and split not in range(len(value.shape)):
        raise ValueError(f"{at}: {value.name} is split along {split!r}, which is none of its dimensions")
    return Weight(value, _recipe(row["recipe"], f"{at}: {value.name}"), row["layout"], split)


def _recipe(data: Mapping[str, Any], at: str) -> Recipe:
    match data:
        case {"take": str(tensor)}:
            return Take(tensor)
        case {"int4": str(module), "group": int(group)}:
            return Int4(module, group)
        case {"random": str(name), "shape": list(shape), "seed": int(seed), "std": float(std), "mean": float(mean)}:
            return Random(name, tuple(shape), seed, std, mean)
        case {"cut": [int(dim), int(start), int(stop)], "of": dict(of)}:
            return Cut(_recipe(of, at), dim, start, stop)
        case {"cat": int(dim), "parts": list(parts)}:
            return Cat(tuple(_recipe(part, at) for part in parts), dim)
        case {"stack": int(count), "of": dict(of)}:
            return Stack(_recipe(of, at), count)
        case {"view": list(shape), "of": dict(of)}:
            return View(_recipe(of, at), tuple(shape))
        case _:
            raise ValueError(f"{at} has an unknown recipe {json.dumps(data)[:60]}")


def _tensor_type(text: Any, at: str) -> TensorType:
    match = _type(text) if isinstance(text, str) else None
    if match is None or match[1] not in DTYPE_BYTES:
        raise ValueError(f"{at} has the type {text!r}, expected one such as bf16[16,64]")
    return TensorType(tuple(int(n) for n in match[2].split(",") if n), match[1])


def _dict(data: Mapping[str, Any], key: str, at: str = "") -> dict[str, Any]:
    return _of(dict, data, key, at, "an object")


def _list(data: Mapping[str, Any], key: str, at: str = "") -> list[Any]:
    return _of(list, data, key, at, "a list")


def _int(data: Mapping[str, Any], key: str, at: str = "") -> int:
    name = f"{at}.{key}" if at else key
    if not isinstance(data, dict) or key not in data:
        raise KeyError(name)
    return _whole(data[key], name)


def _of(kind: type, data: Mapping[str, Any], key: str, at: str, expected: str) -> Any:
    name = f"{at}.{key}" if at else key
    if not isinstance(data, dict) or key not in data:
        raise KeyError(name)
    if not isinstance(data[key], kind):
        raise TypeError(f"{name} must be {expected}")
    return data[key]


def _whole(value: Any, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name} must be a whole number, not {json.dumps(value)[:40]}")
    return value

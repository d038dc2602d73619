"""`quantization_config`: compressed-tensors int4 "pack-quantized" is read, fp8 is recognised, the rest refused."""

from __future__ import annotations

import re
from typing import Final

from ddtree_compile.models.config_fields import Fields
from ddtree_compile.models.config_types import Quantisation

SUPPORTED: Final = "compressed-tensors pack-quantized symmetric int4 in groups"

_PATTERN: Final = "re:"

# Versions, statistics and calibration records: they describe how the weights were made, not how they are read.
_HARMLESS: Final = frozenset({"version", "quantization_status", "global_compression_ratio"})
_WEIGHT_HARMLESS: Final = frozenset({"observer", "observer_kwargs", "scale_dtype", "zp_dtype", "block_structure"})


def read_quantisation(*levels: Fields) -> tuple[Quantisation | None, bool]:
    """(int4 quantisation or None, is it fp8) from the levels of a config that may hold `quantization_config`."""
    holders = [fields for fields in levels if fields.raw("quantization_config", None)]
    if not holders:
        return None, False
    first = holders[0]
    for other in holders[1:]:
        if other.values["quantization_config"] != first.values["quantization_config"]:
            raise other.fail("quantization_config", f"contradicts the one at {first.where}")
    table = first.table("quantization_config")
    method = table.text("quant_method")
    if method == "fp8":
        return None, True
    if method != "compressed-tensors":
        raise table.fail("quant_method", f"is not supported (supported: {SUPPORTED})")
    return _compressed_tensors(table)


def covers(quantisation: Quantisation | None, module: str) -> bool:
    """Is the Linear `module` (its name in the checkpoint, without `.weight`) quantised: it is, unless `ignore` has it.

    An entry is a pattern after `re:`, matched from the start as compressed-tensors does, or a name, whole or the end
    of one. Routers, embeddings and norms are no Linear modules; callers do not ask about them.
    """
    if quantisation is None:
        return False
    for entry in quantisation.ignore:
        if entry.startswith(_PATTERN):
            if re.match(entry.removeprefix(_PATTERN), module):
                return False
        elif module == entry or module.endswith(f".{entry}"):
            return False
    return True


def _compressed_tensors(table: Fields) -> tuple[Quantisation | None, bool]:
    groups = table.table("config_groups")
    if len(groups.values) != 1:
        raise table.fail("config_groups", "is not supported (supported: one group)")
    name = next(iter(groups.values))
    group = groups.table(name)
    weights = group.table("weights")
    if weights.raw("type", "int") == "float" and weights.integer("num_bits") == 8:
        return None, True
    table.only("format", ("pack-quantized",))
    group.only("format", ("pack-quantized",))
    if not (table.has("format") or group.has("format")):
        table.text("format")
    weights.only("type", ("int",))
    if weights.integer("num_bits") != 4:
        raise weights.fail("num_bits", f"is not supported (supported: {SUPPORTED})")
    if weights.text("strategy") != "group":
        raise weights.fail("strategy", f"is not supported (supported: {SUPPORTED})")
    if not weights.boolean("symmetric"):
        raise weights.fail("symmetric", f"is not supported (supported: {SUPPORTED})")
    size = weights.integer("group_size")
    if size % 8:
        raise weights.fail("group_size", "is not a multiple of 8, the codes of one int32 word")
    weights.only("actorder", ())
    weights.only("dynamic", (False,))
    weights.done(_WEIGHT_HARMLESS)
    targets = group.listed("targets", str)
    if targets != ("Linear",):
        raise group.fail("targets", "is not supported (supported: ['Linear'])")
    group.only("input_activations", ())
    group.only("output_activations", ())
    group.done()
    ignore = table.listed("ignore", str, ())
    _check_patterns(table, ignore)
    table.only("kv_cache_scheme", ())
    table.only("sparsity_config", ({},))
    table.only("transform_config", ({},))
    table.done(_HARMLESS)
    return Quantisation(ignore=ignore, group=size), False


def _check_patterns(table: Fields, ignore: tuple[str, ...]) -> None:
    for entry in ignore:
        if entry.startswith(_PATTERN):
            try:
                re.compile(entry.removeprefix(_PATTERN))
            except re.error as error:
                raise table.fail("ignore", f"holds a pattern that is none: {entry!r} ({error})") from None

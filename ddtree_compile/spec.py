"""The user's file: a TOML spec enters `read_spec`, a validated and frozen `CompileSpec` leaves.

A field's description is the phrase that says which values are allowed; errors, and whoever documents the format, print
it. Directories are kept as they were written, so that a plan made from a spec does not depend on where it lies;
`target_dir` and `drafter_dir` find them.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    Strict,
    StringConstraints,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

from ddtree_compile import machine
from ddtree_compile.errors import SpecError
from ddtree_compile.machine import close_match

MAX_BUCKET = 256  # nodes besides the root: beyond that a verify is a batch, not a tree
MAX_CHUNK = 8192  # prompt rows of one prefill graph
MAX_GRAPHS = 32  # buckets, and chunks: each is a captured graph
MAX_SEQ_LEN = 1 << 24  # tokens; a position fits in fp32 exactly
MAX_SEQUENCES = 256
MAX_RANKS = 64
MAX_SEED = (1 << 63) - 1
SHOWN = 60  # characters of a bad value that an error repeats


def _sorted_unique(sizes: tuple[int, ...]) -> tuple[int, ...]:
    if len(set(sizes)) < len(sizes):
        raise ValueError("holds a size twice")
    return tuple(sorted(sizes))


def _known_gpu(name: str) -> str:
    if name not in machine.GPUS:
        raise ValueError("unknown")
    return name


def _probabilities(hit: tuple[tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
    for depth, row in enumerate(hit, start=1):
        if sum(row) > 1 + 1e-6:  # a table rounded to six digits may add up to a little more
            raise ValueError(f"depth {depth} adds up to {sum(row):.4g}")
    return hit


# Lists of graph sizes are kept in rising order
Buckets = Annotated[
    tuple[Annotated[int, Field(ge=1, le=MAX_BUCKET)], ...],
    Strict(False),
    Field(min_length=1, max_length=MAX_GRAPHS),
    AfterValidator(_sorted_unique),
]
Chunks = Annotated[
    tuple[Annotated[int, Field(ge=1, le=MAX_CHUNK)], ...],
    Strict(False),
    Field(min_length=1, max_length=MAX_GRAPHS),
    AfterValidator(_sorted_unique),
]
Directory = Annotated[str, StringConstraints(min_length=1, pattern=r"^[^\x00]+$")]
Probability = Annotated[float, Field(ge=0, le=1)]
Row = Annotated[tuple[Probability, ...], Strict(False), Field(min_length=1)]
Hit = Annotated[tuple[Row, ...], Strict(False), Field(min_length=1), AfterValidator(_probabilities)]


class Table(BaseModel):
    """A table of the spec: frozen, no unknown keys, no conversion between types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class ModelTable(Table):
    """`[model]`: where the two checkpoints are."""

    target: Directory = Field(description="a directory, relative to the spec's file or absolute")
    drafter: Directory = Field(description="a directory, relative to the spec's file or absolute")
    weights: Literal["checkpoint", "random"] = Field(default="checkpoint", description='"checkpoint" or "random"')
    seed: int = Field(default=0, ge=0, le=MAX_SEED, description="an integer from 0 to 2^63 - 1 (of random weights)")


class DrafterTable(Table):
    """`[drafter]`: what a drafter's config may leave unsaid."""

    window: int | None = Field(default=None, ge=1, le=MAX_SEQ_LEN, description="a number of context tokens, 1 or more")
    rope_attention_factor: float | None = Field(default=None, gt=0, le=100, description="a factor above 0, at most 100")


class TreeTable(Table):
    """`[tree]`: the budgets that get a graph, and how a tree is grown."""

    buckets: Buckets = Field(
        description=f"a list of 1 to {MAX_GRAPHS} different node counts, each from 1 to {MAX_BUCKET}"
    )
    top_k_per_depth: int | None = Field(
        default=None, ge=1, le=MAX_BUCKET, description=f"a number of candidates a depth, from 1 to {MAX_BUCKET}"
    )
    keep_top1_chain: bool = Field(default=False, description="true or false")
    shape: Literal["tree", "chain"] = Field(default="tree", description='"tree" or "chain"')


class CacheTable(Table):
    """`[cache]`: the caches of one target and its drafter."""

    max_seq_len: int = Field(default=4096, ge=2, le=MAX_SEQ_LEN, description="a number of tokens, from 2 to 2^24")
    max_sequences: int = Field(
        default=1, ge=1, le=MAX_SEQUENCES, description=f"a number of sequences, from 1 to {MAX_SEQUENCES}"
    )
    dtype: Literal["auto", "bf16", "fp8_e4m3"] = Field(
        default="auto", description='"auto" (that of the model), "bf16" or "fp8_e4m3"'
    )
    context_shards: int = Field(
        default=1, ge=1, le=MAX_RANKS, description="a number of ranks that divides tensor_parallel"
    )


class PrefillTable(Table):
    """`[prefill]`: the row counts that get a prefill graph."""

    chunks: Chunks = Field(
        default=(16, 128), description=f"a list of 1 to {MAX_GRAPHS} different row counts, each from 1 to {MAX_CHUNK}"
    )


class MachineTable(Table):
    """`[machine]`: what the plan is for."""

    gpu: Annotated[str, AfterValidator(_known_gpu)] = Field(
        default="cpu", description=f"one of {', '.join(machine.GPUS)}"
    )
    tensor_parallel: int = Field(default=1, ge=1, le=MAX_RANKS, description=f"a number of ranks, from 1 to {MAX_RANKS}")
    expert_parallel: bool = Field(default=False, description="true or false")


class AcceptanceTable(Table):
    """`[acceptance]`: the prior that turns costs into tokens a second."""

    hit: Hit = Field(
        description="a row a depth; a row holds each rank's probability, from 0 to 1, and adds up to at most 1"
    )


class CompileSpec(Table):
    """All that a user decides. Everything else follows from it and the two models' configs."""

    model: ModelTable
    drafter: DrafterTable = DrafterTable()
    tree: TreeTable
    cache: CacheTable = CacheTable()
    prefill: PrefillTable = PrefillTable()
    machine: MachineTable = MachineTable()
    acceptance: AcceptanceTable | None = None

    _base: Path = PrivateAttr(default_factory=Path)
    REQUIRED: ClassVar[tuple[str, ...]] = ("model.target", "model.drafter", "tree.buckets")

    @model_validator(mode="after")
    def _shards_divide_ranks(self) -> CompileSpec:
        shards, ranks = self.cache.context_shards, self.machine.tensor_parallel
        if ranks % shards:
            raise ValueError(f"cache.context_shards = {shards} must divide machine.tensor_parallel = {ranks}")
        return self

    @classmethod
    def parse(cls, data: dict[str, Any], where: str = "spec", base: Path | None = None) -> CompileSpec:
        """Check `data` (tables as TOML gives them). SpecError: one line that starts with `where`. `base` is the
        directory that relative directories start from (default: the current one)."""
        try:
            spec = cls.model_validate(data)
        except ValidationError as error:
            raise SpecError(f"{where}: {_explain(error, data)}") from None
        spec._base = base or Path()  # noqa: SLF001 - a class method is inside
        return spec

    @property
    def target_dir(self) -> Path:
        return self._base / self.model.target

    @property
    def drafter_dir(self) -> Path:
        return self._base / self.model.drafter

    def override(self, target: str | Path | None = None, drafter: str | Path | None = None) -> CompileSpec:
        """The same spec with other model directories, these relative to the current directory (flags of the CLI)."""
        given = {"target": target, "drafter": drafter}
        changed = {key: str(Path(path).absolute()) for key, path in given.items() if path is not None}
        return self.model_copy(update={"model": self.model.model_copy(update=changed)})

    def to_dict(self) -> dict[str, Any]:
        """The spec with its defaults filled in, as JSON types; `parse` reads it back. Directories stay as written."""
        return self.model_dump(mode="json", exclude_none=True)

    def top_k(self, vocabulary: int) -> int:
        """Candidates drafted at each depth: as asked, or as many as the largest bucket could use."""
        return self.tree.top_k_per_depth or min(max(self.tree.buckets), vocabulary)

    def check_tree(self, horizon: int, vocabulary: int) -> None:
        """SpecError if a bucket is larger than its trees can get with a drafter of `horizon` tokens."""
        top_k = self.top_k(vocabulary)
        if top_k > vocabulary:
            raise SpecError(
                f"tree.top_k_per_depth = {top_k} is more than the vocabulary of {vocabulary}: choose at most that"
            )
        width = 1 if self.tree.shape == "chain" else top_k
        capacity = tree_capacity(width, horizon)
        largest = max(self.tree.buckets)
        if largest <= capacity:
            return
        if self.tree.shape == "chain":
            raise SpecError(
                f"tree.buckets holds {largest}, but a chain of this drafter has {horizon} nodes: choose at most that"
            )
        raise SpecError(
            f"tree.buckets holds {largest}, but a tree of depth {horizon} with top_k_per_depth = {top_k} has at most "
            f"{capacity} nodes: choose a smaller bucket or a larger top_k_per_depth"
        )


def tree_capacity(top_k: int, horizon: int) -> int:
    """Nodes of the largest tree besides its root: the sum of top_k^d over depths d = 1..horizon."""
    return sum(top_k**depth for depth in range(1, horizon + 1))


def read_spec(path: str | Path) -> CompileSpec:
    """Read a TOML spec. SpecError, one line naming file and key, for whatever is wrong with it."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SpecError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except IsADirectoryError:
        raise SpecError(f"{path}: is a directory; name the spec's file, such as {path / 'spec.toml'}") from None
    except FileNotFoundError:
        raise SpecError(f"{path}: no such file; name a spec's TOML file") from None
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise SpecError(f"{path}: not valid TOML: {_one_line(str(error))}") from None
    return CompileSpec.parse(data, where=str(path), base=path.parent)


def _explain(error: ValidationError, data: dict[str, Any]) -> str:
    """The one line for the problem that is most likely the cause: an unknown key before the key it should have been."""
    problems = error.errors(include_url=False)
    problems.sort(key=lambda problem: problem["type"] != "extra_forbidden")
    return _line(problems[0], data)


def _line(problem: ErrorDetails, data: dict[str, Any]) -> str:
    names = [part for part in problem["loc"] if isinstance(part, str)]
    key = ".".join(name if re.fullmatch(r"[\w-]+", name) else json.dumps(name) for name in names)
    if problem["type"] == "extra_forbidden":
        return _unknown(key, names)
    if problem["type"] == "missing":
        first = next(name for name in (*CompileSpec.REQUIRED, key) if name.startswith(key))
        return f"{first} is missing: give {_allowed(first.split('.'))}"
    if problem["type"] == "value_error" and not names:
        return problem["msg"].removeprefix("Value error, ")
    if len(names) == 1:
        return f"{key} = {_shown(problem['input'])} must be a table: write [{key}] and its keys below it"
    value: Any = data
    for name in names:
        value = value[name]
    at = "".join(f"[{part}]" for part in problem["loc"] if isinstance(part, int))
    found = f" ({at} is {_shown(problem['input'])})" if at else ""
    found = f" ({problem['msg'].removeprefix('Value error, ')})" if problem["type"] == "value_error" else found
    hint = close_match(value, machine.GPUS) if key == "machine.gpu" and isinstance(value, str) else found
    return f"{key} = {_shown(value)} is not allowed{hint}: it must be {_allowed(names)}"


def _unknown(key: str, names: list[str]) -> str:
    """An unknown key: the table that has a key of this name, else the nearest key here, else all keys here."""
    *path, name = names
    known = [".".join([*path, other]) for other in _keys(path)]
    homes = [f"{table}.{name}" for table in TABLES if name in TABLES[table].model_fields]
    if homes:
        return f"unknown key {key} (did you mean {homes[0]}?)"
    if path and name in TABLES:
        return f"unknown key {key}: {name} is a table of its own, [{name}]"
    if near := close_match(key, known):
        return f"unknown key {key}{near}"
    return f"unknown key {key}: the {'keys' if path else 'tables'} here are {', '.join(known)}"


TABLES: dict[str, type[Table]] = {
    "model": ModelTable,
    "drafter": DrafterTable,
    "tree": TreeTable,
    "cache": CacheTable,
    "prefill": PrefillTable,
    "machine": MachineTable,
    "acceptance": AcceptanceTable,
}


def _keys(path: list[str]) -> list[str]:
    return list(TABLES[path[0]].model_fields) if path else list(CompileSpec.model_fields)


def _allowed(names: list[str]) -> str:
    return TABLES[names[0]].model_fields[names[1]].description or ""


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _shown(value: Any) -> str:
    """A value as TOML would write it, shortened, on one line."""
    if isinstance(value, str):
        text = json.dumps(value, ensure_ascii=not value.isprintable())
    else:
        text = json.dumps(value) if isinstance(value, bool) else _one_line(repr(value))
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."

"""The op table: every op kind with its record, by family."""

from ddtree_compile.ir.graph import Op
from ddtree_compile.ir.ops.attention import ATTENTION
from ddtree_compile.ir.ops.commit import COMMIT
from ddtree_compile.ir.ops.dense import DENSE
from ddtree_compile.ir.ops.moe import MOE
from ddtree_compile.ir.ops.pick import PICK
from ddtree_compile.ir.ops.record import OpRecord
from ddtree_compile.ir.ops.rotary import ROTARY
from ddtree_compile.ir.ops.rows import ROWS_TABLE
from ddtree_compile.ir.ops.tree import TREE

OPS: dict[str, OpRecord] = DENSE | ROTARY | ATTENTION | MOE | ROWS_TABLE | TREE | PICK | COMMIT


def writes(op: Op) -> tuple[int, ...]:
    """Indices of the arguments that `op` updates in place; a fused op's are those that its parts update."""
    if not op.body:
        return OPS[op.kind].writes
    written = {part.args[i].name for part in op.body for i in writes(part)}
    return tuple(i for i, arg in enumerate(op.args) if arg.name in written)

"""The op table: every op kind with its record, by family."""

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

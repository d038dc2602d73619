"""Text stands alone: importing it loads neither torch nor transformers nor another part of the package."""

import subprocess
import sys

PROGRAM = """
import sys
import ddtree_compile.text
loaded = sorted(sys.modules)
print([name for name in loaded if name.split(".")[0] in ("torch", "transformers", "triton")])
print([name for name in loaded if name.startswith("ddtree_compile.") and not name.startswith("ddtree_compile.text")])
"""


def test_importing_text_loads_little() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", "['ddtree_compile.errors']"]

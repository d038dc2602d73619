"""docs/corridor.md is what the code does now."""

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def test_the_page_is_what_the_code_prints() -> None:
    """A change of a builder or a pass shows in the page: `python docs/corridor.py --write` refreshes it."""
    spec = importlib.util.spec_from_file_location("corridor", DOCS / "corridor.py")
    assert spec is not None and spec.loader is not None
    corridor = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(corridor)
    assert corridor.page() == (DOCS / "corridor.md").read_text(encoding="utf-8")

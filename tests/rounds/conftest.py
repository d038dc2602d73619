"""Small models on disk, made once a session, and plans over them."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.lab import Lab, make_models, one_thread


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Lab]:
    """lab(family, buckets, dtype=, block=, **spec tables): a plan, compiled once for equal arguments."""
    roots: dict[Any, Any] = {}
    labs: dict[str, Lab] = {}

    def make(family: str, buckets: list[int], *, dtype: str = "float32", block: int = 6, **tables: Any) -> Lab:
        key = (family, dtype, block)
        if key not in roots:
            roots[key] = make_models(tmp_path_factory.mktemp(family), family, dtype=dtype, block=block)
        name = repr((key, buckets, tables))
        if name not in labs:
            labs[name] = Lab.make(roots[key], buckets, **tables)
        return labs[name]

    return make


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield

"""The public names: they come lazily, all resolve, and the embedded model is at hand wherever we are installed."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import ddtree_compile
from ddtree_compile.embedded import embedded_spec
from ddtree_compile.spec import read_spec

PACKAGE = Path(ddtree_compile.__file__).parent
TINY = PACKAGE.parent / "plans" / "tiny" / "spec.toml"


def test_importing_the_package_imports_nothing_else():
    code = "import sys; before = set(sys.modules); import ddtree_compile; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-I", "-c", f"import sys; sys.path[:0] = [{str(PACKAGE.parent)!r}]; {code}"],
                          capture_output=True, text=True, timeout=60, check=True)  # fmt: skip
    ours = [name for name in done.stdout.split() if name.startswith(("ddtree_compile.", "torch", "pydantic", "typer"))]
    assert ours == []


@pytest.mark.parametrize("name", ddtree_compile.__all__)
def test_every_public_name_resolves(name):
    assert getattr(ddtree_compile, name) is not None
    assert name in dir(ddtree_compile)


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="has no attribute 'engine_from_thin_air'"):
        ddtree_compile.engine_from_thin_air  # noqa: B018


def test_type_checkers_see_the_same_names():
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.name: node.module.removeprefix("ddtree_compile.")
        for node in block.body if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }  # fmt: skip
    assert seen == ddtree_compile._HOME
    assert {*seen, "__version__"} == set(ddtree_compile.__all__)


def test_package_is_typed():
    assert (PACKAGE / "py.typed").exists()


def test_embedded_spec_names_models_that_are_there():
    spec = read_spec(embedded_spec())
    for directory in (spec.target_dir, spec.drafter_dir):
        assert (directory / "config.json").exists()
        assert (directory / "model.safetensors").exists()
    assert (spec.target_dir / "tokenizer.json").exists()


@pytest.mark.skipif(not TINY.exists(), reason="plans/ is not beside an installed package")
def test_embedded_spec_is_the_tiny_plans_spec():
    ours, tiny = read_spec(embedded_spec()), read_spec(TINY)
    assert tiny.target_dir.resolve() == ours.target_dir.resolve()
    assert tiny.drafter_dir.resolve() == ours.drafter_dir.resolve()
    assert {k: v for k, v in ours.to_dict().items() if k != "model"} == {
        k: v for k, v in tiny.to_dict().items() if k != "model"
    }


def test_engine_from_the_readme():
    from ddtree_compile import Engine, SamplingParams, embedded_spec

    params = SamplingParams(max_new_tokens=9)
    with Engine.from_spec(embedded_spec()) as engine:
        [generation] = engine.generate([[11, 12, 13]], params)
        longer = engine.extend(generation, [16], SamplingParams(max_new_tokens=4))
        both = engine.generate([[11, 12, 13], [14, 15]], [params, SamplingParams(max_new_tokens=3)])
    assert len(generation.token_ids) == 1 + sum(generation.accept_lengths)
    assert both[0].token_ids == generation.token_ids
    assert longer.cached_tokens >= 3
    assert longer.context[: len(generation.context)] == generation.context

"""The engine's drafts against a DFlash drafter written anew from its paper, and its rounds against the published loop.

Every round of every sequence: the candidates that the engine drafted (`draft.lp`, `draft.ids`) are those of a drafter
that recomputes everything from transformers' hidden states. Whole sweep: `pytest -m full tests/oracle`.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from support.cases import Case, Draw, cases, deepseek_targets, qwen3_targets, rope
from support.checkpoints import KIMI, QWEN3, make_drafter, make_kimi, make_qwen3, make_spec
from support.dflash import Drafter, Target, ddtree
from torch import Tensor

from ddtree_compile.runtime.engine import Engine
from ddtree_compile.runtime.sampling import SamplingParams
from ddtree_compile.spec import CompileSpec

TOLERANCE = 1e-4  # of a log-probability
FAMILIES = {"deepseek_v3": (make_kimi, KIMI, deepseek_targets()), "qwen3": (make_qwen3, QWEN3, qwen3_targets())}

# transformers builds the shared expert of a config that has none
pytestmark = pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Drafted:
    """What one `draft` segment left for one sequence: [horizon, k] each."""

    context: tuple[int, ...]
    root: int
    log_probs: Tensor
    ids: Tensor


class DraftRecorder:
    """An executor that keeps what `draft` made."""

    def __init__(self, engine: Engine) -> None:
        self.drafts: list[Drafted] = []
        self._engine, self._inner = engine, engine._executor
        engine._executor = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def run(self, segment: str) -> None:
        self._inner.run(segment)
        if segment != "draft":
            return
        active, roots = self.read("active").tolist(), self.read("root").tolist()
        log_probs, ids = (self.read(name).chunk(len(active)) for name in ("draft.lp", "draft.ids"))
        for s, slot in enumerate(self._engine._residents.slots):
            if active[s]:
                self.drafts.append(Drafted(tuple(slot.tokens), roots[s], log_probs[s], ids[s]))


@dataclass
class Tally:
    configs: int = 0
    drafts: int = 0
    rounds: int = 0
    ties: int = 0
    worst: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.configs} configs, {self.drafts} blocks: worst difference of a log-probability {self.worst:.1e}; "
            f"{self.rounds} rounds of the published loop, {self.ties} ended by a tie at the tree's edge"
        )


@st.composite
def drafter_cases(draw: Draw, targets: st.SearchStrategy[dict[str, Any]]) -> tuple[Case, dict[str, Any]]:
    """A case whose drafter has windows, causal layers, YaRN or an amplitude, spelt in one of the published ways; and
    the spec's `[drafter]` table."""
    case = draw(cases(targets))
    drafter, layers, block = dict(case.drafter), case.drafter["num_hidden_layers"], case.drafter["block_size"]
    windows = st.sampled_from([block, block + 3, 24, 70])
    kinds = draw(st.lists(st.sampled_from(["full_attention", "sliding_attention"]), min_size=layers, max_size=layers))
    nested = dict(drafter["dflash_config"])
    if set(kinds) == {"sliding_attention"} and draw(st.booleans()):
        nested |= {"use_swa": True, "swa_window_size": draw(windows)}
    elif "sliding_attention" in kinds:
        drafter |= {"layer_types": kinds, "sliding_window": draw(windows), "use_sliding_window": True}
    if draw(st.booleans()):
        holder, key = draw(st.sampled_from([(drafter, "is_causal"), (nested, "causal")]))
        holder[key] = draw(st.booleans())
    if draw(st.booleans()):
        nested["block_size"] = block
        drafter["block_size"] = None
    turned = rope(draw, mscale=True)
    if draw(st.booleans()):
        drafter |= {"rope_parameters": turned, "rope_theta": None}
    else:
        spelt = {key: value for key, value in turned.items() if key != "rope_theta"}
        spelt = None if turned["rope_type"] == "default" else spelt
        drafter |= {"rope_theta": turned["rope_theta"], "rope_scaling": spelt}
    drafter["dflash_config"] = nested
    table: dict[str, Any] = {}
    if draw(st.booleans()):
        table["window"] = draw(windows)
    if turned["rope_type"] == "yarn" and draw(st.booleans()):
        table["rope_attention_factor"] = 1.416
    return replace(case, drafter=drafter), table


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sample_of_drafts_agrees(family, capsys):
    sweep(family, 6, 12, capsys)


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("family", FAMILIES)
def test_fifty_configs_of_drafts_agree(family, capsys):
    sweep(family, 50, 40, capsys)


def sweep(family, examples, new_tokens, capsys):
    tally = Tally()

    @seed(list(FAMILIES).index(family))
    @settings(
        max_examples=examples, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(both=drafter_cases(FAMILIES[family][2]))
    def every(both: tuple[Case, dict[str, Any]]) -> None:
        with tempfile.TemporaryDirectory() as directory:
            check_case(family, *both, new_tokens, Path(directory), tally)

    every()
    with capsys.disabled():
        print(f"\n{family} drafts: {tally}")
    assert tally.configs == examples
    assert tally.ties <= 0.02 * tally.rounds


def check_case(family: str, case: Case, table: dict[str, Any], new_tokens: int, root: Path, tally: Tally) -> None:
    make, base, _ = FAMILIES[family]
    model = make(root / "target", case.seed, **case.target)
    config = make_drafter(root / "drafter", {**base, **case.target}, case.seed + 1, **case.drafter)
    tables = make_spec(
        root, list(case.buckets), tree={"top_k_per_depth": case.top_k}, drafter=table,
        cache={"max_sequences": len(case.prompts)}, prefill={"chunks": list(case.chunks)},
    )  # fmt: skip
    target = Target(model, config["dflash_config"]["target_layer_ids"])
    drafter = Drafter(root / "drafter", table.get("window"), table.get("rope_attention_factor"))
    with Engine.from_spec(CompileSpec.parse(tables), poisoned=True) as engine:
        recorder = DraftRecorder(engine)
        params = SamplingParams(max_new_tokens=new_tokens, bucket=case.buckets[-1], ignore_eos=True)
        done = engine.generate(case.prompts, params)
    for drafted in recorder.drafts:
        check_draft(drafted, target, drafter, tally)
    check_loop(target, drafter, case, done[-1], tally)
    tally.configs += 1


def check_draft(drafted: Drafted, target: Target, drafter: Drafter, tally: Tally) -> None:
    """The k candidates of each depth are the k best, with the right log-probabilities."""
    embed = target.model.get_input_embeddings().weight.detach()
    head = target.model.get_output_embeddings().weight.detach()
    official = drafter.log_probs(target.tapped(drafted.context), drafted.root, embed, head)
    best = official.topk(drafted.ids.shape[1], dim=-1).values
    for ours in (official.gather(1, drafted.ids.long()), best):
        worst = float((drafted.log_probs - ours).abs().max())
        assert worst <= TOLERANCE * max(1.0, float(best.abs().max())), f"after {len(drafted.context)} tokens: {worst}"
        tally.worst = max(tally.worst, worst)
    assert all(len(set(row)) == len(row) for row in drafted.ids.tolist())
    tally.drafts += 1


def check_loop(target: Target, drafter: Drafter, case: Case, done: Any, tally: Tally) -> None:
    """The published loop accepts as many tokens in every round, up to a tie at the edge of its tree."""
    prompt, count = case.prompts[-1], len(done.token_ids)
    first, *rounds = ddtree(target, drafter, prompt, count, case.buckets[-1], case.top_k)
    assert first.tokens == done.token_ids[:1]
    said = 1
    for at, one in enumerate(rounds):
        tally.rounds += 1
        if one.tokens != done.token_ids[said : said + done.accept_lengths[at]]:
            assert one.margin <= TOLERANCE, f"round {at} says {one.tokens}, margin {one.margin}"
            tally.ties += 1
            return
        said += len(one.tokens)
    assert said == count
    assert len(rounds) == done.rounds

"""What inductor makes of a round on a CPU (`compile.mode = "default"`): its C++ for bools and masks has holes."""

import pytest
import torch

from modelkit.compile import compile_step, forget
from modelkit.rows import chain
from sampling import SAMPLERS
from spec import Engine
from spec.draft import DRAFTERS
from spec.tree import TREES
from spec.tree.best_first import BestFirst
from spec.tree.chain import Chain
from spec.types import Proposal

pytestmark = pytest.mark.usefixtures("cpp_compiler")

WIDTHS = {"static": {"widths": [2, 2, 1]}}
ROUNDS = [(draft, "best_first", "gumbel", 0.0) for draft in DRAFTERS.names()]
ROUNDS += [("dflash", tree, "gumbel", 0.0) for tree in TREES.names() if tree != "best_first"]
ROUNDS += [("dflash", "chain", name, 1.0) for name in SAMPLERS.names() if name != "greedy"]


@pytest.fixture(autouse=True)
def fresh_compiler():
    yield
    forget()


def test_trees_and_bits():
    """Those that need a way around; every strategy in whole rounds: below."""
    score = (
        torch.randn(1, 5, 16, generator=torch.Generator().manual_seed(1)).sort(descending=True).values.log_softmax(-1)
    )
    edge = score[:, :, None, :].expand(-1, -1, 16, -1).contiguous()
    given = Proposal(ids=torch.arange(80).view(1, 5, 16), score=score, edge=edge)
    root = torch.tensor([90])
    trees = [Chain(Chain.Config()), BestFirst(BestFirst.Config(budget=31))]

    def build() -> list[torch.Tensor]:
        found = []
        for made in [tree.build(given, root) for tree in trees]:
            found += [made.token, made.valid, made.parent, made.ancestors]
        block = chain(token=torch.zeros(1, 16).long(), start=root, count=root * 0 + 16, rows=16, bound=99, causal=False)
        return [*found, block.ancestors]

    wanted = build()
    got = [torch.full_like(tensor, 77 if tensor.dtype != torch.bool else 0) for tensor in wanted]

    def step() -> None:
        for a, b in zip(got, build(), strict=True):
            a.copy_(b)

    compile_step(step, "default")()
    for a, b in zip(got, wanted, strict=True):
        assert torch.equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize(("draft", "tree", "sampling", "temperature"), ROUNDS)
def test_whole_rounds(draft, tree, sampling, temperature, tiny_targets, tiny_drafters):
    def generate(mode: str) -> list[int]:
        engine = Engine.from_config(
            {
                "target": {"path": str(tiny_targets["qwen3"]), "dtype": "float32"},
                "draft": {"name": draft, **({"path": str(tiny_drafters["qwen3"])} if draft == "dflash" else {})},
                "tree": {"name": tree, **WIDTHS.get(tree, {})},
                "sampling": {"name": sampling},
                "engine": {"max_model_len": 64, "prefill_chunk": 16},
                "compile": {"mode": mode},
            }
        )
        return engine.generate([[3, 5, 7, 9]], max_new_tokens=10, temperature=temperature, seed=3)[0].token_ids

    assert generate("default") == generate("none")

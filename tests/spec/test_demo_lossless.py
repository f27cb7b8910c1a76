"""The real demo model on real prompts: the tokens of transformers' greedy `generate`, for drafters x trees, in fp32.

The whole matrix (30 prompts x 96 tokens) is a command: `flashtree check-lossless`, see docs/concepts/lossless.md.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from spec import Engine
from spec.draft import DRAFTERS
from spec.peers import transformers_greedy, transformers_model
from spec.prompts import encode_all, pick_prompts
from spec.requests import Settings
from spec.tree import TREES

PROMPTS = Path(__file__).resolve().parents[3] / "shared" / "prompts"
TOKENS = 32
SETTINGS = [
    {"temperature": 0.3}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.0, "top_k": 50, "min_p": 0.02},
    {"temperature": 1.5, "min_p": 0.1}, {"temperature": 1.0}, {},
]  # fmt: skip


def build(draft: str, tree: str) -> Engine:
    changes = {"draft.name": draft, "tree.name": tree, "target.dtype": "float32", "engine.max_model_len": 1024}
    return Engine.from_config("smollm2-dflash", changes)


@pytest.fixture(scope="module")
def oracle():
    """Token ids of six prompts and what transformers makes of them."""
    files = sorted(map(str, PROMPTS.glob("*.jsonl")))
    if not files:
        pytest.skip(f"the shared prompts are not at {PROMPTS}")
    engine = build("ngram", "chain")
    texts = encode_all(pick_prompts(files, 6), engine.tokenizer, engine.target.config.vocab_size)
    peer = transformers_model(engine)
    return texts, [transformers_greedy(peer, ids, TOKENS) for ids in texts]


@pytest.mark.parametrize("tree", TREES.names())
@pytest.mark.parametrize("draft", DRAFTERS.names())
def test_tokens_are_those_of_transformers(oracle, draft, tree):
    texts, expected = oracle
    got = build(draft, tree).generate(texts, max_new_tokens=TOKENS)
    assert [c.token_ids for c in got] == expected
    if draft in ("self", "dflash"):
        # It really speculates.
        assert min(c.stats.mean_acceptance_length for c in got) > {"self": 2, "dflash": 1}[draft]


@pytest.mark.parametrize("draft", ["ngram", "dflash"])
def test_seeded_tokens_are_those_of_plain_decoding(oracle, draft):
    """A prompt a setting, greedy among them, with speculation and without."""
    engine = build(draft, "best_first")
    settings = [Settings(max_new_tokens=TOKENS // 2, seed=n, **one) for n, one in enumerate(SETTINGS)]
    got, plain = engine.generate(oracle[0], settings), engine.generate_plain(oracle[0], settings)
    assert [c.token_ids for c in got] == [c.token_ids for c in plain]
    assert got[5].token_ids == oracle[1][5][: TOKENS // 2]
    assert sum(c.token_ids != expected[: TOKENS // 2] for c, expected in zip(got, oracle[1], strict=True)) > 3

"""From data to acceptance: `flashtree train` on a target that was trained here on a language of cycles.

The target's forward is written out plainly; the drafter's training is the product's, on text the target writes itself.
"""

import itertools
import json
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).resolve().parent))


import dflash_helpers as tiny  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from spec.cli import main  # noqa: E402

SEED, LETTERS, MODES, LENGTH, BLOCK = 0, 20, 3, 36, 6
MASK = LETTERS + MODES
SIZES = {"vocab_size": MASK + 1, "hidden_size": 32, "intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 16}
TARGET = tiny.TARGET | SIZES | {"num_hidden_layers": 3}
CONFIG = """
[target]
path = "{target}"
dtype = "float32"
[data]
folder = "{root}/data"
prompts = "{root}/seen.jsonl"
documents = 60
shard_documents = 20
temperatures = [0.0, 0.3]
max_new_tokens = {new}
[drafter]
layers = 2
block_size = {block}
target_layer_ids = [2, 0]
mask_token_id = {mask}
[loss]
name = "decay"
gamma = 4.0
[train]
steps = 160
sequence_length = 72
sequences = 12
anchors = 6
learning_rate = 1e-2
weight_decay = 0.0
[output]
folder = "{root}/drafter"
dtype = "float32"
[evaluate]
prompts = ["{root}/held.jsonl"]
max_new_tokens = 30
budgets = [12]
"""


def language(generator):
    """Each mode is a cycle through all letters: mode token, any letter, then the cycle. Texts [MODES, LETTERS, T]."""
    texts = torch.empty(MODES, LETTERS, LENGTH, dtype=torch.int64)
    for mode in range(MODES):
        cycle = torch.randperm(LETTERS, generator=generator)
        for place in range(LETTERS):
            texts[mode, place] = torch.cat([torch.tensor([LETTERS + mode]), cycle.roll(-place).repeat(2)[: LENGTH - 1]])
    return texts


def norm(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def rotary(x, position):
    angle = position[:, None, :, None] * 1000.0 ** -(torch.arange(0, 16, 2) / 16)
    first, second = x.chunk(2, -1)
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)


def layer(weights, index, x, context, seen, position):
    """A Qwen3 block over rows x [B, T, H] behind context rows that give keys and values only; position [B, C + T]."""
    own = {
        name.removeprefix(f"layers.{index}."): w for name, w in weights.items() if name.startswith(f"layers.{index}.")
    }

    def heads(rows, name):
        return F.linear(rows, own[f"self_attn.{name}_proj.weight"]).unflatten(-1, (-1, 16)).transpose(1, 2)

    normed = norm(x, own["input_layernorm.weight"])
    rows = torch.cat([context, normed], 1)
    q = rotary(norm(heads(normed, "q"), own["self_attn.q_norm.weight"]), position[:, context.shape[1] :])
    k = rotary(norm(heads(rows, "k"), own["self_attn.k_norm.weight"]), position)
    out = F.scaled_dot_product_attention(q, k, heads(rows, "v"), attn_mask=seen, enable_gqa=True)
    x = x + F.linear(out.transpose(1, 2).flatten(2), own["self_attn.o_proj.weight"])
    normed = norm(x, own["post_attention_layernorm.weight"])
    gated = F.silu(F.linear(normed, own["mlp.gate_proj.weight"])) * F.linear(normed, own["mlp.up_proj.weight"])
    return x + F.linear(gated, own["mlp.down_proj.weight"])


def target_forward(weights, text):
    """(logits, the residual stream after each layer)"""
    x, states = weights["embed_tokens.weight"][text], []
    position = torch.arange(text.shape[1]).expand(text.shape)
    seen = torch.ones(text.shape[1], text.shape[1], dtype=torch.bool).tril()
    for index in range(TARGET["num_hidden_layers"]):
        x = layer(weights, index, x, x[:, :0], seen, position)
        states.append(x)
    return F.linear(norm(x, weights["norm.weight"]), weights["lm_head.weight"]), states


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Tensors are tiny: several threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def train(weights, steps, loss_of):
    """AdamW with warm-up and decay; leaves `weights` trained and without gradients."""
    parameters = [w.requires_grad_() for w in weights.values()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps, pct_start=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of().backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
    for parameter in parameters:
        parameter.requires_grad_(False)


@pytest.fixture(scope="module")
def trained(one_thread, tmp_path_factory):
    """(target folder, drafter folder, held-out prompts, evaluation records)"""
    generator = torch.Generator().manual_seed(SEED)
    texts = language(generator)
    held_out = torch.rand(MODES, LETTERS, generator=generator) < 0.2
    usable = texts[~held_out]
    weights = tiny.random_weights(TARGET, SEED + 1)

    def target_loss():
        text = usable[torch.randint(len(usable), (12,), generator=generator)]
        logits = target_forward(weights, text)[0]
        return F.cross_entropy(logits[:, 1:-1].flatten(0, 1), text[:, 2:].flatten())

    train(weights, 90, target_loss)
    root = tmp_path_factory.mktemp("trained")
    target = tiny.save_folder(root / "target", TARGET, weights)
    files = {name: root / f"{name}.jsonl" for name in ("seen", "held")}
    for name, some in (("seen", usable), ("held", texts[held_out])):
        length = 2 if name == "seen" else 4
        files[name].write_text("".join(json.dumps({"token_ids": text[:length].tolist()}) + "\n" for text in some))
    config = root / "train.toml"
    config.write_text(CONFIG.format(target=target, root=root, mask=MASK, block=BLOCK, new=LENGTH - 2))
    assert main(["train", "--config", str(config), "--json", str(root / "found.json")]) == 0
    prompts = [text[:4].tolist() for text in texts[held_out]]
    return target, root / "drafter", prompts, json.loads((root / "found.json").read_text())


def acceptance(target, drafter, prompts, tree):
    """Mean acceptance length over the prompts; the tokens are those of plain decoding."""
    engine = tiny.make_engine(target, drafter, tree, slots=3)
    done = engine.generate(prompts, max_new_tokens=30)
    plain = engine.generate_plain(prompts, max_new_tokens=30)
    assert [c.token_ids for c in done] == [c.token_ids for c in plain]
    rounds = [accepted for c in done for accepted in c.stats.per_step_accepted]
    return 1 + sum(rounds) / len(rounds)


@pytest.mark.parametrize(
    "tree", [{"name": "chain"}, {"name": "best_first", "budget": 12}], ids=lambda tree: tree["name"]
)
def test_a_trained_drafter_is_accepted(trained, tree):
    target, drafter, prompts, _ = trained
    assert len(prompts) >= 8 and acceptance(target, drafter, prompts, tree) > 2.5


def test_the_evaluation_says_so(trained):
    target, drafter, prompts, records = trained
    trees = [{"name": "chain"}, *({"name": name, "budget": 12} for name in ("best_first", "spine_first"))]
    assert [r["tree"] for r in records] == [*(tree["name"] for tree in trees), "best_first"]
    assert [r["budget"] for r in records] == [BLOCK - 1, 12, 12, 12]
    assert [r["drafter"] for r in records] == ["dflash"] * 3 + ["ngram"]
    for record, tree in zip(records, trees, strict=False):
        assert record["mean_acceptance_length"] == pytest.approx(acceptance(target, drafter, prompts, tree), abs=0.02)
    # On the spine the chain's best token is right exactly where the chain accepts it (but where a text ends).
    rates = records[0]["acceptance_rate_per_position"]
    conditional = [rates[0]] + [b / a for a, b in itertools.pairwise(rates)]
    assert records[0]["on_spine"] == pytest.approx(conditional, abs=0.08)
    assert records[0]["off_spine"] == [None] * (BLOCK - 1)
    assert any(share is not None for share in records[1]["off_spine"])


def test_the_log_says_so_too(trained):
    lines = [json.loads(line) for line in (trained[1] / "log.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "accuracy" in line]  # the last one may be that of held-out text
    assert lines[-1]["acceptance_length"] > 2.5 > lines[0]["acceptance_length"]
    assert len(lines[-1]["accuracy"]) == BLOCK - 1 and lines[-1]["loss"] < lines[0]["loss"]


@pytest.mark.filterwarnings("ignore:not one token")
def test_a_miswired_drafter_is_not(trained, tmp_path):
    """The same weights behind taps in the wrong order: the right length above is the wiring's merit."""
    target, drafter, prompts, _ = trained
    config = tiny.changed(
        json.loads((drafter / "config.json").read_text()), {"dflash_config": {"target_layer_ids": [0, 2]}}
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(drafter / "model.safetensors")
    assert acceptance(target, tmp_path, prompts, {"name": "chain"}) < 2.0

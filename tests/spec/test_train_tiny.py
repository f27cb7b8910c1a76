"""From training to acceptance: a target and a DFlash drafter, trained here by plain code on a language of cycles.

The forward is written from the paper's definitions, so a high acceptance says that the product means the same by
positions, masks, taps and files as a training script does.
"""

import json
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import dflash_helpers as tiny  # noqa: E402
import torch.nn.functional as F  # noqa: E402

SEED, LETTERS, MODES, LENGTH, BLOCK = 0, 20, 3, 36, 6
MASK = LETTERS + MODES
SIZES = {"vocab_size": MASK + 1, "hidden_size": 32, "intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 16}
TARGET = tiny.TARGET | SIZES | {"num_hidden_layers": 3}
DRAFTER = tiny.DRAFTER | SIZES | {
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_target_layers": 3, "block_size": BLOCK,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [2, 0]},
}  # fmt: skip


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


def drafter_forward(weights, target, features, anchor, start):
    """Logits of the block's rows [B, BLOCK, V]: context is every position before `start`, rows see the whole block."""
    block = torch.full((len(start), BLOCK), MASK)
    block[:, 0] = anchor
    x, length = target["embed_tokens.weight"][block], features.shape[1]
    context = norm(F.linear(features, weights["fc.weight"]), weights["hidden_norm.weight"])
    key = torch.arange(length + BLOCK)
    seen = ((key < start[:, None]) | (key >= length))[:, None, None].expand(-1, 1, BLOCK, -1)
    position = torch.where(key < length, key, start[:, None] + key - length)
    for index in range(DRAFTER["num_hidden_layers"]):
        x = layer(weights, index, x, context, seen, position)
    return F.linear(norm(x, weights["norm.weight"]), target["lm_head.weight"])


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
    """(target folder, drafter folder, held-out prompts)"""
    generator = torch.Generator().manual_seed(SEED)
    texts = language(generator)
    held_out = torch.rand(MODES, LETTERS, generator=generator) < 0.2
    usable = texts[~held_out]
    target, drafter = tiny.random_weights(TARGET, SEED + 1), tiny.random_weights(DRAFTER, SEED + 2)

    def target_loss():
        text = usable[torch.randint(len(usable), (12,), generator=generator)]
        logits = target_forward(target, text)[0]
        return F.cross_entropy(logits[:, 1:-1].flatten(0, 1), text[:, 2:].flatten())

    train(target, 90, target_loss)
    states = target_forward(target, usable)[1]
    features = torch.cat([states[i] for i in DRAFTER["dflash_config"]["target_layer_ids"]], -1)
    decay = (-torch.arange(BLOCK - 1) / 4).exp()

    def drafter_loss():
        index = torch.randint(len(usable), (48,), generator=generator)
        start = torch.randint(2, LENGTH - BLOCK + 1, (len(index),), generator=generator)
        label = usable[index].gather(1, start[:, None] + torch.arange(BLOCK))
        logits = drafter_forward(drafter, target, features[index], label[:, 0], start)
        each = F.cross_entropy(logits[:, 1:].flatten(0, 1), label[:, 1:].flatten(), reduction="none")
        return (each.view(-1, BLOCK - 1) * decay).sum() / (decay.sum() * len(index))

    train(drafter, 160, drafter_loss)
    root = tmp_path_factory.mktemp("trained")
    folders = tiny.save_folder(root / "target", TARGET, target), tiny.save_folder(root / "drafter", DRAFTER, drafter)
    return *folders, [text[:4].tolist() for text in texts[held_out]]


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
    target, drafter, prompts = trained
    assert len(prompts) >= 8 and acceptance(target, drafter, prompts, tree) > 2.5


@pytest.mark.filterwarnings("ignore:not one token")
def test_a_miswired_drafter_is_not(trained, tmp_path):
    """The same weights behind taps in the wrong order: the right length above is the wiring's merit."""
    target, drafter, prompts = trained
    config = tiny.changed(DRAFTER, {"dflash_config": {"target_layer_ids": [0, 2]}})
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(drafter / "model.safetensors")
    assert acceptance(target, tmp_path, prompts, {"name": "chain"}) < 2.0

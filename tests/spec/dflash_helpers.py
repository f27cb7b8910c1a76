"""Tiny Qwen3 targets and DFlash drafters in the published folder format, and engines over them."""

import json
import math

import torch
from safetensors.torch import save_file

from spec import Engine
from spec.types import Proposal

VOCAB, MASK, BLOCK = 53, 52, 6
LAYERS = {
    "model_type": "qwen3", "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6, "rope_theta": 1000.0, "hidden_act": "silu",
    "max_position_embeddings": 256, "attention_bias": False, "tie_word_embeddings": False,
}  # fmt: skip
TARGET = {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 4} | LAYERS
DRAFTER = {
    "architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "block_size": BLOCK,
    "num_hidden_layers": 3, "num_target_layers": 4, "num_attention_heads": 6, "intermediate_size": 40,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [3, 1]},
}  # fmt: skip
DRAFTER = LAYERS | DRAFTER


def changed(config, changes):
    """A copy with keys replaced, one level into `dflash_config` too; a value of ... removes its key."""
    merged = config | changes
    if isinstance(changes.get("dflash_config"), dict):
        merged["dflash_config"] = changed(config["dflash_config"], changes["dflash_config"])
    return {key: value for key, value in merged.items() if value is not ...}


def shapes(config):
    """Tensor names and shapes of a target or a drafter."""
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    out = {"norm.weight": (hidden,)}
    if "dflash_config" in config:
        taps = config["dflash_config"]["target_layer_ids"]
        out |= {"fc.weight": (hidden, len(taps) * hidden), "hidden_norm.weight": (hidden,)}
    else:
        out |= {"embed_tokens.weight": (config["vocab_size"], hidden), "lm_head.weight": (config["vocab_size"], hidden)}
    for i in range(config["num_hidden_layers"]):
        attention = {
            "q_proj": (query, hidden),
            "k_proj": (key, hidden),
            "v_proj": (key, hidden),
            "o_proj": (hidden, query),
        }
        mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
        out |= {f"layers.{i}.self_attn.{name}.weight": shape for name, shape in attention.items()}
        out |= {f"layers.{i}.self_attn.{name}.weight": (dim,) for name in ("q_norm", "k_norm")}
        out |= {f"layers.{i}.mlp.{name}.weight": shape for name, shape in mlp.items()}
        out |= {f"layers.{i}.{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
        if config["attention_bias"]:
            out |= {f"layers.{i}.self_attn.{name}.bias": shape[:1] for name, shape in attention.items()}
    return out


def random_weights(config, seed):
    """Large enough that every feature shows: sharp attention, norms away from 1, biases away from 0."""
    generator, weights = torch.Generator().manual_seed(seed), {}
    for name, shape in shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        if len(shape) == 1:
            weights[name] = 0.5 * noise if name.endswith("bias") else 1 + 0.3 * noise
        else:
            weights[name] = noise if "embed" in name else noise * 1.5 / math.sqrt(shape[1])
    return weights


def save_folder(folder, config, weights):
    """Write config.json and model.safetensors; targets get the prefix of published files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    prefix = "" if "dflash_config" in config else "model."
    named = {name if name.startswith("lm_head") else prefix + name: tensor for name, tensor in weights.items()}
    save_file({name: tensor.detach().contiguous() for name, tensor in named.items()}, folder / "model.safetensors")
    return folder


def make_engine(target, drafter, tree, *, slots=1, draft=None, **engine):
    """An fp32 engine with the `dflash` drafter."""
    return Engine.from_config(
        {
            "target": {"path": str(target), "dtype": "float32"},
            "draft": {"name": "dflash", "path": str(drafter)} | (draft or {}),
            "tree": tree,
            "engine": {"slots": slots} | engine,
        }
    )


ACCEPT = [0, 2, 9, 1, 0, 3, 0, 9, 2, 1]  # draft tokens that are right, round by round; 9: all


def script_rounds(engine, right, random):
    """Replace the drafter's proposals by scripted ones; returns the list that fills up, an entry a round."""
    propose, block_logits, rounds = engine.drafter.propose, engine.drafter.block_logits, []

    def watched(*args):
        rounds[-1]["logits"] = block_logits(*args)
        return rounds[-1]["logits"]

    def scripted(state, bound, perturb):
        rounds.append({name: getattr(state, name).clone() for name in ("tokens", "total", "active")})
        proposal = propose(state, bound, perturb)
        drafted, depth = rounds[-1]["logits"][:, 1:], proposal.depth  # row j of the block is depth j
        assert torch.equal(proposal.ids[..., 0], drafted.argmax(-1))
        torch.testing.assert_close(proposal.score, drafted.log_softmax(-1).gather(-1, proposal.ids))
        ids = torch.zeros(state.slots, depth, 2, dtype=torch.int64)
        for s in range(state.slots):
            text = state.tokens[s, : state.total[s]].tolist()
            whole = next((t for t in right if t[: len(text)] == text), text)
            for d in range(depth):
                token = (*whole[len(text) + d :], 0)[0]
                rank = int(torch.randint(2, (), generator=random)) if d < 2 else 0  # of the right token
                ids[s, d] = torch.tensor([token, (token + 1) % VOCAB]).roll(rank)
                if d == ACCEPT[(len(rounds) + 5 * s) % len(ACCEPT)]:  # wrong here, right again further down
                    ids[s, d] = (ids[s, d] + 2) % VOCAB
        return Proposal(ids=ids, score=torch.tensor([-1.0, -2.0]).expand(ids.shape).clone())

    engine.drafter.block_logits, engine.drafter.propose = watched, scripted
    return rounds


def paths(tree, slot):
    """Token path of each valid node of a slot's tree, the root's left out, in node order."""
    parent, token, valid = (t[slot].tolist() for t in (tree.parent, tree.token, tree.valid))
    found = [()]
    for node in range(1, len(parent)):
        found.append((*found[parent[node]], token[node]))
    return [path for path, real in zip(found[1:], valid[1:], strict=True) if real]

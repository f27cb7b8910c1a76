"""The `dflash` drafter against a dense reference over whole runs; its wiring to the target; what it refuses."""

import re
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import dflash_helpers as tiny  # noqa: E402
import dflash_reference as ref  # noqa: E402
from dflash_helpers import BLOCK, MASK, VOCAB  # noqa: E402

from modelkit.config import ModelConfig  # noqa: E402
from modelkit.loading import load_model  # noqa: E402
from modelkit.rows import chain  # noqa: E402
from spec.draft import DRAFTERS  # noqa: E402
from spec.draft.dflash_model import block_rows  # noqa: E402

SLIDING = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 7,
    "use_sliding_window": True,
}  # fmt: skip
ALL_SLIDING = SLIDING | {"layer_types": ["sliding_attention"] * 3}
NEWER = {"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SCALES = {"input_embedding_scale": 1.7, "output_multiplier": 0.6, "final_logit_softcapping": 3.0}
FULL = {"layer_types": ["full_attention"] * 3, "use_sliding_window": False, "sliding_window": None}
SWA = {"use_swa": True, "swa_window_size": 5}  # every layer slides, both ways, whatever layer_types says (vLLM's rule)
INSIDE = {"block_size": ..., "dflash_config": {"block_size": BLOCK}}


def nested(**keys):
    return {"dflash_config": keys}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dflash") / "target"
    return tiny.save_folder(folder, tiny.TARGET, tiny.random_weights(tiny.TARGET, 1))


@pytest.fixture
def drafter(tmp_path):
    """`make(changes)`: a drafter's folder, with that in config.json."""

    def make(changes=(), weights=None):
        config = tiny.changed(tiny.DRAFTER, dict(changes))
        weights = tiny.random_weights(config, 2) if weights is None else weights
        return tiny.save_folder(tmp_path / f"drafter{len(list(tmp_path.iterdir()))}", config, weights)

    return make


def load(target, folder, slots=1, **draft):
    model = load_model(target, dtype="float32")
    table = {"name": "dflash", "path": str(folder)} | draft
    return DRAFTERS.build(table, target=model, slots=slots, capacity=64, candidates=2)


# ---------------------------------------------------------------- whole runs
PROMPT_LENGTHS = [7, 19, 1]
RUNS = {
    "all full": {},
    "sliding and full": SLIDING | NEWER,
    "use_sliding_window left out": SLIDING | {"use_sliding_window": ...},
    "window smaller than the block": SLIDING | {"sliding_window": 3},
    "all causal by is_causal": {"is_causal": True},
    "all causal by dflash_config": nested(causal=True),
    "is_causal null": {"is_causal": None} | nested(causal=True),
    "is_causal wins": SLIDING | {"is_causal": False} | nested(causal=True),
    "sliding but not causal": ALL_SLIDING | {"is_causal": False, "sliding_window": 4},
    "sliding by max_window_layers": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
    "use_swa": nested(**SWA),
    "use_swa over full layers": FULL | nested(**SWA),
    "scales at the top": SCALES,
    "scales inside": nested(**SCALES) | {"input_embedding_scale": 9.0},
    "more taps than layers": nested(target_layer_ids=[2, 0, 3, 1]),
    "one tap, yarn": nested(target_layer_ids=[3]) | {"rope_scaling": YARN, "rope_parameters": None},
    "biases": {"attention_bias": True, "num_hidden_layers": 1},
    "block size inside": INSIDE,
}


@pytest.mark.parametrize("name,block", [*((name, BLOCK) for name in RUNS), ("all full", 4), ("sliding and full", 4)])
def test_a_run_with_rejections_equals_the_dense_reference(name, block, target, drafter):
    """Two slots of different lengths, slots used again, rejected rows, siblings accepted: the context stays right."""
    folder = drafter(RUNS[name])
    config = tiny.changed(tiny.DRAFTER, RUNS[name])
    spelling = {"block_size": 4} if name == "all full" else {"num_speculative_tokens": 3}
    tree = {"name": "static", "widths": [2, 2] + [1] * (block - 3)}
    engine = tiny.make_engine(
        target, folder, tree, slots=2, draft=spelling if block == 4 else {}, max_model_len=48, prefill_chunk=8
    )
    assert (engine.drafter.depth, engine.drafter.block) == (block - 1, block)
    random = torch.Generator().manual_seed(3)
    prompts = [torch.randint(VOCAB, (n,), generator=random).tolist() for n in PROMPT_LENGTHS]
    plain = [c.token_ids for c in engine.generate_plain(prompts, max_new_tokens=20)]
    texts = [prompt + ids for prompt, ids in zip(prompts, plain, strict=True)]
    rounds = tiny.script_rounds(engine, texts, random)
    done = engine.generate(prompts, max_new_tokens=20)
    assert [c.token_ids for c in done] == plain
    accepted = [a for c in done for a in c.stats.per_step_accepted[:-1]]
    assert set(accepted) >= {0, 1, 2, block - 1}

    weights = {key: value.double() for key, value in tiny.random_weights(tiny.TARGET, 1).items()}
    taps, features = config["dflash_config"]["target_layer_ids"], {}
    for number, text in enumerate(texts):
        outputs, logits = ref.dense_qwen3_target(weights, tiny.TARGET, torch.tensor(text))
        assert logits[len(prompts[number]) - 1 : -1].argmax(-1).tolist() == plain[number]
        features[number] = torch.cat([outputs[i] for i in taps], -1)
    draft_weights, compared = tiny.random_weights(config, 2), set()
    if config["dflash_config"].get("use_swa"):
        config = config | ALL_SLIDING | {"sliding_window": 5, "is_causal": False}
    for entry in rounds:
        for s in entry["active"].nonzero()[:, 0].tolist():
            text = entry["tokens"][s, : entry["total"][s]].tolist()
            number, start = next(i for i, t in enumerate(texts) if t[: len(text)] == text), len(text) - 1
            ids = torch.tensor([text[-1]] + [MASK] * (block - 1))
            _, expected = ref.dense_block_logits(
                draft_weights, config, features[number][:start], ids, start,
                weights["embed_tokens.weight"], weights["lm_head.weight"],
            )  # fmt: skip
            difference = float((entry["logits"][s] - expected).abs().max())
            assert difference < 1e-4 * float(expected.abs().max()), (number, start)
            compared.add((number, s))
    assert {number for number, _ in compared} == set(range(3)) and len({s for _, s in compared}) == 2


# ---------------------------------------------------------------- wiring
@torch.no_grad()
def test_a_tap_is_the_output_of_its_layer(target):
    """Id L is transformers' hidden_states[L + 1]; the last layer's before the final norm, which transformers norms."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        target, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    ours, last = load_model(target, dtype="float32"), []
    theirs.model.layers[-1].register_forward_hook(lambda _, args, out: last.append(out))
    text = torch.randint(VOCAB, (1, 17), generator=torch.Generator().manual_seed(4))
    states = theirs(text, output_hidden_states=True).hidden_states
    assert len(states) == 5
    one = torch.tensor([17])
    output = ours(chain(token=text, start=one * 0, count=one, rows=17, bound=0), None, taps=(3, 0, 2, 2, 1))
    parts = output.taps.chunk(5, -1)
    for found, expected in zip(parts, (last[0], states[1], states[3], states[3], states[2]), strict=True):
        assert float((found - expected[0]).abs().max()) < 1e-4
    assert float((theirs.model.norm(parts[0]) - states[4][0]).abs().max()) < 1e-4
    assert float((parts[0] - states[4][0]).abs().max()) > 0.1


@torch.no_grad()
def test_the_block_is_the_anchor_and_masks(target, drafter):
    built, seen = load(target, drafter(SCALES), slots=2), []
    built.model.register_forward_pre_hook(lambda _, args: seen.append(args[:2]))
    built.block_logits(torch.tensor([7, 11]), torch.tensor([0, 0]), 0)
    embedded, rows = seen[0]
    ids = torch.tensor([[7] + [MASK] * (BLOCK - 1), [11] + [MASK] * (BLOCK - 1)])
    assert torch.equal(embedded.view(2, BLOCK, -1), built.target.embed_tokens.weight[ids] * 1.7)
    assert rows.position.tolist() == [*range(BLOCK)] * 2


KINDS = [  # (changes, does a row see the rows behind it)
    ({}, True),
    ({"is_causal": True}, False),
    (nested(causal=True), False),
    ({"layer_types": ["sliding_attention"], "sliding_window": 9}, False),
    ({"layer_types": ["sliding_attention"], "sliding_window": 9} | nested(causal=False), True),
    ({"layer_types": ["sliding_attention"], "sliding_window": 9, "is_causal": False}, True),
    ({"layer_types": ["sliding_attention"], "sliding_window": 9, "is_causal": True} | nested(causal=False), False),
    (SLIDING | {"num_hidden_layers": 3}, True),
    (ALL_SLIDING | {"num_hidden_layers": 3}, False),
]


@torch.no_grad()
@pytest.mark.parametrize("changes,sees", KINDS)
def test_causality_inside_the_block(changes, sees, target, drafter):
    built = load(target, drafter({"num_hidden_layers": 1} | changes))
    built.ingest(torch.randn(1, 5, built.features, generator=torch.Generator().manual_seed(5)), torch.tensor([5]))

    def run(changed_row):
        ids = torch.tensor([[3, *[MASK] * (BLOCK - 1)]])
        ids[0, changed_row] = 20
        rows, both_ways = block_rows(ids, torch.tensor([5]), 5)
        return built.model(built.target.embed_tokens.weight[ids[0]], rows, both_ways, built.cache)

    assert (float((run(5) - run(4))[2].abs().max()) > 1e-3) == sees
    assert torch.equal(run(5)[2], run(4)[2]) != sees
    assert float((run(1) - run(0))[4].abs().max()) > 1e-3, "rows before it are always seen"


SPELLINGS = [
    [{}, {"rope_scaling": None}, NEWER, NEWER | {"rope_theta": None}, {"rope_parameters": None}],
    [
        {"rope_scaling": YARN},
        {"rope_scaling": {"type" if key == "rope_type" else key: value for key, value in YARN.items()}},
        {"rope_theta": ..., "rope_parameters": YARN | {"rope_theta": 1000.0}},
    ],
    [{}, INSIDE, nested(block_size=BLOCK)],
    [{}, {"sliding_window": 7}, FULL],
    [{}, nested(selector_rank=0, sample_from_anchor=False, projector_type=None, markov_rank=None, mask_token="x")],
    [{}, {"num_target_layers": ...}, {"num_target_layers": ...} | nested(num_target_layers=4)],
    [{}, nested(input_embedding_scale=1, output_multiplier=1.0, final_logit_softcapping=None)],
    [{}, nested(final_logit_softcapping=0.0)],
]


@torch.no_grad()
@pytest.mark.parametrize("spellings", SPELLINGS)
def test_spellings_that_mean_the_same(spellings, target, drafter):
    features = torch.randn(1, 30, 64, generator=torch.Generator().manual_seed(6))
    found = []
    for changes in spellings:
        built = load(target, drafter(changes))
        built.ingest(features, torch.tensor([30]))
        found.append(built.block_logits(torch.tensor([4]), torch.tensor([30]), 30))
    assert all(torch.equal(logits, found[0]) for logits in found)


def test_rope_theta_is_read_and_never_guessed(target, drafter):
    big = NEWER | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    rope = ModelConfig.from_dict(tiny.changed(tiny.TARGET, big)).rope
    assert float(rope.inverse_frequencies(128)[32] * 1000) == pytest.approx(1.0, rel=1e-5)
    assert load(target, drafter(big)).published.model.rope == rope
    with pytest.raises(ValueError, match="rope_theta"):
        load(target, drafter({"rope_theta": ...}))


# ---------------------------------------------------------------- refusals
INSIDE_REFUSED = {  # keys of dflash_config, and values that are refused by the key's name
    "target_layer_ids": [..., None, [], [-1, 0], [0, 4], [0.5, 1]], "mask_token_id": [..., None, -1, VOCAB],
    "block_size": [BLOCK + 1], "projector_type": ["domino", "dspark"], "sample_from_anchor": [True],
    "selector_rank": [256], "conv_kernel_size": [2], "markov_rank": [256], "shift_label": [True],
    "attention_sink_bias": [True], "enable_confidence_head": [True], "use_swa": [True], "target_layer_idz": [[0], None],
}  # fmt: skip
REFUSED = [
    *((key, nested(**{key: value})) for key, values in INSIDE_REFUSED.items() for value in values),
    ("block_size", {"block_size": ...}),
    ("block_size", {"block_size": 1}),
    ("dflash_config", {"dflash_config": ...}),
    *(("architecture", {"architectures": names}) for names in (["Qwen3ForCausalLM"], ["DFlash2DraftModel"], [], ...)),
    ("llama", {"model_type": "llama"}),
    ("sample_from_anchor", {"sample_from_anchor": True}),
    ("draft_vocab_size", {"draft_vocab_size": 32}),
    ("hidden.size", {"hidden_size": 64}),
    ("vocab", {"vocab_size": VOCAB + 1}),
    ("layers", {"num_target_layers": 5}),
    ("layers", {"num_target_layers": ...} | nested(num_target_layers=5)),
    ("layers", {"num_target_layers": None} | nested(num_target_layers=5)),
    ("sliding_window", SLIDING | {"use_sliding_window": False}),
    ("sliding_window", {"layer_types": ["sliding_attention"] * 3}),
    ("layer types", SLIDING | {"layer_types": ["sliding_attention"] * 2}),
    ("layer_types", {"layer_types": ["chunked_attention"] * 3}),
    ("hidden_act", {"hidden_act": "gelu"}),
]


@pytest.mark.parametrize("named,changes", REFUSED)
def test_refused_by_name(named, changes, target, drafter):
    folder = drafter(changes, {"norm.weight": torch.ones(1)})  # the config alone decides
    with pytest.raises(ValueError) as refusal:
        load(target, folder)
    assert re.search(named, str(refusal.value).replace(str(folder), "")), refusal.value


@pytest.mark.parametrize("draft", [{"block_size": BLOCK + 1}, {"num_speculative_tokens": BLOCK}, {"block_size": 1}])
def test_block_sizes_of_the_engine_config(draft, target, drafter):
    with pytest.raises(ValueError, match="block_size"):
        load(target, drafter(), **draft)
    with pytest.raises(ValueError, match=r"block_size.*num_speculative_tokens"):
        load(target, drafter(), block_size=4, num_speculative_tokens=4)


def test_folders_and_tensors(target, drafter, tmp_path):
    with pytest.raises(ValueError, match="nowhere"):
        load(target, tmp_path / "nowhere")
    with pytest.raises(ValueError, match="path"):
        DRAFTERS.build({"name": "dflash"}, target=None, slots=1, capacity=8, candidates=1)
    weights = tiny.random_weights(tiny.DRAFTER, 2)
    with pytest.raises(ValueError, match=r"layers\.2\.mlp\.up_proj\.weight"):
        load(target, drafter((), {k: w for k, w in weights.items() if k != "layers.2.mlp.up_proj.weight"}))
    with pytest.raises(ValueError, match="embed_tokens"):
        load(target, drafter((), weights | {"embed_tokens.weight": torch.zeros(VOCAB, 32)}))
    with pytest.raises(ValueError, match=r"fc\.weight"):
        load(target, drafter(nested(target_layer_ids=[1]), weights))
    load(target, drafter((), {f"model.{key}": w for key, w in weights.items()}))


def test_shipped_drafters():
    """Each is a drafter by name, of a size that a package can carry; a folder of that name comes first."""
    from safetensors import safe_open

    from spec.config import load_config
    from spec.sources import drafter_folder, drafters

    assert load_config("smollm2-dflash").draft.config.path in drafters()
    for name, folder in drafters().items():
        assert drafter_folder(name) == folder and name.endswith("-dflash")
        assert sum(file.stat().st_size for file in folder.iterdir()) <= 25_000_000
        with safe_open(folder / "model.safetensors", "pt") as weights:
            assert "layers.0.self_attn.q_proj.weight" in weights.keys()  # noqa: SIM118
    with pytest.raises(ValueError, match="did you mean 'smollm2-135m-instruct-dflash'"):
        drafter_folder("smollm2-135m-instruct-dflas")


def test_a_users_folder_comes_before_a_shipped_drafter(tmp_path, monkeypatch):
    from spec.sources import drafter_folder

    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2-135m-instruct-dflash").mkdir()
    assert drafter_folder("smollm2-135m-instruct-dflash") == Path("smollm2-135m-instruct-dflash")

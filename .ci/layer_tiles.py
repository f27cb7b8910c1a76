"""How long the layers of a shape take with other tiles; for whoever changes `few_rows.choose_tile` or `linear.tile`.

    python .ci/layer_tiles.py smollm2-135m --rows 1,16,32,64 --layers 15 --context 512
    python .ci/layer_tiles.py qwen3-8b --shards 2 --rows 1,32  # a GPU of two under `tensor`, without sums

All layers run in one CUDA graph with random weights, one projection with another tile at a time. Microseconds of a
replay, the best of three captures: single captures differ by up to 3 %.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from modelkit.config import read_json
from modelkit.kernels import few_rows, linear
from modelkit.loading import load_model
from modelkit.model import Transformer
from modelkit.rows import chain
from spec.sources import shape_file

VOCABULARY, CAPTURES, REPLAYS = 2048, 3, 40
ONE_ROW = [(4, 512, 2), (4, 1024, 4), (4, 2048, 4), (2, 1024, 4), (2, 1024, 2), (2, 2048, 4), (1, 2048, 4)]


def several_rows(rows: int, k: int, swiglu: bool) -> list[few_rows.Tile]:
    """Tiles worth trying for so many rows and K columns."""
    blocks = [block for block in (16, 32, 64) if block <= few_rows.padded(rows)]
    if swiglu:
        tiles = [
            few_rows.Tile(*tile, 1) for tile in ((64, 64, 4), (64, 64, 6), (64, 128, 3), (64, 128, 4), (32, 128, 4))
        ]
        small = [few_rows.Tile(n, 128, 0, 1, block) for n in (16, 32) for block in blocks]
        return tiles + (small if k <= few_rows.SMALL_COLUMNS_SWIGLU else [])
    cuts = [few_rows.Tile(64, step, stages, n) for step, stages in ((64, 6), (128, 4)) for n in (1, 2, 3, 4, 6, 8)]
    small = [
        few_rows.Tile(n, step, 0, -(-k // step), block)
        for n in (16, 32, 64)
        for step in (64, 128, 256)
        for block in blocks
    ]
    return [tile for tile in cuts if tile.splits * tile.block_k <= k] + (small if k <= few_rows.SMALL_COLUMNS else [])


def build(shape: str, shards: int, layers: int) -> Transformer:
    """The shape's layers with one process's part of the heads and of the inner width."""
    file = shape_file(shape)
    if file is None:
        raise SystemExit(f"unknown shape '{shape}'")
    raw = read_json(file) | {"num_hidden_layers": layers, "vocab_size": VOCABULARY}
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        raw[name] //= shards
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(raw), encoding="utf-8")
        model = load_model(config, device="cuda", kernels="triton", random_seed=0)
    if shards > 1:  # as behind a sum: the addition is left to the next norm
        for block in model.layers:
            block.self_attn.leave = block.mlp.leave = lambda x: x
    return model


@torch.no_grad()
def replay_us(step: Callable[[], object]) -> float:
    """Microseconds of a step in a graph."""
    found = []
    for _ in range(CAPTURES):
        step()
        graph = torch.cuda.CUDAGraph()  # noqa: TID251
        with torch.cuda.graph(graph):  # noqa: TID251 - compiling would take a minute a tile
            step()
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        began.record()
        for _ in range(REPLAYS):
            graph.replay()
        ended.record()
        torch.cuda.synchronize()
        found.append(began.elapsed_time(ended) / REPLAYS * 1e3)
    return min(found)


def main() -> None:
    """Parse and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape")
    parser.add_argument("--rows", default="1,16,32,64")
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--context", type=int, default=1024)
    arguments = parser.parse_args()
    model = build(arguments.shape, arguments.shards, arguments.layers)
    cache = model.new_cache(slots=1, capacity=arguments.context + 7168, scratch=64)
    cache.length.fill_(arguments.context)
    config, rule, one_rule = model.config, few_rows.choose_tile, linear.tile
    heads, dim, hidden = config.num_attention_heads, config.head_dim, config.hidden_size
    projections = {
        "qkv": ((heads + 2 * config.num_key_value_heads) * dim, hidden, False), "o": (hidden, heads * dim, False),
        "gate, up": (config.intermediate_size, hidden, True), "down": (hidden, config.intermediate_size, False),
    }  # fmt: skip
    start = torch.full((1,), arguments.context, device="cuda")
    tokens = torch.randint(0, VOCABULARY, (1, 64), device="cuda")
    for rows in map(int, arguments.rows.split(",")):

        def step(rows: int = rows) -> object:
            count = torch.full_like(start, rows)
            flat = chain(token=tokens[:, :rows], start=start, count=count, rows=rows, bound=arguments.context)
            return model(flat, cache)

        few_rows.choose_tile, linear.tile = rule, one_rule
        print(f"{rows} rows: {replay_us(step):.1f} us as it is", flush=True)
        for name, key in projections.items():
            found = []
            for tile in ONE_ROW if rows == 1 else several_rows(rows, key[1], key[2]):
                few_rows.choose_tile = lambda r, *shape, tile=tile, key=key: tile if shape == key else rule(r, *shape)
                linear.tile = lambda *shape, tile=tile, key=key: tile if shape == key else one_rule(*shape)
                try:
                    found.append((replay_us(step), tuple(tile)))
                except Exception as error:  # more shared memory than there is
                    print(f"  {name} {tuple(tile)}: {str(error)[:80]}")
            best = "; ".join(f"{us:.1f} {tile}" for us, tile in sorted(found)[:6])
            print(f"  {name} {key[:2]}: {best}", flush=True)


if __name__ == "__main__":
    main()

"""From the JSON files of `.ci/gpu layout_steps` to the tables of docs/benchmarks/gpu.md, and the bars they are held to.

layout_table.py FOLDER    reads FOLDER/layout-NAME.json; exit code 1 if a bar is missed
"""

import json
import re
import sys
from pathlib import Path

from spec.bench_links import PCIE, Call, latencies, on_link

PLAIN_BARS = {2: 2.9, 4: 2.1}  # ms of a plain step by number of GPUs, layout tensor, the shortest context
PARTS = ("plain step", "verify", "round")  # the single layout's file may be that of `.ci/gpu steps`, with all parts
RATIO_MARGIN = 0.15  # of round over plain step, against one GPU


def shown(part: dict) -> float:
    """Milliseconds on the device; on a CPU there is only the wall clock."""
    return part["ms"] if part["device_ms"] is None else part["device_ms"]


def main(folder: Path) -> int:
    """Print tables and bars."""
    files = [path for path in sorted(folder.glob("layout-*.json")) if not re.search(r"-\d+$", path.stem)]
    records = {path.stem.removeprefix("layout-"): json.loads(path.read_text(encoding="utf-8")) for path in files}
    if not records:
        sys.exit(f"no layout-*.json in {folder}")
    print_steps(records)
    print_links(records)
    missed = [line for name, record in records.items() for line in bars(name, record, records.get("single"))]
    if "single" not in records:
        print(f"\nno layout-single.json in {folder}: round over plain step is not held to one GPU's")
    print("\nbars: " + ("; ".join(missed) if missed else "all kept"))
    return 1 if missed else 0


def print_steps(records: dict[str, dict]) -> None:
    """Layout x part x context: ms, and the floor of what one GPU's bytes take."""
    contexts = sorted({run["context"] for record in records.values() for run in record["runs"]})
    print("| layout | GPUs | part | rows | " + " | ".join(f"context {n}, ms (floor a GPU)" for n in contexts) + " |")
    print("| --- " * (4 + len(contexts)) + "|")
    for name, record in records.items():
        cells: dict[tuple[str, int], dict[int, str]] = {}
        for run in record["runs"]:
            for part in run["parts"]:
                if part["part"] not in PARTS:
                    continue
                text = f"{shown(part):.2f} ({part['floor_ms']:.2f})"
                cells.setdefault((part["part"], part["rows"]), {})[run["context"]] = text
        for (part, rows), found in cells.items():
            line = " | ".join(found.get(n, "-") for n in contexts)
            print(f"| `{name}` | {record['processes']} | {part} | {rows} | {line} |")


def print_links(records: dict[str, dict]) -> None:
    """What collectives take here, and what each step would take over PCIe."""
    for name, record in records.items():
        if "collectives" not in record:
            continue
        times, run = record["collective_us"], record["runs"][0]
        smallest = latencies(times)
        print(f"\n`{name}`, context {run['context']}: collectives of a step, and its time with those of another link\n")
        print(
            "| part | rows | collectives | of that, ms | here, ms | "
            + " | ".join(f"{link}, ms" for link in PCIE)
            + " |"
        )
        print("| --- " * (5 + len(PCIE)) + "|")
        for part in run["parts"]:
            calls = [Call(**call) for call in record["collectives"].get(f"{part['part']} {part['rows']}", [])]
            if not calls:
                continue
            spent = sum(call.count * times[f"{call.kind} {call.bytes}"] for call in calls) / 1e3
            there = [on_link(shown(part), calls, times, record["processes"], link, smallest) for link in PCIE.values()]
            counts = ", ".join(f"{call.count} x {call.kind} of {call.bytes} B" for call in calls)
            cells = " | ".join(f"{ms:.2f}" for ms in there)
            print(f"| {part['part']} | {part['rows']} | {counts} | {spent:.2f} | {shown(part):.2f} | {cells} |")


def bars(name: str, record: dict, single: dict | None) -> list[str]:
    """The bars that a layout misses."""
    missed = [f"{name}: {count} {what}" for what, count in record["compiler"].items() if what != "graphs" and count]
    for index, run in enumerate(record["runs"]):
        where = f"{name}, context {run['context']}"
        if run["recompiles_while_timing"]:
            missed.append(f"{where}: {run['recompiles_while_timing']} recompiles")
        for part in run["parts"]:
            if part["part"] not in PARTS:
                continue
            if part["host_ms"] is not None and part["host_ms"] >= part["device_ms"]:
                missed.append(
                    f"{where}: {part['part']} takes the host {part['host_ms']:.2f} ms, the GPU {shown(part):.2f}"
                )
            bar = PLAIN_BARS.get(record["processes"])
            if name == "tensor" and index == 0 and part["part"] == "plain step" and bar and part["ms"] > bar:
                missed.append(f"{where}: plain step {part['ms']:.2f} ms, bar {bar}")
        ratio = run["round_over_plain_step"]
        if single is None or ratio is None:
            continue
        alone = next((r["round_over_plain_step"] for r in single["runs"] if r["context"] == run["context"]), None)
        if alone is not None and ratio > alone + RATIO_MARGIN:
            missed.append(f"{where}: round over plain step {ratio:.2f}, on one GPU {alone:.2f}")
    return missed


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

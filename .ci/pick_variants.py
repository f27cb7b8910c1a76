"""Of short training runs, the options that helped: python pick_variants.py FOLDER OUTPUT < variants.

A variant is a line of kind, name and options; its run is FOLDER/ablate-NAME. Prints the held-out length of a round of
each, and writes the options of the best of each kind to OUTPUT, where it beats the run named base by a hundredth.
"""

import json
import sys
from pathlib import Path

folder, output = map(Path, sys.argv[1:])
found, options = {}, {}
for line in sys.stdin.read().splitlines():
    kind, name, *given = line.split()
    log = folder / f"ablate-{name}" / "log.jsonl"
    lines = [json.loads(text) for text in log.read_text().splitlines()] if log.is_file() else []
    if not lines or "held_out_round_length" not in lines[-1]:
        print(f"{name}: not finished ({len(lines)} lines)")
        continue
    speed = lines[-2].get("steps_per_second")
    found[kind, name], options[kind, name] = lines[-1]["held_out_round_length"], given
    print(f"{name}: held-out length of a round {found[kind, name]:.3f}, {speed} steps/s, {lines[-1]}")
chosen = []
for kind in dict.fromkeys(kind for kind, _ in found):
    best = max((key for key in found if key[0] == kind), key=found.__getitem__)
    if kind != "base" and found[best] > 1.01 * found.get(("base", "base"), float("inf")):
        chosen += options[best]
output.write_text(" ".join(chosen))
print("chosen:", *chosen)
sys.exit(not found)

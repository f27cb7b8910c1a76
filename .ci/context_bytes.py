"""Mean bytes a launch from ncu's CSV, in groups of equal size, over the bytes that a layer's cache holds.

context_bytes.py CSV LAUNCHES_A_GROUP CACHE_BYTES
"""

import csv
import statistics
import sys
from pathlib import Path

path, group, cache = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
lines = path.read_text(encoding="utf-8").splitlines()
table = [line for line in lines if line.startswith('"')]
values = [float(row["Metric Value"].replace(",", "")) for row in csv.DictReader(table)]
if not values:
    sys.exit("no launches in the profile:\n" + "\n".join(lines[-5:]))
for start in range(0, len(values), group):
    mean = statistics.mean(values[start : start + group])
    print(f"launches {start + 1} to {start + group}: {mean / 1e6:.1f} MB read, {mean / cache:.3f} x the cache")

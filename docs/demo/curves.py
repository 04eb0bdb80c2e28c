"""Prints two loss curves side by side, and their largest relative difference."""

import json
import sys
from pathlib import Path

one, four = (json.loads(Path(name).read_text()) for name in sys.argv[1:3])
top = max(one)
print("step   one process   four processes   ")
for step, (a, b) in enumerate(zip(one, four, strict=True)):
    if step % 10 == 0 or step == len(one) - 1:
        print(f"{step:4}   {a:11.6f}   {b:14.6f}   {'#' * round(48 * b / top)}")
worst = max(abs(a - b) / abs(a) for a, b in zip(one, four, strict=True))
print(f"largest relative difference over {len(one)} steps: {worst:.1e}")
if worst > 1e-3 or one[-1] > 0.8 * one[0]:
    sys.exit("the curves differ, or the model did not learn")

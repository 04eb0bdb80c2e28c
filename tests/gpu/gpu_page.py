"""The results of `make gpu` as a record of each device, and the page docs/generated/gpu.md."""

import csv
import json
import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from records import read_record, table, write_record

HEAD = """# What a GPU has shown

Written by `make gpu`, which runs on one GPU. Ranks share it over NCCL, and each tells NCCL that it
is a separate host. Results of a part are those of its last run on the device.

- `logits` and `gradients` are errors of `planc verify` against one process, in float32 unless the
  command has `--precision`.
- `GiB` and `seconds of compute` are those of one rank of a plan. Collectives return at once.
- Steps with fp8 matmuls are of six layers with the width of llama 3.1 8B and 2 x 8,192 tokens.
  Steps with optimizer states are of a llama with 617M parameters.
- Plans such as `ring.plan` are in `tests/gpu/run.py`.

Not run on a GPU: several nodes, compiled blocks under NCCL, Megatron-FSDP, the kernels of fla,
causal-conv1d and mamba-ssm, and communication that overlaps on several GPUs.
"""
VERIFIED = re.compile(r"Verified on \d+ processes: logits (\S+), gradients (\S+?)[;.]")
STEP = ("ms of a step", "ms of the optimizer")


def results_of(name: str, kind: str, text: str, folder: Path, command: str) -> dict[str, Any]:
    """The results of one part that ended with exit code 0, by the names of the page's rows.

    Args:
        name: the part's name.
        text: what its command printed.
        folder: contains the `rows.csv` of `planc measure`.
        command: what was run, such as `planc measure llama-3.1-8b llama`.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if kind == "verify":
        match = next(filter(None, map(VERIFIED.match, lines)), None)
        assert match, f"{name} exits with 0 and has no verdict"
        numbers = {"logits": match[1], "gradients": match[2]}
        return {name: {"command": command, **numbers}}
    if kind == "measure":
        row = _row(folder / "rows.csv", command)
        numbers = {
            "GiB": f"{float(row['gib']):.2f}",
            "seconds of compute": f"{float(row['compute']):.3f}",
        }
        return {name: {"command": command, **numbers}}
    if kind in ("products", "states"):
        steps = {key: value for line in lines for key, value in _document(line).items()}
        return {
            f"{kind}, {key}": {unit: f"{value[unit]:.0f}" for unit in STEP}
            for key, value in steps.items()
            if "error" not in value
        }
    return {name: {"result": lines[-1]}} if lines else {}


def _row(path: Path, command: str) -> Mapping[str, str]:
    """The last row of the model, plan and sizes of a command."""
    _, _, model, plan, *options = command.split()
    settings = [value for key, value in pairwise(options) if key == "--set"]
    wanted = {"model": model, "plan": plan, "set": " ".join(settings)}
    for key in ("world-size", "batch", "seq"):
        wanted[key.replace("-", "_")] = options[options.index(f"--{key}") + 1]
    with path.open() as file:
        rows = [row for row in csv.DictReader(file) if wanted.items() <= row.items()]
    return rows[-1]


def _document(line: str) -> dict[str, Any]:
    return json.loads(line) if line.startswith("{") else {}


def add_results(machine: str, results: Mapping[str, Any]) -> None:
    """Adds the results of a run on a machine to the record, and writes the page."""
    record = read_record("gpu")
    record[machine] = {**record.get(machine, {}), **results}
    write_record("gpu", record, page(record))


def page(record: Mapping[str, Mapping[str, Mapping[str, str]]]) -> str:
    """The page of a record."""
    text = HEAD
    for machine, results in record.items():
        rows = []
        for name, result in results.items():
            numbers = [f"{k} {v}" for k, v in result.items() if k not in ("command", "result")]
            command = f"`{result['command']}`" if "command" in result else ""
            rows.append([name, command, result.get("result", ", ".join(numbers))])
        text += f"\n## {machine}\n\n" + table(["part", "command", "result"], rows)
    return text

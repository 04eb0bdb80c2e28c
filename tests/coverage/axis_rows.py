"""`make axes`: every causal-LM family with pipeline, context, expert and vocabulary axes.

For each model type and each column, a plan with that axis and FSDP beside it, as `planc check`
judges it: by its rules, and by a training run of a small model with all ranks as threads of one
process (logits or loss, every gradient, clip norm, two optimizer steps). The column `all` has every
axis that the family was proved with, and tensor parallelism, on eight ranks.
Rows are kept in build/coverage/axes as they come, one file a family, so a run that was stopped goes
on where it was. Each column of a family runs in a process of its own, which a time limit ends.
"""

import argparse
import json
import multiprocessing
import re
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import transformers.modeling_utils  # noqa: F401  (once, before the processes are forked)
from family_rows import ROOT, first, shipped, text_of, types
from rich.progress import track

from planc import compiler
from planc.diagnostics.diagnostic import Sink
from planc.diagnostics.source import Source
from planc.ir.experts import expert_count
from planc.model.facts import Facts
from planc.model.layer_kinds import block_lists, length
from planc.model.load import load_values
from planc.model.sources.default_configs import default_config
from planc.proof.layout_flow import flow
from planc.simulate import simulate  # noqa: F401
from planc.syntax import ast, plan_files
from planc.syntax.parse import parse
from planc.tools.init.init import draft
from planc.tools.init.plan_text import parsed_text
from planc.tools.init.roles import roles

COLUMNS = ("pp", "cp", "ring", "ep", "loss", "all")
RANKS = 8
"""Of the column `all`."""

SECONDS = {"pp": 900, "cp": 900, "ring": 900, "ep": 900, "loss": 900, "all": 1800}
"""The time limit of each column of a family."""

ATTENTION = {"cp": "all_gather", "ring": "ring"}
"""How ranks with parts of a sequence exchange keys and values; `all` has the first one."""

OPTIONS = {
    "pp": ("pp", 2),
    "cp": ("cp", 2),
    "loss": ("loss_chunks", 2),
}
"""The option of a shipped plan for each axis that is one, and what it is set to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A family's model, and where its sections go.

    Args:
        blocks: the longest list of blocks.
        experts: the modules with fused experts.
    """

    name: str
    facts: Facts
    blocks: str
    experts: tuple[str, ...]


def case_of(name: str) -> Case | str:
    """The family's model at the sizes of its default configuration, or why it has none."""
    sink = Sink()
    try:
        facts = load_values(default_config(name), name, sink)
    except Exception as error:  # a default configuration that transformers itself refuses
        return f"can't be built: {type(error).__name__}: {error}"
    if facts is None:
        return f"can't be built: {first(sink)}"
    lists = sorted(block_lists(facts.model), key=length)
    fused = dict.fromkeys(str(m) for m in facts.model.below() if expert_count(m.module))
    blocks = str(lists[-1]) if lists else ""
    return Case(name=name, facts=facts, blocks=blocks, experts=tuple(selectors(fused, blocks)))


def selectors(modules, blocks: str) -> Iterator[str]:
    """Each module of the blocks once, by a selector that matches it in every block."""
    inside = {}
    for name in modules:
        below = name.removeprefix(f"{blocks}")
        if below != name and below.startswith(("[", ".")):
            inside[f"{blocks}.*.{below.lstrip('.').partition('.')[2]}"] = None
        else:
            inside[name] = None
    yield from inside


def alone(case: Case, column: str, attention: str = "") -> str:
    """A plan with one axis, and FSDP over the ranks that have other rows; `attention` in the place
    of the column's.
    """
    lines = [f'plan t for "{case.facts.family}"', "mesh {", "    dp_shard = auto"]
    inside = f"{case.blocks}."
    shared = any(sum(n.startswith(inside) for n in group) > 1 for group in case.facts.ties)
    units = [f"    {case.blocks}.* : unit"] if case.blocks and not shared else []
    over, sections = "dp_shard", []
    if column == "pp":
        lines.insert(2, "    pp = 2")
        sections = ["pipeline on pp {", "    microbatches = 2"]
        sections += [f"    stages = even({case.blocks}.*)", "}"]
    elif column in ATTENTION:
        lines.append("    cp = 2")
        over = "dp_shard * cp"
        sections = ["context on cp {", f"    attention = {attention or ATTENTION[column]}", "}"]
    elif column == "ep":
        lines.append("    ep = 2")
        sections = ["expert on ep {"]
        sections += [f"    {name} : dispatch(all_to_all)" for name in case.experts] + ["}"]
        units += [f"    {name} : unit(on = ep_shard, shard_dim = auto)" for name in case.experts]
    else:
        lines.append("    tp = 2")
        found = roles(case.facts, None)
        head = found.heads[-1] if found.heads else "lm_head"
        tied = any(f"{found.embedding}.weight" in group for group in case.facts.ties)
        rows = [f"    {found.embedding} : rowwise"] if tied else []
        sections = ["tensor on tp {", *rows, f"    {head} : colwise(-> replicate)", "}"]
        sections += ["loss on tp {", f"    {head} : cross_entropy(chunks = 2)", "}"]
    ends = [f"fsdp on {over} {{", *units, "    root : unit", "}"]
    return "\n".join([*lines, "}", *sections, *ends, ""])


@dataclass(frozen=True, slots=True)
class Together:
    """A plan with every axis that a family is proved with, and tensor parallelism.

    Args:
        settings: those of eight ranks.
        ways: further ones, of which one is to be proved.
    """

    files: tuple[ast.File, ...]
    axes: list[str]
    settings: list[str]
    ways: list[list[str]]


def plan_together(case: Case, plans: dict[str, str], proved: list[str], folder: Path) -> Together:
    """The plan of the column `all`: the shipped one, or what `planc init` writes."""
    if family := plans.get(case.facts.family) or plans.get(case.name):
        sink = Sink()
        files = plan_files.read(family, sink)
        text = text_of(files)
        own = {"pp": "pipeline on pp", "cp": "context on cp", "loss": "loss on tp"}
        has = [axis for axis, section in own.items() if section in text]
        has += ["ep"] if "ep == 1" in text else []
        axes = [axis for axis in proved if axis in has]
        asked = [f"{OPTIONS[a][0]}={OPTIONS[a][1]}" for a in axes if a in OPTIONS]
        asked += ["microbatches=2"] if "pp" in axes else []
        asked += ["ep=2"] if "ep" in axes else []
        settings = ["tp=2", *asked]
    else:
        sizes = {axis: 2 for axis in proved if axis in ("pp", "cp", "ep")}
        kept = folder / f"{case.name}.{'-'.join(proved)}.plan"
        if not kept.exists():
            kept.write_text(draft(case.facts, Sink(), sizes).text)
        text = kept.read_text()
        head = next((h for h in roles(case.facts, None).heads[-1:] if f"{h} : colwise" in text), "")
        decoder = "decoder.plan" in text
        axes = [axis for axis in proved if axis != "loss" or head or decoder]
        if "loss" in axes and not decoder:
            text += f"\nloss on tp {{\n    {head} : cross_entropy(chunks = 2)\n}}\n"
        files = parsed_text(text)
        settings = ["tp=2"] if "tensor on tp" in text else []
        settings += ["loss_chunks=2"] if "loss" in axes and decoder else []
        settings += ["microbatches=2"] if "pp" in axes and "extend" in text else []
    axes = [*(["tp"] if "tp=2" in settings else []), *axes]
    ways = [[f"sequence={word}"] for word in ("true", "false")]
    return Together(
        files,
        axes,
        [*settings, "param_dtype=fp32"],
        ways if re.search(r"\b(when sequence|sequence = sequence)\b", text) else [[]],
    )


def together(case: Case, plans: dict[str, str], proved: list[str], folder: Path) -> dict:
    """What is found of the plan with every axis, on eight ranks."""
    plan, found = plan_together(case, plans, proved, folder), {}
    for way in plan.ways:
        found = judged(case, plan.files, RANKS, [*plan.settings, *way])
        found |= {
            "axes": plan.axes,
            "without": [axis for axis in proved if axis not in plan.axes],
            "sequence": way == ["sequence=true"],
            "plan": plans.get(case.facts.family) or plans.get(case.name, "init"),
        }
        if found["verdict"] == "proved":
            break
    return found


def judged(case: Case, files, ranks: int, settings=()) -> dict:
    """What `planc check` says of a plan."""
    sink = Sink()
    done = compiler.compile(files, case.facts, sink, world_size=ranks, settings=settings)
    if done.lowered is None:
        error = next(d for d in sink if d.severity == "error")
        return {"verdict": "refused", "code": error.code, "reason": error.message}
    found = flow(done, sink)
    if found.verdict == "proved":
        return {"verdict": "proved", "worst": found.outcome.worst}
    errors = [d for d in sink if d.severity == "error"]
    reason = found.reason or (errors[0].message if errors else "")
    code = errors[0].code if errors else "PL504"
    # a finding that names the module whose tokens see each other is a refusal, as a rule's is
    named = found.verdict == "refuted" and code in BY_NAME
    verdict = "refused" if named else found.verdict
    more = {"facts": [str(f)[:200] for f in errors[0].facts[:2]]} if errors else {}
    return {"verdict": verdict, "code": code, "reason": reason, **more}


BY_NAME = ("PL541",)
"""What layout flow finds of a model that an axis is not for."""


def column_of(case: Case | str, column: str, plans, row: dict, folder: Path) -> dict:
    """What is found of one family in one column."""
    if isinstance(case, str):
        return {"verdict": "unbuilt", "reason": case}
    if column == "ep" and not case.experts:
        return {"verdict": "none", "reason": "no fused experts"}
    if column == "all":
        return together(case, plans, proved_axes(row), folder)
    found = judged(case, (parse(Source("axis.plan", alone(case, column)), Sink()),), 2)
    if column == "cp" and found.get("code") in BY_NAME:  # as the finding says
        files = (parse(Source("axis.plan", alone(case, column, "gather")), Sink()),)
        other = judged(case, files, 2)
        return {**other, "attention": "gather"} if other["verdict"] == "proved" else found
    return found


def proved_axes(row: dict) -> list[str]:
    axes = (column for column in COLUMNS if column not in ("ring", "all"))
    return [axis for axis in axes if row.get(axis, {}).get("verdict") == "proved"]


def worker(send, columns: list[str], name: str, plans, row: dict, folder: Path) -> None:
    """Sends what is found in each column."""
    case: Case | str | None = None
    for column in columns:
        started = time.process_time()
        try:
            case = case or case_of(name)
            row[column] = column_of(case, column, plans, row, folder)
        except BaseException as error:
            text = (str(error).strip().splitlines() or [""])[0][:300]
            row[column] = {"verdict": "raised", "reason": f"{type(error).__name__}: {text}"}
        row[column]["seconds"] = round(time.process_time() - started, 1)
        send.send((column, row[column]))


def limited(work, columns: list[str], seconds, *given) -> Iterator[tuple[str, dict]]:
    """The columns of a row, from a process of its own, which is ended if a column takes too long.

    Args:
        work: called with a connection, the columns and `given`; sends each column with its result.
        seconds: the time limit of each column.
    """
    fork = multiprocessing.get_context("fork")
    receive, send = fork.Pipe(duplex=False)
    process = fork.Process(target=work, args=(send, columns, *given), daemon=True)
    process.start()
    send.close()
    for column in columns:
        found = {"verdict": "late", "reason": f"took more than {seconds[column]} s"}
        try:
            if receive.poll(seconds[column]):
                _, found = receive.recv()
        except EOFError:
            found = {"verdict": "raised", "reason": "the process ended"}
        yield column, found
        if found["verdict"] == "late" or not process.is_alive():
            break
    process.kill()
    process.join()


def settled(found: dict | None, wanted: set[str]) -> bool:
    return found is not None and found["verdict"] not in wanted


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--families", default="", help="some types: mixtral,rwkv")
    parser.add_argument("--columns", default=",".join(COLUMNS))
    parser.add_argument("--again", default="", help="verdicts that are judged anew: refuted,late")
    parser.add_argument("--part", default="0/1", help="of several runs side by side: 0/2, 1/2")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "coverage" / "axes")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore")
    plans, own = shipped(), [int(n) for n in options.part.split("/")]
    names = options.families.split(",") if options.families else types()[own[0] :: own[1]]
    for name in track(names, "families"):
        kept = options.folder / f"{name}.json"
        row = json.loads(kept.read_text()) if kept.exists() else {"type": name}
        again = set(options.again.split(","))
        columns = [c for c in options.columns.split(",") if not settled(row.get(c), again)]
        for column, found in limited(worker, columns, SECONDS, name, plans, row, options.folder):
            row[column] = found
            kept.write_text(json.dumps(row, indent=1))
            print(name, column, json.dumps(found), flush=True)


if __name__ == "__main__":
    sys.exit(main())

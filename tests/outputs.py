"""Compares the outputs of two versions of planc byte for byte: those of commands on all shipped
plans, and on the examples of specs and docs.

    python tests/outputs.py write FOLDER      writes the outputs of the planc that is imported
    python tests/outputs.py compare COMMIT    compares the working tree with a commit

No plan is proved or measured, so a run takes minutes: `check` stops after the structural checks.
"""

import argparse
import filecmp
import io
import os
import re
import shlex
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "support"))
from folders import FOLDERS, ROOT, TESTS

sys.path.extend(FOLDERS)

AXES = (
    ("llama-3.1-8b", "llama", ["pp=2", "microbatches=4", "tp=2"]),
    ("llama-3.1-8b", "llama", ["cp=2", "tp=2", "loss_chunks=4"]),
    ("llama-3.1-8b", "llama", ["dp_replicate=2", "tp=2", "recompute=true"]),
    ("llama-3.1-8b", "llama", ["pp=4", "microbatches=8", "schedule=interleaved_1f1b"]),
    ("mixtral-8x7b", "mixtral", ["ep=4", "tp=2"]),
    ("mixtral-8x7b", "mixtral", ["ep=2", "etp=2", "tp=2"]),
    ("mixtral-8x7b", "mixtral", ["ep=2", "pp=2", "microbatches=2"]),
    ("deepseek-v3", "deepseek_v3", ["ep=8", "cp=2"]),
    ("deepseek-v3", "deepseek_v3", ["ep=4", "pp=2", "tp=2"]),
    ("nemotron-h-8b", "nemotron_h", ["cp=2", "tp=2"]),
    ("qwen3-next-80b-a3b", "qwen3_next", ["cp=2", "ep=2"]),
    ("qwen3-vl-8b", "qwen3_vl", ["tp=2", "cp=2"]),
    ("qwen3-vl-8b", "qwen3_vl", ["tp=2", "pp=2"]),
    ("gemma-3-4b", "gemma3_vision", ["tp=2", "pp=2"]),
    ("gpt-oss-20b", "gpt_oss", ["tp=2", "ep=2"]),
)
"""Models, plans and settings, with axes that have one rank in the cases of the library."""

SECTIONS = {
    "fp8": (
        ("llama-3.1-8b", "llama"),
        """matmul {
            $blocks.{mlp,self_attn}.*_proj : fp8(recipe = tensorwise, gather = fp8)
        }
        compile { $blocks : block }""",
    ),
    "lora": (
        ("llama-3.1-8b", "llama"),
        "adapters { $blocks.self_attn.*_proj : lora(rank = 8, dora = true, dropout = 0.1) }",
    ),
    "qlora": (
        ("llama-3.1-8b", "llama"),
        """adapters { $blocks.mlp.*_proj : qlora(rank = 8) }
        train { $blocks.input_layernorm : trainable }""",
    ),
    "images": (("qwen3-vl-8b", "qwen3_vl"), "override tensor on tp { images = rows }"),
    "muon": (
        ("mixtral-8x7b", "mixtral"),
        "optimizer { $blocks.self_attn.*_proj : muon\nroot : adamw(state = int8) }",
    ),
    "megatron": (
        ("llama-3.1-8b", "llama"),
        """override fsdp on dp_shard, replicate on dp_replicate {
            backend = megatron
            $blocks : unit
            root : unit
        }""",
    ),
    "capacity": (
        ("mixtral-8x7b", "mixtral"),
        """override expert on ep {
            $experts : dispatch(all_to_all, capacity = 1.5)
        }""",
    ),
    "saved": (
        ("llama-3.1-8b", "llama"),
        """override checkpoint {
            $blocks : ops(save = [attention, matmul(every = 2)], offload = cpu)
        }""",
    ),
}
"""Sections that no shipped plan has: models and plans that get them, and their texts."""
PLAYED = ("lower", "check", "diff", "why", "estimate", "fmt")
"""The commands of pages that are run, unless they contain a word of `SKIPPED`."""
BATCH = ["--batch", "64", "--seq", "4096"]
FORMS = {
    "lower": ("lower", []),
    "json": ("lower", ["--format", "json"]),
    "python": ("lower", ["--format", "python"]),
    "sends": ("lower", ["--sends", *BATCH]),
    "check": ("check", ["--level", "structure"]),
}
SKIPPED = {"--save", "--check", "--order", "--measure", "--write", "-o", "--output", "<", ">"}


def outputs(*words):
    """The exit code, the output and the errors of a command as one text."""
    from console import call

    code, text, errors = call(*words)
    return f"[{code}]\n{text}\n--- errors\n{errors}"


def cases():
    """(model, plan, settings) of the library, and of other axes."""
    import test_library
    from diffused import CASES

    params = [p.values for p in CASES if not any(m.args[0] for m in p.marks)]
    yield from (*test_library.CASES, *params, *AXES)
    for name, ((model, plan), text) in SECTIONS.items():
        path = Path(f"{name}.plan")
        path.write_text(f'plan {name} for any\n\nextend "{plan}.plan"\n\n{text}\n')
        for settings in (["tp=2"], ["dp_replicate=2"], ["cp=2", "pp=2", "tp=2"]):
            yield model, path.name, [*settings, "ep=2"] if plan == "mixtral" else settings


def case_outputs(model, plan, settings):
    """Yields (name, text) for each command on a shipped plan."""
    from planc.diagnostics.diagnostic import Sink
    from planc.model.load import load

    options = ["--world-size", "64", *(w for s in settings for w in ("--set", s))]
    for name, (command, more) in FORMS.items():
        yield name, outputs(command, model, plan, *options, *more)
    yield "tp-plan", outputs("lower", model, plan, *options, "--format", "tp-plan")
    yield "estimate", outputs("estimate", model, plan, *options, *BATCH, "--explain")
    yield "diff", outputs("diff", model, plan, *options, "--new-set", "dp_replicate=2", "--sends")
    text = Path(plan) if plan.endswith(".plan") else ROOT / "plans" / f"{plan}.plan"
    yield "fmt", outputs("fmt", text, "--diff")
    known = load(model, Sink())
    names = dict.fromkeys(m.first_name for m in known.model.below())
    for name in [*names][:: max(1, len(names) // 6)]:
        yield f"why.{name}", outputs("why", model, plan, name or "root", *options)
        more = ["--format", "json"]
        yield f"why.{name}.json", outputs("why", model, plan, name or "root", *options, *more)


def pages():
    """The pages whose examples are run."""
    sections = sorted((TESTS / "sections").iterdir())
    folders = (TESTS / "specs", *sections, ROOT / "docs/language", ROOT / "docs/how-to")
    found = [page for folder in folders for page in sorted(folder.glob("*.md"))]
    return [*found, *sorted((ROOT / "docs/diagnostics").glob("PL*.md")), ROOT / "docs/start.md"]


def section_outputs(texts, folder):
    """Yields (command, text) for each command of a section, whose files are written first."""
    from console import BLOCK

    for text in texts:
        for kind, name, body in BLOCK.findall(text):
            if name or kind == "plan":
                file = folder / (name or "example.plan")
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(body)
    for kind, _, body in BLOCK.findall(texts[-1]):
        for line in body.splitlines() if kind == "console" else ():
            command = line.removeprefix("$ ").partition(" | ")[0]
            words = shlex.split(command) if line.startswith("$ planc ") else []
            if len(words) < 2 or words[1] not in PLAYED or SKIPPED & {*words}:
                continue
            if words[1] != "check":
                yield line, outputs(*words[1:])
                continue
            for name, (command, more) in FORMS.items():
                yield f"{line} ({name})", outputs(command, *_plan_words(words[2:]), *more)


def _plan_words(words):
    """The words of a command that say which plan is meant."""
    options = re.findall(r"--(?:world-size|set) \S+|--allow-code", " ".join(words))
    names = [
        w
        for w, before in zip(words, ["", *words], strict=False)
        if not {w[:2], before[:2]} & {"--"}
    ]
    return [*names, *" ".join(options).split()]


def write(target):
    """Writes the outputs of all cases and examples into a folder, a file each."""
    target.mkdir(parents=True)
    target = target.resolve()
    os.environ["COLUMNS"] = "100"
    here = tempfile.mkdtemp()
    os.chdir(here)
    for model, plan, settings in cases():
        for name, text in case_outputs(model, plan, settings):
            place = "_".join([model, plan, *settings, name]).replace("/", "_")
            (target / f"{place}.txt").write_text(text)
    for page in pages():
        sections = re.split(r"^(?=## )", page.read_text(), flags=re.M)
        for number, section in enumerate(sections):
            texts = [section] if number == 0 else [sections[0], section]
            with tempfile.TemporaryDirectory() as folder:
                os.chdir(folder)
                try:
                    found = dict(section_outputs(texts, Path(folder)))
                finally:
                    os.chdir(here)
                text = "\n".join(f"{k}\n{v.replace(folder, 'HERE')}" for k, v in found.items())
            if found:
                name = f"{page.parent.name}.{page.stem}.{number}.txt"
                (target / name).write_text(text)


def start(tree, target):
    """Starts a process that writes the outputs of the planc of a tree, by this script."""
    env = {**os.environ, "PYTHONPATH": str(tree)}
    command = [sys.executable, "-W", "ignore", __file__, "write", str(target)]
    return subprocess.Popen(command, env=env)


def export(commit, tree):
    """The files of a commit, in a folder."""
    files = subprocess.check_output(["git", "archive", commit], cwd=ROOT)
    with tarfile.open(fileobj=io.BytesIO(files)) as archive:
        archive.extractall(tree, filter="data")


def differences(one, two):
    """The names of files that differ, or that only one folder has."""
    names = {p.name for p in one.iterdir()}
    both = names & {p.name for p in two.iterdir()}
    _, unlike, odd = filecmp.cmpfiles(one, two, both, shallow=False)
    return sorted({*unlike, *odd, *(names ^ {p.name for p in two.iterdir()})})


def compare(commit):
    """Prints the names of outputs that differ between a commit and the working tree."""
    with tempfile.TemporaryDirectory() as folder:
        old, new = Path(folder) / "old", Path(folder) / "new"
        export(commit, Path(folder) / "tree")
        writers = [start(Path(folder) / "tree", old), start(ROOT, new)]
        codes = [writer.wait() for writer in writers]
        if any(codes):
            raise SystemExit("the outputs were not written")
        found = differences(old, new)
        print(*found, f"{len(found)} of {len([*new.iterdir()])} outputs differ", sep="\n")
    return bool(found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=("write", "compare"))
    parser.add_argument("where")
    options = parser.parse_args()
    if options.command == "compare":
        sys.exit(compare(options.where))
    write(Path(options.where))

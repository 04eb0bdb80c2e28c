"""What the targets of a repository change on the ranks since a commit, as Markdown.

    python change.py BASE > change.md

Runs in the folder of the pyproject.toml, in a git checkout. The plans and models of both commits
are read, and nothing of them is run. What comes from them is inside one fence that is longer than
any that they contain, so a stranger's plan cannot write Markdown, and it is behind `--` on command
lines, so a stranger's target cannot add an option.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from planc.files.project import ProjectError, Target, project

MARK = "<!-- planc change -->"
LONGEST = 60_000
"""Characters; GitHub refuses comments of more than 65,536."""


def main(base: str) -> None:
    prefix = _git("rev-parse", "--show-prefix").strip()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "base")
        known = subprocess.run(["git", "cat-file", "-e", base], check=False, capture_output=True)
        if known.returncode:
            _git("fetch", "--quiet", "--depth=1", "origin", base)
        _git("worktree", "add", "--quiet", "--detach", str(tree), base)
        try:
            sys.stdout.write(markdown(changes(Path.cwd(), tree / prefix, Path(folder))))
        finally:
            _git("worktree", "remove", "--force", str(tree))


def changes(head: Path, base: Path, scratch: Path) -> str:
    """For each target of either commit what `planc diff` says; empty where nothing changes."""
    new, old = targets(head), targets(base)
    parts = []
    for number, (text, target) in enumerate(new.items()):
        files = [scratch / f"{number}.old.json", scratch / f"{number}.new.json"]
        if text not in old:
            parts.append((text, "a new target"))
        elif not lower(target, head, files[1]):
            parts.append((text, "it cannot be lowered: the findings say why"))
        elif not lower(target, base, files[0]):
            parts.append((text, "it could not be lowered before"))
        else:
            done = _planc("diff", "--", target.model, *map(str, files), folder=head)
            parts += [(text, done.stdout or done.stderr)] if done.returncode else []
    parts += [(text, "no target any more") for text in old if text not in new]
    return "\n".join(f"# {text}\n{said.rstrip()}\n" for text, said in parts)


def targets(folder: Path) -> dict[str, Target]:
    """Those of a checkout, by their text; none where the folder or a right table is missing."""
    if not folder.is_dir():
        return {}
    before = Path.cwd()
    os.chdir(folder)
    try:
        return {target.text: target for target in project().targets}
    except ProjectError:
        return {}  # `planc check` says so
    finally:
        os.chdir(before)


def lower(target: Target, folder: Path, file: Path) -> bool:
    words = ["lower", "--format", "json", "-o", str(file)]
    words += [f"--world-size={target.world_size}"] if target.world_size else []
    words += [f"--set={setting}" for setting in target.set]
    words += ["--", target.model, *([target.plan] if target.plan else [])]
    _planc(*words, folder=folder)
    return file.exists()


def markdown(text: str) -> str:
    if not text:
        return f"{MARK}\nNo changes on any rank, says `planc diff`.\n"
    if len(text) > LONGEST:
        left = text.count("\n", LONGEST)
        text = f"{text[:LONGEST]}\n... and {left} more lines: `planc diff` prints them\n"
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`+", text))])
    title = "**What this changes on the ranks**, as `planc diff` prints it"
    return f"{MARK}\n{title}\n\n{fence}text\n{text}{fence}\n"


def _planc(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = ["planc", *words]
    return subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True)


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    main(sys.argv[1])

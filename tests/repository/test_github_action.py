"""The steps of .github/actions/planc, run as GitHub does, but for GitHub: `gh` only takes notes.

The action itself has not been run on GitHub.
"""

import json
import os
import re
import subprocess
import sys

import pytest
import yaml
from folders import ROOT

ACTION = ROOT / ".github" / "actions" / "planc"
STEPS = yaml.safe_load((ACTION / "action.yml").read_text())["runs"]["steps"]
CHECK, CHANGES, COMMENT = STEPS[1:]
GH = """#!/bin/sh
printf '%s\\n' "$*" >> "$NOTES"
for word in "$@"; do case "$word" in body=@*) cat "${word#body=@}" > "$NOTES.body";; esac; done
case "$*" in
    *--paginate*) printf '%s' "$THERE" ;;
    *) exit "${REFUSED:-0}" ;;
esac
"""
TARGETS = """[[tool.planc.targets]]
model      = "gpt2"
plan       = "mine.plan"
world-size = 8
"""
PLAN = """plan mine for gpt2

extend "gpt2"
"""
CHANGED = """
override mesh {
    dp_replicate = 2
    dp_shard     = auto
    tp           = 1
}
"""


class Job:
    """A job of a pull request: a repository with a base, and a working tree with the head.

    Args:
        folder: an empty one.
    """

    def __init__(self, folder):
        self.root, self.tree = folder, folder / "tree"
        (folder / "bin").mkdir()
        python = f'#!/bin/sh\nexec {sys.executable} -W ignore "$@"\n'
        for name, text in (
            ("gh", GH),
            ("python", python),
            ("planc", python.replace('"$@"', '-m planc "$@"')),
        ):
            (folder / "bin" / name).write_text(text)
            (folder / "bin" / name).chmod(0o755)
        self.tree.mkdir()
        self.git("init", "--quiet")
        self.write(**{"pyproject.toml": TARGETS, "mine.plan": PLAN})
        self.base = self.commit()

    def write(self, **files):
        for name, text in files.items():
            (self.tree / name).write_text(text)

    def git(self, *words):
        who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        done = subprocess.run(
            ["git", *who, *words], cwd=self.tree, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    def commit(self):
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "a commit")
        return self.git("rev-parse", "HEAD")

    def run(self, step, *, there="", refused=False, arguments="", event="pull_request"):
        """(exit code, output) of a step, by the shell that GitHub takes for `bash`."""
        known = {
            "inputs.arguments": arguments,
            "inputs.token": "a token",
            "github.event_name": event,
            "github.repository": "owner/name",
            "github.event.pull_request.base.sha": self.base,
            "github.event.pull_request.number": "7",
        }
        given = {
            name: re.sub(r"\$\{\{ (.*?) \}\}", lambda m: known[m[1]], value)
            for name, value in step.get("env", {}).items()
        }
        script = self.root / "step.sh"
        script.write_text(step["run"])
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)],
            cwd=self.tree,
            check=False,
            capture_output=True,
            text=True,
            env={
                **os.environ,
                "PATH": f"{self.root / 'bin'}:{os.environ['PATH']}",
                "COLUMNS": "100",
                "GITHUB_ACTION_PATH": str(ACTION),
                "GITHUB_STEP_SUMMARY": str(self.root / "summary"),
                "RUNNER_TEMP": str(self.root),
                "NOTES": str(self.root / "notes"),
                "THERE": there,
                "REFUSED": "1" if refused else "0",
                **given,
            },
        )
        return done.returncode, done.stdout + done.stderr

    @property
    def change(self):
        return (self.root / "planc-change.md").read_text()

    @property
    def notes(self):
        return (self.root / "notes").read_text().splitlines()


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path)


def test_no_expression_is_part_of_a_script():
    """What a pull request names, such as its branch, would be run otherwise."""
    assert len(STEPS) == 4
    assert all("${{" not in step["run"] for step in STEPS)


@pytest.mark.parametrize("event", ["pull_request_target", "workflow_run"])
def test_events_with_rights_are_refused(job, event):
    assert job.run(STEPS[0]) == (0, "")
    code, said = job.run(STEPS[0], event=event)
    assert code == 1 and said.startswith("::error::")


def test_findings_are_annotations_and_the_change_a_comment(job):
    wrong = PLAN + CHANGED.replace("dp_replicate = 2", "dp_replicate = 3")
    job.write(**{"mine.plan": wrong})
    job.commit()
    code, said = job.run(CHECK, arguments="--level structure")
    assert code == 1 and re.search(r"^::error file=mine\.plan,line=7,.*title=PL303", said, re.M)
    assert job.run(CHANGES) == (0, "")
    assert "# gpt2 mine.plan --world-size 8\nit cannot be lowered" in job.change

    job.write(**{"mine.plan": PLAN + CHANGED})
    job.commit()
    assert job.run(CHECK, arguments="--level structure")[0] == 0
    assert job.run(CHANGES) == (0, "")
    assert "~ mesh" in job.change and "dp_replicate 1 -> 2, dp_shard 8 -> 4" in job.change
    assert (job.root / "summary").read_text().endswith(job.change)
    assert job.git("status", "--short") == "" and job.git("worktree", "list").count("\n") == 0

    assert job.run(COMMENT) == (0, "")
    assert job.notes[-1].startswith("api --method POST repos/owner/name/issues/7/comments ")
    assert (job.root / "notes.body").read_text() == job.change
    assert job.run(COMMENT, there="12\n15\n") == (0, "")
    assert job.notes[-1].startswith("api --method PATCH repos/owner/name/issues/comments/12 ")
    code, said = job.run(COMMENT, refused=True)
    assert code == 0 and said.startswith("::notice::this token may not comment")


def test_without_a_change_an_old_comment_is_brought_up_to_date_and_none_written(job):
    job.write(README="x")
    job.commit()
    assert job.run(CHANGES) == (0, "")
    assert job.change.endswith("No changes on any rank, says `planc diff`.\n")
    assert job.run(COMMENT) == (0, "") and len(job.notes) == 1
    assert job.run(COMMENT, there="12\n") == (0, "") and len(job.notes) == 3
    assert job.notes[-1].startswith("api --method PATCH")


def test_what_a_stranger_writes_is_neither_markdown_nor_an_option(job):
    run = job.root / "ran"
    (job.tree / "evil.py").write_text(f"open({str(run)!r}, 'w')\n")
    targets = [
        {"model": "gpt2 --allow-code evil:model"},
        {"model": "--allow-code", "plan": "evil:model"},
        {"model": "evil:model", "set": ["--allow-code", "x=1 --allow-code"]},
        {"model": "a````b\n```\n@everyone"},
    ]
    text = "".join(
        "[[tool.planc.targets]]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in one.items())
        for one in targets
    )
    job.write(**{"pyproject.toml": text})
    job.base = job.commit()  # in the base too, so that each is lowered
    assert job.run(CHECK)[0] == 2
    assert job.run(CHANGES) == (0, "")
    assert not run.exists()
    assert job.change.count("it cannot be lowered") == 4
    head, fence, rest = job.change.partition("\n`````text\n")
    assert fence and "@" not in head and rest.endswith("`````\n") and rest.count("`````") == 1

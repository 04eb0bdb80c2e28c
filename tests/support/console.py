"""Runs the examples of a Markdown page: files, commands, and what the commands print.

A fenced block with a name after its language (```plan base.plan, ```json config.json,
```python own_styles.py) is written to a file of that name; a ```plan block without a name is
written to `example.plan`. The commands of a ```console block run in that folder, inside this
process: `$ planc ...`, optionally followed by `< FILE`, `> FILE` or `| grep [-vE] PATTERN`.
"""

import contextlib
import io
import re
import shlex
import sys

from planc.cli import main

BLOCK = re.compile(r"^```(\w+)(?: ([\w./-]+))?\n(.*?)^```$", re.M | re.S)
PIPE = re.compile(r" \| grep (?:-(v?)E? )?('[^']*'|\S+)$")
ROUNDING = re.compile(r"(?<=largest error )\d+(?:\.\d+)?e-\d+")
REDIRECT = re.compile(r" ([<>]) (\S+)(?= [<>] |$)")


def call(*words, stdin=""):
    """(exit code, standard output, standard error) of one planc command."""
    streams = io.StringIO(), io.StringIO()
    before = sys.stdin
    sys.stdin = io.TextIOWrapper(io.BytesIO(stdin.encode()))
    try:
        with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
            code = main([str(word) for word in words])
    except SystemExit as error:  # argparse, on a command line that is wrong
        code = error.code
    finally:
        sys.stdin = before
    return code, *(stream.getvalue() for stream in streams)


def run(command, folder, status=False):
    """What a command line prints, errors last; `status` adds a failing exit code as `[1]`."""
    if pipe := PIPE.search(command):
        [pattern], command = shlex.split(pipe[2]), command[: pipe.start()]
    files = dict(REDIRECT.findall(command))
    words = shlex.split(REDIRECT.sub("", command))
    assert words[0] == "planc", f"an example runs planc: {command}"
    stdin = (folder / files["<"]).read_text() if "<" in files else ""
    code, output, errors = call(*words[1:], stdin=stdin)
    if ">" in files:
        (folder / files[">"]).write_text(output)
        output = ""
    lines = [line.rstrip() for line in (output + errors).splitlines()]
    if pipe:
        lines = [line for line in lines if bool(pipe[1]) != bool(re.search(pattern, line))]
    if status and code:
        lines.append(f"[{code}]")
    return "".join(f"{line}\n" for line in lines)


def with_rounding_of(page, shown):
    """The output with the page's rounding errors: they differ by a digit from CPU to CPU.

    Only an error of the size of float32's rounding is replaced, by one of that size.
    """
    written = ROUNDING.findall(page)
    if len(written) != len(ROUNDING.findall(shown)):
        return shown
    numbers = iter(written)

    def replace(match):
        number = next(numbers)
        return number if max(float(number), float(match[0])) < 1e-5 else match[0]

    return ROUNDING.sub(replace, shown)


def played(text, folder, status=False):
    """The page as it reads with the true output in its console blocks."""

    def replace(match):
        kind, name, body = match.groups()
        if name or kind == "plan":
            file = folder / (name or "example.plan")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(body)
            return match[0]
        commands = [line[2:] for line in body.splitlines() if line.startswith("$ planc ")]
        if kind != "console" or not commands:
            return match[0]
        shown = "".join(f"$ {c}\n{run(c, folder, status)}" for c in commands)
        return f"```console\n{with_rounding_of(body, shown)}```"

    return BLOCK.sub(replace, text)

"""Every notebook of the docs is run: its cells must give the outputs that it stores.

A notebook is JSON, and its cells are plain Python, so no Jupyter is needed to run them. `pytest
--update` writes the true outputs into the notebook.
"""

import ast
import contextlib
import io
import json
import os

import pytest
from console import with_rounding_of
from folders import ROOT
from helpers import slow

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
LONG = ("8-to-512.ipynb",)
"""Notebooks that take a minute; `make processes` runs them."""


def lines_of(text):
    """A text as notebooks store it: a list of lines, each with its line break."""
    return text.splitlines(keepends=True)


def outputs_of(source, names, count):
    """The outputs of one cell: what it prints, and its last expression as a notebook displays it.

    Args:
        source: the code of the cell.
        names: the variables of the notebook, which the cell changes.
        count: the number of the cell, from 1.
    """
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, result = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "<cell>", "exec"), names)
        if last is not None:
            result = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
    outputs = []
    if printed.getvalue():
        text = lines_of(printed.getvalue())
        outputs.append({"name": "stdout", "output_type": "stream", "text": text})
    if result is not None:
        shown = getattr(result, "_repr_html_", None)
        html = {"text/html": lines_of(shown())} if shown else {}
        data = {**html, "text/plain": lines_of(str(result) if shown else repr(result))}
        shape = {"metadata": {}, "output_type": "execute_result"}
        outputs.append({"data": data, "execution_count": count, **shape})
    return outputs


def text_of(notebook):
    return json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


@pytest.mark.parametrize(
    "path",
    [slow(path) if path.name in LONG else path for path in NOTEBOOKS],
    ids=[path.stem for path in NOTEBOOKS],
)
def test_notebook(path, tmp_path, monkeypatch, no_verdicts, request):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    stored = path.read_text()
    notebook = json.loads(stored)
    names = {"__name__": "__main__"}
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for count, cell in enumerate(code, 1):
        cell["execution_count"] = count
        cell["outputs"] = outputs_of("".join(cell["source"]), names, count)
    new = with_rounding_of(stored, text_of(notebook))
    if request.config.getoption("--update"):
        path.write_text(new)
        return
    assert new == stored, f"run pytest {os.path.relpath(__file__, ROOT)} --update and look at it"


def test_notebooks_have_pictures_and_begin_with_what_a_reader_can_do():
    assert len(NOTEBOOKS) == 3
    for path in NOTEBOOKS:
        cells = json.loads(path.read_text())["cells"]
        assert "After this notebook you can " in "".join(cells[0]["source"]), path.name
        assert "data:image/svg+xml;base64," in path.read_text(), path.name

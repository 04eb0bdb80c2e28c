"""Compiled modules in the text of a lowered plan and in a diff."""

from lowered import modules
from test_diff import difference
from test_text import text

from planc.sections.compile.ops import Compile


def test_the_text_names_compiled_modules():
    assert text(
        Compile(modules=modules("model.layers[0:32]")),
        Compile(modules=modules("lm_head"), fullgraph=True),
    ) == [
        "compile     model.layers[0:32]",
        "            lm_head  as one graph, or fail",
    ]


def test_a_diff_names_compiled_modules():
    graphs = Compile(modules=modules("b[0:4]"))
    whole = Compile(modules=modules("b[0:4]"), fullgraph=True)
    assert difference([graphs], [whole]) == ["  ~ compile b[0:4]  graph with breaks -> full graph"]
    assert difference([], [graphs]) == ["  + compile b[0:4]"]

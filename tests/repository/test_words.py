"""The rules of language that a machine can hold: docstrings, names of functions, terms.

`docs/glossary.md` lists the terms, and the words that we do not use for them. The numbers here are
ceilings for words that the code has had before: they only fall.
"""

import ast
import re
from collections import Counter
from functools import cache

import pytest
from folders import ROOT

PACKAGE = ROOT / "planc"
FILES = sorted(PACKAGE.rglob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
GLOSSARY = ROOT / "docs" / "glossary.md"
SLACK = 10
"""The most by which a number may be lower than its ceiling, for branches that are merged."""

CLAUSES = {"What", "Of", "Those", "That", "As", "Where", "Which", "How", "Whatever"}
"""First words of docstrings that are clauses, and no verb in the third person or noun phrase."""
PREPOSITIONS = re.compile(
    "of|at|by|in|on|to|inside|outside|alone|apart|beside|others|every|own|whole|each|rest|until|"
    "behind|around|within"
)
PARTICIPLES = re.compile(
    "[a-z]+ed|made|told|kept|held|given|left|found|taken|said|known|seen|begun|sent|drawn|written|"
    "built|ruled"
)
NOUNS_AND_VERBS = {"need", "feed", "seed", "embed", "shared"}

VAGUE_VARIABLES = {"found", "own", "one", "made", "every", "some"}
VARIABLES_AT_MOST = 403
"""The variables and parameters in planc/ with a name of `VAGUE_VARIABLES`, which is no noun."""
WORDS_AT_MOST = {
    "go around": 1,
    "timetable": 4,
}
"""The occurrences in planc/ and on pages of words of the glossary's last column; else none."""


@cache
def nodes():
    """(file, node) of every node of the package's syntax trees."""
    return [(file, node) for file in FILES for node in ast.walk(ast.parse(file.read_text()))]


def is_participle(name):
    """Whether a name is one word that is a participle, such as `gathered`, `told` or `_kept`."""
    word = name.strip("_")
    return bool(PARTICIPLES.fullmatch(word)) and word not in NOUNS_AND_VERBS


def is_preposition(name):
    """Whether a name is one preposition, adverb or pronoun, such as `of`, `inside` or `others`."""
    return bool(PREPOSITIONS.fullmatch(name.strip("_")))


def docstrings():
    """(place, text) of every docstring, those of attributes included."""
    for file, node in nodes():
        text = getattr(getattr(node, "value", None), "value", None)
        if isinstance(node, ast.Expr) and isinstance(text, str):
            yield f"{file.relative_to(ROOT)}:{node.lineno}", text


def functions():
    """(place, name) of every function and method, without those that Python calls."""
    for file, node in nodes():
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if function and not re.fullmatch(r"__\w+__", node.name):
            yield f"{file.relative_to(ROOT)}:{node.lineno}", node.name


def test_docstrings_are_sentences():
    """A docstring begins with a verb in the third person, or a noun phrase for the result."""
    every = list(docstrings())
    assert len(every) > 3000
    wrong = [(place, text[:60]) for place, text in every if first_word(text) in CLAUSES]
    assert not wrong


def first_word(text):
    """The first word of a text, without a mark after it."""
    return next(iter(text.split()), "").strip(",.:;")


@pytest.mark.parametrize("rule", [is_participle, is_preposition])
def test_functions_are_verbs_or_nouns(rule):
    assert not [f"{place} {name}" for place, name in functions() if rule(name)]


@cache
def vague_variables():
    """The occurrences of each name of `VAGUE_VARIABLES` as a variable or parameter in planc/."""
    names = (
        node.id if isinstance(node, ast.Name) else node.arg
        for _, node in nodes()
        if isinstance(node, ast.arg)
        or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    )
    return Counter(name for name in names if name in VAGUE_VARIABLES)


def test_variables_are_nouns():
    """A variable is a noun of the field, such as `shard` or `tokens`, in place of `found`."""
    counts = vague_variables()
    assert counts.total() <= VARIABLES_AT_MOST, counts.most_common()


def words_not_used():
    """The words in code in the last columns of the glossary's tables."""
    rows = re.findall(r"^\|.*\|$", GLOSSARY.read_text(), re.M)
    return [word for row in rows for word in re.findall(r"`([^`]+)`", row.split("|")[-2])]


def test_the_glossary_is_a_table_of_terms():
    rows = [line for line in GLOSSARY.read_text().splitlines() if line.startswith("|")]
    assert len(rows) > 60
    assert {line.count("|") for line in rows} == {4}
    words = words_not_used()
    assert len(words) > 15 and len(words) == len(set(words))
    assert WORDS_AT_MOST.keys() <= set(words)


@cache
def words_in_use():
    """The occurrences of each word of the glossary's last column in planc/ and on pages."""
    skipped = (GLOSSARY, ROOT / "docs" / "CHANGELOG.md")
    texts = [p.read_text() for p in (*FILES, *PAGES) if p not in skipped]
    counts = Counter()
    for word in words_not_used():
        spaced = r"\s+".join(map(re.escape, word.split()))
        pattern = re.compile(rf"\b{spaced}\b", re.I)
        counts[word] = sum(len(pattern.findall(text)) for text in texts)
    return counts


def test_code_and_pages_use_the_terms_of_the_glossary():
    counts = words_in_use()
    assert not {word: n for word, n in counts.items() if n > WORDS_AT_MOST.get(word, 0)}


def test_ceilings_fall_with_their_counts():
    """Holds for all of planc: a copy without a section (`test_sections.py`) has fewer words."""
    counts = words_in_use() | {"VARIABLES_AT_MOST": vague_variables().total()}
    ceilings = WORDS_AT_MOST | {"VARIABLES_AT_MOST": VARIABLES_AT_MOST}
    fewer = {name: counts[name] for name, most in ceilings.items() if counts[name] < most - SLACK}
    assert not fewer, f"fewer than before: lower the ceilings to {fewer}"


def test_the_rules_find_wrong_words():
    assert first_word("Where: a place") in CLAUSES and first_word("The ranks") not in CLAUSES
    assert is_participle("_gathered") and is_participle("told")
    assert not is_participle("gather") and not is_participle("seed")
    assert not is_participle("gathered_rows")
    assert is_preposition("_of") and not is_preposition("parts_of")

"""Plans in Pygments, so in Sphinx, Jupyter and on terminals: the language `plan`."""

from typing import ClassVar

from pygments import token
from pygments.lexer import RegexLexer, bygroups, words

_NAME = r"[A-Za-z_]\w*"
_PICKED = r"\{[^{}\s]+\}|\[[-:,\d]*\]"
_STATEMENTS = "plan|language|option|let|style|extend|require|ignore"
_SECTION = rf"(?<!\bon )(?<!\* )({_NAME})(?=(?:\s+on\s[\w\s*,.]+)?\s*\{{\s*(?:#.*)?$)"


class PlanLexer(RegexLexer):  # type: ignore[misc]
    """The tokens of `grammars/plan.lark`; a keyword is one only where the grammar allows it."""

    name = "plan"
    aliases: ClassVar = ["plan"]
    filenames: ClassVar = ["*.plan"]
    tokens: ClassVar = {
        "root": [
            (r"\s+", token.Whitespace),
            (r"#[^\n]*", token.Comment.Single),
            (r'"(\\.|[^"\\\n])*"', token.String),
            (rf"({_STATEMENTS})\b(?=[ \t]+\S)", token.Keyword),
            (
                words(("when", "then", "else", "for", "has", "on"), r"\b", r"\b(?!\s*=[^=])"),
                token.Keyword,
            ),
            (words(("optional", "override"), r"\b", r"\b"), token.Keyword.Declaration),
            (words(("and", "or", "not", "in"), r"\b", r"\b"), token.Operator.Word),
            (words(("true", "false", "null"), r"\b", r"\b"), token.Keyword.Constant),
            (r"python(?=\s*\")|(?<=, )replicate(?=\s+on\b)", token.Keyword),
            (r"1[fF]1[bB]\b", token.Name),
            (r"<[A-Za-z_]\w*>", token.Name.Class),
            (_SECTION, token.Name.Namespace),
            (r"(?<=[\w)\]] )\*(?= )", token.Operator),
            (rf"(?=[\w.]*(?:[*$]|{_PICKED}))(?![0-9\[.])(?:[\w.*$]|{_PICKED})+", token.Name.Tag),
            (
                rf"(:)(\s*)({_NAME}(?:\.\w+)*)",
                bygroups(token.Punctuation, token.Text, token.Name.Function),
            ),
            (rf"{_NAME}(?:\.\w+)*(?=(?:<\w+>)?\s*:)", token.Name.Tag),  # a selector of names alone
            (rf"{_NAME}(?=\()", token.Name.Function),
            (rf"{_NAME}(\.\w+)*", token.Name),
            (r"\d{1,18}(\.\d{1,18})?([eE][+-]?\d{1,2})?([KMGT](iB)?)?", token.Number),
            (r"->|==|!=|<=|>=|//|[<>=+\-*/%]", token.Operator),
            (r"[{}()\[\],:]", token.Punctuation),
        ]
    }

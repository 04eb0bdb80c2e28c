"""The random numbers that modules draw in training, on ranks that share a sample."""

from planc.sections import SectionDeclaration

DECLARATION = SectionDeclaration(
    codes=(
        ("PL670", "info", "plan", "training uses random numbers"),
        ("PL671", "warning", "plan", "layers that are skipped at random"),
    ),
)

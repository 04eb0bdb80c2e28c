"""The loss of a causal language model, computed in its head in chunks of tokens."""

from planc.sections import SectionDeclaration

DECLARATION = SectionDeclaration(
    example="lm_head : cross_entropy(chunks = 8)",
    codes=(
        ("PL530", "error", "plan", "the loss cannot be computed in this module"),
        ("PL531", "error", "plan", "a head whose style is not that of its loss"),
        ("PL557", "error", "runtime", "a loss that the script has replaced"),
    ),
)

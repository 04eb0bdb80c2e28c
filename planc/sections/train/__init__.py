"""Parameters that train, and parameters that are frozen."""

from planc.sections import SectionDeclaration

DECLARATION = SectionDeclaration(
    example="model.layers.* : frozen",
    codes=(
        ("PL188", "error", "plan", "freezing modules that adapters already freeze"),
        ("PL451", "error", "plan", "a train rule without effect"),
        ("PL452", "error", "plan", "nothing trains"),
        ("PL453", "error", "plan", "tied parameters of which only one is frozen"),
    ),
    other_words={"train { model.embed_tokens : frozen }": "freeze frozen requires_grad"},
)

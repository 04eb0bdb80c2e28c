"""Modules that `torch.compile` compiles, each by itself."""

from planc.sections import SectionDeclaration

DECLARATION = SectionDeclaration(
    example="model.layers.* : block",
    codes=(
        ("PL431", "error", "plan", "nested compiled modules"),
        ("PL432", "error", "plan", "compiled blocks behind a vocabulary-parallel embedding"),
        ("PL434", "error", "plan", "fullgraph compilation around an FSDP unit"),
        ("PL435", "error", "plan", "a vocabulary-parallel embedding is compiled"),
        (
            "PL436",
            "error",
            "plan",
            "asynchronous tensor parallelism without collectives to overlap",
        ),
    ),
)

"""Outputs of modules, kept between two values: a section that only tests have."""

from planc.sections import SectionDeclaration

DECLARATION = SectionDeclaration(
    example="model.layers.*.mlp : outputs(most = 100)",
    codes=(("PL999", "error", "plan", "a clamp of a module that is not called"),),
)

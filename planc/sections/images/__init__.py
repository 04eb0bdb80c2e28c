"""Encoders of images and sound that ranks run together: `images = rows` of a tensor or a context
section, and data ranks whose batches have no such inputs.
"""

from planc.sections import SectionDeclaration

DECLARATION = SectionDeclaration(
    codes=(("PL572", "error", "plan", "images that cannot be divided over an axis"),),
)

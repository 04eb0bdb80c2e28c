"""Recurrent states that end with a document, where a row has several."""

from planc.sections import SectionDeclaration

DECLARATION = SectionDeclaration()

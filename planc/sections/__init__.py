"""The sections of the language that are folders: all that follows from a section, in one place."""

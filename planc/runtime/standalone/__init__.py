"""Definitions that torch lacks: `apply` calls them, emitted scripts inline them.

Scripts have them without their types. So the only imports are torch and the standard
library, and code is laid out so that every formatter leaves it as it is.
"""

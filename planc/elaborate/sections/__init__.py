"""One file for each section of the language, and the helpers that they share."""

"""One file for each section of the language, and what those read with."""

"""Sphinx's settings for `make docs`: the pages of this folder as a site with a search."""

project = "planc"
extensions = ["myst_nb"]
nb_execution_mode = "off"  # the tests run the notebooks
html_theme = "furo"
html_title = "planc"
exclude_patterns = ["demo/train.py"]
myst_heading_anchors = 4
# the pages link to files of the repository beside them, which are no part of the site
suppress_warnings = ["myst.xref_missing", "misc.highlighting_failure"]

"""Sphinx's settings for `make docs`; docs/site/pages.py prepares the sources."""

import os

project = "Lockstep"
copyright = "the Lockstep authors"
html_title = "Lockstep"
extensions = ["myst_parser"]
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["lockstep.css"]
html_search_scorer = os.path.join(os.path.dirname(os.path.abspath(__file__)), "scorer.js")
html_copy_source = False
html_show_sphinx = False
# Messages and options are quoted as they are.
smartquotes = False
# Sections are linked by GitHub's names for them, in the documents and here.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "attrs_inline"]
# Fragments of output and of configuration files have no language that a highlighter knows.
suppress_warnings = ["misc.highlighting_failure"]

"""The site: `make docs`."""

from importlib import metadata

project = "asdsim"
author = "asdsim contributors"
copyright = "asdsim contributors, Apache-2.0"
release = metadata.version("asdsim")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"asdsim {release}"
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
napoleon_google_docstring = False
napoleon_use_ivar = True
autodoc_typehints = "none"  # the docstrings say more than the annotations do
autodoc_member_order = "bysource"
copybutton_prompt_text = "$ "

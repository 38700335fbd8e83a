"""Sphinx builds the pages of this folder: `make docs`."""

from spark_dl import __version__

project, author, release = "spark_dl", "the spark_dl developers", __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build", "README.md"]
html_theme, html_title = "furo", f"spark_dl {release}"
html_static_path, html_css_files = ["static"], ["wide.css"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
python_use_unqualified_type_names = True
default_role = "code"

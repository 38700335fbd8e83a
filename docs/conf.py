"""Sphinx builds the pages of this folder: `make docs`."""

import re
from pathlib import Path

from nbconvert import MarkdownExporter

import spark_dl
from spark_dl import __version__

ROOT = Path(spark_dl.__file__).parents[1]

project, author, release = "spark_dl", "the spark_dl developers", __version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
autosummary_generate = True
templates_path = ["templates"]
exclude_patterns = ["_build", "README.md", "templates"]
html_theme, html_title = "furo", f"spark_dl {release}"
html_static_path, html_css_files = ["static"], ["wide.css"]
myst_heading_anchors = 3
myst_enable_extensions = ["attrs_inline"]  # ![alt](file){width=220px}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
python_use_unqualified_type_names = True
default_role = "code"


def write_tutorial(app: object) -> None:
    """Writes the notebook, with its outputs, as the page `tutorial.md`. Sphinx calls it before it reads the pages."""
    here = Path(__file__).parent
    text, resources = MarkdownExporter().from_filename(str(ROOT / "examples" / "notebook.ipynb"))
    for name, content in resources["outputs"].items():
        (here / "images" / f"tutorial-{name}").write_bytes(content)
    text = re.sub(r"!\[(\w+)\]\((output_\w+\.\w+)\)", r"![\1](images/tutorial-\2)", text)
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)  # colors of terminals
    (here / "tutorial.md").write_text(text)


def setup(app: object) -> None:
    """Called by Sphinx."""
    app.connect("builder-inited", write_tutorial)  # type: ignore[attr-defined]

"""The site: `sphinx-build -W --keep-going -b html docs docs/_build/html`, after `pip install -e '.[docs]'`.

Pages are Markdown. Two sets of pages are made from the code before each build: `catalogue/`, a page for every policy
(`policy_pages.py`), and `api/`, the reference (`api_pages.py`).
"""

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import api_pages
import policy_pages
from docutils import nodes
from docutils.utils import new_document
from myst_parser.mdit_to_docutils.sphinx_ import SphinxRenderer
from myst_parser.parsers.mdit import create_md_parser
from sphinx.util.docutils import SphinxDirective

import jaxkv

project = "jaxkv"
author = "the jaxkv authors"
release = version = jaxkv.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
exclude_patterns = ["_build", "notes.md"]
LINKED = ("calibration", "choosing", "from-kvpress", "results")  # pages where each policy's name leads to its page
POLICIES = set(policy_pages.catalogue())
OPTIONAL = ("merging", "serving")  # pages that stand in index.md's table of contents as soon as their files are there
nitpicky = True
nitpick_ignore_regex = [("py:.*", ".*")]  # types in signatures are code; docstrings name things in backticks

myst_enable_extensions = ["alert"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 90
add_module_names = False
default_role = "code"

html_theme = "furo"
html_title = "jaxkv"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
templates_path: list[str] = []
copybutton_exclude = ".linenos, .gp"


class Docstring(SphinxDirective):
    """The Markdown of a docstring, in the middle of what autodoc writes."""

    has_content = True

    def run(self) -> list:
        document = new_document(self.get_source_info()[0], self.state.document.settings)
        parser = create_md_parser(self.env.myst_config, SphinxRenderer)
        parser.options["document"] = document
        parser.render("\n".join(self.content))
        return document.children


def as_markdown(app, what, name, obj, options, lines: list[str]) -> None:
    """Hands every docstring to the directive above."""
    if any(lines):
        lines[:] = [".. docstring::", "", *(f"   {line}" for line in lines), ""]


def only_there(app, name: str, source: list[str]) -> None:
    """Takes the optional pages that have no file out of the table of contents."""
    if name == "index":
        gone = {page for page in OPTIONAL if not (HERE / f"{page}.md").exists()}
        source[0] = "\n".join(line for line in source[0].splitlines() if line not in gone)


def link_policies(app, doctree, name: str) -> None:
    """On pages that speak of policies their names lead to their pages."""
    if name not in LINKED:
        return
    for literal in list(doctree.findall(nodes.literal)):
        policy = literal.astext()
        if policy in POLICIES and not isinstance(literal.parent, nodes.reference):
            target = app.builder.get_relative_uri(name, f"catalogue/{policy}")
            link = nodes.reference("", "", internal=True, refuri=target)
            literal.replace_self(link)
            link += literal


def setup(app) -> None:
    policy_pages.write(HERE / "catalogue")
    api_pages.write(HERE / "api")
    app.add_directive("docstring", Docstring)
    app.connect("source-read", only_there)
    app.connect("doctree-resolved", link_policies)
    app.connect("autodoc-process-docstring", as_markdown)

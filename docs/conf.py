"""The site's settings. `docs/build.py` stages the pages and calls Sphinx."""
import sys
from pathlib import Path
from typing import get_type_hints

from fastcore.docments import docments

sys.path.insert(0, str(Path(__file__).parent))
import stage

project = "composer_replication"
copyright = "2026, composer_replication authors"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.viewcode", "sphinx_copybutton", "sphinx_design"]
root_doc = "index"
smartquotes_action = "D"  # dashes only: quotes in this prose are often code

html_theme = "furo"
html_title = "Composer replication"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_js_files = ["custom.js"]
html_search_scorer = str(Path(__file__).parent / "_static" / "scorer.js")
html_favicon = "_static/favicon.svg"
html_show_sphinx = False
html_copy_source = False

nb_execution_mode = "off"
nb_merge_streams = True
nb_render_markdown_format = "gfm"  # tables in outputs; their links are final, see `stage.as_page`
myst_enable_extensions = ["amsmath", "attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_dmath_allow_digits = False  # "$5 a trace, below $5" is money
myst_heading_anchors = 3

add_module_names = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "signature"
maximum_signature_line_length = 70
python_use_unqualified_type_names = True
viewcode_follow_imported_members = False
copybutton_exclude = ".linenos, .gp, .go"

if (Path(__file__).parent / "_static" / "vendor" / "complete").exists():  # else their public addresses
    mathjax_path = "vendor/tex-svg.js"
    nb_ipywidgets_js = {"vendor/require.js": {}, "vendor/embed-amd.js": {}}


def add_docments(app, what, name, obj, options, lines):
    "Docstrings as reStructuredText, with the comments beside parameters as fields."
    module = getattr(obj, "__module__", None)
    lines[:] = [stage.docstring_to_rst(line, module) for line in lines]
    if what not in ("function", "method", "class"):
        return
    try:
        fields = docments(obj, full=True)
    except Exception:  # no source, or none that fastcore can read
        return
    comments = [(key, " ".join(field.docment.split())) for key, field in fields.items() if field.docment and key != "self"]
    if comments and lines and lines[-1]:
        lines.append("")
    for key, text in comments:
        text = stage.docstring_to_rst(text, module)
        lines.append(f":returns: {text}" if key == "return" else f":param {key}: {text}")


def plain_hints(app, obj, bound_method):
    "A command's parameters without Typer's options, which print as addresses; what they say is in the page of commands."
    try:
        hints = get_type_hints(obj, include_extras=True)
    except Exception:  # a name that only type checkers see
        return
    if any("typer.models" in repr(hint) for hint in hints.values()):
        obj.__annotations__ = get_type_hints(obj)


def one_document(app, doctree):
    "Parts in reStructuredText name a document of their own, and by it all pages read so far: every file would hold them."
    for node in doctree.findall():
        if node is not doctree:
            node.document = doctree


def setup(app):
    app.connect("doctree-read", one_document)
    app.connect("autodoc-before-process-signature", plain_hints)
    app.connect("autodoc-process-docstring", add_docments)

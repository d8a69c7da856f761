"""The site's settings. `docs/build.py` stages the pages and calls Sphinx."""
import inspect
import json
import re
import sys
from functools import cache
from importlib import import_module
from itertools import count
from pathlib import Path
from pkgutil import walk_packages
from typing import get_type_hints

from docutils import nodes
from docutils.utils import new_document
from fastcore.docments import docments
from myst_parser.mocking import MockRSTParser
from sphinx.search.en import SearchEnglish
from sphinx.util.docutils import SphinxDirective

sys.path.insert(0, str(Path(__file__).parent))
import stage

project = "composer_replication"
copyright = "2026, composer_replication authors"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx_copybutton", "sphinx_design"]
if not tags.has("without_sources"):  # noqa: F821  # Sphinx hands it in
    extensions.append("sphinx.ext.viewcode")
root_doc = "index"
smartquotes_action = "D"  # dashes only: quotes in this prose are often code

html_theme = "furo"
html_title = project
html_logo = "_static/logo.svg"
html_theme_options = {f"{mode}_css_variables": {f"color-brand-{part}": colour for part in ("primary", "content")}
                      for mode, colour in (("light", "#0072B2"), ("dark", "#56B4E9"))}  # the reports' colour of the student
html_use_index = False  # half a megabyte that no page links to: the search finds names
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_js_files = ["custom.js"]
html_search_scorer = str(Path(__file__).parent / "_static" / "scorer.js")
html_favicon = "_static/favicon.svg"
html_show_sphinx = False
html_copy_source = False

nb_execution_mode = "off"
nb_code_prompt_show = nb_code_prompt_hide = "Code"
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


class Entries(SphinxDirective):
    """API entries, as reStructuredText.

    `eval-rst` does the same and reads an empty line for each line before, of which myst-nb counts 10,000 a cell.
    """

    has_content = True

    def run(self) -> list[nodes.Node]:
        part = new_document(self.state.document["source"], self.state.document.settings)
        part.reporter = self.state.document.reporter
        MockRSTParser().parse("\n".join(self.content), part)
        return part.children


class Explorer(SphinxDirective):
    "Some of the shipped traces as the embedded model reads them, to click through; computed when the page is read, in seconds."

    def run(self) -> list[nodes.Node]:
        from composer_replication.envs.toy.model import embedded_model, embedded_tokenizer
        from composer_replication.envs.toy.traces import toy_traces
        from composer_replication.hints.layers import default_composite
        from composer_replication.report.explorer import error_turns, explored, explorer_body, explorer_data
        from composer_replication.report.html import fragment
        from composer_replication.traces.siblings import SiblingIndex
        package = stage.ROOT / stage.PACKAGE
        for pattern in ("report/*.py", "data/report/explorer*", "data/report/theme.css"):
            for file in package.glob(pattern):
                self.env.note_dependency(str(file))
        traces = toy_traces()
        hints = default_composite(siblings=SiblingIndex(traces))
        model, tokenizer = embedded_model(), embedded_tokenizer()
        read = [explored(trace, hints, (model, tokenizer)) for trace in filter(error_turns, traces[:20])]
        data = explorer_data(read, hints, reader="the embedded model")
        return [nodes.raw("", fragment(explorer_body(data)), format="html")]


def one_document(app, doctree):
    "Parts in reStructuredText name a document of their own, and by it all pages read so far: every file would hold them."
    for node in doctree.findall():
        if node is not doctree:
            node.document = doctree


@cache
def words(builder, name):
    "What the sidebar calls a page: a section by its short name, any other by its title."
    short = {page: said for said, page in stage.SECTIONS.items()}
    return short.get(name) or builder.render_partial(builder.env.titles[name])["title"]


SWITCH = """<input aria-label="Toggle navigation of {name}" class="toctree-checkbox" id="{id}" name="{id}" role="switch" \
type="checkbox"{checked}/><label for="{id}"><span class="icon"><svg><use href="#svg-arrow-right"></use></svg></span></label>"""


def sidebar(builder, here, switches, parent="index", level=1):
    """The pages below one as the theme shows them, with a switch where there are more below; counts the switches.

    Sphinx's way copies all headings of all pages, and the theme parses that anew, once a page.
    """
    items = []
    for name in builder.env.toctree_includes.get(parent, ()):
        has = bool(builder.env.toctree_includes.get(name))
        number, title = next(switches) if has else 0, words(builder, name)
        below, own = sidebar(builder, here, switches, name, level + 1), name == here
        current = own or 'class="current' in below
        classes = f"toctree-l{level}{' current' * current}{' has-children' * has}{' current-page' * own}"
        link = f"""<a class="{"current " * own}reference internal" href="{builder.get_relative_uri(here, name) or '#'}">"""
        told = {"name": re.sub("<[^>]*>", "", title), "id": f"toctree-checkbox-{number}", "checked": ' checked=""' * current}
        items.append(f'<li class="{classes}">{link}{title}</a>{SWITCH.format(**told) if has else ""}{below}</li>\n')
    listed = "".join(items)
    opens = ' class="current"' if " current" in listed else ""
    return f"<ul{opens}>\n{listed}</ul>\n" if items else ""


def no_tree(app, pagename, templatename, context, doctree):
    context["toctree"] = lambda **_: ""


def fast_tree(app, pagename, templatename, context, doctree):
    context["furo_navigation_tree"] = sidebar(app.builder, pagename, count(1))


def kinds_for_search(app, pagename, templatename, context, doctree):
    "The search ranks a page by what it is, and says it."
    if pagename == "search":
        app.add_js_file(None, body=f"window.KINDS = {json.dumps(stage.kinds())}")


def found_once(app, env):
    "A name is looked for among all objects, thousands of times the same few; they no longer change when pages are written."
    domain = env.domains.python_domain
    domain.find_obj = cache(domain.find_obj)


def imported_once(app):
    "Before Sphinx forks the processes that read, each of which would import all of this anew."
    package = import_module(stage.PACKAGE)
    for module in walk_packages(package.__path__, f"{stage.PACKAGE}."):
        if ".tasksets." not in module.name:  # needs verifiers, which has an environment of its own
            import_module(module.name)


def asked_once(app):
    "Each object's source is asked for by four readers, each word's stem once a page."
    inspect.getsourcelines = cache(inspect.getsourcelines)
    SearchEnglish.stem = cache(SearchEnglish.stem)


def setup(app):
    app.connect("builder-inited", imported_once)
    app.connect("builder-inited", asked_once)
    app.connect("html-page-context", no_tree, priority=400)  # before the theme asks
    app.connect("html-page-context", fast_tree, priority=600)  # after it
    app.connect("html-page-context", kinds_for_search)
    app.connect("env-check-consistency", found_once)
    app.add_directive("entries", Entries)
    app.add_directive("explorer", Explorer)
    app.connect("doctree-read", one_document)
    app.connect("autodoc-before-process-signature", plain_hints)
    app.connect("autodoc-process-docstring", add_docments)

"""Who can see and reach what stands on the site: contrast, axe, keys, in a real browser."""
import pytest
from pages import faint


@pytest.mark.parametrize("mode", ["light", "dark"])
@pytest.mark.parametrize("name", ["index", "explorer", "error_site", "exploits", "replay", "report/display", "gaps"])
def test_text_can_be_read(site, visit, name, mode):
    page = visit((site / f"{name}.html").as_uri(), mode)
    assert faint(page, "article :not(.highlight *)") == []


SPHINX = {"definition-list"}  # its entries of classes and functions


QUICK = ("index", "explorer", "error_site", "episodes", "replay", "guide", "coverage", "adrs/index",
         "spikes/104-ladder")
LONG = ("training_step", "losses/distill", "exploits", "gaps", "commands", "core/trace", "spikes/004-ab", "recipe",
        "report/display", "report/ladder")  # the longest take half a minute each


@pytest.mark.parametrize("mode, names", [
    *((mode, QUICK) for mode in ("light", "dark")),
    *(pytest.param(mode, LONG, marks=pytest.mark.slow) for mode in ("light", "dark"))])
def test_axe_finds_no_serious_fault(site, visit, mode, names):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="pip install axe-playwright-python").Axe()
    faults = {}
    for name in names:
        page = visit((site / f"{name}.html").as_uri(), mode)
        options = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]}
        found = axe.run(page, options=options).response["violations"]
        if wrong := [[fault["id"], *fault["nodes"][0]["target"]] for fault in found if fault["id"] not in SPHINX]:
            faults[name] = wrong
    assert faults == {}


def test_faint_text_is_found(visit, tmp_path):
    (tmp_path / "a.html").write_text("<body style='background:#fff'><p style='color:#999'>faint</p><p>clear</p>")
    page = visit((tmp_path / "a.html").as_uri())
    assert [line.split(": ")[1] for line in faint(page, "body *")] == ["faint"]


def test_the_sites_switch_turns_our_views_too(site, visit):
    page = visit((site / "error_site.html").as_uri(), "light")
    colour = "getComputedStyle(document.querySelector('.cr .tab.mine')).borderBottomColor"
    colours = []
    for theme in ("light", "dark"):
        page.evaluate(f"document.body.dataset.theme = '{theme}'")
        colours.append(page.evaluate(colour))
    assert colours == ["rgb(0, 114, 178)", "rgb(86, 180, 233)"]


def test_every_control_can_be_reached_by_keyboard_and_has_a_name(site, visit):
    page = visit((site / "error_site.html").as_uri())
    page.evaluate("""() => { window.reached = new Set();
        document.addEventListener('focusin', e => window.reached.add(e.target)); }""")
    for _ in range(400):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement === document.body"):
            break
    # Of a group of radio buttons the chosen one takes the focus; the arrow keys do the rest.
    found = "document.querySelectorAll('article :is(summary, select, button, input)')"
    controls = f"[...{found}].filter(n => n.checkVisibility())"
    missed = f"{controls}.filter(n => n.tabIndex >= 0 && (n.type !== 'radio' || n.checked) && !window.reached.has(n))"
    nameless = f"{controls}.filter(n => !(n.ariaLabel || n.title || n.textContent.trim() || n.labels?.length))"
    assert page.evaluate(f"{missed}.map(n => n.outerHTML.slice(0, 120))") == []
    assert page.evaluate(f"{nameless}.map(n => n.outerHTML.slice(0, 120))") == []


SHOWS_FOCUS = """node => {  // what of it is on the screen: a radio button in a strip is shown by its label
  const box = [node, node.closest("label"), node.labels?.[0], node.nextElementSibling].find(n => {
    const r = n?.getBoundingClientRect(), seen = n?.checkVisibility({visibilityProperty: true, opacityProperty: true});
    return seen && r.width > 3 && r.height > 3; });
  const r = box?.getBoundingClientRect();
  return r && {x: Math.max(0, r.x - 6), y: Math.max(0, r.y - 6), width: r.width + 12, height: Math.min(r.height + 12, 300)};
}"""


def tabbed(page, most):
    "What Tab reaches: (place in the document, text, whether the picture differs with and without the focus)."
    reached = []
    for _ in range(most):
        page.keyboard.press("Tab")
        node = page.evaluate_handle("document.activeElement").as_element()
        if node.evaluate("n => n === document.body"):
            break
        node.evaluate("n => n.scrollIntoView({block: 'center', behavior: 'instant'})")
        box = node.evaluate(SHOWS_FOCUS)
        with_focus = page.screenshot(clip=box) if box else b""
        node.evaluate("n => n.blur()")
        told = node.evaluate("n => [[...document.querySelectorAll('*')].indexOf(n), n.outerHTML.slice(0, 80)]")
        reached.append((*told, bool(box) and with_focus != page.screenshot(clip=box)))
        node.evaluate("n => n.focus({preventScroll: true, focusVisible: true})")
    return reached


@pytest.mark.parametrize("name, start", [
    ("guides/hint-layer", "article"), ("explorer", "article"), ("index", "body")])
def test_tab_follows_the_page_and_the_focus_is_seen(site, visit, name, start):
    page = visit((site / f"{name}.html").as_uri())
    page.locator(start).evaluate("n => { n.tabIndex = -1; n.focus(); }")
    reached = tabbed(page, 16)
    assert len(reached) > 5
    assert [place for place, *_ in reached] == sorted(place for place, *_ in reached)
    assert [text for _, text, seen in reached if not seen] == []


def test_a_focus_that_is_not_seen_is_found(visit, tmp_path):
    (tmp_path / "a.html").write_text("<style>.no:focus { outline: none }</style><p><a href=#>One</a> <a class=no href=#>Two</a>")
    assert [seen for *_, seen in tabbed(visit((tmp_path / "a.html").as_uri()), 9)] == [True, False]

"""Who can see and reach what stands on the site: contrast, axe, keys, in a real browser."""
import pytest
from pages import PAGES, faint


@pytest.mark.parametrize("mode", ["light", "dark"])
@pytest.mark.parametrize("name", ["index", "explorer", "error_site", "exploits", "replay", "report/display", "gaps"])
def test_text_can_be_read(site, visit, name, mode):
    page = visit((site / f"{name}.html").as_uri(), mode)
    assert faint(page, "article :not(.highlight *)") == []


SPHINX = {"definition-list"}  # its entries of classes and functions


@pytest.mark.parametrize("mode, names", [
    # Of one mode the others differ in colours alone; the longest pages take half a minute each.
    ("light", ("index", "explorer", "error_site", "episodes", "replay", "guide")), ("dark", ("index", "explorer", "error_site")),
    *(pytest.param(mode, (*PAGES[:10], "core/trace"), marks=pytest.mark.slow) for mode in ("light", "dark"))])
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

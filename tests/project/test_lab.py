"""The start pages in JupyterLab, in a real browser."""
import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import nbformat
import pytest
from pages import LIMIT, faint, picture
from playwright.sync_api import expect
from waiting import free_port

ROOT = Path(__file__).resolve().parents[2]
MOVED = ".jp-OutputArea-output .cr p:has-text('Moved most')"


@pytest.fixture(scope="module")
def lab(browser, tmp_path_factory):  # without a browser nothing is started
    "JupyterLab as `make lab` starts it, on a copy of the notebooks; the address, and the folder."
    folder = tmp_path_factory.mktemp("lab")
    root = folder / "project"
    shutil.copytree(ROOT / "nbs", root / "nbs", ignore=shutil.ignore_patterns("*.scratch.py", ".ipynb_checkpoints"))
    shutil.copytree(ROOT / "tools" / "lab", root / "tools" / "lab")
    shutil.copy(ROOT / "settings.ini", root)
    for name in ("spikes", "docs"):  # read only
        (root / name).symlink_to(ROOT / name)
    port = free_port()
    target = re.search(r"^lab:.*\n\t(.*)$", (ROOT / "Makefile").read_text(), re.M)[1]
    command = target.replace("$(LAB)", f"--no-browser --port={port} --ServerApp.port_retries=0 --IdentityProvider.token=key")
    command = command.replace(".venv/bin/", f"{Path(sys.prefix, 'bin')}/")
    own = {f"JUPYTER_{name}_DIR": str(folder / name) for name in ("CONFIG", "DATA", "RUNTIME")}
    own |= {"IPYTHONDIR": str(folder / "ipython"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}  # the Makefile's
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(command.split(), cwd=root, env=os.environ | own, stdout=log, stderr=subprocess.STDOUT)
    try:
        end = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/api?token=key", timeout=2):
                break
            assert server.poll() is None and time.monotonic() < end, (folder / "log").read_text()
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/lab/tree/nbs/", root / "nbs"
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()


def opened(visit, lab, name, mode="light"):
    "A notebook, open and idle."
    page = visit(f"{lab[0]}{name}?token=key&reset", mode)
    page.locator(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-Cell").first.wait_for()
    assert page.locator("dialog[open], .jp-Dialog").count() == 0  # nothing is asked before one can begin
    return page


IDLE = ".jp-NotebookPanel:not(.lm-mod-hidden) .jp-Notebook-ExecutionIndicator[data-status=idle]"


def prompts(page):
    "What stands beside the code cells that are not folded: [ ]: before they run, [*]: while they wait, [3]: afterwards."
    return page.locator(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-CodeCell .jp-InputPrompt").all_text_contents()


def run_all(page, until=None):
    "Run every cell and wait for the last one, or until a script says true."
    panel, end = page.locator(".jp-NotebookPanel:not(.lm-mod-hidden)"), time.monotonic() + 4 * LIMIT / 1000
    while not any(re.match(r"\[[*\d]", text) for text in prompts(page)):  # as long as JupyterLab settles, commands are lost
        assert time.monotonic() < end, f"nothing runs: {prompts(page)}"
        asked = page.locator(".jp-Dialog")
        if asked.count():  # on a slow machine it asks for the kernel before it knows of any
            assert "Select Kernel" in asked.first.inner_text(), asked.first.inner_text()
            asked.first.locator(".jp-mod-accept").click()
        elif "Python" in panel.locator(".jp-KernelName").inner_text() and page.locator(IDLE).count():
            panel.locator(".jp-MarkdownCell").first.click(position={"x": 5, "y": 5})  # its middle may be a link
            page.locator(".lm-MenuBar-item", has_text="Run").click()
            page.locator(".lm-Menu-item", has_text="Run All Cells").first.click()
        page.wait_for_timeout(1000)
    while not page.evaluate(until) if until else "[*]:" in prompts(page) or not page.locator(IDLE).count():
        assert time.monotonic() < end, prompts(page)
        time.sleep(0.1)


@pytest.mark.parametrize("mode", [pytest.param("light", marks=pytest.mark.slow), "dark"])
def test_the_start_page_runs_and_a_hint_of_ones_own_is_read(visit, lab, mode):
    name = f"index-{mode}.ipynb"
    shutil.copy(lab[1] / "index.ipynb", lab[1] / name)
    page = opened(visit, lab, name, mode)
    run_all(page)
    assert page.locator("[data-mime-type*=stderr], [data-mime-type*='vnd.jupyter.error']").count() == 0
    layer, text = page.locator(".widget-dropdown select").first, page.locator(".widget-textarea textarea").first
    moved = page.locator(MOVED).last
    before, hint = moved.text_content(), text.input_value()
    layer.select_option(label="raw_error")
    expect(text).not_to_have_value(hint, timeout=LIMIT)
    expect(moved).not_to_have_text(before, timeout=LIMIT)
    text.fill("Use the tool `cat`.")
    other = moved.text_content()
    text.blur()
    expect(moved).not_to_have_text(other, timeout=LIMIT)
    changed = moved.text_content()
    assert faint(page, ".jp-OutputArea-output .cr *") == []
    picture(page, f"lab-index-{mode}")
    page.keyboard.press("Escape")
    page.keyboard.press("Control+s")
    page.wait_for_function("() => !document.querySelector('.jp-NotebookPanel .jp-mod-dirty, .lm-TabBar-tab.jp-mod-dirty')")
    end = time.monotonic() + 30
    while "Use the tool `cat`." not in (lab[1] / name).read_text():
        assert time.monotonic() < end, "the notebook was not saved"
        time.sleep(0.1)
    page.close()
    again = opened(visit, lab, name, mode)
    expect(again.locator(MOVED).last).to_have_text(changed, timeout=LIMIT / 2)
    assert again.locator(".widget-textarea textarea").first.input_value() == "Use the tool `cat`."
    nbformat.validate(nbformat.read(lab[1] / name, 4))


SIDE_BY_SIDE = """(titles) => {  // both boxes of one moment: the page still moves as cells above are drawn
    const [left, right] = titles.map(title => [...document.querySelectorAll('p')].find(p => p.textContent == title)
        ?.getBoundingClientRect());
    return left && right && left.y == right.y && left.right <= right.left;
}"""


def test_both_judges_stand_side_by_side_before_the_notebook_is_trusted(visit, lab):
    page = opened(visit, lab, "04_exploits.ipynb")
    assert page.locator(".jp-OutputArea-output style").count() == 0  # the theme is gone
    page.wait_for_function(SIDE_BY_SIDE, arg=["the naive judge", "our judge"], timeout=LIMIT)
    picture(page, "lab-04-untrusted")


def test_of_views_behind_buttons_one_is_open_before_the_notebook_is_trusted(visit, lab):
    page = opened(visit, lab, "01_error_site.ipynb")
    strip = page.locator(".jp-OutputArea-output .views").first
    strip.wait_for(state="attached")
    assert page.locator(".jp-OutputArea-output style").count() == 0
    shown = strip.evaluate("e => [...e.children].map(view => view.getBoundingClientRect().height > 0)")
    assert len(shown) > 3 and sum(shown) == 1
    picture(page, "lab-01-untrusted")


OUTPUTS = "[...document.querySelectorAll('.jp-NotebookPanel:not(.lm-mod-hidden) .jp-OutputArea-output')]"
SAID = f"() => document.body.dataset.said ??= {OUTPUTS}.map(e => e.innerText.trim()).find(text => text)"  # as first seen


@pytest.mark.parametrize("name", ["01_error_site", pytest.param("02_training_step", marks=pytest.mark.slow)])
def test_a_page_says_something_before_it_has_loaded_pytorch(visit, lab, name):
    "Its code up to PyTorch's import, as one cell that ends with a word: its first output is there before that word."
    book = nbformat.read(lab[1] / f"{name}.ipynb", 4)
    loads = next(i for i, cell in enumerate(book.cells) if "import embedded_model" in cell.source)
    cells = [cell.source for cell in book.cells[:loads + 1] if cell.cell_type == "code"]
    end = "import sys\nprint('behind it', 'torch' in sys.modules)"
    book.cells = [book.cells[0], nbformat.v4.new_code_cell("\n".join([*cells, end]))]
    nbformat.write(book, lab[1] / f"first-{name}.ipynb")
    page = opened(visit, lab, f"first-{name}.ipynb")
    run_all(page, until=SAID)
    assert "behind it" not in page.evaluate(SAID)
    page.wait_for_function(f"() => {OUTPUTS}.some(e => e.innerText.includes('behind it True'))", timeout=2 * LIMIT)

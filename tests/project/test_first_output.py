"How long a start page says nothing, in kernel starts; both in CPU seconds of the kernel, which a busy machine leaves alone."
from pathlib import Path

import nbformat
import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["index", *sorted(path.stem for path in (ROOT / "nbs").glob("0*.ipynb"))]
LIMIT = 300


@pytest.mark.parametrize("page", PAGES)
def test_the_first_output_comes_within_four_kernel_starts(page, monkeypatch):
    "What loads PyTorch without a word before it takes six to ten; these pages take 0.01 to 1.3."
    manager = pytest.importorskip("jupyter_client.manager")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    seen = []
    kernel, client = manager.start_new_kernel(cwd=str(ROOT / "nbs"), startup_timeout=LIMIT)
    spoken = ("stream", "display_data", "execute_result", "error")
    used = lambda: sum(psutil.Process(kernel.provisioner.pid).cpu_times()[:2])
    hook = lambda message: seen.append(used() - start) if message["msg_type"] in spoken else None
    try:
        start = used()
        for cell in nbformat.read(ROOT / "nbs" / f"{page}.ipynb", 4).cells:
            if cell.cell_type == "code" and not seen:
                client.execute_interactive(cell.source, timeout=LIMIT, output_hook=hook)
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)
    print(f"{page}: {seen[0] / start:.2f} kernel starts")
    assert seen[0] < 4 * start

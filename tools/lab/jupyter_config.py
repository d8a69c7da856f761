"""JupyterLab as `make lab` starts it: on the start page, quiet, and saving notebooks clean."""
import logging
import os
from pathlib import Path

from nbdev.clean import clean_jupyter


def clean(model, path, **kwargs):
    "What is saved is what `nbdev_clean` would make of it, without the state of widgets where there are none."
    if model["type"] != "notebook":
        return
    cells = model["content"]["cells"]
    trusted = [cell["metadata"].get("trusted") for cell in cells]
    clean_jupyter(path=path, model=model)
    for cell, was in zip(cells, trusted):  # never written: the server signs by it, or no widget is shown when it is opened again
        if was is not None:
            cell["metadata"]["trusted"] = was
    metadata = model["content"]["metadata"]
    if not any(kept.get("state") for kept in metadata.get("widgets", {}).values()):
        metadata.pop("widgets", None)


c = get_config()  # noqa: F821 (Jupyter defines it)
c.LabApp.default_url = "/lab/tree/nbs/index.ipynb"
c.LabApp.app_settings_dir = str(Path(__file__).resolve().parent)  # overrides.json
c.FileContentsManager.pre_save_hook = clean
c.ServerApp.allow_root = os.getuid() == 0  # containers
c.Application.log_level = logging.WARNING

"nbdev 3 reads [tool.nbdev] beside settings.ini: the same settings, and (make test-nbdev3) the same modules."
import configparser
import os
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["nbdev"]


def test_both_configurations_say_the_same():
    parser = configparser.ConfigParser()
    parser.read(ROOT / "settings.ini")
    ini = dict(parser["DEFAULT"])
    for name, value in OURS.items():
        plain = {True: "True", False: "False"}.get(value, value) if isinstance(value, bool) else value
        assert ini[name] == (" ".join(plain) if isinstance(plain, list) else plain), name
    assert len(OURS) == 11


def test_nbdev_3_exports_and_cleans_to_the_same_files(tmp_path):
    programs = os.environ.get("COMPOSER_NBDEV3")
    if not programs:
        pytest.skip("no nbdev 3 here: make test-nbdev3")
    for name in ("nbs", "composer_replication"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "*.scratch.py"))
    for name in ("pyproject.toml", "settings.ini", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    for command in ("nbdev-export", "nbdev-clean"):
        subprocess.run([f"{programs}/{command}"], cwd=tmp_path, check=True, capture_output=True, timeout=900)
    files = [path.relative_to(ROOT) for name, kind in (("composer_replication", "*.py"), ("nbs", "*.ipynb"))
             for path in (ROOT / name).rglob(kind) if not path.name.endswith(".scratch.py")]
    differ = [str(path) for path in files if (tmp_path / path).read_bytes() != (ROOT / path).read_bytes()]
    assert len(files) > 300
    assert differ == ["composer_replication/_modidx.py"], "the site's addresses stand there, and nbdev 3 knows none"

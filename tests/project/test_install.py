"Where packages come from is told to uv as pip was told."
import re
import sys
from importlib.metadata import PackageNotFoundError, distribution, metadata
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import install

LISTING = """:env:.find-links='/wheels /more'
:env:.disable-pip-version-check='1'
global.extra-index-url='file:///a/simple file:///b/simple'
global.find-links='/not-this-one'
download.index-url='https://of.another/command'
global.cert='/etc/ca.crt'"""


def test_uv_looks_where_pip_looks_and_the_environment_wins():
    environment = install.uv_environment(install.pip_settings(LISTING))
    assert environment == {"UV_INDEX_STRATEGY": "unsafe-best-match", "UV_FIND_LINKS": "/wheels,/more",
                           "UV_INDEX": "file:///a/simple file:///b/simple", "SSL_CERT_FILE": "/etc/ca.crt"}


@pytest.mark.parametrize("listing", ["", "global.quiet='1'", "not a setting"])
def test_without_such_settings_uv_keeps_its_own(listing):
    assert install.uv_environment(install.pip_settings(listing)) == {"UV_INDEX_STRATEGY": "unsafe-best-match"}


def test_where_uv_fails_pip_installs_and_says_so(monkeypatch, capsys):
    ran = []

    def run(command, **options):
        ran.append(command)
        failed = "uv" in command[1:3] and command[3:5] == ["pip", "install"]
        return type("Done", (), {"returncode": int(failed), "stdout": ""})

    monkeypatch.setattr(install.subprocess, "run", run)
    assert install.main() == 0
    assert [command[2] for command in ran] == ["pip", "pip", "uv", "pip", "pip"] and "pip does" in capsys.readouterr().err


def test_every_pinned_package_runs_on_the_first_python_that_the_project_names():
    "Debian 12 has Python 3.11.2, and a package that wants 3.11.5 cannot be installed there."
    pinned = re.findall(r"^([\w.-]+)==", (install.ROOT / "requirements" / "core.txt").read_text(), re.M)
    needs = {name: metadata(name)["Requires-Python"] for name in pinned if is_here(name)}
    first = re.search(r'^requires-python = ">=([\d.]+)"', (install.ROOT / "pyproject.toml").read_text(), re.M)[1]
    assert len(needs) > 100
    assert {name: needs[name] for name in needs if needs[name] and not SpecifierSet(needs[name]).contains(f"{first}.0")} == {}


def is_here(name):
    try:
        return bool(distribution(name))
    except PackageNotFoundError:  # one for another system
        return False

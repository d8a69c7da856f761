"""Install this package and what requirements/core.txt pins into the running environment: by uv, or by pip where uv cannot.

    .venv/bin/python tools/install.py

uv reads none of pip's settings, so those that say where packages come from are handed to it: a machine with a CPU build of torch
beside pip keeps it.
"""
import ast
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
UV = "uv==0.13.9"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
PLACES = {  # pip's setting: uv's variable, and what stands between two values there
    "find-links": ("UV_FIND_LINKS", ","), "index-url": ("UV_DEFAULT_INDEX", " "), "extra-index-url": ("UV_INDEX", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "), "cert": ("SSL_CERT_FILE", " "), "proxy": ("ALL_PROXY", " "),
    "no-index": ("UV_NO_INDEX", " "), "default-timeout": ("UV_HTTP_TIMEOUT", " "), "timeout": ("UV_HTTP_TIMEOUT", " ")}


def pip_settings(listing: str) -> dict[str, list[str]]:
    "The values of each setting that `pip config list` prints; the environment wins over files."
    settings: dict[str, list[str]] = {}
    for line in sorted(listing.splitlines(), key=lambda line: line.startswith(":env:")):
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        if section in ("global", "install", ":env:") and value:
            settings[key] = str(ast.literal_eval(value)).split()
    return settings


def uv_environment(settings: dict[str, list[str]]) -> dict[str, str]:
    "What uv reads instead. Like pip, it takes the best version of all indexes, not of the first that has one."
    given = {variable: between.join(settings[name]) for name, (variable, between) in PLACES.items() if name in settings}
    return {"UV_INDEX_STRATEGY": "unsafe-best-match", **given}


def main() -> int:
    "The exit code of the installation."
    wanted = ["-r", str(ROOT / "requirements" / "core.txt")]
    listing = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True).stdout
    environment = uv_environment(pip_settings(listing)) | os.environ
    uv = [sys.executable, "-m", "uv", "pip", "install", "-q", "--python", sys.executable]
    own = ["--no-deps", "--editable", str(ROOT)]
    if subprocess.run([*PIP, "install", "-qq", UV]).returncode == 0 and all(
            subprocess.run([*uv, *words], env=environment).returncode == 0 for words in (wanted, own)):
        return 0
    print("uv could not install the packages; pip does, which takes some minutes.", file=sys.stderr)
    return max(subprocess.run([*PIP, "install", "-qq", *words]).returncode for words in (wanted, own))


if __name__ == "__main__":
    sys.exit(main())

"""Build the site: `python docs/build.py [--out FOLDER] [--without-sources]`. Every warning of Sphinx is a failure.

The mathematics and widget scripts are fetched once from the npm registry, so that the pages work offline and from a
disk; where npm is not there the pages name the scripts' public addresses instead.
"""
import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import stage
from sphinx.cmd.build import build_main

VENDOR = stage.DOCS / "_static" / "vendor"
SCRIPTS = {  # npm package: the files of it that are kept
    "mathjax@3.2.2": ("es5/tex-svg.js",),
    "requirejs@2.3.8": ("require.js",),
    "@jupyter-widgets/html-manager@1.0.15": ("dist/embed-amd.js",),
}


def fetch(package: str, files: tuple[str, ...]) -> None:
    "Take the files out of a package of the npm registry."
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([shutil.which("npm"), "pack", "--silent", package], cwd=folder, check=True, timeout=180,
                       stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        with tarfile.open(next(Path(folder).glob("*.tgz"))) as archive:
            for file in files:
                (VENDOR / Path(file).name).write_bytes(archive.extractfile(f"package/{file}").read())


def vendor() -> bool:
    "Whether the scripts are there, fetched if need be."
    complete = VENDOR / "complete"  # written last
    wanted = "\n".join(SCRIPTS) + "\n"
    if not (complete.exists() and complete.read_text() == wanted) and shutil.which("npm"):
        VENDOR.mkdir(parents=True, exist_ok=True)
        try:
            for package, files in SCRIPTS.items():
                fetch(package, files)
            complete.write_text(wanted)
        except (subprocess.SubprocessError, OSError, LookupError, StopIteration, tarfile.TarError) as problem:
            print(f"npm gave no scripts ({problem}); the pages will name their public addresses.", file=sys.stderr)
    return complete.exists()


def names(sources: bool) -> set[str]:
    "The pages of the site, without suffix, relative."
    pages = {"search", *(page.name for page in stage.pages())}
    if not sources:
        return pages
    modules = {path.relative_to(stage.ROOT) for path in stage.ROOT.glob("composer_replication/**/*.py")}
    modules = {path.parent if path.name == "__init__.py" else path.with_suffix("") for path in modules}
    return pages | {"_modules/index", *(f"_modules/{module.as_posix()}" for module in modules)}


def build(out: Path, sources: bool) -> int:
    "Stage and build; Sphinx's exit code."
    vendor()
    tag = [] if sources else ["-t", "without_sources"]
    source, wanted = stage.stage(), names(sources)
    built = {path: path.relative_to(out).with_suffix("").as_posix() for path in out.rglob("*.html")}
    anew = [] if wanted == {*built.values()} else ["-E", "-a"]  # a page came or went: the sidebar of every page names it
    code = build_main(["-W", "--keep-going", "-q", "-j", "auto", "-b", "html", "-c", str(stage.DOCS), *tag, *anew,
                       "-d", str(out.parent / "doctrees"), str(source), str(out)])
    (out / "llms.txt").write_text(stage.llms_txt())
    for old in (path for path, name in built.items() if name not in wanted):
        old.unlink()
    return code


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=stage.DOCS / "_build" / "html")
    parser.add_argument("--without-sources", action="store_true", help="leave out the page of each module's code: half the pages")
    given = parser.parse_args()
    sys.exit(build(given.out, not given.without_sources))

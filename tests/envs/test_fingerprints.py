"A copy of deleted code is found in the texts of a folder; a store of version control is not shown to an agent."

import os
import shutil
import subprocess

import numpy as np
import pytest

from composer_replication.envs.deletion import fingerprints
from composer_replication.envs.deletion.fingerprints import (
    index_folder,
    index_texts,
    shingles,
    shown_copies,
)

CODE = """    rows, place = [], 0
    for name, width in sorted(columns.items(), key=lambda pair: -pair[1]):
        if not name or width <= 0:
            raise ValueError(f"column {name!r} has no width")
        rows.append((place, "left" if width > limit else 'right'))
        place += width + gap
    return rows, place
"""
SOURCE = f"import os\n\n\ndef lay(columns, limit, gap=1):\n    'Where each column begins.'\n{CODE}\n\nSIZE = 3\n"
DATA = SOURCE.encode()


@pytest.mark.parametrize("store", [".git/objects/ab/cdef", ".jj/repo/store/git/objects/pack/x", ".hg/store/data/a.py.i",
                                   ".svn/pristine/ab/x.svn-base", "_darcs/hashed", "old/mirror/objects/ab/cdef"])
def test_a_store_of_version_control_is_not_shown(store, tmp_path):
    (tmp_path / store).parent.mkdir(parents=True)
    (tmp_path / store).write_bytes(os.urandom(100))
    if store.startswith("old"):
        (tmp_path / "old/mirror/refs").mkdir()
        (tmp_path / "old/mirror/HEAD").write_text("ref: refs/heads/main\n")
    assert store in index_folder(tmp_path).closed


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_a_clone_under_another_name(tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "a.py").write_text(SOURCE)
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@x", "-C", str(tmp_path / "work")]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"], ["gc", "-q"]):
        subprocess.run([*git, *words], check=True, capture_output=True)
    shutil.move(tmp_path / "work" / ".git", tmp_path / "shown" / "history")
    index = index_folder(tmp_path / "shown")
    packs = {path for path in index.paths if path.endswith(".pack")}
    assert packs and packs <= index.closed


@pytest.mark.parametrize("data", [b"", b"\0" * 5000, b"\x7fELF\0" + DATA, b"'" * 100_000, b"\xff\xfe\x00"])
def test_what_is_no_text_is_no_copy(data, tmp_path):
    (tmp_path / "file").write_bytes(data)
    assert index_folder(tmp_path).copies(shingles(CODE)) == []


def test_half_of_the_code_and_the_least_number_make_a_copy():
    code = np.arange(60, dtype=np.uint64)
    index = fingerprints._index({"half": code[:30], "less": code[:29], "most": code[10:], "none": code[:0]})
    assert index.copies(code) == ["half", "most"] and index.copies(code, ["most"]) == ["half"]
    assert index.copies(code[:30]) == ["half", "less"] and index.copies(code[:23]) == [] and index.copies(code[:23], least=23)


def test_only_what_changed_is_read_again(tmp_path):
    "A file that was changed behind its size and time shows what was read of it last."
    folder, kept = tmp_path / "tree", tmp_path / "index.npz"
    folder.mkdir()
    (folder / "a.py").write_text("x = 1\n")
    (folder / "gone.py").write_text(SOURCE)

    def blank(name):
        before = (folder / name).stat()
        (folder / name).write_bytes(b" " * before.st_size)
        os.utime(folder / name, ns=(before.st_atime_ns, before.st_mtime_ns))

    def copies():
        return index_folder(folder, kept).copies(shingles(CODE))

    assert copies() == ["gone.py"]
    blank("gone.py")
    assert copies() == ["gone.py"]
    fingerprints._LOADED.clear()  # as another process sees it
    (folder / "new.txt").write_bytes(DATA)
    assert copies() == ["gone.py", "new.txt"]
    (folder / "gone.py").unlink()
    assert copies() == ["new.txt"]
    blank("new.txt")
    assert copies() == ["new.txt"]
    (folder / "new.txt").write_bytes(b"x" + b" " * len(DATA))
    assert copies() == []


def test_the_tree_as_it_is_laid_out_is_what_counts(tmp_path):
    pristine, tree = tmp_path / "pristine", tmp_path / "tree"
    pristine.mkdir()
    (pristine / "rows.py").write_text(SOURCE)
    (pristine / "same.py").write_text("y = 2\n")
    shutil.copytree(pristine, tree)
    known, code = index_folder(pristine), shingles(CODE)
    assert shown_copies([code], tree, known) == ["rows.py"]
    (tree / "rows.py").write_text(SOURCE.replace(CODE, "    raise NotImplementedError\n"))
    assert shown_copies([code], tree, known) == []
    assert shown_copies([code], tree, known, [index_texts({"library.py": SOURCE})]) == ["library.py"]
    (tree / "notes.txt").write_text(f"See:\n{SOURCE}")
    assert shown_copies([code], tree, known) == ["notes.txt"]

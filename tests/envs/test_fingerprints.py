"A copy of deleted code is found in whatever an interpreter can open; what it cannot open is not shown to an agent."

import base64
import binascii
import bz2
import codecs
import gzip
import io
import json
import lzma
import marshal
import os
import pickle
import py_compile
import quopri
import shutil
import sqlite3
import subprocess
import tarfile
import zipfile
import zlib
from importlib.util import MAGIC_NUMBER
from urllib.parse import quote

import numpy as np
import pytest

from composer_replication.envs.deletion import fingerprints
from composer_replication.envs.deletion.fingerprints import (
    MOST_READ,
    index_folder,
    index_texts,
    plain,
    shingles,
    shown_copies,
    visible_texts,
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


def _zip(method=zipfile.ZIP_DEFLATED):
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", method) as archive:
        archive.writestr("package/rows.py", SOURCE)
    return target.getvalue()


def _tar(mode):
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode=mode) as archive:
        info = tarfile.TarInfo("package-1.0/rows.py")
        info.size = len(DATA)
        archive.addfile(info, io.BytesIO(DATA))
    return target.getvalue()


def _sqlite(rows):
    base = sqlite3.connect(":memory:")
    base.execute("create table kept (number integer, line blob)")
    base.executemany("insert into kept values (?, ?)", enumerate(rows))
    base.commit()
    return base.serialize()


def _notebook(source):
    return json.dumps({"cells": [{"cell_type": "code", "source": source, "outputs": []}], "nbformat": 4}, indent=1).encode()


def _dump(data):
    return "".join(f"{at:08x}  {data[at : at + 16].hex(' ')}  |...|\n" for at in range(0, len(data), 16))


B64 = base64.b64encode(DATA).decode()
LINES = SOURCE.splitlines()
FORMS = {
    "plain": DATA,
    "zip": _zip(),
    **{f"zip {method}": _zip(getattr(zipfile, f"ZIP_{method}")) for method in ("STORED", "BZIP2", "LZMA")},
    "zip behind an image": b"\x89PNG\r\n\x1a\n" + os.urandom(300) + _zip(),
    "zip without its end": _zip()[:-60],
    **{f"tar {mode}": _tar(mode) for mode in ("w", "w:gz", "w:xz", "w:bz2")},
    "gzip": gzip.compress(DATA),
    "gzip cut": gzip.compress(DATA * 3)[:-40],
    "zlib": zlib.compress(DATA),
    "zlib fast": zlib.compress(DATA, 1),
    "bz2": bz2.compress(DATA),
    "xz": lzma.compress(DATA),
    "lzma": lzma.compress(DATA, lzma.FORMAT_ALONE),
    "zip in gzip in xz": lzma.compress(gzip.compress(_zip())),
    "git object": zlib.compress(b"blob 9\0" + DATA),
    "pickle": pickle.dumps({"x": [SOURCE]}),
    "pickle of lines": pickle.dumps(LINES),
    "sqlite": _sqlite([SOURCE]),
    "sqlite of pages": _sqlite(["x" * 9000, SOURCE * 4]),
    "sqlite of lines": _sqlite(LINES),
    "sqlite of zlib": _sqlite([zlib.compress(DATA)]),
    "sqlite of base64": _sqlite([B64]),
    "notebook": _notebook(SOURCE.splitlines(True)),
    "notebook of one text": _notebook(SOURCE),
    "json of lines": json.dumps(LINES).encode(),
    "json lines": json.dumps({"text": SOURCE}).encode() + b"\n{}\n",
    "json in json": json.dumps({"a": json.dumps({"b": SOURCE})}).encode(),
    "json of letters": json.dumps("".join(f"\\u{ord(c):04x}" for c in SOURCE)).encode(),
    "python literals": "\n".join(f"    {line + chr(10)!r}" for line in LINES).encode(),
    "literals of 40": "\n".join(f"    {SOURCE[k : k + 40]!r}" for k in range(0, len(SOURCE), 40)).encode(),
    "repr": repr(DATA).encode(),
    "c string": "".join(f'"{line}\\n"\n' for line in (text.replace("\\", "\\\\").replace('"', '\\"') for text in LINES)).encode(),
    **{coded.__name__: coded(DATA) for coded in (
        base64.b64encode, base64.encodebytes, base64.urlsafe_b64encode, base64.b32encode, base64.b85encode, quopri.encodestring)},
    "base64 in a text": f"The data={B64[2:]} end".encode(),
    "base64 in literals": ("x = (" + "\n     ".join(f'"{B64[k : k + 60]}"' for k in range(0, len(B64), 60)) + ")").encode(),
    "base64 of gzip": base64.b64encode(gzip.compress(DATA)),
    "base64 of base64": base64.b64encode(B64.encode()),
    "ascii85": base64.a85encode(DATA, adobe=True, wrapcol=76),
    "hex": DATA.hex().encode(),
    "hex upper, spaced": DATA.hex(" ").upper().encode(),
    "hex dump": _dump(DATA).encode(),
    "hex array": ("{" + ", ".join(f"0x{byte:02x}" for byte in DATA) + "}").encode(),
    "escaped": "".join(f"\\x{byte:02x}" for byte in DATA).encode(),
    "octal": "".join(f"\\{byte:03o}" for byte in DATA).encode(),
    "numbers": str(list(DATA)).encode(),
    "bits": " ".join(f"{byte:08b}" for byte in DATA).encode(),
    "uuencoded": b"begin 644 x.py\n" + b"".join(binascii.b2a_uu(DATA[k : k + 45]) for k in range(0, len(DATA), 45)) + b"`\nend\n",
    "percent": quote(SOURCE).encode(),
    "html": SOURCE.replace("<", "&lt;").replace('"', "&quot;").encode() + b"</p>",
    "spans": "".join(f"<span class='k'>{word}</span> " for word in SOURCE.replace("<", "&lt;").split(" ")).encode(),
    **{name: SOURCE.encode(name) for name in ("utf-16", "utf-16-be", "utf-32", "utf-7", "utf-8-sig", "cp037")},
    "utf-16 behind bytes": b"\0\1\2" + SOURCE.encode("utf-16-le"),
    "rot13": codecs.encode(SOURCE, "rot13").encode(),
    "reversed": SOURCE[::-1].encode(),
    **{f"each line behind {mark}": "\n".join(f"{mark} {line}" for line in LINES).encode() for mark in ("#", ">", ">>>")},
    "removed in a diff": ("--- a/x.py\n+++ b/x.py\n@@ -1,9 +1,1 @@\n" + "\n".join(f"-{line}" for line in LINES)).encode(),
    "changed in a diff": ("--- a/x.py\n+++ b/x.py\n@@ -1,9 +1,9 @@\n" + "\n".join(
        f"{' -'[k % 2]}{line}" + "\n+other(text)" * (k % 2) for k, line in enumerate(LINES))).encode(),
    "numbered": "\n".join(f"{k:4}: {line}" for k, line in enumerate(LINES)).encode(),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_copy_is_found_in(form, tmp_path):
    (tmp_path / "file.bin").write_bytes(FORMS[form])
    (tmp_path / "other.txt").write_text("Nothing of it.\n" * 100)
    assert index_folder(tmp_path).copies(shingles(CODE)) == ["file.bin"]


def _encrypted():
    data = bytearray(_zip())
    data[6] |= 1
    return bytes(data)


CLOSED = {
    "7z": b"7z\xbc\xaf\x27\x1c" + os.urandom(200), "rar": b"Rar!\x1a\x07\x01\0" + os.urandom(200),
    "zstd": b"\x28\xb5\x2f\xfd" + os.urandom(200), "encrypted": _encrypted(), "compress": b"\x1f\x9d\x90" + os.urandom(200),
    "pack": b"PACK\0\0\0\2" + os.urandom(200), "bundle": b"# v2 git bundle\n\nPACK\0\0\0\2" + os.urandom(200),
    "lz4": b"GIF89a\0" + b"\x04\x22\x4d\x18" + os.urandom(99), "bomb": gzip.compress(gzip.compress(bytes(MOST_READ + 1))),
}


@pytest.mark.parametrize("data", CLOSED.values(), ids=CLOSED)
def test_what_cannot_be_opened_is_not_shown(data, tmp_path):
    (tmp_path / "file").write_bytes(data)
    (tmp_path / "area.py").write_text("x = 1\n")
    index = index_folder(tmp_path)
    assert index.closed == {"file"} and list(visible_texts(tmp_path)) == ["area.py"]
    assert shown_copies([], tmp_path, index) == ["file"]
    (tmp_path / "b.py").write_text("y = 2\n")
    assert index_folder(tmp_path).closed == {"file"}  # what is known of the file is kept


def test_bytecode_and_layers_without_end_are_not_shown(tmp_path):
    (tmp_path / "a.py").write_text(SOURCE)
    py_compile.compile(str(tmp_path / "a.py"), str(tmp_path / "cache"))
    (tmp_path / "marshalled").write_bytes(MAGIC_NUMBER + bytes(12) + marshal.dumps(compile(SOURCE, "a.py", "exec")))
    data = DATA
    for _ in range(12):
        data = gzip.compress(data)
    (tmp_path / "deep").write_bytes(data)
    assert index_folder(tmp_path).closed == {"cache", "deep", "marshalled"}


@pytest.mark.parametrize("mode", [py_compile.PycInvalidationMode.TIMESTAMP, py_compile.PycInvalidationMode.CHECKED_HASH])
def test_bytecode_is_shown_beside_its_own_source_alone(mode, tmp_path):
    (tmp_path / "package").mkdir()
    for path in (tmp_path / "a.py", tmp_path / "package" / "b.py"):
        path.write_text(SOURCE)
        py_compile.compile(str(path), invalidation_mode=mode)
    assert index_folder(tmp_path).closed == set()
    (tmp_path / "package" / "b.py").write_text("def lay(columns, limit, gap=1):\n    raise NotImplementedError\n")
    assert [path.split(".")[0] for path in index_folder(tmp_path).closed] == ["package/__pycache__/b"]


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


def test_ordinary_files_are_no_copies_and_stay_open(tmp_path):
    for k, data in enumerate([
            b"", b"\0" * 5000, os.urandom(50_000), b"\x7fELF" + b"7z\xbc\xaf\x27\x1c" + os.urandom(99),
            b"\x89PNG\r\n\x1a\n" + os.urandom(5000), b"id\r\n1,2,3,4,\r\n" * 40, b"don't \"quote " * 2000,
            b"SQLite format 3\0" + os.urandom(4000), b"PK\x03\x04", b"\x1f\x8b\x08", b"a" * 200_000, b"'" * 100_000,
            b"\\" * 100_000, b"0x" * 50_000, b"AAAA " * 30_000, ("é" * 40_000).encode(), b"\xff\xfe\x00",
            json.dumps([[[[1]]]] * 500).encode()]):
        (tmp_path / f"{k}").write_bytes(data)
    index = index_folder(tmp_path)
    assert index.copies(shingles(CODE)) == [] and not index.closed


def test_half_of_the_code_and_the_least_number_make_a_copy():
    code = np.arange(60, dtype=np.uint64)
    index = fingerprints._index({"half": code[:30], "less": code[:29], "most": code[10:], "none": code[:0]})
    assert index.copies(code) == ["half", "most"] and index.copies(code, ["most"]) == ["half"]
    assert index.copies(code[:30]) == ["half", "less"] and index.copies(code[:23]) == [] and index.copies(code[:23], least=23)


def test_only_what_changed_is_read_again(tmp_path):
    folder, kept = tmp_path / "tree", tmp_path / "index.npz"
    folder.mkdir()
    (folder / "a.py").write_text("x = 1\n")
    (folder / "gone.py").write_text(SOURCE)
    reads = []

    def read(data):
        reads.append(data)
        return plain(data)

    for _ in range(2):
        assert index_folder(folder, kept, read).copies(shingles(CODE)) == ["gone.py"] and len(reads) == 2
    fingerprints._LOADED.clear()  # as another process sees it
    (folder / "gone.py").unlink()
    (folder / "new.txt").write_bytes(DATA)
    assert index_folder(folder, kept, read).copies(shingles(CODE)) == ["new.txt"] and len(reads) == 3
    (folder / "new.txt").write_bytes(b"x" + DATA)
    assert index_folder(folder, kept, read).copies(shingles(CODE)) == ["new.txt"] and len(reads) == 4


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
    (tree / "notes.db").write_bytes(FORMS["sqlite"])
    assert shown_copies([code], tree, known) == ["notes.db"]

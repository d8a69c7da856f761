# ruff: noqa: E501
"""Files that hold the deleted code in some form: a tree holds none that no test opens, whatever the form."""

import ast
import base64
import binascii
import bz2
import codecs
import csv
import difflib
import dis
import gzip
import hashlib
import html
import io
import json
import lzma
import marshal
import pickle
import plistlib
import quopri
import re
import sqlite3
import symtable
import tarfile
import textwrap
import tokenize
import zipfile
import zlib
from urllib.parse import quote
from xml.sax.saxutils import escape

import pytest
from envs_tasks import LARDER, write

from composer_replication.envs.deletion.fingerprints import index_folder, shingles, shown_copies
from composer_replication.envs.deletion.judge.trees import lay_out
from composer_replication.envs.deletion.subject import prepare_subject

PLANS = (LARDER / "src/larder/plans.py").read_text()
BODY = PLANS[PLANS.index("    merged = []"):PLANS.index("\n\ndef schedule")]
CODE = f"def merge_spans(spans):\n{BODY}"
LINES = CODE.split("\n")
NUMBERED = list(enumerate(LINES, 1))


def packed(opened, name="small.py"):
    "An archive with the code in one file."
    stream = io.BytesIO()
    with opened(stream) as archive:
        if isinstance(archive, zipfile.ZipFile):
            archive.writestr(name, CODE)
        else:
            info = tarfile.TarInfo(name)
            info.size = len(CODE)
            archive.addfile(info, io.BytesIO(CODE.encode()))
    return stream.getvalue()


def database():
    with sqlite3.connect(":memory:") as base:
        base.execute("create table line (n, text)")
        base.executemany("insert into line values (?, ?)", NUMBERED)
        return base.serialize()


def rows(delimiter):
    stream = io.StringIO()
    csv.writer(stream, delimiter=delimiter).writerows(NUMBERED)
    return stream.getvalue()


def named(tree):
    return [(t.get_name(), [s.get_name() for s in t.get_symbols()]) for t in tree.get_children()]


BLOB = b"blob %d\0" % len(CODE) + CODE.encode()
COLOURED = ["".join(re.sub(r"(\w+|[^\w\s])", "\x1b[34m\\1\x1b[39;49;00m", line)) for line in LINES]
FORMS = {  # what a repository may hold beside its code, and how it shows the same code
    "plain.txt": CODE, "second.py": CODE, "second.py.orig": CODE, "small.py~": CODE, "upper.txt": CODE.upper(), "reversed.txt": CODE[::-1],
    "terminal.log": "\n".join(COLOURED), "screen.ansi": "".join(f"{line}\r\n" for line in COLOURED), "caret.txt": CODE.replace("\n", "^J\n"),
    "blame.txt": "\n".join(f"^1a2b3c4 (Ann Author 2024-05-01 10:11:12 +0200 {n:4d}) {line}" for n, line in NUMBERED),
    "grep.txt": "\n".join(f"src/small.py:{n}:{line}" for n, line in NUMBERED), "nl.txt": "\n".join(f"{n:6d}\t{line}" for n, line in NUMBERED),
    "change.diff": "\n".join(difflib.unified_diff([], LINES, "a", "b", lineterm="")), "removed.patch": "\n".join(f"-{line}" for line in LINES),
    "ed.txt": "0a\n" + CODE + ".\nw\n", "quoted.eml": "\n".join(f"> {line}" for line in LINES), "doctest.rst": "\n".join(f"    >>> {line}" for line in LINES),
    "guide.md": f"```python\n{CODE}```\n", "guide.rst": ".. code-block:: python\n\n" + textwrap.indent(CODE, "    "), "guide.adoc": f"[source]\n----\n{CODE}----\n",
    "guide.html": f"<pre>{html.escape(CODE)}</pre>", "coloured.html": "<pre>" + re.sub(r"(\w+)", r'<span class="n">\1</span>', html.escape(CODE)) + "</pre>",
    "guide.xml": f"<code>{escape(CODE)}</code>", "drawing.svg": "".join(f'<text y="{n}"><tspan>{escape(line)}</tspan></text>' for n, line in NUMBERED),
    "listing.tex": "\n".join(re.sub(r"(\w+)", r"\\PY{n}{\1}", line) for line in LINES), "verbatim.tex": "\\begin{verbatim}\n" + CODE + "\\end{verbatim}",
    "note.rtf": "{\\rtf1 " + "".join(re.sub(r"(\w+)", r"{\\cf2 \1}", line) + "\\par\n" for line in LINES) + "}", "man.1": "\n".join(f"\\&{line}" for line in LINES),
    "page.ps": "\n".join(f"72 {800 - 12 * n} moveto ({line}) show" for n, line in NUMBERED), "page.pdf": b"%PDF-1.4\n" + zlib.compress(CODE.encode()),
    "text.yaml": "code: |\n" + textwrap.indent(CODE, "  "), "items.yaml": "\n".join(f"- {json.dumps(line)}" for line in LINES), "data.toml": f"code = '''\n{CODE}'''\n",
    "data.ini": "[code]\n" + "\n".join(f"line{n} = {line}" for n, line in NUMBERED), "data.env": "CODE=" + json.dumps(CODE), "data.properties": CODE.replace("\n", "\\n\\\n"),
    "data.json": json.dumps({"code": CODE}), "lines.json": json.dumps(LINES), "rows.jsonl": "\n".join(json.dumps({"n": n, "text": line}) for n, line in NUMBERED),
    "small.ipynb": json.dumps({"cells": [{"cell_type": "code", "source": LINES}]}), "output.ipynb": json.dumps({"cells": [{"outputs": [{"text": COLOURED}]}]}),
    "data.csv": rows(","), "data.tsv": rows("\t"), "data.sql": "\n".join(f"INSERT INTO line VALUES({n},{line!r});" for n, line in NUMBERED),
    "data.db": database, "data.plist": lambda: plistlib.dumps({"code": LINES}), "data.bplist": lambda: plistlib.dumps({"code": CODE}, fmt=plistlib.FMT_BINARY),
    "embedded.c": "static const char code[] =\n" + "\n".join(f"  {json.dumps(line)} \"\\n\"" for line in LINES) + ";\n", "embedded.js": f"export default {json.dumps(CODE)};\n",
    "bytes.c": "{" + ",".join(map(str, CODE.encode())) + "}", "words.txt": " ".join(CODE.split()), "one.txt": "\n".join(CODE.split()), "rot13.txt": codecs.encode(CODE, "rot13"),
    "code.b64": base64.encodebytes(CODE.encode()), "code.b32": base64.b32encode(CODE.encode()), "code.a85": base64.a85encode(CODE.encode()), "code.hex": binascii.hexlify(CODE.encode()),
    "code.uu": b"begin 644 a\n" + b"".join(binascii.b2a_uu(line.encode()[:45]) for line in LINES) + b"end\n", "code.qp": quopri.encodestring(CODE.encode()), "code.url": quote(CODE),
    "code.u16": CODE.encode("utf-16"), "code.u32": CODE.encode("utf-32"), "code.ebcdic": CODE.encode("cp500"), "code.gz": lambda: gzip.compress(CODE.encode()),
    "code.bz2": lambda: bz2.compress(CODE.encode()), "code.xz": lambda: lzma.compress(CODE.encode()), "code.z": zlib.compress(CODE.encode()),
    "code.zip": lambda: packed(lambda stream: zipfile.ZipFile(stream, "w")), "code.whl": lambda: packed(lambda stream: zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED)),
    "code.tar": lambda: packed(lambda stream: tarfile.open(fileobj=stream, mode="w")), "code.tgz": lambda: packed(lambda stream: tarfile.open(fileobj=stream, mode="w:gz")),
    "code.pickle": pickle.dumps(CODE), "compiled.pickle": pickle.dumps(marshal.dumps(compile(CODE, "x", "exec"))), "small.marshal": marshal.dumps(compile(CODE, "x", "exec")),
    "kept.pyc": b"\0" * 16 + marshal.dumps(compile(CODE, "x", "exec")), "dis.txt": lambda: dis.Bytecode(compile(CODE, "x", "exec").co_consts[0]).dis(), "tree.txt": ast.dump(ast.parse(CODE), indent=1),
    "tokens.txt": lambda: "\n".join(map(str, tokenize.generate_tokens(io.StringIO(CODE).readline))), "symbols.txt": lambda: str(named(symtable.symtable(CODE, "x", "exec"))),
    "minified.txt": ast.unparse(ast.parse(CODE)).replace("    ", " "), "renamed.txt": CODE.replace("merged", "out").replace("spans", "parts"),
    "history.git/HEAD": "ref: refs/heads/main\n", f"history.git/objects/{hashlib.sha1(BLOB).hexdigest()}": zlib.compress(BLOB), "history.git/refs/heads/main": "0" * 40, "pack.bundle": b"# v2 git bundle\n" + zlib.compress(BLOB),
}  # fmt: skip


def held(form):
    made = form() if callable(form) else form
    return made if isinstance(made, bytes) else made.encode()


SMALL = f"""from pathlib import Path

NOTE = (Path(__file__).parent / "shown" / "note.txt").read_text()


{CODE}

def shown(name):
    return (Path(__file__).parent / "shown" / name).read_bytes()
"""
TESTS = """from pathlib import Path

import small


def test_merge_spans():
    assert small.merge_spans([(1, 3), (2, 5), (7, 8)]) == [(1, 5), (7, 8)]


def test_data():
    assert small.shown("table.bin") and (Path(__file__).parent / "expected.txt").read_text()
"""


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    "A package with each form at its top, beside the target, among its data, its tests' data and its documents; its own tests open three files."
    files = {"pyproject.toml": "[project]\nname = 'small'\nversion = '1.0'\n", "src/small/__init__.py": SMALL, "tests/test_small.py": TESTS,
             "src/small/shown/note.txt": "n", "src/small/shown/table.bin": b"\0\1\xff", "tests/expected.txt": "5"}
    for place in ("", "src/small/", "src/small/shown/", "tests/data/", "docs/", "src/unused/"):
        files |= {place + name: held(form) for name, form in FORMS.items()}
    folder = tmp_path_factory.mktemp("leftovers")
    return prepare_subject(write(folder / "repo", files), folder / "store")


def listed(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


OWN = ["pyproject.toml", "src/small/__init__.py", "src/small/shown/note.txt", "src/small/shown/table.bin", "tests/expected.txt", "tests/test_small.py"]


def test_no_form_of_the_code_lies_in_the_agent_s_or_the_judge_s_tree(subject, tmp_path):
    assert len(FORMS) >= 67 and listed(subject.tree) == OWN
    lay_out(subject.tree, {}, tmp_path / "judge")
    assert listed(tmp_path / "judge") == OWN


def test_what_the_agent_is_given_holds_no_copy_once_the_code_is_deleted(subject, tmp_path):
    known = index_folder(subject.tree)
    assert shown_copies([shingles(BODY)], subject.tree, known) == ["src/small/__init__.py"]
    lay_out(subject.tree, {"src/small/__init__.py": SMALL.replace(BODY, "    raise NotImplementedError\n").encode()}, tmp_path / "agent")
    assert shown_copies([shingles(BODY)], tmp_path / "agent", known) == []

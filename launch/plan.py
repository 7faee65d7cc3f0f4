r"""What would this pod do? Compiles the decoding loop for TPUs without a TPU.

  python -m launch.plan --topology=v5e:4x4 --target=llama-3.1-70b \
    --draft=llama-3.2-1b --batch_size=8 --max_length=4096 \
    --num_speculative_tokens=4 --output=P.json

  python -m launch.plan --topology=v5e:4x4 --target=llama-3.1-70b \
    --drafter=eagle3 --draft=eagle3-llama-3.1-70b --max_length=2048 \
    --output=P.json

Needs x86-64 Linux and `pip install -e '.[tpu]'`; no TPU, account or network.
Models are names in configs/shapes.py or paths of a `config.json`; so are draft
heads, whose kind is --drafter. For encoder-decoders --input_length says what
the encoder reads, --max_length what the decoder writes, and --prompt_length=1
that it begins with one token. What is reported as bytes, collectives and copies
is read from the compiled program; what is reported as time is a roofline
(launch/planning/roofline.py), a model and no measurement: for each pass whether
memory, arithmetic or collectives bound it, and the best number of drafted
tokens at acceptances of .5 to .95. Compiling takes half a minute to some
minutes; stderr says for how long it has.

With --sweep, --topology, --batch_size, --num_speculative_tokens and
--num_drafts take several values each, as in 1,2,4; --output then holds a list,
and --plot draws it.

Exit codes: 0, 2 for a mistake (unknown topologies list the known ones), 3 for
what does not fit; of a sweep, if nothing does.
"""

import dataclasses
import itertools
import os
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

if __name__ == "__main__":  # a compiler is all it takes; before jax starts
  os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from absl import flags

from configs import shapes
from launch import cli, figures, hardware, provenance, results, terminal
from launch.planning import answer, plots, program
from models import meshes
from models.formats import head_checkpoints, json_files
from models.formats.huggingface import translate
from models.head_shapes import KINDS, HeadShape
from models.networks.layers import TransformerConfig
from models.networks.t5_config import T5Config
from models.networks.transformer import SkippedLayers
from specjax import tree as tree_lib

cli.reads(
  cli.TARGET, cli.DRAFT, cli.RULE, cli.NUM_SPECULATIVE_TOKENS,
  cli.NUM_DRAFTS, cli.OUTPUT,
)  # fmt: skip
_TOPOLOGY = flags.DEFINE_list("topology", None, "Slices, as v5e:4x4 or v5p-8.")
_BATCH_SIZE = flags.DEFINE_list("batch_size", ["8"], "Rows, over all devices.")
_MAX_LENGTH = flags.DEFINE_integer(
  "max_length", 4096, "Tokens of a prompt with its completion.", lower_bound=2
)
_PROMPT_LENGTH = flags.DEFINE_integer(
  "prompt_length", 128,
  "Tokens that prefill takes at once; its temporaries grow with them.",
  lower_bound=1,
)  # fmt: skip
_TEXT_LENGTH = flags.DEFINE_integer(
  "text_length", None,
  "Tokens of the longest row when passes are timed; --max_length by default.",
  lower_bound=1,
)  # fmt: skip
_INPUT_LENGTH = flags.DEFINE_integer(
  "input_length", None, "Tokens that the encoder of an encoder-decoder reads.",
  lower_bound=1,
)  # fmt: skip
_DRAFTER = flags.DEFINE_enum(
  "drafter", "model",
  ("model", *KINDS, "ngram", "layer_skip", "lookahead", "plain"),
  "What proposes.",
)  # fmt: skip
_WINDOW = flags.DEFINE_integer(
  "window", 7, "Columns of the lookahead window; --num_drafts are guesses.",
  lower_bound=1,
)  # fmt: skip
_SKIP_ATTENTION = flags.DEFINE_list(
  "skip_attention", [], "Layers whose attention layer_skip leaves out."
)
_SKIP_MLP = flags.DEFINE_list(
  "skip_mlp", [], "Layers whose MLP layer_skip leaves out."
)
_TREE = flags.DEFINE_list(
  "tree", None, "Parents of a token tree, as -1,0,0,1,1; instead of paths."
)
_NUM_NODES = flags.DEFINE_integer(
  "num_nodes", 0, "Nodes of a tree that a head grows anew in every round, "
  "of certain tokens (EAGLE-2's); --num_speculative_tokens is its depth.",
  lower_bound=0,
)  # fmt: skip
_NUM_CHILDREN = flags.DEFINE_integer(
  "num_children", 10, "Children of a node of such a tree at most.",
  lower_bound=1,
)  # fmt: skip
_SIBLINGS = flags.DEFINE_string(
  "siblings", "iid", "How children are drawn; see specjax.siblings."
)
_MESH = flags.DEFINE_string(
  "mesh", "", "As data:2,model:8; all devices on 'model' by default."
)
_DRAFT_DEVICES = flags.DEFINE_integer(
  "draft_devices", None,
  "Devices that each copy of the draft is cut over; as many as can be, up to "
  "the target's.", lower_bound=1,
)  # fmt: skip
_SWEEP = flags.DEFINE_bool("sweep", False, "Plan every combination of values.")
_PLOT = flags.DEFINE_string("plot", None, "Where to draw a sweep, SVG or PNG.")

_OF_DRAFT = (cli.DRAFT, _DRAFT_DEVICES)
_OF_SKIPPED = (_SKIP_ATTENTION, _SKIP_MLP)
_OF_GROWN = (_NUM_NODES, _NUM_CHILDREN)
_UNREAD = {
  **dict.fromkeys(KINDS, (*_OF_SKIPPED, _WINDOW)),
  "model": (*_OF_SKIPPED, _WINDOW, *_OF_GROWN),
  "layer_skip": (*_OF_DRAFT, _WINDOW, *_OF_GROWN),
  "ngram": (*_OF_DRAFT, *_OF_SKIPPED, _SIBLINGS, _WINDOW, *_OF_GROWN),
  "lookahead": (*_OF_DRAFT, *_OF_SKIPPED, _SIBLINGS, _TREE, *_OF_GROWN),
  "plain": (
    *_OF_DRAFT, *_OF_SKIPPED, _SIBLINGS, _TREE, cli.RULE, cli.NUM_DRAFTS,
    cli.NUM_SPECULATIVE_TOKENS, _WINDOW, *_OF_GROWN,
  ),
}  # fmt: skip

_SHAPES = shapes.SHAPES | shapes.T5_SHAPES
_DOES_NOT_FIT = 3
_T = TypeVar("_T")


def shape(text: str) -> TransformerConfig | T5Config:
  """A model by its name, or by the path of its `config.json` or of its folder.

  Raises:
    UserError: if it is neither.
  """
  path = _shape_file(text)
  if text in shapes.HEADS or (
    path is not None and head_checkpoints.is_head(str(path.parent))
  ):
    raise cli.UserError(
      f"{text} is a draft head: say of what kind, as in --drafter=eagle3"
    )
  return _read(text, _SHAPES, _translated)


def head(text: str, kind: str, target: TransformerConfig) -> HeadShape:
  """A draft head, likewise.

  Args:
    text: its name, or where its `config.json` is.
    kind: what it is said to be.
    target: the model that it drafts for.

  Raises:
    UserError: if it is none, or another one.
  """
  about = head_checkpoints.Target(
    num_layers=target.num_layers,
    embed_dim=target.embed_dim,
    vocab_size=target.vocab_size,
  )
  found = _read(
    text,
    shapes.HEADS,
    lambda settings: head_checkpoints.shape(settings, about, kind=kind),
  )
  if found.kind != kind:
    raise cli.UserError(f"--drafter={kind}, and {text} is {found.kind!r}")
  return found


def _read(
  text: str,
  named: Mapping[str, dict[str, Any]],
  meant: Callable[[Mapping[str, Any]], _T],
) -> _T:
  """What the settings of that name, or in that file, mean."""
  path = _shape_file(text)
  if path is None and text in named:
    return meant(named[text])
  if path is None or not path.is_file():
    raise cli.UserError(
      f"unknown shape {text!r}: expected one of {sorted(named)}, or the path "
      "of a config.json"
    )
  try:
    return meant(json_files.read_object(path))
  except ValueError as error:
    raise cli.UserError(f"cannot use {path}: {error}") from error


def _translated(settings: Mapping[str, Any]) -> TransformerConfig | T5Config:
  """A shape; of a T5 whose file does not tie them, outputs are apart."""
  found = translate(settings)
  if isinstance(found, T5Config):
    tied = settings.get("tie_word_embeddings", True) is not False
    found = dataclasses.replace(found, tied_embeddings=tied)
  return found


def _shape_file(text: str) -> pathlib.Path | None:
  """Where a shape is read from; None for one that has a name."""
  if text in _SHAPES or text in shapes.HEADS:
    return None
  path = pathlib.Path(text)
  return path / "config.json" if path.is_dir() else path


def _layers(flag: flags.FlagHolder) -> tuple[int, ...]:
  """The layer numbers of a list flag; UserError if they are none."""
  if not all(text.isdecimal() for text in flag.value):
    raise cli.UserError(
      f"--{flag.name} must be layers, as in 1,3,5, got {','.join(flag.value)!r}"
    )
  return tuple(sorted({int(text) for text in flag.value}))


def question(
  topology: hardware.Topology, *, batch_size: int, length: int, num_drafts: int
) -> program.Question:
  """What the flags ask, for one combination of values."""
  if cli.TARGET.value is None:
    raise cli.UserError("--target is required; see --help for an example")
  is_head = _DRAFTER.value in KINDS
  drafts = is_head or _DRAFTER.value == "model"
  cli.refuse_with(f"--drafter={_DRAFTER.value}", *_UNREAD[_DRAFTER.value])
  if drafts and cli.DRAFT.value is None:
    raise cli.UserError(f"drafter {_DRAFTER.value!r} needs --draft")
  target = shape(cli.TARGET.value)
  draft = of_head = None
  if is_head:
    of_head = head(cli.DRAFT.value, _DRAFTER.value, target)
  elif drafts:
    draft = shape(cli.DRAFT.value)
  layout = meshes.parse(
    _MESH.value,
    topology.num_devices,
    draft=of_head.even_sizes() if of_head else draft,
    draft_devices=_DRAFT_DEVICES.value,
  )
  siblings = _SIBLINGS.value
  if _NUM_NODES.value:
    cli.refuse_with("--num_nodes", _TREE, _SIBLINGS, cli.NUM_DRAFTS)
    tree = tree_lib.bound(_NUM_NODES.value, length, _NUM_CHILDREN.value)
    siblings = "given"
  elif _TREE.value is not None:
    if cli.NUM_SPECULATIVE_TOKENS.value or cli.NUM_DRAFTS.value:
      raise cli.UserError(
        "--tree takes the place of --num_speculative_tokens and --num_drafts"
      )
    try:
      tree = tree_lib.Tree(tuple(int(p) for p in _TREE.value))
    except ValueError as error:
      raise cli.UserError(f"--tree: {error}") from error
  elif _DRAFTER.value == "plain":
    tree = tree_lib.chain(0)
  else:
    tree = tree_lib.paths(length, num_drafts)
  skipped = None
  if _DRAFTER.value == "layer_skip":
    skipped = SkippedLayers(
      attention=_layers(_SKIP_ATTENTION), mlp=_layers(_SKIP_MLP)
    )
  ahead = _WINDOW.value if _DRAFTER.value == "lookahead" else None
  usual = "token" if tree.is_chain else "recursive"
  if ahead or siblings == "given":
    usual = "match"  # for tokens that are certain
  return program.Question(
    target=target,
    draft=draft,
    head=of_head,
    skipped=skipped,
    lookahead=ahead,
    tree=tree,
    siblings=siblings,
    rule=cli.RULE.value or usual,
    batch_size=batch_size,
    max_length=_MAX_LENGTH.value,
    prompt_length=_PROMPT_LENGTH.value,
    layout=layout,
    input_length=_INPUT_LENGTH.value or 0,
    text_length=_TEXT_LENGTH.value,
  )


def warn_of_vocabularies(
  target: TransformerConfig | T5Config,
  draft: TransformerConfig | T5Config | None,
) -> None:
  """A line on stderr if two models may not speak of the same tokens."""
  if draft is not None and draft.vocab_size != target.vocab_size:
    print(
      f"warning: the target has {target.vocab_size} token ids and the draft "
      f"{draft.vocab_size}; they can be a pair only if they share a tokenizer, "
      "and the difference is padding",
      file=sys.stderr,
    )


def _result(plans: list[dict]) -> list[dict] | dict:
  return plans if _SWEEP.value else plans[0]


def run(_) -> int:
  """The command."""
  results.check(
    {"--output": cli.OUTPUT.value}, drawn={"--plot": _PLOT.value}, stdout=True
  )
  if not _TOPOLOGY.value:
    raise cli.UserError("--topology is required; see --help for an example")
  values = (
    [hardware.topology(name) for name in _TOPOLOGY.value],
    cli.integers(_BATCH_SIZE, default=[]),
    cli.integers(cli.NUM_SPECULATIVE_TOKENS, default=[4]),
    cli.integers(cli.NUM_DRAFTS, default=[1]),
  )
  combinations = list(itertools.product(*values))
  if len(combinations) > 1 and not _SWEEP.value:
    raise cli.UserError(
      f"{len(combinations)} combinations of values need --sweep"
    )
  if _PLOT.value and not _SWEEP.value:
    raise cli.UserError("--plot draws a --sweep")
  if _PLOT.value and not _PLOT.value.endswith((".svg", ".png")):
    raise cli.UserError(f"--plot must end in .svg or .png, got {_PLOT.value!r}")
  out = results.beside(cli.OUTPUT.value)
  console = terminal.console(out, width=None if out.isatty() else 100)
  questions = [  # all before the first minute of compiling is spent
    question(
      topology, batch_size=batch_size, length=length, num_drafts=num_drafts
    )
    for topology, batch_size, length, num_drafts in combinations
  ]
  for one in questions:
    one.check()
  warn_of_vocabularies(questions[0].target, questions[0].draft)
  names = {"--target": cli.TARGET.value, "--draft": cli.DRAFT.value}
  files = {flag: _shape_file(name) for flag, name in names.items() if name}
  made_by = provenance.record(files=files)
  plans = []
  for (topology, *_), asked in zip(combinations, questions, strict=True):
    count = f" {len(plans) + 1} of {len(questions)}" if _SWEEP.value else ""
    what = (
      f"compiling plan{count} for {topology.name}: batch {asked.batch_size}, "
      f"{asked.tree.num_drafted} drafted nodes"
    )
    with terminal.waiting(what):
      plans.append(answer.plan(topology, asked) | made_by)
    answer.show(console, plans[-1])
    if cli.OUTPUT.value and cli.OUTPUT.value != results.STDOUT:
      results.write_json(cli.OUTPUT.value, _result(plans))
  if cli.OUTPUT.value == results.STDOUT:
    results.write_json(results.STDOUT, _result(plans))
  if _PLOT.value:
    figures.save(lambda: plots.sweep(plans), _PLOT.value)
  return 0 if any(plan["fits"] for plan in plans) else _DOES_NOT_FIT


if __name__ == "__main__":
  # Programs for another machine cannot be read back from the cache.
  jax.config.update("jax_enable_compilation_cache", False)
  cli.run(run, required=())

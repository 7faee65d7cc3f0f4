r"""Plans decoding on a TPU slice: compiles the loop for it, without a TPU.

  python -m launch.plan --topology=v5e:4x4 --target=llama-3.1-70b \
    --drafter='model("llama-3.2-1b", tokens=4)' --batch_size=8 \
    --max_length=4096 --output=P.json

  python -m launch.plan --topology=v5e:4x4 --target=llama-3.1-70b \
    --drafter='eagle3("eagle3-llama-3.1-70b", tokens=4)' --max_length=2048 \
    --output=P.json

Needs x86-64 Linux and `pip install -e '.[tpu]'`; no TPU, account or network.
Models are names in configs/shapes.py or paths of a `config.json`; so are draft
heads. --drafter is a call as in configs (model, ngram, layer_skip, lookahead,
quantised_self, plain or a kind of head but assistant), without policies and
ladders. Without --rule a path is verified by token, certain tokens by match,
i.i.d. paths by block_transport and others by recursive. Weights are bfloat16,
or as --weights and the call say. For encoder-decoders --input_length says what
the encoder reads, --max_length what the decoder writes, and --prompt_length=1
that it begins with one token. Bytes, collectives and copies are read from the
compiled program. Times are a roofline (launch/planning/roofline.py), a model
and no measurement: for each pass whether memory, arithmetic or collectives
bound it, and the best number of drafted tokens at acceptances of .5 to .95. Of
a mixture of experts it says at which batch sizes, acceptances and lengths
drafting pays, and where it cannot; --experts takes measured counts in place of
uniform routing. Compiling takes half a minute to some minutes; stderr says for
how long it has.

With --sweep, --topology, --batch_size and --drafter take several values each,
as in 1,2,4; --output then holds a list, and --plot draws it.

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
import rich.console
from absl import flags

from configs import shapes
from launch import cli, display, hardware, provenance, report, results
from launch.assembly import layers, precision
from launch.assembly.drafting import Drafting
from launch.assembly.registry import DRAFTERS
from launch.planning import answer, mixtures, page, program
from models import head_shapes, meshes
from models.formats import head_checkpoints, json_files, mtp_format
from models.formats.huggingface import translate
from models.formats.huggingface_config import of_text
from models.head_shapes import KINDS, HeadShape
from models.networks import lowbits
from models.networks.layers import TransformerConfig
from models.networks.lowbits import Format
from models.networks.t5_config import T5Config
from specjax import calls, low_cache
from specjax import tree as tree_lib
from specjax.calls import Call
from specjax.siblings import GIVEN, IID

cli.reads(cli.TARGET, cli.RULE, cli.OUTPUT)
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
_DRAFTER = flags.DEFINE_string(
  "drafter", None, "What proposes, as in configs; of a --sweep several."
)
_MESH = flags.DEFINE_string(
  "mesh", "", "As data:2,model:8; all devices on 'model' by default."
)
_DRAFT_DEVICES = flags.DEFINE_integer(
  "draft_devices", None,
  "Devices that each copy of the draft is cut over; as many as can be, up to "
  "the target's.", lower_bound=1,
)  # fmt: skip
_EXPERTS = flags.DEFINE_string(
  "experts", None,
  "A result of launch.evaluate --count_experts: of a mixture's experts passes "
  "touch as many as there; uniform routing by default.",
)  # fmt: skip
_WEIGHTS = flags.DEFINE_string(
  "weights",
  "",
  "How the target's are stored: int8, int4, fp8; by default bfloat16.",
)
_CACHE = flags.DEFINE_enum(
  "cache", None, sorted(low_cache.KINDS),
  "What the target's keys and values are stored as; by default bfloat16.",
)  # fmt: skip
_SWEEP = flags.DEFINE_bool("sweep", False, "Plan every combination of values.")
_PLOT = flags.DEFINE_string("plot", None, "Where to draw a sweep, SVG or PNG.")

_DRAFTERS = (
  "plain", "model", "layer_skip", "quantised_self", "ngram", "lookahead",
  *KINDS,
)  # fmt: skip
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
      f'{text} is a draft head: say of what kind, as in eagle3("{text}")'
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
  head_shape = _read(
    text,
    shapes.HEADS,
    lambda settings: head_checkpoints.shape(settings, about, kind=kind),
  )
  if head_shape.kind != kind:
    raise cli.UserError(f"--drafter={kind}, and {text} is {head_shape.kind!r}")
  return head_shape


def own_head(text: str, target: TransformerConfig) -> HeadShape:
  """The MTP head of a target, of as many layers as its settings say.

  Args:
    text: the target's name, or where its `config.json` is.
    target: the model.

  Raises:
    UserError: if it has none that could be read.
  """

  def meant(settings: Mapping[str, Any]) -> HeadShape:
    # Of other families one could be trained, of one layer.
    comes = of_text(settings).get("model_type") in mtp_format.FORMS
    depths = mtp_format.num_depths(settings) if comes else 1
    return head_shapes.mtp_shape(target, num_depths=depths)

  return _read(text, shapes.SHAPES, meant)


def _read(
  text: str,
  named: Mapping[str, dict[str, Any]],
  meant: Callable[[Mapping[str, Any]], _T],
) -> _T:
  """The shape of that name, or in that file."""
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
  config = translate(settings)
  if isinstance(config, T5Config):
    tied = settings.get("tie_word_embeddings", True) is not False
    config = dataclasses.replace(config, tied_embeddings=tied)
  return config


def _shape_file(text: str) -> pathlib.Path | None:
  """The file of a shape; None for one that has a name."""
  if text in _SHAPES or text in shapes.HEADS:
    return None
  path = pathlib.Path(text)
  return path / "config.json" if path.is_dir() else path


def drafting_of(call: Call) -> Drafting:
  """The drafting of a --drafter; UserError for one that cannot be planned."""
  drafting = DRAFTERS.make(call)
  if call.name not in _DRAFTERS or drafting.policy is not None:
    raise cli.UserError(
      f"drafter {str(call)!r} is not planned: expected one of "
      f"{', '.join(_DRAFTERS)}, without a policy"
    )
  if drafting.needs_checkpoint and not drafting.checkpoint:
    raise cli.UserError(
      f'drafter {drafting.name!r} needs a shape, as {drafting.name}("NAME")'
    )
  if drafting.reads in ("head", "mtp") and drafting.weights:
    raise cli.UserError("heads are planned in bfloat16: leave out weights")
  return drafting


def usual_rule(drafting: Drafting) -> str:
  """The rule of a plan that names none.

  Of several i.i.d. paths of one length `block_transport` accepts most, for
  milliseconds where a round takes many (docs/rules.md).
  """
  if drafting.siblings is GIVEN:
    return "match"  # for tokens that are certain
  if drafting.tree.is_chain:
    return "token"
  tree = drafting.tree
  ends = {tree.depth[n] for n, below in enumerate(tree.children) if not below}
  whole = drafting.siblings is IID and len(ends) == 1
  return "block_transport" if whole else "recursive"


def question(
  topology: hardware.Topology, *, batch_size: int, drafting: Drafting
) -> program.Question:
  """The plan's question, by the flags and one combination of values."""
  if cli.TARGET.value is None:
    raise cli.UserError("--target is required; see --help for an example")
  target = shape(cli.TARGET.value)
  draft = of_head = skipped = ahead = None
  tree, siblings = drafting.tree, drafting.siblings.name
  if drafting.reads == "head":
    of_head = head(drafting.checkpoint, drafting.name, target)
  elif drafting.reads == "mtp":
    of_head = own_head(cli.TARGET.value, target)
  elif drafting.reads == "model":
    draft = shape(drafting.checkpoint)
  elif drafting.reads in ("layers", "weights") and drafting.checkpoint:
    skipped = layers.read(drafting.checkpoint)
  if draft is None and of_head is None:
    cli.refuse_with(f"--drafter={drafting.name}", _DRAFT_DEVICES)
  if drafting.name == "lookahead":
    ahead = (len(tree.lanes) + 1) // tree.max_depth
    tree = tree_lib.paths(tree.max_depth, tree.max_children)
  layout = meshes.parse(
    _MESH.value,
    topology.num_devices,
    draft=of_head.even_sizes() if of_head else draft,
    draft_devices=_DRAFT_DEVICES.value,
  )
  distinct = None
  if _EXPERTS.value:
    try:
      distinct = mixtures.measured(report.read(_EXPERTS.value), target)
    except FileNotFoundError:
      raise cli.UserError(f"--experts={_EXPERTS.value}: no such file") from None
    except (LookupError, TypeError, AttributeError, ValueError) as error:
      raise cli.UserError(f"--experts={_EXPERTS.value}: {error}") from error
  weights = precision.weights(_WEIGHTS.value)
  form = _format(drafting) if drafting.reads == "weights" else None
  return program.Question(
    target=target,
    draft=draft,
    head=of_head,
    skipped=skipped,
    lookahead=ahead,
    tree=tree,
    siblings=siblings,
    rule=cli.RULE.value or usual_rule(drafting),
    batch_size=batch_size,
    max_length=_MAX_LENGTH.value,
    prompt_length=_PROMPT_LENGTH.value,
    layout=layout,
    input_length=_INPUT_LENGTH.value or 0,
    text_length=_TEXT_LENGTH.value,
    distinct=distinct,
    weights=weights,
    draft_weights=_format(drafting) if drafting.reads == "model" else None,
    own_weights=lowbits.below(form, weights) if form and weights else form,
    cache=_CACHE.value,
    draft_cache=drafting.cache,
  )


def _format(drafting: Drafting) -> Format | None:
  """The format of a draft's weights; UserError for one that files decide."""
  if drafting.weights == "published":
    raise cli.UserError("a plan reads no weights: give the draft's format")
  return drafting.weights


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
  results.check(cli.OUTPUT.value, _PLOT.value)
  for flag in (_TOPOLOGY, _DRAFTER):
    if not flag.value:
      raise cli.UserError(f"--{flag.name} is required; see --help for examples")
  values = (
    [hardware.topology(name) for name in _TOPOLOGY.value],
    cli.integers(_BATCH_SIZE, default=[]),
    list(map(drafting_of, calls.parse_list(_DRAFTER.value))),
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
  console = rich.console.Console(file=out, width=None if out.isatty() else 100)
  questions = [  # all before the first minute of compiling is spent
    question(topology, batch_size=batch_size, drafting=drafting)
    for topology, batch_size, drafting in combinations
  ]
  for one in questions:
    one.check()
  drafts = {one.draft.vocab_size: one.draft for one in questions if one.draft}
  for draft in drafts.values():
    warn_of_vocabularies(questions[0].target, draft)
  made_by = provenance.record()
  plans = []
  for (topology, *_), asked in zip(combinations, questions, strict=True):
    count = f" {len(plans) + 1} of {len(questions)}" if _SWEEP.value else ""
    drafted = (
      f"compiling plan{count} for {topology.name}: batch {asked.batch_size}, "
      f"{asked.tree.num_drafted} drafted nodes"
    )
    with display.waiting(drafted):
      plans.append(answer.plan(topology, asked) | made_by)
    answer.show(console, plans[-1])
    if cli.OUTPUT.value and cli.OUTPUT.value != results.STDOUT:
      results.write_json(cli.OUTPUT.value, _result(plans))
  if cli.OUTPUT.value == results.STDOUT:
    results.write_json(results.STDOUT, _result(plans))
  if _PLOT.value:
    report.save(lambda: page.sweep(plans), _PLOT.value)
  return 0 if any(plan["fits"] for plan in plans) else _DOES_NOT_FIT


if __name__ == "__main__":
  # Programs for another machine cannot be read back from the cache.
  jax.config.update("jax_enable_compilation_cache", False)
  cli.run(run, required=())

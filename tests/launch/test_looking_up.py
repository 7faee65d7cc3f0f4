"""What is looked up, by its names on the command line; and corpora on disk."""

import json

import jax
import numpy as np
import pytest
from absl.testing import flagsaver

from configs import common
from launch import cli as command_line
from launch import decode, looking_up
from launch.build import drafters, pair, retrieval
from launch.evaluation import systems
from launch.tools import corpus_index
from models import tokenizers
from specjax.drafters.shared import corpus
from specjax.siblings import GIVEN

pytestmark = pytest.mark.usefixtures("quick_to_compile")

EMBEDDED = "configs/embedded.py"
TARGET = "models/pretrained/target"


def index(*args):
  with flagsaver.flagsaver():
    return command_line.execute(corpus_index.run, ["test", *map(str, args)])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
  """A folder of texts, and its index."""
  root = tmp_path_factory.mktemp("corpus")
  (root / "in" / "below").mkdir(parents=True)
  (root / "in" / "a.py").write_text("import os\nimport sys\n")
  (root / "in" / "below" / "b.txt").write_text("def main():\n  pass\n")
  (root / "in" / "image.bin").write_bytes(b"\xff\xfe\x00")
  (root / "in" / "zero.bin").write_bytes(b"ab\x00")
  (root / "in" / ".hidden").write_text("nobody")
  output = root / "index.safetensors"
  flags = (f"--target={TARGET}", f"--output={output}")
  assert index(f"--input={root / 'in'}", *flags) == 0
  return root, output


def test_an_index_holds_all_text_of_a_folder(made):
  root, output = made
  tokenizer = tokenizers.load(TARGET)
  found = retrieval.read(str(output), tokenizer)
  texts = ["import os\nimport sys\n", "def main():\n  pass\n"]
  expected = corpus.build([tokenizer.encode_text(t) for t in texts])
  jax.tree.map(np.testing.assert_array_equal, found, expected)
  assert retrieval.texts(str(root / "in")) == texts


def test_completions_are_indexed_by_line(made, tmp_path, capsys):
  lines = [{"id": 1, "completion": "x = 1"}, {"text": "y"}]
  file = tmp_path / "c.jsonl"
  file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
  output = tmp_path / "i.safetensors"
  flags = (f"--input={file}", f"--target={TARGET}", f"--output={output}")
  assert index(*flags) == 0
  assert capsys.readouterr().out.startswith("2 texts, ")
  assert index(*flags) == 0  # the same again
  file.write_text('{"text": "z"}')
  assert index(*flags) == 2
  assert "holds something else" in capsys.readouterr().err
  assert index(*flags, "--overwrite") == 0


@pytest.mark.parametrize(
  ("content", "words"),
  [
    ("{", "c.jsonl:1: not JSON"),
    ('{"text": "a"}\n{"prompt": "b"}', ':2: expected an object with a "co'),
    ("[1]", "c.jsonl:1: expected an object"),
    ("", "there is no text in"),
    (None, "no such file or folder"),
  ],
)
def test_what_is_no_corpus_is_one_line(content, words, tmp_path, capsys):
  file = tmp_path / "c.jsonl"
  if content is not None:
    file.write_text(content)
  output = f"--output={tmp_path / 'i'}"
  assert index(f"--input={file}", f"--target={TARGET}", output) == 2
  error = capsys.readouterr().err
  assert words in error
  assert error.count("\n") == 1


@pytest.mark.parametrize("missing", ["input", "target", "output"])
def test_every_flag_of_the_index_is_needed(missing, made, capsys):
  flags = dict(input=made[0], target=TARGET, output=made[1])
  given = [f"--{k}={v}" for k, v in flags.items() if k != missing]
  assert index(*given) == 2
  assert f"--{missing} is needed" in capsys.readouterr().err


def test_an_index_of_another_tokenizer_is_refused(made, tmp_path):
  other = tokenizers.train(["a b c"], vocab_size=300)
  with pytest.raises(ValueError, match="another tokenizer than the target's"):
    retrieval.read(str(made[1]), other)
  with pytest.raises(FileNotFoundError, match="no such corpus"):
    retrieval.read(str(tmp_path / "none"), other)
  (tmp_path / "text").write_text("text")
  with pytest.raises(ValueError, match="cannot use the corpus"):
    retrieval.read(str(tmp_path / "text"), other)


def config(**changes):
  found = common.get_config()
  found.target, found.draft = TARGET, "models/pretrained/draft"
  found.rule = "match"
  found.update(changes)
  return found


@pytest.mark.parametrize(
  ("changes", "words"),
  [
    (dict(drafter="lookahead", rule="token"), "config.rule=match verifies"),
    (dict(drafter="suffix", rule="block"), "config.rule=match verifies"),
    (dict(drafter="rasd", num_nodes=16, rule="token"), "rule=recursive verif"),
    (dict(drafter="rest"), "looks into a corpus: give config.corpus"),
    (dict(drafter="suffix", num_drafts=2), "makes its trees by itself"),
    (dict(drafter="suffix", tree=(-1, 0)), "makes its trees by itself"),
    (dict(drafter="suffix", num_nodes=3), r"depth of a draft \(5\), got 3"),
    (dict(drafter="suffix", nodes_per_match=0.5), "nodes_per_match must be"),
    (dict(drafter="lookahead", num_nodes=9), "and no num_nodes"),
    (dict(drafter="lookahead", window=0), "needs columns and guesses"),
    (dict(drafter="rasd", draft="", num_nodes=16), "needs a draft checkpoint"),
    (dict(drafter="rasd"), "needs num_nodes above the 5 nodes"),
    (dict(drafter="ngram", num_nodes=30), "and the drafter is 'ngram'"),
  ],
)
def test_settings_that_do_not_fit_are_refused_in_words(changes, words):
  with pytest.raises(ValueError, match=words):
    pair.check_config(config(**changes))


def test_systems_of_an_evaluation_name_their_settings():
  _, ahead, suffix, both = systems.parse(
    "lookahead:window=3,num_guesses=4,suffix:num_nodes=12,"
    "rasd:num_nodes=20,siblings=top_k,corpus=I",
    config(),
  )
  tree = drafters.make_tree(ahead.config)
  assert (tree.num_drafted, len(tree.lanes)) == (4 * 5, 2 + 4 * 3)
  assert drafters.make_tree(suffix.config).num_drafted == 12
  assert drafters.make_siblings(suffix.config) is GIVEN
  assert drafters.make_tree(both.config).num_drafted == 20
  assert drafters.reads_corpus(both.config)
  assert not drafters.reads_corpus(suffix.config)


def test_a_tree_of_the_drafts_own_is_not_the_depth_of_the_whole():
  found = config(drafter="rasd", tree=(-1, 0, 0), num_nodes=9, siblings="top_k")
  assert pair.settled(found).num_speculative_tokens == 5
  tree, _ = looking_up.form_of_rasd(found)
  assert (tree.num_drafted, tree.max_depth) == (9, 5)


@pytest.mark.parametrize(
  "flags",
  [
    pytest.param(
      ("lookahead", "--config.window=3", "--config.num_guesses=2"),
      marks=pytest.mark.heavy,
    ),
    pytest.param(("rest",), marks=pytest.mark.heavy),
    ("rasd", "--config.num_nodes=8", "--config.siblings=top_k"),
  ],
)
def test_greedy_texts_are_those_of_plain_decoding(flags, cli, made, tmp_path):
  """With the index of a corpus, and a provenance that names it."""
  prompts = tmp_path / "p.jsonl"
  prompts.write_text('{"id": 0, "prompt": "import os\\nimport"}\n')
  name, *more = flags
  texts = []
  for drafter in (f"--config.drafter={name}", None):
    out, summary = tmp_path / f"{drafter}.jsonl", tmp_path / f"{drafter}.json"
    given = ["--config.num_speculative_tokens=0"]
    if drafter:
      given = [drafter, "--config.rule=match", *more]
      given += ["--config.num_speculative_tokens=3"]
      given += [f"--config.corpus={made[1]}"] * (name != "lookahead")
    code = cli(
      decode.run, *given, "--config.max_new_tokens=16", "--nobaseline",
      f"--prompts={prompts}", f"--output={out}", f"--summary={summary}",
      config=EMBEDDED,
    )  # fmt: skip
    assert code == 0
    texts.append(json.loads(out.read_text())["completion"])
    if drafter and name != "lookahead":
      found = json.loads(summary.read_text())["provenance"]["checkpoints"]
      assert len(found["corpus"]["sha256"]) == 64
  assert texts[0] == texts[1]


def test_a_tree_of_the_default_size_has_room_beside_its_longest_path():
  found, _ = looking_up.form_of_lookup(config(drafter="suffix"))
  assert found.max_depth == 5
  assert found.max_children > 5

"""Heads from the command line: a directory tells by itself what it is."""

import files
import heads_on_disk
import jax
import jax.numpy as jnp
import pytest
import several

from configs import huggingface
from launch import pair, prompts
from specjax.runtime import engine

pytestmark = pytest.mark.usefixtures("quick_to_compile")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  path = tmp_path_factory.mktemp("heads")
  heads_on_disk.write_all(path)
  return path


def settings(saved, head, **changes):
  config = huggingface.get_config(
    f"target={saved / 'target'},draft={saved / head}"
  )
  config.update({"max_new_tokens": 12, "num_speculative_tokens": 3, **changes})
  return config


RUNS = {
  "a chain": ("eagle3", {}),
  "a dynamic tree": (
    "eagle3", dict(num_nodes=8, num_children=3, rule="match", drafter="eagle3")
  ),
  "a certain tree": (
    "medusa",
    dict(tree=(-1, 0, 0, 1, 2, 3), siblings="given", rule="match"),
  ),
  "a drawn tree": (
    "medusa", dict(num_drafts=2, rule="kseq", drafter="medusa")
  ),
  "typical acceptance": (
    "medusa",
    dict(tree=(-1, 0, 0, 1, 2, 3), siblings="top_k", rule="typical"),
  ),
  "a block": ("parallel", dict(rule="block", drafter="parallel")),
  "the best tree of a block": (
    "parallel", dict(num_nodes=8, num_children=3, rule="match")
  ),
  "blockwise": ("blockwise", dict(siblings="given", rule="match")),
  "a text that is read on": (
    "eagle3", dict(drafter="eagle3", repeats=1, elsewhere=2)
  ),
  "a ladder of chains": ("eagle3", dict(ladder=(0, 1, 3), drafter="eagle3")),
  "a ladder of marginals": (
    "medusa", dict(ladder=(0, 1, 3), drafter="medusa")
  ),
}  # fmt: skip


@pytest.mark.parametrize(
  "name",
  [n if n in ("a ladder of chains", "a certain tree",
              "the best tree of a block")
   else pytest.param(n, marks=pytest.mark.heavy) for n in RUNS],
)  # fmt: skip
def test_greedy_text_is_that_of_plain_decoding(saved, name):
  head, changes = RUNS[name]
  config = pair.settled(settings(saved, head, **changes))
  found = pair.build(config, climbs=True)
  items = prompts.built_in(found.tokenizer, max_tokens=60)[:2]
  (batch,) = engine.make_batches(items, batch_size=2, max_width=60)
  texts = []
  for plain in (True, False):
    decodes = pair.engine_of(config, found, baseline=plain)
    if decodes.ladder is not None:  # whatever the clock says, all are tried
      decodes.ladder.every, decodes.ladder.patience = 2, 1
    done, _ = decodes.run(batch)
    texts.append([c.token_ids for c in done])
  assert texts[0] == texts[1]
  assert sum(c.num_drafted for c in done) > 0


def test_a_text_that_repeats_itself_is_read_on_in_place_of_the_head(saved):
  changes = dict(drafter="eagle3", repeats=1, elsewhere=1)
  found = pair.build(settings(saved, "eagle3", **changes))
  assert found.decoder.drafter.name == "eagle3, depth 1, repeats"
  assert found.decoder.widths == (2,)
  (batch,) = engine.make_batches(
    prompts.built_in(found.tokenizer, max_tokens=60)[:2],
    batch_size=2, max_width=60,
  )  # fmt: skip
  done, _ = pair.engine_of(settings(saved, "eagle3", **changes), found).run(
    batch
  )
  rounds = sum(c.num_target_calls for c in done)
  assert sum(c.num_drafted for c in done) > rounds  # the head drafts one


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (dict(repeats=4), r"must be in 1..max_ngram \(3\)"),
    (dict(repeats=-1), "must be in 1..max_ngram"),
    (dict(repeats=2, elsewhere=4), "elsewhere must be in 1..3"),
    (dict(repeats=2, elsewhere=1, depth="1"), "config.depth none"),
    (
      dict(repeats=2, drafter="model", draft="models/pretrained/draft"),
      "made of what stands",
    ),
    (
      dict(repeats=2, num_nodes=8, num_children=3, rule="match"),
      "with a dynamic tree",
    ),
    (dict(repeats=2, ladder=(0, 1, 3)), "not with repeats"),
    (dict(repeats=2, online=True), "learns online"),
    (dict(repeats=2, depth="optimal(cost=0.4)"), "learns from rounds"),
    (dict(repeats=2, num_drafts=2, rule="kseq"), "drafts one path"),
  ],
  ids=str,
)
def test_settings_that_do_not_go_with_reading_on_are_refused(
  saved, changes, message
):
  config = settings(saved, "eagle3", **(dict(drafter="eagle3") | changes))
  with pytest.raises(ValueError, match=message):
    pair.check_config(config)


@pytest.mark.parametrize(
  "head, changes, message",
  [
    ("eagle3", dict(drafter="medusa"), "is 'medusa', and the head .* 'eagle3'"),
    ("eagle3", dict(siblings="given"), "tokens that are not drawn"),
    ("medusa", dict(num_speculative_tokens=4), "says 3 tokens ahead.* depth 4"),
    ("eagle3", dict(num_nodes=8, num_children=3), "rule 'token'"),
    ("target", dict(drafter="eagle"), "cannot use the head in .*/target"),
    (
      "target",
      dict(num_nodes=12, rule="match"),
      "num_nodes is of a tree whose form",
    ),
    ("medusa", dict(tree=("mc_sim",)), "or one of .*mc_sim_7b_63"),
    ("eagle3", dict(ladder=(0, 2)), "got 'model' for a head: name its kind"),
    ("eagle3", dict(depth="2"), "got 'model' for a head: name its kind"),
    ("parallel", dict(ladder=(0, 2), drafter="parallel"), "got 'parallel'"),
    (
      "eagle3",
      dict(
        drafter="eagle3",
        ladder=(0, 2),
        num_nodes=8,
        num_children=4,
        rule="match",
      ),
      "not with num_nodes",
    ),
    (
      "medusa",
      dict(drafter="medusa", ladder=(0, 2), siblings="given", rule="match"),
      "not with siblings",
    ),
  ],
)
def test_what_does_not_fit_is_one_line(saved, head, changes, message):
  with pytest.raises(ValueError, match=message) as error:
    pair.build(settings(saved, head, **changes))
  assert "\n" not in str(error.value)


def test_no_text_is_longer_than_the_head_knows(saved):
  """The target knows 256 positions, its heads that have any 200."""

  def begin(found, length):
    prompts = jnp.zeros((1, 4), jnp.int32)
    return jax.eval_shape(
      lambda: found.decoder.init(
        found.params, prompts, jnp.array([4]), jax.random.key(0),
        buffer_length=length, max_new_tokens=8,
      )
    )  # fmt: skip

  for head, most in (("eagle3", 200), ("parallel", 200), ("medusa", 256)):
    config = pair.settled(settings(saved, head, max_length=250))
    found = pair.build(config)
    assert found.max_length == min(most, 250)
    assert begin(found, most).tokens.shape[1] >= most
    with pytest.raises(ValueError, match=rf"model has {most} positions"):
      begin(found, most + 1)


def test_a_published_tree_is_named(saved):
  config = settings(
    saved, "medusa", tree=("mc_sim_7b_63",), siblings="given", rule="match"
  )
  with pytest.raises(ValueError, match=r"says 3 tokens ahead.* depth 4"):
    pair.build(config)
  config.tree = ("mc_sim_7b_63", "eagle_25")
  with pytest.raises(ValueError, match="or one of"):
    pair.check_config(config)


@pytest.mark.heavy
@pytest.mark.parametrize("head", ["eagle3", "medusa", "parallel"])
def test_two_processes_decode_on_a_mesh_what_one_device_does(
  saved, head, tmp_path
):
  """Greedy in float32; a near-tie may go either way, none of these does."""
  records = [{"id": i, "prompt": f"def f{i}(x):\n  return"} for i in range(2)]
  prompts = files.write_jsonl(tmp_path / "in.jsonl", records)
  command = [
    "-m", "launch.decode", "--nobaseline", f"--prompts={prompts}",
    f"--config=configs/huggingface.py:target={saved / 'target'},"
    f"draft={saved / head}",
    "--config.max_new_tokens=12", "--config.num_speculative_tokens=3",
    "--config.batch_size=2",
  ]  # fmt: skip
  rows = []
  for count, mesh in ((1, ""), (2, "data:2,model:2")):
    output = tmp_path / f"{count}.jsonl"
    run = [*command, f"--output={output}", f"--config.mesh={mesh}"]
    for code, _, errors in several.finish(
      several.start([run] * count, devices=2 if mesh else 1)
    ):
      assert code == 0, errors[-3000:]
    rows.append([row["token_ids"] for row in files.read_jsonl(output)])
  assert rows[0] == rows[1]


def test_a_head_that_cannot_be_cut_so_is_one_line(saved, monkeypatch):
  monkeypatch.setattr(jax, "devices", lambda: real * 3)
  real = jax.local_devices()
  monkeypatch.setattr(jax, "device_count", lambda: 3)
  with pytest.raises(ValueError, match="cannot be cut over 3 devices"):
    pair.build(settings(saved, "eagle3", mesh="data:1,model:3", batch_size=1))

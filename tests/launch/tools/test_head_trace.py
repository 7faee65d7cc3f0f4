"""launch.tools.head_trace: what is written is what the head says."""

import json

import files
import heads_on_disk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import flagsaver

from launch import cli as command_line
from launch.tools import head_trace
from models import checkpoints
from models.networks.transformer import SkippedLayers

pytestmark = pytest.mark.usefixtures("quick_to_compile")


def trace(folder, head, *args, code=0):
  output = folder / "trace.json"
  config = f"configs/huggingface.py:target={folder / 'target'},draft={head}"
  with flagsaver.flagsaver():
    arguments = [
      f"--config={config}", f"--output={output}", "--overwrite",
      "--config.max_new_tokens=10",
      f"--config.drafter={head.name}(tokens=3)", *args,
    ]  # fmt: skip
    assert command_line.execute(head_trace.run, ["test", *arguments]) == code
  return json.loads(output.read_text()) if not code else None


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  path = tmp_path_factory.mktemp("traced")
  heads_on_disk.write_all(path)
  files.write_jsonl(
    path / "in.jsonl",
    [{"id": "a", "prompt": "import os\n"}, {"id": "b", "prompt": "def f("}],
  )
  return path


@pytest.fixture(scope="module")
def traced(folder):
  return trace(
    folder, folder / "eagle3", f"--prompts={folder / 'in.jsonl'}",
    "--trace_rounds=2", "--top=4", "--config.rule=match",
    "--config.drafter=eagle3(tokens=3, tree=dynamic(6, top_k=2))",
  )  # fmt: skip


def test_it_says_what_it_is_of_and_what_to_expect(traced):
  assert traced["head"] == {"kind": "eagle3", "features": [0, 1]}
  assert {"block_efficiency": 6.13} == {
    k: v for k, v in traced["literature"][0].items() if k != "of"
  }
  assert 1 <= traced["block_efficiency"] <= 4
  assert traced["num_tokens"] == 20
  assert set(traced["provenance"]["checkpoints"]) == {"target", "draft"}


def test_features_are_those_of_the_target(traced, folder):
  """At the last token but one: embeddings, and what the first layer gave."""
  network = checkpoints.load(
    str(folder / "target"), dtype=jnp.float32, mesh=None, sharding=None
  )
  model = network.functions(SkippedLayers(), (0, 1))
  for one in traced["prompts"]:
    tokens = jnp.asarray([one["token_ids"]])
    cache = model.init_cache(1, tokens.shape[1])
    features = model.apply(network.params, tokens, cache)[0].features
    for part, values in zip(
      one["features"], np.split(features[0, -2], 2), strict=True
    ):
      assert part["norm"] == pytest.approx(np.linalg.norm(values), rel=1e-4)
      np.testing.assert_allclose(part["first"], values[:4], atol=1e-5)


def test_laws_are_those_of_the_head_fed_on_its_own(traced, folder):
  """The first round of each prompt, in a pass over the whole chain."""
  network = checkpoints.load(
    str(folder / "target"), dtype=jnp.float32, mesh=None, sharding=None
  )
  head = checkpoints.load_head(
    str(folder / "eagle3"), network, dtype=jnp.float32
  )
  model, params = head.functions()
  target = network.functions(SkippedLayers(), head.features)
  for one in traced["prompts"]:
    first = one["rounds"][0]
    ids = one["token_ids"]
    assert (first["position"], first["newest"]) == (len(ids), ids[-1])
    features = target.apply(
      network.params, jnp.asarray([ids]), target.init_cache(1, len(ids))
    )[0].features
    hidden = model.fuse(params, features[:, :-1])
    logits, states, cache = model.apply(
      params, jnp.asarray([ids[1:]]), hidden, model.init_cache(1, 40)
    )
    logits, states = logits[:, -1:], states[:, -1:]
    for drafted in first["drafted"]:
      law = np.asarray(jax.nn.log_softmax(logits[0, 0]))
      best = np.argsort(-law)[:4]
      assert drafted["token"] == best[0]
      assert [t for t, _ in drafted["top"]] == best.tolist()
      np.testing.assert_allclose(
        [v for _, v in drafted["top"]], law[best], atol=1e-3
      )
      logits, states, cache = model.apply(
        params, jnp.asarray([[drafted["token"]]]), states, cache
      )


def test_accepted_tokens_are_those_of_the_greedy_text(traced):
  for one in traced["prompts"]:
    text = one["token_ids"] + one["greedy"]
    for number, actual in enumerate(one["rounds"]):
      after = text[actual["position"] :]
      drafted = [d["token"] for d in actual["drafted"]]
      agrees = [a == b for a, b in zip(drafted, after, strict=False)]
      count = ([*agrees, False]).index(False)
      assert actual["accepted"] == count
      if number:
        before = one["rounds"][number - 1]
        assert actual["position"] == before["position"] + before["accepted"] + 1


def test_medusas_are_traced_too(folder):
  actual = trace(folder, folder / "medusa", f"--prompts={folder / 'in.jsonl'}")
  assert actual["head"] == {"kind": "medusa", "features": ["final"]}
  assert len(actual["prompts"][0]["rounds"][0]["drafted"]) == 3


@pytest.mark.parametrize(
  "head, args, message",
  [
    ("target", ["--config.drafter=model"], "no draft head drafts: 'model'"),
    ("eagle3", ["--config.mesh=data:1,model:1"], "give no config.mesh"),
    ("eagle3", ["--config.drafter=plain"], "no draft head drafts: 'plain'"),
  ],
)
def test_mistakes_are_one_line(folder, head, args, message, capsys):
  trace(folder, folder / head, *args, code=2)
  (line,) = capsys.readouterr().err.strip().splitlines()
  assert message in line

"""`launch.decode --steps --log_probs`: what every round did."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from files import read_jsonl, write_jsonl

from launch import decode
from models.formats import huggingface, loading
from models.networks.transformer import as_language_model
from specjax.warp import make_sampling, warp

FLAGS = ("--config.max_new_tokens=12",
         "--config.drafter=model(tree=(-1,0,0,1,1))",
         "--config.rule=recursive", "--config.batch_size=3",
         "--config.seed=2")  # fmt: skip
TEMPERATURE, TOP_P = 0.8, 0.9
RECORDS = [
  {"id": "a", "prompt": "def f(x):\n", "temperature": TEMPERATURE,
   "top_p": TOP_P, "num_samples": 2},
  {"id": "b", "prompt": "import os", "temperature": 0},
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp("traced")


@pytest.fixture(scope="module")
def traced(cli, folder):
  """Rows and their rounds."""
  source = write_jsonl(folder / "in.jsonl", RECORDS)
  code = cli(
    decode.run, *FLAGS, "--log_probs", f"--prompts={source}",
    f"--output={folder / 'out.jsonl'}", f"--steps={folder / 'trace.jsonl'}",
    f"--summary={folder / 's.json'}",
  )  # fmt: skip
  assert code == 0
  lines = read_jsonl(folder / "trace.jsonl")
  rows = read_jsonl(folder / "out.jsonl")
  by_row = itertools.groupby(lines, key=lambda x: (x["id"], x.get("sample")))
  rounds = [list(actual) for _, actual in by_row]
  assert len(rows) == len(rounds) == 3
  return list(zip(rows, rounds, strict=True))


def joined(rounds, name):
  return list(itertools.chain.from_iterable(x[name] for x in rounds))


def test_traced_rounds_concatenate_to_rows_and_report_no_timings(
  traced, folder
):
  numbers = json.loads((folder / "s.json").read_text())
  for name in ("seconds", "tokens_per_second", "speedup"):
    assert numbers[name] is None
  assert numbers["block_efficiency"] > 1
  for row, rounds in traced:
    assert joined(rounds, "tokens") == row["token_ids"]
    assert [x["round"] for x in rounds] == list(range(len(rounds)))
    assert len(rounds) == row["num_target_calls"]
    start = rounds[0]["position"]
    for one in rounds:
      assert one["position"] == start
      start += len(one["tokens"])
      assert len(one["drafted"]) == 4
      assert one["parents"] == [0, 0, 1, 1]
      path = [one["drafted"][node - 1] for node in one["accepted"]]
      assert one["tokens"][: len(path)] == path[: len(one["tokens"])]
      kept = one["origins"].count("accepted")
      assert kept == min(len(path), len(one["tokens"]))
      assert sum(one["node_probs"]) == pytest.approx(1, abs=1e-5)
    assert joined(rounds, "warped_log_probs") == row["warped_log_probs"]


def test_raw_and_warped_log_probs_match_a_full_forward_pass(traced, pair):
  """Of one pass over the whole text, which is another program."""
  from models import tokenizers

  model, params = as_language_model(loading.load(huggingface.source(pair[0])))
  vocab = tokenizers.load(pair[0]).vocab_size
  prompt = tokenizers.load(pair[0]).encode(RECORDS[0]["prompt"])
  sampling = make_sampling(1, temperature=TEMPERATURE, top_p=TOP_P)
  for row, rounds in traced[:2]:
    ids = [*prompt, *row["token_ids"]]
    assert rounds[0]["position"] == len(prompt)
    output, _ = model.apply(
      params, jnp.array([ids]), model.init_cache(1, len(ids))
    )
    logits = output.logits[:, len(prompt) - 1 : -1, :vocab]
    at = lambda law, ids=row["token_ids"]: np.take_along_axis(
      np.asarray(law)[0], np.array(ids)[:, None], 1
    )[:, 0]
    np.testing.assert_allclose(
      row["log_probs"], at(jax.nn.log_softmax(logits)), atol=1e-3
    )
    np.testing.assert_allclose(
      row["warped_log_probs"], at(warp(logits, sampling)), atol=1e-3
    )
  greedy = traced[2][0]
  assert greedy["warped_log_probs"] == [0.0] * len(greedy["token_ids"])
  assert max(greedy["log_probs"]) < 0

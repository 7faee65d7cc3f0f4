"""`launch.studies.quality` and the scores it compares by."""

import json

import files
import jax
import numpy as np
import pytest
import torch
import transformers

from launch.studies import quality
from models import tokenizers
from models.formats import huggingface
from models.networks.transformer import as_language_model


@pytest.fixture(scope="module")
def tokenizer():
  return tokenizers.load(files.EMBEDDED)


def test_log_likelihood_is_the_mean_over_the_completion(pair, tokenizer):
  prompt = tokenizer.encode("def f(x):\n")
  completions = [tokenizer.encode(t) for t in ("return x\n", "pass", "x = 1")]
  actual = quality.log_likelihood(pair[0], tokenizer)(prompt, completions)
  model, params = as_language_model(huggingface.load(pair[0]))
  for score, completion in zip(actual, completions, strict=True):
    text = np.array([[*prompt, *completion]])
    cache = model.init_cache(1, text.shape[1])
    output, _ = jax.jit(model.apply)(params, text, cache)
    law = np.asarray(jax.nn.log_softmax(output.logits[0], axis=-1))
    places = range(len(prompt), text.shape[1])
    expected = np.mean([law[i - 1, text[0, i]] for i in places])
    assert score == pytest.approx(expected, abs=1e-4)


def test_reward_models_are_read_by_transformers(tokenizer, tmp_path):
  config = transformers.LlamaConfig(
    vocab_size=tokenizer.vocab_size, hidden_size=16, intermediate_size=16,
    num_hidden_layers=1, num_attention_heads=2, num_labels=1, pad_token_id=0,
  )  # fmt: skip
  torch.manual_seed(0)
  model = transformers.LlamaForSequenceClassification(config).eval()
  model.save_pretrained(tmp_path)
  tokenizers.save(tokenizer, str(tmp_path))
  prompt = tokenizer.encode("def f(x):\n")
  completions = [tokenizer.encode(t) for t in ("  return x\n", "pass")]
  actual = quality.reward(str(tmp_path), tokenizer)(prompt, completions)
  for score, completion in zip(actual, completions, strict=True):
    with torch.no_grad():
      ids = torch.tensor([[*prompt, *completion]])
      assert score == pytest.approx(float(model(ids).logits[0, 0]), abs=1e-5)


def test_win_rates_in_both_readings():
  first = np.array([[3, 3, 1], [1, 1, 1], [2, 0, 1]] * 2)
  second = np.array([[2, 2, 2], [2, 1, 2], [2, 1, 0]] * 2)
  actual = quality.win_rates(first, second)
  assert actual["comparisons_won"] == pytest.approx((2 + 0.5 + 1.5) / 9)
  assert actual["prompts_won"] == pytest.approx((1 + 0 + 0.5) / 3)
  low, high = actual["comparisons_won_ci"]
  assert low <= actual["comparisons_won"] <= high


@pytest.mark.slow
def test_the_command_compares_both_rules(cli, pair, tmp_path):
  output, asked = tmp_path / "q.json", tmp_path / "p.jsonl"
  asked.write_text('{"prompt": "def f(x):"}\n{"prompt": "import os"}\n')
  code = cli(
    quality.run, "--config.max_new_tokens=6", "--config.num_comparisons=6",
    "--config.batch_size=4", "--config.drafter=model(tokens=2)",
    "--config.epsilons=(0.0,0.5)", f"--prompts={asked}", f"--output={output}",
    config=f"configs/quality.py:target={pair[0]},draft={pair[1]}",
  )  # fmt: skip
  assert code == 0
  result = json.loads(output.read_text())
  assert result["num_prompts"] == 2
  exact, loose = result["rows"]
  assert (exact["epsilon"], loose["epsilon"]) == (0.0, 0.5)
  assert exact["total_variation"]["opt"] == pytest.approx(0, abs=1e-6)
  assert exact["total_variation"]["uno"] > 0
  for rule in ("opt", "uno"):
    assert loose["rejections_saved"][rule] > 0
    assert loose["total_variation"][rule] > 0
    assert 0 <= loose["against_lossless"][rule] <= 1

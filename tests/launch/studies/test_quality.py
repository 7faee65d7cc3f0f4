"""`launch.studies.quality` and the scores it compares by."""

import json

import files
import jax
import ml_collections
import numpy as np
import pytest
import torch
import transformers

from launch.studies import quality
from models import tokenizers
from models.formats import huggingface
from models.networks.transformer import as_language_model

pytestmark = pytest.mark.usefixtures("quick_to_compile")


@pytest.fixture(scope="module")
def tokenizer():
  return tokenizers.load(files.EMBEDDED)


def test_log_likelihood_is_the_mean_over_the_completion(pair, tokenizer):
  prompt = tokenizer.encode("def f(x):\n")
  completions = [tokenizer.encode(t) for t in ("return x\n", "pass", "x = 1")]
  actual = quality.LogLikelihood(pair[0], tokenizer)(prompt, completions)
  model, params = as_language_model(huggingface.load(pair[0]))
  for score, completion in zip(actual, completions, strict=True):
    text = np.array([[*prompt, *completion]])
    cache = model.init_cache(1, text.shape[1])
    output, _ = jax.jit(model.apply)(params, text, cache)
    law = np.asarray(jax.nn.log_softmax(output.logits[0], axis=-1))
    places = range(len(prompt), text.shape[1])
    expected = np.mean([law[i - 1, text[0, i]] for i in places])
    assert score == pytest.approx(expected, abs=1e-4)


def test_a_scorer_must_know_the_pairs_tokens(pair, tokenizer, tmp_path):
  other = tokenizers.train(["a b c"] * 3, vocab_size=260)
  directory = files.make_checkpoint(tmp_path / "other")
  tokenizers.save(other, directory)
  with pytest.raises(ValueError, match="the pair's tokenizer"):
    quality.LogLikelihood(directory, tokenizer)


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
  actual = quality.Reward(str(tmp_path), tokenizer)(prompt, completions)
  for score, completion in zip(actual, completions, strict=True):
    with torch.no_grad():
      ids = torch.tensor([[*prompt, *completion]])
      assert score == pytest.approx(float(model(ids).logits[0, 0]), abs=1e-5)
  model.config.pad_token_id = None  # then one by one
  model.save_pretrained(tmp_path / "unpadded")
  tokenizers.save(tokenizer, str(tmp_path / "unpadded"))
  alone = quality.Reward(str(tmp_path / "unpadded"), tokenizer)
  np.testing.assert_allclose(alone(prompt, completions), actual, atol=1e-5)
  model = transformers.LlamaForSequenceClassification(
    transformers.LlamaConfig(**{**config.to_dict(), "num_labels": 3})
  )
  model.save_pretrained(tmp_path / "three")
  tokenizers.save(tokenizer, str(tmp_path / "three"))
  with pytest.raises(ValueError, match="one output, got 3"):
    quality.Reward(str(tmp_path / "three"), tokenizer)
  # A causal model has no trained output: a new one would be random.
  transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "causal")
  tokenizers.save(tokenizer, str(tmp_path / "causal"))
  with pytest.raises(ValueError, match=r"no reward model.* score\.weight"):
    quality.Reward(str(tmp_path / "causal"), tokenizer)
  with pytest.raises(ValueError, match="no such folder of a reward model"):
    quality.Reward(str(tmp_path / "none"), tokenizer)


def test_a_long_text_is_scored_by_its_end(tokenizer, tmp_path):
  config = transformers.LlamaConfig(
    vocab_size=tokenizer.vocab_size, hidden_size=16, intermediate_size=16,
    num_hidden_layers=1, num_attention_heads=2, num_labels=1, pad_token_id=0,
  )  # fmt: skip
  transformers.LlamaForSequenceClassification(config).save_pretrained(tmp_path)
  tokenizers.save(tokenizer, str(tmp_path))
  settings = tmp_path / "tokenizer_config.json"
  settings.write_text(
    json.dumps(json.loads(settings.read_text()) | {"model_max_length": 8})
  )
  prompt = tokenizer.encode("def f(x):\n" * 8)
  completions = [tokenizer.encode(t) for t in ("  return x\n", "pass")]
  first, second = quality.Reward(str(tmp_path), tokenizer)(prompt, completions)
  assert first != second


def test_scores_do_not_depend_on_how_many_are_scored_together(
  pair, tokenizer, monkeypatch
):
  prompt = tokenizer.encode("def f(x):\n")
  completions = [tokenizer.encode(t) for t in ("return x\n", "pass", "x = 1")]
  scorer = quality.LogLikelihood(pair[0], tokenizer)
  together = scorer(prompt, completions)
  monkeypatch.setattr(quality, "_ROWS", 2)
  np.testing.assert_allclose(scorer(prompt, completions), together, rtol=1e-5)


@pytest.mark.parametrize(
  "flags, words",
  [
    (("--config.score=taste",), "score must be one of"),
    (("--config.score=reward",), "needs config.scorer"),
    (("--config.num_comparisons=0",), "num_comparisons must be >= 1"),
    (("--config.num_prompts=0",), "num_prompts must be >= 1"),
    (("--config.prompt_tokens=0",), "prompt_tokens must be >= 1"),
    (("--config.prompt_tokens=256",), "prompt_tokens (256) must be at most"),
    (("--config.epsilons=(-0.1,)",), "numbers >= 0"),
    (("--config.epsilons=('a',)",), "numbers >= 0"),
    (("--config.epsilons=()",), "numbers >= 0"),
  ],
)
def test_mistakes_are_one_line_and_exit_code_2(
  cli, pair, tmp_path, capsys, flags, words
):
  config = f"configs/quality.py:target={pair[0]},draft={pair[1]}"
  output = f"--output={tmp_path / 'q.json'}"
  assert cli(quality.run, *flags, output, config=config) == 2
  error = capsys.readouterr().err
  assert words in error
  assert error.count("\n") == 1


def test_where_nothing_was_rejected_there_is_nothing_to_save():
  config = ml_collections.ConfigDict({"epsilons": (0.1,)})
  counts = {
    "scores": [0.0], "tokens": 1, "rejections": 0, "total_variation": 0.0
  }  # fmt: skip
  names = ("token", "decoding_opt(epsilon=0.1)", "decoding_uno(epsilon=0.1)")
  rows = quality.rows_of(config, [{"rules": dict.fromkeys(names, counts)}])
  assert rows[0]["rejections_saved"] == {"opt": None, "uno": None}
  assert "– / –" in quality.table({"": {"rows": rows}})


def test_win_rates_in_both_readings():
  first = np.array([[3, 3, 1], [1, 1, 1], [2, 0, 1]] * 2)
  second = np.array([[2, 2, 2], [2, 1, 2], [2, 1, 0]] * 2)
  actual = quality.win_rates(first, second)
  assert actual["comparisons_won"] == pytest.approx((2 + 0.5 + 1.5) / 9)
  assert actual["prompts_won"] == pytest.approx((1 + 0 + 0.5) / 3)
  low, high = actual["prompts_won_ci"]
  assert 0 <= low <= actual["prompts_won"] <= high <= 1


@pytest.mark.heavy
def test_the_command_compares_and_resumes(cli, pair, tmp_path, capsys):
  output = tmp_path / "q.json"
  flags = ("--config.max_new_tokens=6", "--config.num_comparisons=6",
           "--config.batch_size=4",
           "--config.drafter=model(tokens=2)",
           "--config.num_prompts=2", "--config.prompt_tokens=16",
           "--config.epsilons=(0.0,0.5)", f"--output={output}")  # fmt: skip
  config = f"configs/quality.py:target={pair[0]},draft={pair[1]}"
  real, calls = quality.compare, []

  def dies(*args, **options):
    calls.append(args[-1])
    if len(calls) == 2:
      raise KeyboardInterrupt
    return real(*args, **options)

  quality.compare = dies
  try:
    with pytest.raises(KeyboardInterrupt):
      cli(quality.run, *flags, config=config)
    assert cli(quality.run, *flags, "--config.seed=3", config=config) == 2
    assert "config.seed was" in capsys.readouterr().err
    assert cli(quality.run, *flags, config=config) == 0
  finally:
    quality.compare = real
  assert calls == [0, 1, 1]
  result = json.loads(output.read_text())
  assert [row["epsilon"] for row in result["rows"]] == [0.0, 0.5]
  exact, loose = result["rows"]
  assert exact["total_variation"]["opt"] == pytest.approx(0, abs=1e-6)
  assert exact["total_variation"]["uno"] > 0
  for rule in ("opt", "uno"):
    assert loose["rejections_saved"][rule] > 0
    assert loose["total_variation"][rule] > 0
  for row in result["rows"]:
    assert 0 <= row["comparisons_won"] <= 1
  assert "comparisons won by OPT" in capsys.readouterr().out

r"""Quality of two lossy rules' texts: Decoding-OPT against Decoding-UNO.

  python -m launch.tools.held_out_prompts --output=P.jsonl --count=20
  python -m launch.studies.quality --config=configs/quality.py \
    --prompts=P.jsonl --output=OUT.json

Both rules complete every prompt many times at every epsilon, as does lossless
decoding; a score compares completions in pairs. OPT's win rate is given in two
readings: the share of comparisons won, with 95% intervals over prompts, and the
share of prompts on which it wins most of them (ties are half a win), beside the
rejections saved against lossless decoding and each rule's exact total variation
(the config's rule is ignored). Takes ten minutes on two cores.
"""

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import tqdm

from launch import cli, prompts, provenance, results
from launch.assembly import pair
from launch.evaluation import intervals
from models import checkpoints
from models.networks.transformer import as_language_model
from models.tokenizers import Tokenizer
from specjax.runtime.requests import make_batches
from specjax.state import Origin

cli.reads(cli.CONFIG, cli.PROMPTS, cli.OUTPUT)
_RULES = ("opt", "uno")
_ROWS = 16  # completions scored together, their logits all in memory


# A scorer is made of a directory and the pair's tokenizer, and called with the
# token ids of a prompt and of n completions: `f64[n]`, larger is better.


def log_likelihood(directory: str, tokenizer: Tokenizer):
  """Scores by the mean log-probability of a completion's tokens, in nats."""
  theirs = checkpoints.load_tokenizer(directory)
  if theirs.fingerprint() != tokenizer.fingerprint():
    raise ValueError(
      f"the scorer in {directory} must have the pair's tokenizer"
    )
  model, params = as_language_model(checkpoints.load_module(directory))

  @jax.jit
  def mean_of(params, tokens, first, last):
    output, _ = model.apply(params, tokens, model.init_cache(*tokens.shape))
    logits = output.logits[:, :-1, : tokenizer.vocab_size].astype(jnp.float32)
    log_probs = jax.nn.log_softmax(logits, axis=-1)
    each = jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1)[..., 0]
    place = jnp.arange(1, tokens.shape[1])
    inside = (place >= first) & (place < last[:, None])
    return jnp.sum(jnp.where(inside, each, 0), 1) / jnp.sum(inside, 1)

  def score(prompt, completions) -> np.ndarray:
    texts = [[*prompt, *completion] for completion in completions]
    last = np.array([*map(len, texts)], np.int32)
    width = 32 * (-(-max(last) // 32))  # few shapes
    tokens = np.array([text + [0] * (width - len(text)) for text in texts])
    parts = [
      mean_of(params, tokens[i : i + _ROWS], len(prompt), last[i : i + _ROWS])
      for i in range(0, len(tokens), _ROWS)
    ]
    return np.concatenate(parts).astype(np.float64)

  return score


def reward(directory: str, tokenizer: Tokenizer):
  """Scores by a Hugging Face sequence-classification model, with torch.

  Of a text longer than the model's tokenizer allows the end is scored.
  """
  import torch
  import transformers

  kind = transformers.AutoModelForSequenceClassification
  theirs = transformers.AutoTokenizer.from_pretrained(
    directory, truncation_side="left"
  )
  model, loaded = kind.from_pretrained(directory, output_loading_info=True)
  if model.config.num_labels != 1 or loaded["missing_keys"]:
    raise ValueError(
      f"the model in {directory} is no reward model of one trained output"
    )
  device = "cuda" if torch.cuda.is_available() else "cpu"
  model = model.eval().to(device)

  def score(prompt, completions) -> np.ndarray:
    values = []
    for completion in completions:  # one by one: no padding token is needed
      text = tokenizer.decode([*prompt, *completion])
      fed = theirs(text, return_tensors="pt", truncation=True).to(device)
      with torch.inference_mode():
        values.append(float(model(**fed).logits[0, 0]))
    return np.array(values)

  return score


SCORERS = {"log_likelihood": log_likelihood, "reward": reward}


def compare(config, engines, score, prompt, number: int, *, room: int) -> dict:
  """One prompt's scores and counts, by rule."""
  record = {}
  for place, (rule, one) in enumerate(engines.items()):
    first = (number * len(engines) + place) * config.num_comparisons
    batches = make_batches(
      [
        prompts.Prompt(first + i, i, prompt.text, prompt.token_ids)
        for i in range(config.num_comparisons)
      ],
      batch_size=config.batch_size,
      max_width=room,
    )
    completed = [done for batch in batches for done in one.run(batch)[0]]
    record[rule] = {
      "scores": score(prompt.token_ids, [c.token_ids for c in completed]),
      "tokens": sum(len(c.token_ids) for c in completed),
      "rejections": sum(c.origins.count(Origin.RESIDUAL) for c in completed),
      "total_variation": intervals.sum_known(
        c.total_variation for c in completed
      ),
    }
  return record


def win_rates(first: np.ndarray, second: np.ndarray) -> dict:
  """Win rates of the first, from scores `f[prompts, comparisons]` of both."""
  won = (first > second) + 0.5 * (first == second)
  by_prompt = won.mean(axis=1)
  prompts_won = (by_prompt > 0.5) + 0.5 * (by_prompt == 0.5)
  return {
    "comparisons_won": float(won.mean()),
    "comparisons_won_ci": intervals.mean_interval(by_prompt),
    "prompts_won": float(prompts_won.mean()),
  }


def row_of(epsilon: float, records: list[dict]) -> dict:
  """The report on an epsilon, from the records of all prompts."""
  column = lambda rule, name: np.array([x[rule][name] for x in records], float)
  rate = lambda rule, name: (
    column(rule, name).sum() / column(rule, "tokens").sum()
  )
  lossless = rate("token", "rejections")
  rules = {name: f"decoding_{name}(epsilon={epsilon})" for name in _RULES}
  scores = {name: column(rule, "scores") for name, rule in rules.items()}
  saved = lambda rule: 1 - rate(rule, "rejections") / lossless
  against = lambda name: win_rates(scores[name], column("token", "scores"))
  return {
    "epsilon": epsilon,
    **win_rates(scores["opt"], scores["uno"]),
    "against_lossless": {n: against(n)["comparisons_won"] for n in _RULES},
    # None where there were no rejections to save.
    "rejections_saved": {
      name: saved(rule) if lossless else None for name, rule in rules.items()
    },
    "total_variation": {
      name: rate(rule, "total_variation") for name, rule in rules.items()
    },
  }


def run(_) -> int:
  """The command."""
  config = cli.CONFIG.value
  results.check(cli.OUTPUT.value)
  names = ["token"] + [
    f"decoding_{rule}(epsilon={epsilon})"
    for epsilon in config.epsilons
    for rule in _RULES
  ]
  models, engines = pair.load(config), {}
  for name in names:
    settings = ml_collections.ConfigDict(config.to_dict())
    settings.rule = name
    assembled = pair.assemble(settings, models)
    engines[name] = pair.engine_of(settings, assembled)
  tokenizer = models.tokenizer
  room = assembled.room(config.max_new_tokens)
  items = prompts.distinct(
    prompts.all_of(cli.PROMPTS.value, tokenizer, max_tokens=room)
  )
  scorer = SCORERS[config.score](config.scorer or config.target, tokenizer)
  records = [
    compare(config, engines, scorer, prompt, number, room=room)
    for number, prompt in enumerate(tqdm.tqdm(items, unit="prompt"))
  ]
  rows = [row_of(epsilon, records) for epsilon in config.epsilons]
  result = {"rows": rows, "num_prompts": len(items)}
  results.write_json(cli.OUTPUT.value, result | provenance.record(config))
  return 0


if __name__ == "__main__":
  cli.run(run, required=("config", "output"))

"""Quality of two lossy rules' texts: Decoding-OPT against Decoding-UNO.

  python -m launch.studies.quality --config=configs/quality.py --output=OUT.json

Every prompt is completed many times by both rules at every epsilon, and once
more without loss; completions are compared in pairs by a score. The win rate of
OPT is given in both readings: the share of comparisons won, and the share of
prompts on which it wins most of them (ties are half a win), with 95% intervals
over prompts, Student's t of the first, Clopper and Pearson's of the second.
Beside it are the rejections saved against lossless decoding, and the exact
total variation of each rule (the config's own rule is not looked at). All of
--prompts are used; `num_prompts` counts the built-in ones without it. A stopped
run goes on with the same command.
"""

import math
import pathlib
import sys

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import tqdm

from launch import cli, prompts, provenance, report, results
from launch.assembly import pair
from launch.results import Journal
from launch.training import corpus
from models import checkpoints
from models.networks.transformer import as_language_model
from models.tokenizers import Tokenizer
from specjax import intervals
from specjax.runtime import engine
from specjax.runtime.requests import make_batches
from specjax.state import Origin

cli.reads(cli.CONFIG, cli.PROMPTS, cli.OUTPUT)
_RULES = ("opt", "uno")
_ROWS = 16  # completions scored together, their logits all in memory


# A scorer is built of a directory and the pair's tokenizer, and called with the
# token ids of a prompt and of n completions: `f64[n]`, larger is better.


class LogLikelihood:
  """Mean log-probability of a completion's tokens, nats, at temperature 1.

  Args:
    directory: a causal checkpoint.
    tokenizer: of the pair; the checkpoint's must be the same.

  Raises:
    ValueError: if the tokenizers differ.
  """

  def __init__(self, directory: str, tokenizer: Tokenizer):
    theirs = checkpoints.load_tokenizer(directory)
    if theirs.fingerprint() != tokenizer.fingerprint():
      raise ValueError(
        f"the scorer in {directory} must have the pair's tokenizer"
      )
    self._vocab = tokenizer.vocab_size
    model, self._params = as_language_model(checkpoints.load_module(directory))

    @jax.jit
    def score(params, tokens, first, last):
      output, _ = model.apply(params, tokens, model.init_cache(*tokens.shape))
      logits = output.logits[:, :-1, : self._vocab].astype(jnp.float32)
      law = jax.nn.log_softmax(logits, axis=-1)
      each = jnp.take_along_axis(law, tokens[:, 1:, None], axis=-1)[..., 0]
      place = jnp.arange(1, tokens.shape[1])
      inside = (place >= first) & (place < last[:, None])
      return jnp.sum(jnp.where(inside, each, 0), 1) / jnp.sum(inside, 1)

    self._score = score

  def __call__(self, prompt, completions) -> np.ndarray:
    """Scores of completions, `f64[n]`."""
    longest = len(prompt) + max(map(len, completions))
    width = 32 * (-(-longest // 32))  # few shapes
    tokens = np.zeros((len(completions), width), np.int32)
    last = np.zeros(len(completions), np.int32)
    for row, completion in enumerate(completions):
      text = [*prompt, *completion]
      tokens[row, : len(text)], last[row] = text, len(text)
    parts = [
      self._score(
        self._params, tokens[i : i + _ROWS], len(prompt), last[i : i + _ROWS]
      )
      for i in range(0, len(tokens), _ROWS)
    ]
    return np.concatenate(parts).astype(np.float64)


class Reward:
  """The scalar of a Hugging Face sequence-classification model, with torch.

  Of a text longer than the model's tokenizer allows the end is scored. On a GPU
  if torch has one; in batches if the model names its padding token.

  Args:
    directory: the reward model, with its own tokenizer.
    tokenizer: of the pair, whose ids are turned into text.

  Raises:
    ValueError: if there is no such directory, the model in it is none with one
      trained output, or torch is missing.
  """

  def __init__(self, directory: str, tokenizer: Tokenizer):
    try:
      import torch
      import transformers
    except ImportError as error:
      raise ValueError(
        "a reward model needs torch and transformers: pip install -e "
        "'.[experiments,test]'"
      ) from error
    if not pathlib.Path(directory).is_dir():
      raise ValueError(f"no such folder of a reward model: {directory}")
    transformers.logging.set_verbosity_error()
    self._torch, self._ours = torch, tokenizer
    kind = transformers.AutoModelForSequenceClassification
    try:
      self._tokenizer = transformers.AutoTokenizer.from_pretrained(
        directory, truncation_side="left", padding_side="right"
      )
      model, loaded = kind.from_pretrained(directory, output_loading_info=True)
    except ValueError as error:
      raise ValueError(
        f"cannot read the reward model in {directory}: {error}"
      ) from error
    if model.config.num_labels != 1:
      raise ValueError(
        f"the reward model in {directory} must have one output, got "
        f"{model.config.num_labels}"
      )
    missing = sorted(loaded["missing_keys"])
    if missing:  # they would be drawn at random
      raise ValueError(
        f"the model in {directory} is no reward model: it has no {missing[0]}"
      )
    # Without a padding token of its own a model finds no text's end in a batch.
    padding = model.config.pad_token_id
    if padding is not None:
      self._tokenizer.pad_token_id = padding
    self._rows = 1 if padding is None else _ROWS
    device = "cuda" if torch.cuda.is_available() else "cpu"
    self._model = model.eval().to(device)

  def __call__(self, prompt, completions) -> np.ndarray:
    """Scores of completions, `f64[n]`."""
    texts = [self._ours.decode([*prompt, *c]) for c in completions]
    scores = []
    for start in range(0, len(texts), self._rows):
      fed = self._tokenizer(
        texts[start : start + self._rows],
        return_tensors="pt", truncation=True, padding=self._rows > 1,
      ).to(self._model.device)  # fmt: skip
      with self._torch.inference_mode():
        scores.append(self._model(**fed).logits[:, 0].float().cpu().numpy())
    return np.concatenate(scores).astype(np.float64)


SCORERS = {"log_likelihood": LogLikelihood, "reward": Reward}


def check(config) -> None:
  """Raises ValueError for an experiment that compares nothing."""
  if config.score not in SCORERS:
    raise ValueError(
      f"score must be one of {sorted(SCORERS)}, got {config.score!r}"
    )
  if config.score == "reward" and not config.scorer:
    raise ValueError("score 'reward' needs config.scorer, a model's directory")
  for name in ("num_comparisons", "num_prompts", "prompt_tokens"):
    if config[name] < 1:
      raise ValueError(f"{name} must be >= 1, got {config[name]}")
  good = [
    isinstance(epsilon, (int, float)) and 0 <= epsilon < math.inf
    for epsilon in config.epsilons
  ]
  if not good or not all(good):
    raise ValueError(
      "epsilons must be one or more numbers >= 0, as in (0.1,0.2), got "
      f"{tuple(config.epsilons)}"
    )


def completions_of(config, one: engine.Engine, prompt, *, seed: int, room: int):
  """`num_comparisons` completions of a prompt, each from its own stream."""
  batches = make_batches(
    [
      prompts.Prompt(seed + i, i, prompt.text, prompt.token_ids)
      for i in range(config.num_comparisons)
    ],
    batch_size=config.batch_size,
    max_width=room,
  )
  return [done for batch in batches for done in one.run(batch)[0]]


def compare(config, engines, scorer, prompt, number: int, *, room: int) -> dict:
  """One prompt's scores and counts, for every rule and epsilon.

  Args:
    config: the experiment.
    engines: by rule, what decodes with it.
    scorer: of `SCORERS`.
    prompt: the prompt.
    number: of the prompt; runs of one rule draw from streams of their own.
    room: longest prompt that fits.
  """
  record: dict = {"batch": number, "rules": {}}
  for place, (rule, one) in enumerate(engines.items()):
    seed = (number * len(engines) + place) * config.num_comparisons
    completed = completions_of(config, one, prompt, seed=seed, room=room)
    record["rules"][rule] = {
      "scores": scorer(
        prompt.token_ids, [c.token_ids for c in completed]
      ).tolist(),
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
    "prompts_won_ci": intervals.share_interval(prompts_won.sum(), len(won)),
  }


def rows_of(config, records: list[dict]) -> list[dict]:
  """One row an epsilon."""
  column = lambda rule, name: np.array(
    [record["rules"][rule][name] for record in records], float
  )
  rate = lambda rule, name: (
    column(rule, name).sum() / column(rule, "tokens").sum()
  )
  lossless = rate("token", "rejections")
  rows = []
  for epsilon in config.epsilons:
    names = {r: f"decoding_{r}(epsilon={epsilon})" for r in _RULES}
    plain = column("token", "scores")
    opt, uno = (column(names[r], "scores") for r in _RULES)
    rows.append(
      {
        "epsilon": epsilon,
        **win_rates(opt, uno),
        "opt_against_lossless": win_rates(opt, plain)["comparisons_won"],
        "uno_against_lossless": win_rates(uno, plain)["comparisons_won"],
        "mean_score": {
          "opt": opt.mean(), "uno": uno.mean(), "lossless": plain.mean()
        },
        "rejections_saved": {  # None where there were none to save
          r: 1 - rate(names[r], "rejections") / lossless if lossless else None
          for r in _RULES
        },
        "total_variation": {
          r: rate(names[r], "total_variation") for r in _RULES
        },
      }
    )  # fmt: skip
  return rows


def table(results: dict[str, dict]) -> str:
  """The result as a Markdown table."""
  (result,) = results.values()
  both = lambda row, name: " / ".join(
    report.number(row[name][rule], ".3f") for rule in _RULES
  )
  return report.columns(
    result["rows"],
    {
      "ε": lambda x: f"{x['epsilon']}",
      "comparisons won by OPT": lambda x: report.estimate(
        x, "comparisons_won", ".3f"
      ),
      "prompts won by OPT": lambda x: report.estimate(x, "prompts_won", ".3f"),
      "won against lossless, OPT / UNO": lambda x: " / ".join(
        f"{x[f'{rule}_against_lossless']:.3f}" for rule in _RULES
      ),
      "rejections saved, OPT / UNO": lambda x: both(x, "rejections_saved"),
      "total variation, OPT / UNO": lambda x: both(x, "total_variation"),
    },
  )


def run(_) -> int:
  """The command."""
  config = cli.CONFIG.value
  results.check(cli.OUTPUT.value)
  check(config)
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
  if cli.PROMPTS.value:
    items = prompts.distinct(
      prompts.all_of(cli.PROMPTS.value, tokenizer, max_tokens=room)
    )
  else:
    if config.prompt_tokens > room:
      raise ValueError(
        f"prompt_tokens ({config.prompt_tokens}) must be at most {room}: "
        "prompt and completion share the pair's positions"
      )
    items = prompts.first_tokens(
      corpus.held_out_prompts(config.num_prompts),
      tokenizer,
      num_tokens=config.prompt_tokens,
    )
  scorer = SCORERS[config.score](config.scorer or config.target, tokenizer)
  settings = provenance.settings(config, prompts=[p.text for p in items])
  journal = Journal(cli.OUTPUT.value, settings)
  for number, prompt in enumerate(
    tqdm.tqdm(items, unit="prompt", disable=not sys.stderr.isatty())
  ):
    if number not in journal.batches:
      journal.add(compare(config, engines, scorer, prompt, number, room=room))
  result = {
    "rows": rows_of(config, [journal.batches[i] for i in range(len(items))]),
    "num_prompts": len(items),
    **provenance.record(config),
  }
  results.write_json(cli.OUTPUT.value, result)
  journal.finish()
  print(table({"": result}))
  return 0


if __name__ == "__main__":
  cli.run(run, required=("config", "output"))

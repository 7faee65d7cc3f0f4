r"""Looks for the sub-layers that a target should skip to draft for itself.

  python -m launch.layer_search --config=configs/embedded.py \
    --method=bayesian --evaluations=100 --output=skip.json
  python -m launch.decode --config=configs/embedded.py \
    --config.drafter='layer_skip("skip.json")'

Of the 2L attentions and MLPs some set is skipped in every draft pass
(Zhang et al., ACL 2024). Methods are bayesian (tree-structured Parzen
estimators; pip install 'specjax[search]'), random, greedy, and knapsack, the
dynamic programme of KnapSpec, which proposes one set for every saving. What is
maximised, --objective, is

  predicted  a throughput formula's speed-up, of the set's acceptance and cost:
             one pass over texts that the target emitted scores a set, and no
             program is compiled for it (launch/searching/scorer.py)
  measured   tokens per second of decoding the same prompts, over those of
             plain decoding: the truth, and minutes a set

--costs says what passes cost (launch/searching/costs.py): bytes, of the weights
they read, for the target on an accelerator at batch size 1; or measured, here.

Prompts are --prompts, as launch.decode reads them, or our own. The acceptance
is that of the config's temperature and truncations, over max_new_tokens of each
prompt. OUT.json is what layer_skip reads: the best set, with the number
of tokens to draft; beside it every evaluation, the best after each, and the
bound: what the cost model gives any set of that acceptance, if skipped layers
were all of them. A run that was stopped goes on where it was, and a finished
one goes on with more --evaluations. `launch.tables layers` draws the table.
"""

import dataclasses
import json
import sys
import time

import ml_collections
import tqdm
from absl import flags

from launch import cli, provenance, results
from launch.build import drafters, layers, pair
from launch.results import Journal
from launch.searching import costs as costs_lib
from launch.searching import knapsack, methods, page, texts
from launch.searching.costs import Costs
from launch.searching.scorer import Scorer
from models import checkpoints
from models.networks.transformer import SkippedLayers
from specjax.runtime import engine
from specjax.theory import throughput

cli.reads(cli.CONFIG, cli.PROMPTS, cli.OUTPUT, cli.SEED)
_METHOD = flags.DEFINE_enum(
  "method", "bayesian", [*methods.METHODS, "knapsack"], "How sets are proposed."
)
_OBJECTIVE = flags.DEFINE_enum(
  "objective", "predicted", ["predicted", "measured"], "What is maximised."
)
_EVALUATIONS = flags.DEFINE_integer(
  "evaluations", 100, "Sets that are scored.", lower_bound=1
)
_TOKENS = flags.DEFINE_integer(
  "draft_tokens", 8, "Drafted tokens, at most.", lower_bound=1
)
_COSTS = flags.DEFINE_enum(
  "costs", "bytes", costs_lib.MODELS, "What passes cost."
)


def settled(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
  """The config as it is run: the target drafts for itself, whatever it says."""
  config = ml_collections.ConfigDict(config.to_dict())
  config.drafter, config.rule = "plain", "token"
  if config.mesh:
    raise ValueError(f"layers are looked for on one device: {config.mesh!r}")
  return config


def evaluation(
  skipped: SkippedLayers, acceptance: float, costs: Costs, num_layers: int
) -> dict:
  """What is known of a set by its acceptance."""
  draft = costs.draft(skipped, num_layers)
  found = costs_lib.predict(acceptance, draft, costs.verify)
  count = found.num_speculative_tokens
  verify = float(throughput.verify_curve(costs.verify)(count + 1))
  needed = throughput.break_even(count, draft, verify, 1.0)
  return {
    **layers.as_json(skipped),
    "acceptance": acceptance,
    "draft_cost": draft,
    "num_speculative_tokens": count,
    "speedup": found.speedup,
    "break_even": needed if needed <= 1 else None,
    "bound": costs_lib.bound(acceptance, costs).speedup,
  }


def measured_speedup(
  config, loaded, skipped: SkippedLayers, batches, *, count: int
) -> float:
  """Tokens per second with `count` drafted, over those of plain decoding."""
  if skipped == SkippedLayers():
    return 1.0  # the target itself, which nobody would draft with
  drafting = dataclasses.replace(
    drafters.layer_skip(tokens=count), skipped=skipped
  )
  models = pair.assemble(config, loaded, drafting=drafting)
  rates = []
  for baseline in (False, True):
    one = pair.engine_of(config, models, baseline=baseline)
    runs = [one.run(batch) for batch in batches]
    tokens = sum(len(c.token_ids) for done, _ in runs for c in done)
    rates.append(tokens / sum(seconds for _, seconds in runs))
  return rates[0] / rates[1]


def improvements(evaluations: list[dict], score: str) -> list[dict]:
  """Each evaluation that was better than all before it."""
  found: list[dict] = []
  for number, one in enumerate(evaluations, start=1):
    if not found or one[score] > found[-1][score]:
      found.append({"evaluations": number, **one})
  return found


def search(
  propose: methods.Method, score, journal: Journal, count: int
) -> None:
  """Scores what a method proposes until so many sets are in the journal.

  Args:
    propose: the method, at its beginning.
    score: `SkippedLayers -> record`, with what is maximised under "score".
    journal: of the run; what is in it is told to the method, in its order.
    count: sets in all; fewer if the method has no more.

  Raises:
    ValueError: if the journal has other sets than the method proposes.
  """
  progress = tqdm.tqdm(
    total=count, initial=min(len(journal.batches), count), unit="set",
    disable=not sys.stderr.isatty(),
  )  # fmt: skip
  told: float | None = None
  with progress:
    for number in range(count):
      try:
        skipped = next(propose) if told is None else propose.send(told)
      except StopIteration:
        return
      if number not in journal.batches:
        start = time.perf_counter()
        record = score(skipped)
        record["seconds"] = time.perf_counter() - start
        journal.add({"batch": number, **record})
        progress.update()
      record = journal.batches[number]
      known = {n: record[n] for n in ("skip_attention", "skip_mlp")}
      if known != layers.as_json(skipped):
        raise ValueError(
          f"set {number} of the journal is not the one that is proposed (by "
          "another version of the method?): --overwrite begins anew"
        )
      told = record["score"]


def run(_) -> int:
  """The command."""
  output = cli.OUTPUT.value
  if not output:
    raise cli.UserError("--output is required; see --help for an example")
  config, seed = settled(cli.CONFIG.value), cli.SEED.value or 0
  results.check({}, grown={"--output": output})
  loaded = pair.load(config)
  models = pair.assemble(config, loaded)
  module = checkpoints.load_module(config.target)
  num_layers = module.config.num_layers
  items = texts.asked(
    models, cli.PROMPTS.value, max_new_tokens=config.max_new_tokens
  )
  search_of = {
    "method": _METHOD.value, "objective": _OBJECTIVE.value,
    "costs": _COSTS.value, "seed": seed,
  }  # fmt: skip
  made_by = provenance.record(
    models=provenance.checkpoints(config), prompts=cli.PROMPTS.value,
    texts=[str(item.token_ids) for item in items],
  )  # fmt: skip
  settings = {
    **search_of,
    "config": json.loads(config.to_json_best_effort(sort_keys=True)),
    "prompts": provenance.hash_texts([str(i.token_ids) for i in items]),
  }
  with Journal(output, settings, grows=True) as journal:
    known = journal.batches.get("costs")
    if known:  # what was timed is not timed again
      verify = {int(n): cost for n, cost in known["verify"].items()}
      costs = Costs(
        attention=known["attention"], mlp=known["mlp"], rest=known["rest"],
        verify=verify,
      )  # fmt: skip
    else:
      most = _TOKENS.value
      costs = (
        costs_lib.of_bytes(module.config, most)
        if _COSTS.value == "bytes"
        else costs_lib.measured(module, most)
      )
      journal.add({"batch": "costs", **vars(costs)})
    judged = texts.completed(config, models, items)
    sampling = {
      name: config[name] for name in ("temperature", "top_k", "top_p", "min_p")
    }
    scorer = Scorer(
      module, judged, sampling, vocab_size=models.tokenizer.vocab_size
    )
    batches = engine.make_batches(
      items, batch_size=config.batch_size,
      max_width=models.room(config.max_new_tokens),
    )  # fmt: skip

    def score(skipped: SkippedLayers) -> dict:
      found = evaluation(skipped, scorer.acceptance(skipped), costs, num_layers)
      if _OBJECTIVE.value == "measured":
        found["measured"] = measured_speedup(
          config, loaded, skipped, batches,
          count=found["num_speculative_tokens"],
        )  # fmt: skip
      return {**found, "score": found.get("measured", found["speedup"])}

    if _METHOD.value == "knapsack":
      propose = methods.listed(knapsack.sets(module, judged, costs))
    else:
      propose = methods.METHODS[_METHOD.value](num_layers, seed=seed)
    search(propose, score, journal, _EVALUATIONS.value)
    numbers = [n for n in journal.batches if isinstance(n, int)]
    evaluations = [
      {k: v for k, v in journal.batches[n].items() if k != "batch"}
      for n in sorted(numbers)
    ]
    if not evaluations:
      raise ValueError(
        f"the method {_METHOD.value!r} has no set to propose for a target of "
        f"{num_layers} layers"
      )
    better = improvements(evaluations, "score")
    best = better[-1]
    result = {
      **{k: best[k] for k in ("skip_attention", "skip_mlp")},
      "num_speculative_tokens": best["num_speculative_tokens"],
      "best": best,
      "improvements": better,
      "num_layers": num_layers,
      "costs": vars(costs),
      "search": search_of,
      "num_judged": int(judged.judged.sum()),
      "config": settings["config"],
      "evaluations": evaluations,
      **made_by,
    }
    results.write_json(output, result)
    journal.finish()
  print(page.table({output: result}))
  return 0


if __name__ == "__main__":
  cli.run(run)

# %% [markdown]
# # Speculative decoding in ten minutes
#
# A small *draft* model proposes a few tokens, the large *target* model scores
# them all in one pass, and a *verification rule* keeps some of them, so that
# the text is distributed exactly as if the target had written it alone. This
# notebook decodes with a pair of real models, looks inside one round, and
# then asks how many tokens are worth drafting: predicted, and measured.
#
# A CPU is enough. Nothing is downloaded: the pair, 13.8 and 1.9 million
# parameters trained on Python source, is in the repository.

# %% [markdown]
# This cell installs the project on Colab, whose own jax is too old: from a
# checkout that you upload (a folder `specjax` or a file `specjax*.zip`), or
# cloned from `REPOSITORY`. Elsewhere run `make setup`; the cell does nothing.

# %% tags=["install"]
import glob
import os
import shutil
import subprocess
import sys

REPOSITORY = ""  # where the project is published
if "google.colab" in sys.modules and not os.path.isfile("requirements.lock"):
  for archive in glob.glob("specjax*.zip"):
    shutil.unpack_archive(archive)
  if not glob.glob("specjax*/requirements.lock"):
    if not REPOSITORY:
      raise ValueError("upload a checkout, or set REPOSITORY to its address")
    clone = ["git", "clone", "--quiet", "--depth=1", REPOSITORY, "specjax"]
    subprocess.run(clone, check=True)
  os.chdir(os.path.dirname(glob.glob("specjax*/requirements.lock")[0]))
  extras = "cuda,experiments" if shutil.which("nvidia-smi") else "tpu"
  install = [sys.executable, "-m", "pip", "install", "--quiet"]
  install += ["-c", "requirements.lock", "-e", f".[{extras}]"]
  subprocess.run(install, check=True)

# %% [markdown]
# First the paths: names of files below are those of the checkout's root.
# `SMALL` is how the tests ask for a short run.

# %%
import os
import pathlib

import launch
from launch import without_tpu

os.chdir(pathlib.Path(launch.__file__).parents[1])
without_tpu.set_environment()  # where there is no TPU nobody looks for one
SMALL = "SPECJAX_SMALL" in os.environ

# %% [markdown]
# A *config* says everything about a run: the checkpoints, what drafts, the
# rule, the temperature. What drafts is a call, here of a draft model's so many
# tokens. `pair.load` reads the models once, and
# `pair.assemble` makes decoders of them. `configs/common.py` lists what else
# could be set.

# %%
from configs import embedded
from launch import prompts
from launch.assembly import pair

config = embedded.get_config()
depth, config.max_new_tokens = (2, 12) if SMALL else (6, 64)
config.drafter, config.temperature = f"model(tokens={depth})", 0.5
models = pair.load(config)
one = pair.assemble(config, models)
items = prompts.built_in(one.tokenizer, max_tokens=64)[: 2 if SMALL else 6]
print(one.decoder.drafter.name, one.decoder.rule.name, one.decoder.vocab_size)

# %% [markdown]
# An *engine* is a decoder with its settings, compiled once for every shape of
# batch. Plain decoding is the same loop with nothing drafted, so that the two
# can be compared.

# %%
from specjax.runtime import requests

(batch, *_) = requests.make_batches(items, batch_size=len(items), max_width=64)
fast = pair.engine_of(config, one)
plain = pair.engine_of(config, one, baseline=True)
completions, _ = fast.run(batch)
plainly, _ = plain.run(batch)

# %% [markdown]
# Every token has an origin. **Green** was drafted and accepted; orange was
# drawn anew where a drafted token was rejected (the *residual*); blue is the
# *bonus*, which the target adds for free when all drafted tokens are accepted.

# %%
import rich.console

from launch import display

console = rich.console.Console()
for prompt, completion in zip(batch.prompts[:2], completions, strict=False):
  display.show_completion(console, one.tokenizer, prompt, completion)
display.show_legend(console)

# %% [markdown]
# What it saves is target passes. The counts are exact, so they must add up:
# every pass emits the drafted tokens that it accepted and one of its own (the
# last pass of a row may be cut short by the budget), and plain decoding needs
# a pass for each token.

# %%
for c, p in zip(completions, plainly, strict=True):
  assert sum(c.accept_counts) == c.num_target_calls
  assert sum(n * k for n, k in enumerate(c.accept_counts)) == c.num_accepted
  num_own = len(c.token_ids) - c.num_accepted
  assert c.num_target_calls - 1 <= num_own <= c.num_target_calls
  assert p.num_target_calls == len(p.token_ids)
  print(f"{len(c.token_ids)} tokens in {c.num_target_calls} target passes")

# %% [markdown]
# ## Inside one round
#
# `decoder.step` is one round, and returns what it did: the drafted tokens,
# the laws they were drawn from (p) and the target's laws after each (q).
# Token i is accepted with probability $\min(1, q/p)$, given that all before
# it were.

# %%
import jax
import numpy as np

state = fast.prefill(batch)
_, info = jax.jit(one.decoder.step)(one.params, state)
drafted = np.asarray(info.draft.tokens)[0, 1:]
p = np.exp(info.draft.log_probs)[0, np.arange(1, depth + 1), drafted]
q = np.exp(info.target_log_probs)[0, np.arange(depth), drafted]
accept = np.minimum(1, q / p)

# %% [markdown]
# A rule flips no coins. It maps these laws to the probability that each node
# is the *deepest* accepted one, and one shared sampler draws from that. So
# what it says can be checked by hand: the first d tokens are accepted with
# the product of their acceptances.

# %%
reach = np.cumprod([1, *accept])
deepest = reach * [*(1 - accept), 1]
assert np.allclose(info.node_probs[0], deepest, atol=1e-5)
assert np.isclose(np.sum(info.node_probs[0]), 1, atol=1e-5)

# %% [markdown]
# The same as a picture: the draft's and the target's probability of each
# drafted token of the first prompt, and how likely the round gets there.

# %%
import matplotlib.pyplot as plt

places = np.arange(1, depth + 1)
plt.bar(places - 0.2, p, 0.4, label="draft, p")
plt.bar(places + 0.2, q, 0.4, label="target, q")
plt.plot(places, reach[1:], "ko-", label="accepted up to here")
plt.xticks(places, [repr(one.tokenizer.decode([t])) for t in drafted])
plt.gca().set(xlabel="drafted token, in order", ylabel="probability")
plt.legend(loc="upper left", bbox_to_anchor=(1, 1))
plt.show()

# %% [markdown]
# ## How many tokens to draft?
#
# A longer draft is accepted less to its end, and costs a draft pass a token.
# `evaluate` decodes the prompts with several lengths and plainly, in
# turn, and times rounds and passes; `explain.findings` *predicts* each rate
# from those costs and the acceptance. This takes some minutes, most of it for
# compiling. (`launch.evaluate --explain` is the same as a command.)

# %%
from launch.evaluate import evaluate
from launch.evaluation import explain, questions

config.batch_size, rounds = (len(items), 1) if SMALL else (1, 3)
lengths = (1,) if SMALL else (1, 2, 4, 8)
names = [config.drafter, *(f"model(tokens={n})" for n in lengths)]
measured = evaluate(
  config, ", ".join(names), lambda contest: questions.of_prompts(items),
  rounds=rounds, timing="rounds" if SMALL else "passes",
)  # fmt: skip
(finding,) = explain.findings(measured)
print(explain.verdict(finding))

# %% [markdown]
# Acceptance by place. If every token were accepted with one probability
# $\alpha$, independently, "all so far" would be the dashed line $\alpha^i$.
# Where it leaves that line, acceptance depends on the place, or on what was
# accepted before.

# %%
by_position = finding["acceptance_by_position"]
alpha = finding["block_efficiency"]["acceptance"]
places = np.arange(1, len(by_position["joint"]) + 1)
plt.plot(places, by_position["conditional"], "o-", label="given those before")
plt.plot(places, by_position["joint"], "s-", label="all so far")
plt.plot(places, alpha**places, "k--", label=f"{alpha:.2f} to the power i")
plt.gca().set(xlabel="drafted token i", ylabel="accepted", ylim=(0, 1))
plt.legend()
plt.show()

# %% [markdown]
# Tokens per second against the length of the draft: the curve was predicted
# from passes that were timed alone, the points were measured. With few
# prompts the 95% intervals are wide.

# %%
from IPython.display import display as show

show(explain.figure({"explained": [finding]}))

# %% [markdown]
# Tokens per target call, again predicted and measured. `independent` is the
# textbook formula $(1 - \alpha^{N+1})/(1 - \alpha)$; `rao_blackwell` replaces
# the luck of the coins by its exact expectation given the drafts.

# %%
from specjax.theory import throughput

efficiency = finding["block_efficiency"]
for name in ("measured", "rao_blackwell", "independent"):
  print(f"{name:>14} {efficiency[name]:.2f} tokens per target call")
by_hand = sum(alpha**i for i in range(depth + 1))
assert np.isclose(throughput.tokens_per_cycle(depth, alpha), by_hand)

# %% [markdown]
# ## Where to go next
#
# - `README.md`: the same through the library alone, without a config.
# - `specjax/types.py`, then `specjax/decode.py`: the pieces and the loop.
# - `docs/reports/greedy-explained.md`: the same of the six built-in prompts,
#   by `python -m launch.evaluate --explain`.
# - `configs/huggingface.py`: your own checkpoints; and `docs/decode.md`.
# - `colab/rules.py`: why the text is exactly the target's, checked by sums.

# %% [markdown]
# # Speculative decoding in ten minutes
#
# A small *draft* model proposes a few tokens, the large *target* model scores
# them all in one pass, and a *verification rule* keeps some of them. The text
# has exactly the distribution that the target alone would give it. This
# notebook decodes with a pair of real models, looks inside one round, and asks
# how many tokens to draft, by prediction and by measurement.
#
# A CPU is enough. Nothing is downloaded: the pair, 13.8 and 1.9 million
# parameters trained on Python source, is in the repository.

# %% [markdown]
# On Colab this cell installs the project, because Colab's own jax is too old.
# It takes a checkout that you upload (a folder `specjax` or a file
# `specjax*.zip`), or clones `REPOSITORY`. Elsewhere run `make setup`; the cell
# then does nothing.

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
# Paths below are relative to the checkout's root. The tests set `SMALL` for a
# short run.

# %%
import os
import pathlib

import launch
from launch import without_tpu

os.chdir(pathlib.Path(launch.__file__).parents[1])
without_tpu.set_environment()  # stops libtpu's search if there is no TPU
SMALL = "SPECJAX_SMALL" in os.environ

# %% [markdown]
# A *config* describes a run: checkpoints, drafter, rule, temperature. The
# drafter is a call; here a draft model proposes `depth` tokens. `pair.load`
# reads the models once, and `pair.assemble` builds decoders from them.
# `configs/common.py` lists all settings.

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
# An *engine* is a decoder with its settings, compiled once per batch shape.
# Plain decoding is the same loop with an empty draft, so the two are
# comparable.

# %%
from specjax.runtime import requests

(batch, *_) = requests.make_batches(items, batch_size=len(items), max_width=64)
fast = pair.engine_of(config, one)
plain = pair.engine_of(config, one, baseline=True)
completions, _ = fast.run(batch)
plainly, _ = plain.run(batch)

# %% [markdown]
# Every token has an origin. **Green** tokens were drafted and accepted. Orange
# ones replace a rejected token (drawn from the *residual*). Blue ones are the
# *bonus*: when all drafted tokens are accepted, the target adds one for free.

# %%
import rich.console

from launch import display

console = rich.console.Console()
for prompt, completion in zip(batch.prompts[:2], completions, strict=False):
  display.show_completion(console, one.tokenizer, prompt, completion)
display.show_legend(console)

# %% [markdown]
# The savings are target passes. The counts are exact, so they must add up:
# every pass emits the drafted tokens that it accepted and one of its own (the
# budget may cut a row's last pass short), and plain decoding needs one pass per
# token.

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
# `decoder.step` runs one round and reports it: the drafted tokens, the
# distributions they were drawn from (p), and the target's distributions at the
# same positions (q). Token i is accepted with probability $\min(1, q/p)$, given
# that all tokens before it were.

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
# A rule flips no coins. It maps these distributions to the probability that
# each node is the *deepest* accepted one, and one shared sampler draws from
# those probabilities. So we can check them by hand: the first d tokens are all
# accepted with the product of their acceptance probabilities.

# %%
reach = np.cumprod([1, *accept])
deepest = reach * [*(1 - accept), 1]
assert np.allclose(info.node_probs[0], deepest, atol=1e-5)
assert np.isclose(np.sum(info.node_probs[0]), 1, atol=1e-5)

# %% [markdown]
# The same for the first prompt as a picture: each drafted token's probability
# under the draft and under the target, and the probability that it and all
# before it are accepted.

# %%
import matplotlib.pyplot as plt

positions = np.arange(1, depth + 1)
plt.bar(positions - 0.2, p, 0.4, label="draft, p")
plt.bar(positions + 0.2, q, 0.4, label="target, q")
plt.plot(positions, reach[1:], "ko-", label="accepted up to here")
plt.xticks(positions, [repr(one.tokenizer.decode([t])) for t in drafted])
plt.gca().set(xlabel="drafted token, in order", ylabel="probability")
plt.legend(loc="upper left", bbox_to_anchor=(1, 1))
plt.show()

# %% [markdown]
# ## How many tokens to draft?
#
# In a longer draft the last tokens are accepted less often, and every token
# costs a draft pass. `evaluate` alternates between several draft lengths and
# plain decoding, and times rounds and passes; `explain.findings` *predicts*
# each rate from those costs and the acceptance. This takes some minutes, mostly
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
# Acceptance by position. If tokens were accepted independently with the same
# probability $\alpha$, "all so far" would follow the dashed line $\alpha^i$. A
# departure means that acceptance depends on the position, or on what was
# accepted before.

# %%
by_position = finding["acceptance_by_position"]
alpha = finding["block_efficiency"]["acceptance"]
i = np.arange(1, len(by_position["joint"]) + 1)
plt.plot(i, by_position["conditional"], "o-", label="given those before")
plt.plot(i, by_position["joint"], "s-", label="all so far")
plt.plot(i, alpha**i, "k--", label=f"{alpha:.2f} to the power i")
plt.gca().set(xlabel="drafted token i", ylabel="accepted", ylim=(0, 1))
plt.legend()
plt.show()

# %% [markdown]
# Tokens per second by draft length. The curve is predicted from passes timed
# alone; the points are measured. With few prompts the 95% intervals are wide.

# %%
from IPython.display import display as show

show(explain.figure({"explained": [finding]}))

# %% [markdown]
# Tokens per target call, predicted and measured. `independent` is the textbook
# formula $(1 - \alpha^{N+1})/(1 - \alpha)$; `rao_blackwell` replaces the coin
# flips of verification by their exact expectation given the drafts.

# %%
efficiency = finding["block_efficiency"]
for name in ("measured", "rao_blackwell", "independent"):
  print(f"{name:>14} {efficiency[name]:.2f} tokens per target call")

# %% [markdown]
# ## Where to go next
#
# - `README.md`: the same with the library alone, without a config.
# - `specjax/types.py`, then `specjax/decode.py`: the pieces and the loop.
# - `docs/reports/greedy-explained.md`: the report that
#   `python -m launch.evaluate --explain` writes, for greedy decoding.
# - `docs/decode.md` and `configs/huggingface.py`: your own checkpoints.
# - `colab/rules.py`: why the text is exactly the target's, proved by summation.

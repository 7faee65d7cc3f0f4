# %% [markdown]
# # Will it pay on my pod?
#
# Whether speculative decoding beats plain decoding is arithmetic: how often a
# drafted token is accepted, what a draft pass costs, and what it costs the
# target to score several tokens instead of one. This notebook does the
# arithmetic, reads costs from plans compiled for TPU slices without a TPU,
# compiles such a plan, and combines it with a measured acceptance.
#
# A CPU is enough.

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
# short run. This notebook leaves the accelerator to commands that you start.

# %%
import os
import pathlib
import tempfile

import launch
from launch import without_tpu

os.chdir(pathlib.Path(launch.__file__).parents[1])
without_tpu.set_environment()  # stops libtpu's search if there is no TPU
SMALL = "SPECJAX_SMALL" in os.environ
workdir = pathlib.Path(tempfile.mkdtemp())

# %% [markdown]
# ## The arithmetic
#
# A round drafts N tokens, each accepted with probability P if all before it
# were, and emits one more token of the target's own. So it emits between 1 and
# N + 1 tokens, $(1 - P^{N+1})/(1 - P)$ on average.

# %%
import matplotlib.pyplot as plt
import numpy as np

from specjax.theory import throughput

assert throughput.tokens_per_cycle(4, 0.0) == 1
assert throughput.tokens_per_cycle(4, 1.0) == 5
print(throughput.tokens_per_cycle(4, 0.8), "tokens a round at P = 0.8")

# %% [markdown]
# A round costs N draft passes and one target pass. Measure time in target
# passes over one token, so that plain decoding has rate 1. Let a draft pass
# cost c, and let scoring N + 1 tokens cost as much as scoring one, as when
# reading the weights dominates. Longer drafts then help, up to a point.

# %%
lengths, cost = np.arange(17), 0.05
for acceptance in (0.9, 0.8, 0.7, 0.5):
  rates = throughput.throughput(lengths, acceptance, cost, 1.0)
  best = throughput.best_num_tokens(acceptance, cost, 1.0, most=16)
  assert best == rates.argmax()
  plt.plot(lengths, rates, "o-", markersize=4, label=f"P = {acceptance}")
plt.gca().set(xlabel="drafted tokens N", ylabel="speed-up, c = 0.05")
plt.legend()
plt.show()

# %% [markdown]
# ## Break-even
#
# Conversely: what acceptance breaks even? Drafting one token pays as soon as P
# exceeds c. A draft as slow as its target never pays, however often it is
# accepted.

# %%
assert np.isclose(throughput.break_even(1, 0.3, 1.0, 1.0), 0.3)
assert throughput.break_even(4, 1.01, 1.0, 1.0) == float("inf")
costs = np.linspace(0, 0.99, 60)
for length in (1, 2, 4, 8):
  least = [throughput.break_even(length, c, 1.0, 1.0) for c in costs]
  plt.plot(costs, least, label=f"N = {length}")
plt.xlabel("cost of a draft pass, in target passes")
plt.ylabel("least acceptance that pays")
plt.legend()
plt.show()

# %% [markdown]
# ## Costs on a slice
#
# Both costs, c and scoring N + 1 tokens, depend on the models, the slice and
# the batch. `launch.plan` compiles prefill and loop for a TPU slice, with the
# TPU compiler and without a TPU: memory, collectives and copies are read from
# the program. Times are a *roofline*, a model and not a measurement. These
# plans are in the repository.

# %%
from IPython.display import Markdown

from launch import report

names = ("2.8b-v5e-4", "70b-v5e-16", "70b-v6e-8-eagle3")
plans = {name: report.read(f"docs/plans/{name}.json") for name in names}
rows = []
for name, plan in plans.items():
  size, line = plan["per_device_bytes"], plan["roofline"]
  memory = f"{size['peak'] / 2**30:.1f} of {size['hbm'] / 2**30:.1f}"
  numbers = (line["cost_ratio"], line["break_even_acceptance"])
  rows.append([name, memory, *(f"{x:.3f}" for x in numbers)])
Markdown(report.table(["plan", "GiB a device", "c", "break-even"], rows))

# %% [markdown]
# A plan's break-even is the theory's at the slice's costs; different code
# computes the two.

# %%
for name, plan in plans.items():
  line, length = plan["roofline"], plan["settings"]["num_speculative_tokens"]
  verify, draft = line["verify_seconds"], line["draft_pass_seconds"]
  least = throughput.break_even(length, draft, verify[length], verify[0])
  assert np.isclose(least, line["break_even_acceptance"], atol=1e-6)
  print(f"{name}: N = {length} pays from P = {least:.3f}")

# %% [markdown]
# The speed-up by acceptance, at the best draft length for each. Rows decoded
# together share each read of the weights, which is what drafting saves, so the
# gain shrinks with the batch (8 rows here). On two CPU cores, which a batch
# keeps busy, six rows already lose (`docs/results.md`).

# %%
for name, plan in plans.items():
  rows = plan["roofline"]["by_acceptance"]
  gains = [row["its speed-up"] for row in rows]
  plt.plot([row["acceptance"] for row in rows], gains, "o-", label=name)
plt.axhline(1, color="gray", linewidth=0.8)
plt.xlabel("acceptance P")
plt.ylabel("speed-up, by the roofline")
plt.legend()
plt.show()

# %% [markdown]
# ## Your plan
#
# Name your slice and models (from `configs/shapes.py`, or the path of any
# `config.json`). Compiling these takes half a minute and needs libtpu, which
# exists for Linux on x86-64. Without it a committed plan stands in.

# %%
import importlib.util
import subprocess
import sys

target = "models/pretrained/target" if SMALL else "pythia-2.8b"
draft = "models/pretrained/draft" if SMALL else "pythia-70m"
command = f"""{sys.executable} -m launch.plan --topology=v5e:1x1
  --target={target} --drafter=model("{draft}",tokens=2)
  --max_length=1024 --output={workdir}/plan.json"""
if importlib.util.find_spec("libtpu"):
  subprocess.run(command.split(), check=True, stdout=subprocess.DEVNULL)

# %% [markdown]
# The verdict in one line, then the tables. "cache buffers" and "copies of a
# whole cache" show whether the caches stay in place: each copy costs as much as
# another read of the cache.

# %%
import rich.console

from launch.planning import answer

mine = workdir / "plan.json"
path = mine if mine.exists() else "docs/plans/2.8b-v5e-4.json"
plan = report.read(str(path))
answer.show(rich.console.Console(width=100), plan)
assert plan["buffers_reused"]
assert plan["fits"]
assert plan["per_device_bytes"]["peak"] <= plan["per_device_bytes"]["hbm"]

# %% [markdown]
# ## Acceptance, and the answer
#
# Acceptance is a property of the pair and the text, not of the machine: measure
# it anywhere. Here the plan gets the embedded pair's acceptance at temperature
# 1, from a committed result. For your own use `launch.decode` and
# `launch.evaluate --explain`.

# %%
(explained,) = report.read("docs/reports/temperature-1.json")["explained"]
acceptance = explained["block_efficiency"]["acceptance"]
line, length = plan["roofline"], plan["settings"]["num_speculative_tokens"]
verify = line["verify_seconds"]
rate = throughput.throughput(
  length, acceptance, line["draft_pass_seconds"], verify[length]
)
gain = rate * verify[0]
print(f"P = {acceptance:.2f}: speed-up {gain:.2f} by the roofline")
assert (gain > 1) == (acceptance > line["break_even_acceptance"])

# %% [markdown]
# ## On your device
#
# The roofline and the theory ignore what the loop costs besides its passes. A
# model too small to fill a TPU or GPU shows that cost: SmolLM2-135M, drafted by
# n-grams of its own text (c = 0), timed beside plain decoding, with the
# speed-up predicted from its passes:
#
#     !{sys.executable} -m launch.tools.fetch_smollm2
#     !{sys.executable} -m launch.evaluate --config=configs/smollm2.py \
#       --prompts=built-in --systems=ngram --output=build/evaluation.json

# %% [markdown]
# ## Where to go next
#
# - `docs/pods.md`: every committed plan, sharded decoding, and what it
#   communicates.
# - `launch/tpu/README.md`: scripts that create a TPU VM or a pod slice, run a
#   command on it and fetch the results.
# - `launch/planning/networks.py` and `launch/hardware.py`: how times are
#   modeled; `configs/shapes.py`: models by name.
# - `docs/theory.md`: the theorems next to simulations.
# - `docs/results.md`: all measurements.

# %% [markdown]
# # Train a draft for your model
#
# Speculative decoding is only as good as its draft, and a draft trained for one
# target on one kind of text is accepted less often on another. This notebook
# asks what to train a draft *for*, trains the embedded draft further on other
# text, tracks its acceptance, and decodes with the result. The text is this
# repository's own source; put yours in its place.
#
# A CPU is enough: ten minutes, most of them training.

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
# short run. Output goes to a temporary folder.

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
# ## What to train for
#
# A draft is too small to match its target everywhere. It must choose what to
# get wrong, and the objective makes that choice. Take a target distribution
# with two peaks and students that have only one: discretized bell curves on a
# grid of centers and widths.

# %%
import matplotlib.pyplot as plt
import numpy as np

tokens = np.arange(24)
bell = lambda center, width: -(((tokens - center) / width) ** 2) / 2
law = lambda logits: np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
target = 0.5 * law(bell(5, 1)) + 0.5 * law(bell(18, 4))
students = np.array(
  [bell(center, width) for center in range(24) for width in range(1, 12)]
)

# %% [markdown]
# Every objective of `specjax.training.losses` is a function of the student's
# logits, the teacher's logits, the text and weights. Here the text is every
# token once, weighted by the target's probability, so each value is an exact
# expectation.

# %%
import jax
import jax.numpy as jnp

from specjax.training import losses


def values_of(name):
  objective = losses.get(name, block=1)
  tile = lambda logits: jnp.broadcast_to(logits, (24, 1, 24))
  of = lambda logits: objective(
    tile(logits), tile(np.log(target)), tokens[:, None], target[:, None]
  )
  return jax.jit(jax.vmap(of))(students)


# %% [markdown]
# Two identities hold for every student. The acceptance of one drafted token is
# one minus the total variation. The cross-entropy of the text is the forward KL
# plus the target's entropy, so both have the same optimum.

# %%
values = {name: values_of(name) for name in losses.OBJECTIVES}
accepted = 1 - values["total_variation"]
assert np.allclose(accepted, np.minimum(law(students), target).sum(1))
assert np.allclose(accepted, -values["acceptance"], atol=1e-5)
entropy = -(target * np.log(target)).sum()
assert np.allclose(
  values["next_token"], values["forward_kl"] + entropy, atol=1e-3
)

# %% [markdown]
# The best student by each objective. Forward KL covers everything that the
# target may emit; reverse KL sits on one peak. Neither is what speculative
# decoding is paid for. By definition the best student by total variation is
# accepted most.

# %%
plt.bar(tokens, target, color="lightgray", label="target")
for name in ("forward_kl", "reverse_kl", "total_variation"):
  best = np.argmin(values[name])
  label = f"{name}: {accepted[best]:.3f} accepted"
  plt.plot(tokens, law(students[best]), label=label)
plt.gca().set(xlabel="token", ylabel="probability")
plt.legend()
plt.show()

# %% [markdown]
# ## Your text
#
# A folder with subfolders `train` and `validation`, which hold *.txt files (one
# document each) or *.jsonl files of `{"text": ...}` lines. Every eighth file is
# for validation.

# %%
texts = workdir / "texts"
sources = sorted(pathlib.Path("specjax").rglob("*.py"))
for number, source in enumerate(sources[:24] if SMALL else sources):
  folder = texts / ("train" if number % 8 else "validation")
  folder.mkdir(parents=True, exist_ok=True)
  (folder / f"{number}.txt").write_text(source.read_text("utf-8"))
print(len(list(texts.glob("train/*"))), "files to train on")

# %% [markdown]
# A training run is a config and a folder. Here the embedded draft is trained
# further with the embedded target as teacher. `launch/training/model.py` can
# also train on samples of the target or of the draft (`config.contexts`). That
# costs more per step, but matches what the draft sees when decoding.

# %%
from configs import embedded, train_embedded

config = train_embedded.get_config("draft")
config.dataset, config.init_from = str(texts), "models/pretrained/draft"
config.num_steps = 4 if SMALL else 60
config.warmup_steps, config.learning_rate = config.num_steps // 4, 5e-4
config.sequence_length, config.batch_size = (32, 4) if SMALL else (256, 8)
config.validate_every = config.num_steps // 4
config.validation_batches = 2 if SMALL else 8

# %% [markdown]
# Two objectives, same text, same steps: predict the text itself, or match the
# target's distribution at each of its positions. `Run` is what
# `python -m launch.train --config=... --workdir=...` runs. After a kill the
# same command resumes, to the same bits.

# %%
from launch.training import run as run_lib

run_lib.quiet()
for objective in ("next_token", "total_variation"):
  config.objective = objective
  run = run_lib.Run(config, str(workdir / objective))
  module, finished = run.train()
  assert finished
  run.export(module, str(workdir / objective / "model"))

# %% [markdown]
# Acceptance during training: the probability that a token drafted along the
# validation text would be accepted at temperature 1. Both runs start from the
# same model, so their first values are equal.

# %%
from launch import report

curves = {}
for objective in ("next_token", "total_variation"):
  rows = report.read(str(workdir / objective / "metrics.jsonl"))
  name = "validation_acceptance"
  curves[objective] = [(r["step"], r[name]) for r in rows if name in r]
  assert curves[objective][-1][0] == config.num_steps
assert curves["next_token"][0] == curves["total_variation"][0]

# %% [markdown]
# Learning the text is not learning the target. This target was never trained on
# this text either, so a draft that learns the text moves away from the target.
# In a run of 60 steps the acceptance of `next_token` fell from 0.73 to 0.59;
# that of `total_variation`, on the same text, rose to 0.76.

# %%
for objective, curve in curves.items():
  plt.plot(*zip(*curve, strict=True), "o-", label=objective)
plt.gca().set(xlabel="training step", ylabel="accepted, of one drafted token")
plt.legend()
plt.show()

# %% [markdown]
# ## What it is worth
#
# Decode prompts from the validation text at temperature 1, where acceptance was
# measured. With any draft the text has the target's distribution; only the
# number of target passes changes.

# %%
from launch import prompts
from launch.assembly import pair
from launch.training import data


def decoder_with(draft):
  settings = embedded.get_config()
  settings.checkpoints.draft, settings.temperature = draft, 1.0
  settings.max_new_tokens = 16 if SMALL else 128
  one, held_out = pair.build(settings), data.documents(config, "validation")
  items = prompts.first_tokens(held_out, one.tokenizer, num_tokens=64)
  return pair.engine_of(settings, one), items


# %% [markdown]
# Tokens per target call (block efficiency) with a 95% interval over prompts.
# After 60 steps `next_token` had lost: 2.50 (2.23–2.81), from 3.15 (2.82–3.52).
# The gain of `total_variation`, to 3.20 (2.82–3.63), was too small to see on so
# few prompts. To see it, train longer on more text.

# %%
from launch.evaluation import intervals
from specjax.runtime import requests

drafts, decoded = {"before": "models/pretrained/draft"}, {}
drafts |= {name: str(workdir / name / "model") for name in curves}
for name, draft in drafts.items():
  fast, items = decoder_with(draft)
  (batch,) = requests.make_batches(items, batch_size=len(items), max_width=64)
  units = [intervals.unit_of([c], 0.0, None) for c in fast.run(batch)[0]]
  decoded[name] = intervals.summarize(units)

# %% [markdown]
# Six tokens are drafted per call, and the target adds one. Fewer than five
# prompts get no interval.

# %%
for name, numbers in decoded.items():
  assert 1 <= numbers["block_efficiency"] <= 7
  ends = numbers["block_efficiency_ci"]
  print(
    f"{name} {numbers['block_efficiency']:.2f}"
    + (f" ({ends[0]:.2f} to {ends[1]:.2f})" if ends else "")
  )

# %% [markdown]
# ## Where to go next
#
# - `docs/training.md`: the trainer and its data; `configs/train_embedded.py`:
#   its settings.
# - `docs/results.md`: shapes, objectives and heads, measured.
# - `specjax/training/losses.py`: the objectives, and the identity by which
#   acceptance is differentiated through the shipped rule.
# - `launch/training/model.py`: whose text a draft learns from.
# - `colab/pods.py`: whether a draft pays on your hardware.

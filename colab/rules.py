# %% [markdown]
# # Verification rules, exactly
#
# Is a rule for speculative decoding *lossless*: does the text have the
# distribution that the target alone would give it? Samples cannot prove it.
# This notebook computes the output distribution by summing over every outcome,
# through the code that decodes. You write your own rule and prove it lossless,
# see how close known rules come to the optimum, and catch a broken rule that no
# affordable number of samples would.
#
# A CPU is enough; it takes a minute or two.

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
# ## Distributions in, distribution out
#
# The draft draws a token from p; the target would draw it from q. A rule maps
# these distributions and the drafted token to an acceptance probability and the
# distribution of the next token. It flips no coins, so the output distribution
# is a finite sum over drafted tokens, whether they are accepted, and next
# tokens. `exact.block_law` computes it in double precision (a *law* is a
# probability distribution).

# %%
import jax
import matplotlib.pyplot as plt
import numpy as np

from specjax import exact, rules, tree


def law_of(rule, shape, draft, target):
  with jax.enable_x64(True):
    return exact.block_law(rule, shape, draft, target)


# %% [markdown]
# Take two distributions over four tokens, the same in every context, one
# drafted token, and the rule `token` of Leviathan et al. and Chen et al.:
# accept x with probability $\min(1, q(x)/p(x))$, else draw from $[q - p]_+$,
# normalized. It accepts with probability $\sum \min(p, q)$, and its output is
# q.

# %%
p = np.array([0.45, 0.30, 0.20, 0.05])
q = np.array([0.10, 0.35, 0.15, 0.40])
outcome = law_of(rules.get("token"), tree.chain(1), lambda c: p, lambda c: q)

print("law of the next token", outcome.output.sum(1))
assert np.abs(outcome.output.sum(1) - q).max() < 1e-12
assert np.isclose(outcome.expected_accepted, np.minimum(p, q).sum())

# %% [markdown]
# Where the mass comes from: accepted tokens contribute $\min(p, q)$, and the
# residual fills the rest of q exactly. That is the whole proof for one token.

# %%
accepted, residual = outcome.emitted[1].sum(1), outcome.emitted[0]
tokens = np.arange(len(q))
plt.bar(tokens - 0.2, accepted, 0.4, label="drafted and accepted")
plt.bar(tokens - 0.2, residual, 0.4, bottom=accepted, label="residual")
plt.bar(tokens + 0.2, q, 0.4, color="lightgray", label="target, q")
plt.plot(tokens - 0.2, p, "k_", markersize=20, label="draft, p")
plt.gca().set(xlabel="token", ylabel="probability", xticks=tokens)
plt.legend(loc="upper left", bbox_to_anchor=(1, 1))
plt.show()

# %% [markdown]
# Real distributions depend on the context, and many bugs show only then: an
# index that is off by one reads another context's distribution. So we draw a
# random distribution for every context and compare the *joint* distribution of
# all tokens that a round can emit.

# %%
import functools


@functools.cache
def random_law(seed, context):
  rng = np.random.default_rng([seed, *context])
  return rng.dirichlet(np.ones(3))


draft = functools.partial(random_law, 1)
target = functools.partial(random_law, 2)

# %% [markdown]
# Some rules for a chain of two drafted tokens. The lossless ones all give the
# target's distribution but accept different amounts: `block` decides about both
# tokens jointly, and no lossless rule for a path accepts more. The lossy ones,
# `lenient` and `typical`, have the error shown.

# %%
wanted = exact.target_block_law(target, length=3)
names = ["match", "token", "block", "multipath_block", "lenient", "typical"]
accepts = {}
for name in names[:3] if SMALL else names:
  law = law_of(rules.get(name), tree.chain(2), draft, target)
  error = np.abs(law.output - wanted).max()
  print(f"{name}: {law.expected_accepted:.4f} accepted, error {error:.0e}")
  assert (error < 1e-10) == rules.get(name).lossless
  accepts[name] = law.expected_accepted
assert accepts["match"] <= accepts["token"] <= accepts["block"]

# %% [markdown]
# ## A rule of your own
#
# `token` is the Metropolis rule of Markov chain Monte Carlo. Barker's rule
# (1965) accepts with probability $q/(p+q)$ instead. The accepted mass of x is
# then $b = pq/(p+q) \le \min(p, q)$, and the residual $q - b$ must supply the
# rest. Such a rule is one function for one node: candidates and distributions
# in, a `Decision` out. `verify_nodes` walks the tree with it.

# %%
import jax.numpy as jnp

from specjax import distributions
from specjax.rules.nodewise import Decision, verify_nodes


def barker(target_log_probs, draft_log_probs, tokens, valid):
  q, p = jnp.exp(target_log_probs), jnp.exp(draft_log_probs[0])
  ratio = q / jnp.where(p + q > 0, p + q, 1)
  rest = distributions.normalize(q - p * ratio, target_log_probs)
  accept = jnp.where(valid, ratio[tokens], 0)
  return Decision(accept=accept, next_log_probs=rest)


# %% [markdown]
# A `Rule` names it, declares it lossless, and rejects trees that it does not
# support. It is now ready for `make_decoder(..., rule=...)`.

# %%
from specjax import Rule
from specjax.rules import requirements


def rule_of(name, decide):
  return Rule(
    name=name,
    verify=verify_nodes(decide),
    lossless=True,
    check=lambda tree, siblings: requirements.single_path(name, tree),
  )


# %% [markdown]
# The proof: the joint distribution of all tokens of the round equals the
# target's up to rounding. Barker's rule is as lossless as `token` but accepts
# less; for a single token at least half as much, since $b \ge \min(p, q)/2$.

# %%
law = law_of(rule_of("barker", barker), tree.chain(2), draft, target)
error = np.abs(law.output - wanted).max()
print(f"accepts {law.expected_accepted:.4f}, error {error:.0e}")
assert error < 1e-12
assert law.expected_accepted < accepts["token"]
first = law.accepted_at_least[1]
assert first >= np.minimum(draft((0,)), target((0,))).sum() / 2

# %% [markdown]
# ## The optimum
#
# With K independent drafts of one position, the highest acceptance of any rule
# is an optimal transport problem, which `theory.optimum` solves exactly
# (derived in `docs/optimum.md`). Compare four rules with it.

# %%
from specjax.theory import optimum

NAMES = ("match", "recursive", "kseq", "transport")
counts = (1, 2) if SMALL else (1, 2, 3, 4)
best = [optimum.iid_optimum(p, q, count) for count in counts]
reached = {name: [] for name in NAMES}
for name in NAMES:
  for shape in map(tree.k_ary, counts):
    law = law_of(rules.get(name), shape, lambda c: p, lambda c: q)
    reached[name].append(law.expected_accepted)

# %% [markdown]
# No rule exceeds the optimum, and `transport` attains it up to rounding, since
# both are exact.

# %%
for name in NAMES:
  assert (np.array(reached[name]) <= np.array(best) + 1e-9).all()
  plt.plot(counts, reached[name], "o-", label=name)
assert np.allclose(reached["transport"], best, atol=1e-9)
plt.plot(counts, best, "k--", label="the optimum")
plt.gca().set(xlabel="drafts K", ylabel="accepted", xticks=counts)
plt.legend()
plt.show()

# %% [markdown]
# ## A broken rule that sampling misses
#
# A serving system added $\varepsilon$ to p in the ratio, to avoid a division by
# zero: accept with probability $\min(1, q/(p + \varepsilon))$. It rejects
# slightly too often, and the residual does not account for that.


# %%
def careful(epsilon, target_log_probs, draft_log_probs, tokens, valid):
  q, p = jnp.exp(target_log_probs), jnp.exp(draft_log_probs[0])
  accept = jnp.minimum(1, q[tokens] / (p[tokens] + epsilon))
  return Decision(
    accept=jnp.where(valid, accept, 0),
    next_log_probs=distributions.residual(target_log_probs, draft_log_probs[0]),
  )


# %% [markdown]
# The exact error of its output for several $\varepsilon$. At zero the rule is
# `token`, and the error is rounding. At $10^{-9}$, as in that system, the error
# is millions of times larger: plain to see.

# %%
epsilons = (0.0, 1e-9, 1e-3) if SMALL else (0.0, 1e-9, 1e-7, 1e-5, 1e-3, 1e-2)
broken = {}
for epsilon in epsilons:
  rule = rule_of(f"{epsilon:g}", functools.partial(careful, epsilon))
  outcome = law_of(rule, tree.chain(1), lambda c: p, lambda c: q)
  broken[epsilon] = outcome.output.sum(1)
  print(f"{epsilon:g}: error {np.abs(broken[epsilon] - q).max():.1e}")
assert np.abs(broken[0] - q).max() < 1e-14
assert np.abs(broken[1e-9] - q).max() > 1e-11

# %% [markdown]
# How many samples would a test need? Pearson's chi-squared test with n samples
# has noncentrality $n \sum (o - q)^2 / q$, with o the output distribution. For
# power 0.9 at the 5% level it must be about 14 for four tokens.

# %%
from scipy import optimize, stats

freedom = len(q) - 1
limit = stats.chi2.isf(0.05, freedom)
power = lambda x: stats.ncx2.sf(limit, freedom, x)
needed = optimize.brentq(lambda x: power(x) - 0.9, 1, 100)
samples = {
  e: needed / ((law - q) ** 2 / q).sum() for e, law in broken.items() if e
}

# %% [markdown]
# Now test a million tokens sampled from each broken rule. To find the bug at
# $10^{-9}$ takes more than $10^{17}$ samples: at a million per second,
# thousands of years. The sum took a second.

# %%
rng = np.random.default_rng(0)
for epsilon, count in samples.items():
  drawn = rng.multinomial(10**6, broken[epsilon])
  test = stats.chisquare(drawn, 10**6 * q)
  print(f"{epsilon:g}: {count:.0e} samples needed; p-value {test.pvalue:.2g}")
assert samples[1e-9] > 1e17

# %% [markdown]
# ## Where to go next
#
# - `CONTRIBUTING.md`: your own rule or drafter in the library, and
#   `specjax.exact.check_drafter`, which checks that a drafter reports the
#   distributions that it drew from.
# - `specjax/rules/match.py`: the shortest rule; `specjax/rules/block.py`: one
#   that decides about a whole path; `specjax/exact/enumeration.py`: the sum.
# - `tests/specjax/mutants/test_rules.py`: more broken rules, with the system
#   that had the bug where one is known.
# - `docs/rules.md`: all rules, and what they accept on a real pair;
#   `docs/theory.md`: what lossy rules trade.
# - `python -m launch.studies.rules`: all rules on two distributions, compared
#   with the optimum.
# - `colab/drafts.py`: train a draft that is accepted more often.

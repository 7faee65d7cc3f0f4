"""The loss of a head, and what is measured of it, against sums in NumPy."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

from launch.training import head_loss
from launch.training.head_loss import Loss, Vocabulary
from models import checkpoints, head_starts
from models.networks.dflash2 import DFlash2
from models.networks.dspark import DSpark
from models.networks.training_time_test import num_kept

V, WORDS, DEPTH = 4096, 64, 3


# Where the blocks of `case` begin; of every other head drafts do everywhere.
PLACES = np.array([[7, 0, 3, 9, 5, 1], [0, 8, 3, 6, 2, 7]], np.int32)


@pytest.fixture(scope="module")
def module(target):
  return checkpoints.load_module(target)


@pytest.fixture(scope="module", params=["eagle3", "p_eagle", "dflash"])
def case(module, request):
  """A head with a small vocabulary, a batch of two documents, and both laws."""
  rng = np.random.default_rng(0)
  ids = np.sort(rng.choice(V, WORDS, replace=False)).astype(np.int32)
  blocks = request.param in ("dflash", "dspark")
  masks = request.param == "p_eagle"
  layers = (0, 1)
  if blocks:
    more = dict(block_size=DEPTH + 1)
    if request.param == "dspark":
      more = dict(block_size=DEPTH, kind=DSpark, rank=3, confidence=True)
    layers = (1,)
    head = head_starts.parallel(
      module, num_layers=1, layers=layers, mask_token=7, draft_vocab=ids,
      rngs=nnx.Rngs(0), **more,
    )  # fmt: skip
  else:
    head = head_starts.eagle3(
      module, layers=layers, draft_vocab=ids, rngs=nnx.Rngs(0),
      mask_token=7 if masks else None,
    )  # fmt: skip
  length = 10
  segments = np.array([[1] * 11, [1] * 5 + [2] * 6], np.int32)
  batch = {
    # Half of the tokens are of the draft vocabulary.
    "tokens": np.where(
      rng.random((2, 11)) < 0.5, rng.choice(ids, (2, 11)),
      rng.integers(0, V, (2, 11)),
    ).astype(np.int32),
    "segments": segments,
    "positions": np.array([range(11), [*range(5), *range(6)]], np.int32),
  }  # fmt: skip
  begin = [np.broadcast_to(np.arange(length), (2, length))] * DEPTH
  if blocks:
    begin = [PLACES] * DEPTH
  if masks:
    begin[1:] = [PLACES[:, : num_kept(length, j)] for j in range(1, DEPTH)]
    assert [x.shape[1] for x in begin] == [10, 6, 3]
  if blocks or masks:
    batch["places"] = PLACES
  watch = head_loss.make_pass(module, layers)
  rows = lambda params: head_starts.output_rows(module)
  words = Vocabulary(ids, V)
  params = nnx.state(module)

  @jax.jit
  def laws(params):
    seen = watch(params, batch)
    said = [x[:2] for x in head_loss.head_logits(head, seen, batch, DEPTH)]
    return *zip(*said, strict=True), seen.final @ rows(params).T

  said, more, judged = laws(params)
  p = []  # as the shipped head says it: no mass outside
  for logits in said:
    law = np.zeros((*logits.shape[:2], V))
    law[..., ids] = jax.nn.softmax(logits)
    p.append(law)
  q = np.asarray(jax.nn.softmax(judged), np.float64)
  whole, _ = module(
    batch["tokens"][:, :-1], positions=batch["positions"][:, :-1],
    segments=segments[:, :-1],
  )  # fmt: skip
  np.testing.assert_allclose(judged, whole.logits, atol=1e-4)

  def places(depth):
    """Each draft that counts, and the place of the law which judges it."""
    return [
      (row, i, t + 1 + depth)
      for row in range(2) for i, t in enumerate(begin[depth][row].tolist())
      if t + 2 + depth < 11
      and segments[row, t] == segments[row, t + 2 + depth]
    ]  # fmt: skip

  def losses_of(objective, **more):
    loss = Loss(
      **dict(
        objective=objective, depth=DEPTH, decay=0.5, feature_weight=0.0,
        first=0, by_count=masks,
      ) | more
    )  # fmt: skip
    shared = (loss, watch, rows, words)
    one = jax.jit(lambda b: head_loss.make_loss(*shared)(head, params, b))
    return float(one(batch))

  return dict(
    p=p, q=q, ids=ids, batch=batch, places=places, loss=losses_of,
    head=head, params=params, shared=(watch, rows, words), masks=masks,
    more=more,
  )  # fmt: skip


def restricted(q, ids):
  inside = np.zeros_like(q)
  inside[..., ids] = q[..., ids]
  return inside / inside.sum(-1, keepdims=True)


def expected(case, of_place):
  """The weighted mean over depths of the mean over places.

  Over all places of all depths, for P-EAGLE.
  """
  each = [
    [of_place(j, *place) for place in case["places"](j)] for j in range(DEPTH)
  ]
  weights = np.array([1, 0.5, 0.25])
  if case["masks"]:
    weights *= [len(x) for x in each]
  return np.average([np.mean(x) for x in each], weights=weights)


def kl(case, j, row, t, judge):
  """From the target's law on the draft vocabulary."""
  ids, q = case["ids"], restricted(case["q"], case["ids"])
  a, b = q[row, judge, ids], case["p"][j][row, t, ids]
  return np.sum(a * np.log(a / b))


def test_forward_kl_uses_the_target_on_the_draft_vocabulary(case):
  wanted = expected(case, functools.partial(kl, case))
  assert case["loss"]("forward_kl") == pytest.approx(wanted, 1e-4)


def away(case, j, row, t, judge):
  """The total variation from the target's whole law."""
  return 1 - np.minimum(case["q"][row, judge], case["p"][j][row, t]).sum()


@pytest.mark.parametrize("first", [0, 7])
def test_total_variation_uses_the_full_target_distribution(case, first):
  """Of tokens from the first on, as where a prompt before it is the data's."""
  places = case["places"]
  case = case | dict(
    places=lambda j: [x for x in places(j) if x[2] + 1 >= first]
  )
  actual = case["loss"]("total_variation", first=first)
  wanted = expected(case, functools.partial(away, case))
  assert actual == pytest.approx(wanted, 1e-5)
  assert 0.3 < actual < 0.999


@pytest.mark.parametrize("case", ["dspark"], indirect=True)
def test_dspark_loss_sums_text_target_and_confidence_terms(case):
  """Of the text where it can draft the token."""
  tokens, ids = case["batch"]["tokens"], case["ids"]
  places = lambda j: [
    x for x in case["places"](j) if tokens[x[0], x[2] + 1] in ids
  ]

  def of_confidence(*at):
    far, odds = away(case, *at), float(case["more"][at[0]][at[1], at[2]])
    sure = 1 / (1 + np.exp(-odds))
    return -(1 - far) * np.log(sure) - far * np.log(1 - sure)

  of_law = lambda *at: 1.8 * away(case, *at) + of_confidence(*at)

  of_text = lambda j, row, t, judge: (
    -np.log(case["p"][j][row, t, tokens[row, judge + 1]])
  )
  wanted = expected(case, of_law)
  wanted += 0.1 * expected(case | dict(places=places), of_text)
  actual = case["loss"]("next_token_and_tv", confidence=True)
  assert actual == pytest.approx(wanted, 1e-4)
  wanted = expected(case, lambda *at: kl(case, *at) + of_confidence(*at))
  actual = case["loss"]("forward_kl", confidence=True)
  assert actual == pytest.approx(wanted, 1e-4)


@pytest.mark.parametrize("case", ["eagle3", "dflash"], indirect=True)
def test_acceptance_loss_averages_whole_draft_acceptance(case):
  tokens, shares = case["batch"]["tokens"], []
  for row, t, last in case["places"](DEPTH - 1):
    survival, total = 1.0, 0.0
    for j in range(DEPTH):
      judge = last - (DEPTH - 1) + j
      token = tokens[row, judge + 1]
      p, q = case["p"][j][row, t, token], case["q"][row, judge, token]
      survival *= min(1, p / q)
      total += survival
    shares.append(-total / DEPTH)
  actual = case["loss"]("acceptance")
  assert actual == pytest.approx(np.mean(shares), 1e-4)
  assert actual < -0.001


def test_validation_counts_accepted_and_agreeing_tokens(case):
  loss = Loss(
    objective="forward_kl", depth=DEPTH, decay=1.0, feature_weight=0, first=0
  )
  measure = head_loss.make_measure(loss, *case["shared"])
  actual = jax.jit(lambda b: measure(case["head"], case["params"], b))(
    case["batch"]
  )
  for j in range(DEPTH):
    places = case["places"](j)
    both = [(case["q"][r, judge], case["p"][j][r, t]) for r, t, judge in places]
    assert float(actual[f"tokens_{j + 1}"]) == len(places)
    accepted = sum(np.minimum(q, p).sum() for q, p in both)
    assert float(actual[f"accepted_{j + 1}"]) == pytest.approx(accepted, 1e-4)
    agreed = sum(q.argmax() == p.argmax() for q, p in both)
    assert float(actual[f"agreed_{j + 1}"]) == agreed


def test_dflash2_selector_loss_counts_only_candidate_tokens(module):
  head = head_starts.parallel(
    module, num_layers=1, layers=(1,), block_size=3, mask_token=7,
    draft_vocab=None, rngs=nnx.Rngs(0), kind=DFlash2, taps=2, group=4,
    rank=3, num_candidates=V // 2,
  )  # fmt: skip
  codes = head.candidate_selector.successor_codebook
  codes[...] = jax.random.normal(jax.random.key(0), codes.shape)
  tokens = np.random.default_rng(0).integers(0, V, (1, 11)).astype(np.int32)
  batch = {
    "tokens": tokens, "segments": np.ones((1, 11), np.int32),
    "positions": np.arange(11)[None], "places": np.array([[2, 8, 5, 0]]),
  }  # fmt: skip
  watch = head_loss.make_pass(module, (1,))
  loss = Loss(
    objective="next_token", depth=2, decay=0.5, feature_weight=0.0, first=0,
    selects=True,
  )  # fmt: skip
  rows = lambda params: head_starts.output_rows(module)
  shared = (loss, watch, rows, Vocabulary(np.arange(V), V))

  @jax.jit
  def run(params):
    seen = watch(params, batch)
    said = [x[:2] for x in head_loss.head_logits(head, seen, batch, 2)]
    return said, jax.nn.log_softmax(seen.final[0] @ rows(params).T), (
      head_loss.make_loss(*shared)(head, params, batch),
      head_loss.make_measure(*shared)(head, params, batch),
    )  # fmt: skip

  said, target, (actual, measured) = run(nnx.state(module))
  wanted, inside = 0.0, 0
  for j, (logits, (scores, candidates)) in enumerate(said):
    base, selected, accepted = [], [], 0.0
    for i, place in enumerate(batch["places"][0]):
      if place + 2 + j > 10:
        continue
      token, some = tokens[0, place + 2 + j], np.asarray(candidates[0, i])
      law = np.asarray(jax.nn.log_softmax(scores[0, i]))
      judge = np.exp(target[place + 1 + j, some])
      accepted += np.minimum(judge, np.exp(law)).sum()
      base.append(-jax.nn.log_softmax(logits[0, i])[token])
      selected += [-x for x in law[some == token]]
    inside += len(selected)
    wanted += 0.5**j * (np.mean(base) + np.mean(selected)) / 1.5
    assert float(measured[f"accepted_{j + 1}"]) == pytest.approx(accepted, 1e-4)
  assert 2 <= inside < 7
  assert float(actual) == pytest.approx(wanted, 1e-4)


def test_block_anchors_are_drawn_where_a_token_follows():
  """At different places of a row, and at others with another key."""
  segments = np.array([[1] * 12, [1] * 4 + [2] * 3 + [0] * 5], np.int32)
  batch = {"segments": segments}
  draw = jax.jit(head_loss.draw_places, static_argnames=("count", "first"))
  actual = [
    np.asarray(draw(batch, jax.random.key(i), count=5, first=3)["places"])
    for i in range(20)
  ]
  for places in actual:
    assert [len({*row}) for row in places.tolist()] == [5, 5]
    # Token t + 2 is the place's first; tokens 0..2 do not count.
    assert (places[0] >= 1).all()
    assert (places[0] <= 9).all()
    # Of the second row tokens 3 and 6 alone can be said at first.
    assert {1, 4} <= {*places[1].tolist()}
  assert len({tuple(sorted(p[0].tolist())) for p in actual}) > 10
  assert {int(t) for p in actual for t in p[0]} == {*range(1, 10)}

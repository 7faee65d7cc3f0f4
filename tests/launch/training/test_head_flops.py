"""Operations counted for a head's training step, beside XLA's count."""

import itertools
import types

import jax
import pytest

from configs import train_head
from launch.training import flops, head, step
from launch.training.run import Run

pytestmark = pytest.mark.usefixtures("quick_to_compile")


@pytest.mark.parametrize(("platform", "count"), [("gpu", 4), ("cpu", 1)])
def test_a_measured_peak_is_of_all_devices_but_of_one_processor(
  platform, count, monkeypatch
):
  one = types.SimpleNamespace(device_kind="of no list", platform=platform)
  monkeypatch.setattr(jax, "devices", lambda: [one] * 4)
  monkeypatch.setattr(jax, "device_count", lambda: 4)
  clock = itertools.count()
  monkeypatch.setattr(flops.timing.time, "perf_counter", lambda: next(clock))
  expected = count * 2 * 1024**3, "measured"  # a product a second
  assert flops.peak_flops.__wrapped__() == expected


@pytest.mark.parametrize(
  "kind",
  ["eagle3", "medusa"]
  + [
    pytest.param(kind, marks=pytest.mark.heavy)
    for kind in ("eagle", "mtp", "blockwise", "dflash")
  ],
)
def test_a_step_is_charged_for_the_products_that_it_makes(
  kind, texts, tmp_path
):
  """Of the embedded target, whose softmaxes and norms are little beside them.

  XLA also counts those, and no gradient of what a first layer reads.
  """
  config = train_head.get_config(kind)
  config.dataset = str(texts)
  config.sequence_length, config.batch_size = 64, 2
  config.validate_every = 0
  if kind == "dflash":
    config.head.anchors = 16
  run = Run(config, str(tmp_path))
  assert head.step_flops(config) == run.task.step_flops
  state = jax.eval_shape(run.steps.init, jax.random.key(0))
  batch = step.place_batch(next(run.iterator), run.mesh)
  cost = jax.jit(run.steps.train).lower(state, batch).cost_analysis()
  assert run.task.step_flops == pytest.approx(cost["flops"], rel=0.05)


def test_attention_is_charged_by_the_length_of_a_row():
  """Twice the row: twice the products a token of EAGLE's, none of Medusa's."""

  def per_token(kind, length):
    config = train_head.get_config(kind)
    config.sequence_length = length
    return head.step_flops(config) / (config.batch_size * length)

  more = {k: per_token(k, 512) - per_token(k, 256) for k in ("eagle", "medusa")}
  target = 6 * 2 * 384 * 256  # six layers of the target, in either
  assert more["medusa"] == pytest.approx(target)
  depth = train_head.get_config("eagle").head.depth
  assert more["eagle"] == pytest.approx(target + 3 * depth * 2 * 384 * 256)

"""Meshes as they are written."""

import jax
import pytest
import several
from absl.testing import flagsaver
from files import read_jsonl, write_jsonl

from configs import shapes
from launch import cli, decode
from models import meshes
from models.formats.huggingface_config import config_from_json

LLAMA = config_from_json(shapes.SHAPES["llama-3.2-1b"])  # 8 key/value heads


@pytest.mark.parametrize(
  ("text", "devices", "draft_devices", "expected"),
  [
    ("", 16, None, (1, 16, 8)),
    ("data:2,model:4", 8, None, (2, 4, 4)),
    ("model:4,data:2", 8, 1, (2, 4, 1)),
    ("data:1,model:16", 16, 4, (1, 16, 4)),
  ],
)
def test_layouts_are_read(text, devices, draft_devices, expected):
  actual = meshes.parse(text, devices, draft=LLAMA, draft_devices=draft_devices)
  assert (actual.data, actual.model, actual.draft) == expected


def test_a_draft_of_its_own_size_has_an_axis():
  of = lambda **sizes: meshes.Layout(**sizes).mesh(
    jax.devices() * (sizes["data"] * sizes["model"])
  )
  assert dict(of(data=2, model=4, draft=4).shape) == dict(data=2, model=4)
  assert dict(of(data=2, model=4, draft=1).shape) == dict(data=2, model=4)
  layout = meshes.Layout(data=2, model=8, draft=2)
  assert dict(layout.mesh(jax.devices() * 16).shape) == dict(
    data=2, model=4, draft=2
  )
  target, draft = layout.shardings()
  assert target.axes == ("model", "draft")
  assert draft.axes == ("draft",)


def test_without_a_draft_model_nothing_is_cut_for_it():
  assert meshes.most_devices(None, 16) == 1
  assert meshes.most_devices(LLAMA, 4) == 4


def settings_of(folder, **changes):
  """Arguments that decode two prompts of one width with the built-in pair."""
  records = [{"id": i, "prompt": f"def f{i}(x):\n  return"} for i in range(2)]
  prompts = write_jsonl(folder / "in.jsonl", records)
  settings = dict(max_new_tokens=12, batch_size=2, drafter="model(tokens=3)")
  return [
    "--config=configs/embedded.py", f"--prompts={prompts}", "--nobaseline",
    *(f"--config.{k}={v}" for k, v in (settings | changes).items()),
  ]  # fmt: skip


def test_the_command_decodes_on_a_mesh_what_it_decodes_without(tmp_path):
  """Greedy in float32; a near-tie may go either way, none of these does."""
  alone, apart = (tmp_path / f"{name}.jsonl" for name in ("alone", "two"))
  with flagsaver.flagsaver():
    code = cli.execute(
      decode.run, ["test", *settings_of(tmp_path), f"--output={alone}"]
    )
  assert code == 0
  command = [
    "-m", "launch.decode", f"--output={apart}",
    *settings_of(tmp_path, mesh="data:2,model:2"),
  ]  # fmt: skip
  # Two processes of two devices: models are cut within each, rows across.
  for code, _, errors in several.finish(
    several.start([command] * 2, devices=2)
  ):
    assert code == 0, errors[-3000:]
  assert [row["token_ids"] for row in read_jsonl(apart)] == [
    row["token_ids"] for row in read_jsonl(alone)
  ]

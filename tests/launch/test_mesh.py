"""Meshes as they are written."""

import json

import jax
import pytest
import several

from configs import shapes
from launch import mesh
from models.huggingface_config import config_from_json

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
  found = mesh.parse(text, devices, draft=LLAMA, draft_devices=draft_devices)
  assert (found.data, found.model, found.draft) == expected


@pytest.mark.parametrize(
  ("text", "draft_devices", "message"),
  [
    ("data:2", None, "must be as in data:2,model:8, got 'data:2'"),
    ("data:2,model:x", None, "must be as in"),
    ("data:0,model:8", None, "must be as in"),
    ("data:2,model:2", None, "takes 4 devices, there are 8"),
    ("", 3, r"the draft's devices \(3\) must divide those of the target \(8\)"),
  ],
)
def test_mistakes_say_what_was_expected(text, draft_devices, message):
  with pytest.raises(ValueError, match=message):
    mesh.parse(text, 8, draft=LLAMA, draft_devices=draft_devices)


def test_a_draft_of_its_own_size_has_an_axis():
  of = lambda **sizes: mesh.Layout(**sizes).mesh(
    jax.devices() * (sizes["data"] * sizes["model"])
  )
  assert dict(of(data=2, model=4, draft=4).shape) == dict(data=2, model=4)
  assert dict(of(data=2, model=4, draft=1).shape) == dict(data=2, model=4)
  own = mesh.Layout(data=2, model=8, draft=2)
  assert dict(own.mesh(jax.devices() * 16).shape) == dict(
    data=2, model=4, draft=2
  )
  target, draft = own.shardings()
  assert target.column_dn[1] == ("model", "draft")
  assert draft.column_dn[1] == "draft"


def test_without_a_draft_model_nothing_is_cut_for_it():
  assert mesh.most_devices(None, 16) == 1
  assert mesh.most_devices(LLAMA, 4) == 4


def rows(path):
  return {
    row["id"]: row["token_ids"]
    for row in map(json.loads, path.read_text().splitlines())
  }


def decode(folder, *, mesh, processes=1, devices=1, **changes):
  """Tokens of the built-in prompts by the command, on some devices."""
  output = (
    folder / f"{mesh.replace(':', '').replace(',', '-')}-{processes}.jsonl"
  )
  settings = dict(
    max_new_tokens=12, batch_size=2, num_speculative_tokens=3, mesh=mesh
  )
  command = [
    "-m", "launch.decode", "--config=configs/embedded.py", f"--output={output}",
    "--nobaseline",
    *(f"--config.{k}={v}" for k, v in (settings | changes).items()),
  ]  # fmt: skip
  for code, _, errors in several.finish(
    several.start([command] * processes, devices=devices)
  ):
    assert code == 0, errors[-3000:]
  return rows(output)


def test_the_command_decodes_on_meshes_what_it_decodes_without(tmp_path):
  """Greedy in float32; a near-tie may go either way, none of these does."""
  expected = decode(tmp_path, mesh="")
  on_mesh = decode(tmp_path, mesh="data:2,model:2", devices=4)
  assert on_mesh == expected
  apart = decode(tmp_path, mesh="data:2,model:2", devices=2, processes=2)
  assert apart == expected


def test_a_mesh_that_does_not_suit_the_pair_is_one_line(tmp_path):
  (process,) = several.start(
    [["-m", "launch.decode", "--config=configs/embedded.py",
      "--config.mesh=data:1,model:4", "--config.max_new_tokens=8"]], devices=4
  )  # fmt: skip
  ((code, _, errors),) = several.finish([process])
  assert code == 2
  assert "num_heads (6) cannot be cut over 4 devices" in errors
  assert "Traceback" not in errors

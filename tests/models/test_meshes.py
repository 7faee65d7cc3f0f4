"""Meshes as they are written."""

import jax
import pytest

from configs import shapes
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
def test_layout_strings_are_parsed(text, devices, draft_devices, expected):
  actual = meshes.parse(text, devices, draft=LLAMA, draft_devices=draft_devices)
  assert (actual.data, actual.model, actual.draft) == expected


def test_partially_sharded_draft_gets_its_own_mesh_axis():
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


def test_absent_draft_model_uses_one_device():
  assert meshes.most_devices(None, 16) == 1
  assert meshes.most_devices(LLAMA, 4) == 4

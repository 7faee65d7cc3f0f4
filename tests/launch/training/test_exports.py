"""Exports of training: a model that is there is not replaced unasked."""

import pytest
from absl import flags
from absl.testing import flagsaver

from launch import cli
from launch.training import exports


def test_a_model_is_replaced_only_if_that_is_asked(tmp_path):
  (tmp_path / "model.safetensors").write_bytes(b"x")
  with flagsaver.flagsaver():
    flags.FLAGS(["test"])
    exports.check(None)
    exports.check(str(tmp_path / "new"))
    with pytest.raises(cli.UserError, match="--overwrite replaces it"):
      exports.check(str(tmp_path))
    flags.FLAGS(["test", "--overwrite"])
    exports.check(str(tmp_path))

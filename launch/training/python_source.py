"""`python_source`, a TFDS dataset of the Python files of this machine.

It is prepared without TensorFlow or network; `launch.training.corpus` says
which files it holds, and which split a file is in. Another machine, Python or
set of package versions gives another dataset; its metadata says which they
were, and with what licences. A prepared dataset is not read again from the
files: delete its folder to make it anew.
"""

import importlib.metadata
import os
import pathlib
import platform

import tensorflow_datasets as tfds
from absl import logging

from launch.training import corpus

# The distribution that each package of `corpus.PACKAGES` comes with.
_DISTRIBUTIONS = {
  "absl": "absl-py",
  "ml_collections": "ml-collections",
  "orbax": "orbax-checkpoint",
}


class Builder(tfds.core.GeneratorBasedBuilder):
  """A TFDS builder; records are `{"text", "name", "package"}`."""

  name = "python_source"
  VERSION = tfds.core.Version("1.2.0")

  def _info(self) -> tfds.core.DatasetInfo:
    text = tfds.features.Text()
    return tfds.core.DatasetInfo(
      builder=self,
      description="Python source files, split by hash of their path.",
      features=tfds.features.FeaturesDict(
        {"text": text, "name": text, "package": text}
      ),
      supervised_keys=None,
      metadata=tfds.core.MetadataDict(),
      disable_shuffling=True,
    )

  def _split_generators(self, dl_manager):
    del dl_manager
    files = corpus.python_files()
    splits: dict[str, list] = {"train": [], "validation": [], "test": []}
    for file in files:
      splits[file.split].append(file)
    packages = sorted({file.package for file in files})
    self.info.metadata.update(
      python=platform.python_version(),
      licences={p: corpus.LICENCES[p] for p in packages},
      versions={p: _version(p) for p in packages},
      files={
        package: {
          split: sum(f.package == package for f in members)
          for split, members in splits.items()
        }
        for package in packages
      },
      bytes={
        s: sum(len(f.text.encode()) for f in m) for s, m in splits.items()
      },
    )
    return {s: self._generate_examples(m) for s, m in splits.items()}

  def _generate_examples(self, files):
    for index, file in enumerate(files):
      yield (
        index,
        {"text": file.text, "name": file.name, "package": file.package},
      )


def _version(package: str) -> str:
  if package == "stdlib":
    return platform.python_version()
  try:
    return importlib.metadata.version(_DISTRIBUTIONS.get(package, package))
  except importlib.metadata.PackageNotFoundError:
    return "none"


def prepare(data_dir: str | pathlib.Path) -> Builder:
  """The builder with its dataset in `data_dir`, made now if it is not there."""
  builder = Builder(data_dir=str(data_dir), file_format="array_record")
  builder.download_and_prepare()
  made_of = dict(builder.info.metadata["versions"])
  here = {package: _version(package) for package in made_of}
  if made_of != here:
    logging.warning(
      "%s was made of %s; installed here are %s. Delete the folder to have it "
      "made anew.", builder.data_path, made_of, here,
    )  # fmt: skip
  return builder


def default_dir() -> pathlib.Path:
  """The folder of this user's datasets, `$XDG_DATA_HOME/specjax`."""
  home = os.environ.get("XDG_DATA_HOME") or pathlib.Path.home() / ".local/share"
  return pathlib.Path(home) / "specjax"

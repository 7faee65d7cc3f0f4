r"""Replicas of `launch.serve` under Ray Serve.

  pip install "ray[serve]"
  SPECJAX_CONFIG=configs/embedded.py serve run launch.tpu.ray_serve:app

Run it from the checkout's root. Ray starts as many replicas as `num_replicas`
says, each with a pair and slots of its own, sends requests to whoever has
fewer, and restarts one that is unhealthy: one whose loop is dead or stuck. A
replica knows nothing of the others, and nothing that outlives a request. Ray's
port is its own (8000 by default), and so are its limits on top of the server's.

$SPECJAX_CONFIG is a config's file, $SPECJAX_SLOTS and $SPECJAX_MAX_PROMPT are
sizes, $SPECJAX_REPLICAS says how many there are. On TPUs give the deployment
`ray_actor_options={"resources": {"TPU": 4}}`, or what your cluster calls them.
"""

import importlib.util
import os

import ml_collections
from ray import serve
from starlette.applications import Starlette

from launch.assembly import pair
from launch.serving import assembly, http, server
from launch.serving.assembly import Sizes
from launch.serving.http import Service


def config_of(path: str) -> ml_collections.ConfigDict:
  """The config of a file, which is Python."""
  spec = importlib.util.spec_from_file_location("served_config", path)
  if spec is None or spec.loader is None:
    raise ValueError(f"no config: {path}")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module.get_config()


# This process's, once Ray has started a replica in it.
_services: list[Service] = []


def build() -> Starlette:
  """The routes of a service of its own, which runs."""
  config = config_of(os.environ.get("SPECJAX_CONFIG", "configs/embedded.py"))
  sizes = Sizes(
    slots=int(os.environ.get("SPECJAX_SLOTS", "8")),
    max_prompt=int(os.environ.get("SPECJAX_MAX_PROMPT", "1024")),
    token=os.environ.get("SPECJAX_API_KEY") or None,
  )
  config.batch_size = sizes.slots
  loaded = pair.load(config)
  slots = assembly.make_slots(config, loaded, sizes)
  service = server.make_service(config, loaded, slots, sizes)
  service.scheduler.start()
  _services.append(service)
  return http.application(service)


@serve.deployment(
  num_replicas=int(os.environ.get("SPECJAX_REPLICAS", "2")),
  # As many as a server takes by itself: slots, and its queue.
  max_ongoing_requests=int(os.environ.get("SPECJAX_SLOTS", "8")) + 64,
  health_check_period_s=5,
  graceful_shutdown_timeout_s=60,
)
@serve.ingress(build)
class Replica:
  """A server to which Ray hands requests."""

  def check_health(self) -> None:
    """Raises if the loop is dead or stuck: Ray then replaces the replica."""
    for service in _services:
      stuck = service.scheduler.stuck() > service.stuck_seconds
      if stuck or not service.scheduler.is_alive():
        raise RuntimeError("the loop is dead or stuck")


app = Replica.bind()

"""Builds the HTTP service over slots, with its scheduler.

What only decodes in slots (`launch.tools.self_data`) needs `assembly` alone,
and none of the packages of a server.
"""

import dataclasses
import os

import ml_collections

from launch import processes
from launch.build import pair
from launch.serving import objectives, several
from launch.serving.asking import Defaults
from launch.serving.assembly import Sizes
from launch.serving.controller import Controller
from launch.serving.http import Service
from launch.serving.limits import Limits
from launch.serving.metrics import Metrics
from launch.serving.scheduler import Scheduler
from launch.serving.slots import Slots


def make_service(
  config: ml_collections.ConfigDict,
  loaded: pair.Models,
  slots: Slots,
  sizes: Sizes,
) -> Service:
  """The service over these slots; its scheduler is not started.

  Args:
    config, loaded, sizes: as of `assembly.make_slots`.
    slots: of `assembly.make_slots`.
  """
  models = pair.assemble(config, loaded)
  tokenizer = models.tokenizer
  if sizes.chat_template is not None:
    tokenizer = dataclasses.replace(
      tokenizer, chat_template=sizes.chat_template
    )
  name = sizes.name or os.path.basename(os.path.normpath(config.target))
  metrics = Metrics(model=name, num_slots=slots.num_slots, depth=slots.depth)
  adapts = sizes.depth_policy != "whole"
  controller = None
  if adapts:
    policy = objectives.POLICIES[sizes.depth_policy]
    controller = Controller(policy, slots.seconds_of_round)
  scheduler = Scheduler(
    several.leading(slots),
    num_slots=slots.num_slots,
    depth=slots.depth,
    max_rounds=slots.max_rounds,
    queue_length=sizes.queue,
    metrics=metrics,
    depths=controller,
    place=slots.place,
    keeps_in_touch=processes.several(),
  )
  return Service(
    scheduler=scheduler,
    metrics=metrics,
    tokenizer=tokenizer,
    defaults=Defaults(
      model=name,
      temperature=config.temperature,
      top_k=config.top_k,
      top_p=config.top_p,
      min_p=config.min_p,
      vocab_size=models.decoder.vocab_size,
      max_new_tokens=config.max_new_tokens,
      longest_prompt=slots.longest,
      max_length=slots.max_length,
      most=slots.num_slots + sizes.queue,
      scores=slots.scores,
      has_objectives=adapts,
      classes=sizes.classes,
    ),
    limits=Limits(
      answer_seconds=sizes.answer_seconds, token=sizes.token, names=sizes.names
    ),
    about={
      "model": name,
      "drafter": models.decoder.drafter.name,
      "rule": models.decoder.rule.name,
      "depth_policy": sizes.depth_policy,
      "slots": slots.num_slots,
      "is_chat": tokenizer.chat_template is not None,
    },
  )

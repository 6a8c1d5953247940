"""Importing this module installs the head into verl's Megatron engine, for the rest of the process.

verl imports what its configuration names before it makes an engine, in each worker:

    actor_rollout_ref.model.external_lib=tp_headloss.integrations.verl.external_lib

With options, name a module of your own that calls `engine.install`. `installed.calls` counts the
calls of the head.
"""

from .engine import install

installed = install()

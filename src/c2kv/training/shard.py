"""Sharding: the frozen backbone's weights spread over the processes of a run (FSDP)."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from c2kv.backbone import Backbone
from c2kv.errors import ConfigError


def shard(backbone: Backbone) -> None:
    """Keep in each process its part of every linear layer's weights; a layer gathers them when it
    runs, in the forward and in the backward pass. Embeddings and norms stay whole.

    By linear layer, because extraction calls them one by one. Raises ConfigError in a run of one
    process."""
    if not dist.is_initialized() or dist.get_world_size() < 2:
        raise ConfigError("shard: true needs several processes; start them by accelerate launch")
    mesh = init_device_mesh(backbone.device.type, (dist.get_world_size(),))
    tied = backbone.embed_tokens.weight
    for module in backbone.model.modules():
        if isinstance(module, nn.Linear) and module.weight is not tied:
            sharded = fully_shard(module, mesh=mesh, reshard_after_forward=True)
            # The first gathering makes the tensors that later ones fill: made under inference
            # mode, they could not be trained through.
            sharded.unshard()
            sharded.reshard()

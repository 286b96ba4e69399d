"""Tensor parallelism: tells the rank of this process, and refuses what does not work sharded.

transformers gives every rank whole heads of the key projection, in order, while the model's config keeps the counts of
the whole model. Caches need no help: they take the shape of the keys that reach them.
"""

from __future__ import annotations

from typing import Any

import torch.distributed
from torch import Tensor
from transformers import PreTrainedModel

from .text_config import count_of, text_config_of

# As in transformers' own check of a tensor-parallel plan: the projections that make keys, the style that shards heads.
_KEY_PROJECTIONS = ("k_proj", "qkv_proj", "query_key_value")
_SHARDS_HEADS = "colwise"


def rank_of(model: PreTrainedModel) -> tuple[int, int]:
    """This process's tensor-parallel rank for a model and the number of ranks; (0, 1) without tensor parallelism.

    Weights that are sharded in another way (FSDP) are whole when they are used, so they do not count.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return 0, 1
    from torch.distributed.tensor import DTensor  # slow to import, and needed by few

    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            names = mesh.mesh_dim_names
            if names is None or "tp" in names:
                dim = 0 if names is None else names.index("tp")
                return mesh.get_local_rank(dim), mesh.size(dim)
    return 0, 1


def why_not_captured(model: PreTrainedModel) -> str | None:
    """Why the steps of a model whose weights are divided among processes cannot be CUDA graphs; `None` if they can.

    A graph holds the calls of NCCL between the ranks of tensor parallelism. Weights that are divided in another way
    (FSDP, DeepSpeed's ZeRO) are gathered by the host in every forward.
    """
    if any(parameter.numel() == 0 for parameter in model.parameters()):
        return "its weights are divided among processes"
    for parameter in model.parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is None:
            continue
        from torch.distributed.fsdp import FSDPModule  # slow to import, and needed by few

        is_gathered = any(isinstance(module, FSDPModule) for module in model.modules())
        if is_gathered or mesh.ndim > 1 or mesh.mesh_dim_names not in (None, ("tp",)):
            return "its weights are divided among processes in another way than by tensor parallelism"
        backend = torch.distributed.get_backend(mesh.get_group())
        if model.device.type == "cuda" and backend != "nccl":
            return f"its ranks communicate by {backend}, and only NCCL works in a CUDA graph"
    return None


def rows_here(weight: Tensor) -> Tensor | None:
    """The rows of a weight that this process has: all, or its part under tensor parallelism.

    `None` if they are not numbers to be read: quantised, or divided in another way.
    """
    if type(weight.data) is Tensor:
        return weight
    placements: Any = getattr(weight, "placements", ())
    if len(placements) != 1 or not placements[0].is_shard(0):
        return None
    sharded: Any = weight
    part: Tensor = sharded.to_local()
    return part


def check_heads(model: PreTrainedModel, where: str) -> None:
    """Refuse a model if tensor parallelism splits a key-value head between ranks.

    Raises:
        ValueError: The number of heads is not a multiple of the number of ranks.
    """
    _, num_ranks = rank_of(model)
    if num_ranks == 1:
        return
    plan: dict[str, str] = model.tp_plan or {}
    if not any(name.split(".")[-1] in _KEY_PROJECTIONS and style == _SHARDS_HEADS for name, style in plan.items()):
        return  # every rank computes all keys
    for layer_config in text_config_of(model).per_layer_config:
        num_heads = count_of(layer_config, "num_key_value_heads")
        if num_heads is not None and num_heads % num_ranks:
            raise ValueError(
                f"{where}: `model` must have a multiple of {num_ranks} key-value heads for tensor parallelism over "
                f"{num_ranks} ranks, got {num_heads}, which would split a head. Load it on fewer ranks."
            )


def check_whole(model: PreTrainedModel, where: str) -> None:
    """Refuse a model of which this process holds only a part, for work that needs all heads together.

    Raises:
        NotImplementedError: The model is sharded.
    """
    _, num_ranks = rank_of(model)
    if num_ranks > 1:
        raise NotImplementedError(
            f"{where}: `model` must be whole in this process, got one that is sharded over {num_ranks} ranks. Do this "
            "with the model in one process, save it with save_pretrained, and load that with tensor parallelism."
        )

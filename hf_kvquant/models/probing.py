"""Runs a model to learn about it, and leaves it unchanged.

Most forwards here only ask which calls there are or what reaches attention. `in_float32` makes them fast on CPUs that
have no instructions for bfloat16.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, EncoderDecoderCache

from ..upstream.releases import CHECKPOINTING_DROPS_CACHES, with_cache
from .layers import layers_of
from .text_config import text_config_of

logger = logging.getLogger(__name__)


@torch.no_grad()
def num_kv_heads(model: PreTrainedModel) -> dict[int, int]:
    """Per layer index, how many key-value heads this process computes. Sends one token through the model."""
    return {index: key.shape[1] for index, key in keys_of_a_token(model).items()}


def keys_of_a_token(model: PreTrainedModel) -> dict[int, Tensor]:
    """The cached keys of one token, `[1, num_kv_heads, 1, head_dim]` for each layer that keeps all keys."""
    return {index: key for index, (key, _) in states_of_a_token(model).items()}


@torch.no_grad()
def states_of_a_token(model: PreTrainedModel) -> dict[int, tuple[Tensor, Tensor]]:
    """The cached key and value of one token, `[1, num_kv_heads, 1, head_dim]` each, as in `keys_of_a_token`."""
    cache = whole_cache(model)
    decoder: Any = model
    given: Cache = cache
    if model.config.is_encoder_decoder:
        # Without encoder states most models skip cross-attention. Moonshine runs it, and needs the cache for it.
        decoder, given = model.get_decoder(), EncoderDecoderCache(cache, DynamicCache())
    token = torch.zeros((1, 1), dtype=torch.long, device="cpu" if model.device.type == "meta" else model.device)
    with evaluating(model):
        decoder(input_ids=token, attention_mask=torch.ones_like(token), **with_cache(given), use_cache=True)
    whole = {
        i: layer for i, layer in enumerate(cache.layers) if isinstance(layer, DynamicLayer) and not layer.is_sliding
    }
    return {
        i: (layer.keys, layer.values)
        for i, layer in whole.items()
        if layer.keys is not None and layer.values is not None and layer.keys.numel() > 0
    }


def whole_cache(model: PreTrainedModel) -> DynamicCache:
    """A `DynamicCache` that keeps all keys, even those outside a sliding window. Masks hide those."""
    text_config = text_config_of(model)
    cache = DynamicCache(config=text_config)
    for index, layer_type in enumerate(layers_of(text_config)[0]):
        if layer_type == "sliding_attention":
            cache.layers[index] = DynamicLayer()
    return cache


# Models that count positions from 0 in every forward without positions, whatever the cache holds (transformers 5.24).
_COUNT_FROM_ZERO = ("bamba",)


def forward(
    model: PreTrainedModel, input_ids: Tensor, *, cache: Cache | None = None, only_last: bool = False, **kwargs: Tensor
) -> Tensor:
    """Run a forward and return its logits, `[batch, tokens, vocab_size]` in the dtype of the model.

    Args:
        model: Only run.
        input_ids: `[batch, tokens]` int64, on any device.
        cache: Filled in place; `None` for a forward without a cache.
        only_last: Whether logits of the last token will do, where the model can leave out the others: for callers that
            look at attention. In small models a fifth of the time goes into logits.
        **kwargs: `attention_mask` or `position_ids`, shaped like `input_ids`. By default, positions follow the mask, as
            in `generate`. Models that take no positions get none.
    """
    mask = kwargs.get("attention_mask")
    if mask is not None:
        kwargs.setdefault("position_ids", (mask.cumsum(1) - 1).clamp(min=0))
    elif cache is not None and model.config.model_type in _COUNT_FROM_ZERO:
        begin = int(cache.get_seq_length())
        kwargs.setdefault("position_ids", torch.arange(begin, begin + input_ids.shape[1]).unsqueeze(0))
    known = inspect.signature(model.forward).parameters
    if "position_ids" not in known:
        kwargs.pop("position_ids", None)
    last: dict[str, Any] = {"logits_to_keep": 1} if only_last and "logits_to_keep" in known else {}
    # Offloaded weights are on the meta device; the hooks that load them also move the inputs.
    device = torch.device("cpu") if model.device.type == "meta" else model.device
    placed = {name: value.to(device) for name, value in kwargs.items()}
    # Compiled code does not see hooks and was compiled for other shapes.
    with torch.compiler.set_stance("force_eager"):
        logits: Tensor = model(
            input_ids=input_ids.to(device), **with_cache(cache), use_cache=cache is not None, **placed, **last
        ).logits
    return logits


def chunks_of(input_ids: Tensor, first_chunk: int, chunk_size: int) -> list[Tensor]:
    """Cut texts, `[texts, tokens]`, into a first chunk that fills a cache and chunks that read it."""
    tokens = input_ids.shape[1]
    bounds = [0, *range(first_chunk, tokens, chunk_size), tokens]
    return [input_ids[:, start:stop] for start, stop in itertools.pairwise(bounds)]


def arbitrary_ids(model: PreTrainedModel, tokens: int) -> Tensor:
    """Arbitrary token ids, `[1, tokens]` int64 on the CPU, for a forward whose text does not matter."""
    ids: Tensor = torch.arange(5, 5 + tokens, device="cpu")[None] % text_config_of(model).vocab_size
    return ids


@contextlib.contextmanager
def hooked(hooks: Iterable[tuple[nn.Module, Callable[..., Any]]], *, before: bool = False) -> Iterator[None]:
    """Call functions after the forward of modules, or before it, as PyTorch's forward hooks and forward pre-hooks."""
    with contextlib.ExitStack() as stack:
        for module, hook in hooks:
            stack.enter_context(
                module.register_forward_pre_hook(hook) if before else module.register_forward_hook(hook)
            )
        yield


def why_without_cache(model: nn.Module) -> str | None:
    """Why forwards of a model drop the cache that they are given, as the end of a sentence; `None` if they keep it."""
    takes_gradients = CHECKPOINTING_DROPS_CACHES or torch.is_grad_enabled()
    if takes_gradients and any(
        module.training and getattr(module, "gradient_checkpointing", False) for module in model.modules()
    ):
        return (
            "in training mode with gradient checkpointing, which drops the cache of every forward. Call model.eval() "
            "before, and model.train() afterwards."
        )
    return None


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode, uncompiled: compiled code ignores hooks and was compiled for other shapes."""
    was_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module in was_training:
            module.training = True


@contextlib.contextmanager
def in_float32(model: PreTrainedModel) -> Iterator[torch.dtype | None]:
    """Let a bfloat16 model compute in float32 on a CPU without instructions for bfloat16, while the block runs.

    PyTorch multiplies bfloat16 matrices one number at a time there: a forward of 256 tokens takes SmolLM2-135M 4.3 s,
    and 0.85 s in float32 (AMD EPYC with AVX2, 2 threads, torch 2.13). Both dtypes have the same range, so what is
    finite in one is so in the other; float32 only rounds less. That is no proof that something stays the same to the
    bit in bfloat16, so such proofs do not use it.

    It takes temporary memory: 4 bytes for each bfloat16 number, twice what the model takes. If that is more than half
    of the free memory, the log says so and the model computes in bfloat16. Afterwards all tensors of the model are the
    very ones that it had. Models in other dtypes, on other devices, with quantised or offloaded weights compute as they
    always do.

    Yields:
        The dtype that the model has outside the block, or `None` if it computes as always.
    """
    tensors = _slow_tensors(model)
    needed = sum(4 * tensor.numel() for tensor in tensors)
    free = _free_bytes() if tensors else None
    if free is not None and 2 * needed > free:
        logger.warning(
            "%s in bfloat16 is slow on this CPU, and %.1f GB of free memory are too little for a copy in float32 "
            "(%.1f GB). Correct, slower.",
            type(model).__name__,
            free / 1e9,
            needed / 1e9,
        )
        tensors = []
    originals = [tensor.data for tensor in tensors]
    copies: dict[Any, Tensor] = {}  # one for parameters that share their numbers, so that they still do
    try:
        for tensor in tensors:
            place = tensor.data_ptr(), tensor.shape, tensor.stride()
            if place not in copies:
                copies[place] = tensor.data.float()
            tensor.data = copies[place]
        yield torch.bfloat16 if tensors else None
    finally:
        for tensor, original in zip(tensors, originals, strict=True):
            tensor.data = original


def _slow_tensors(model: PreTrainedModel) -> list[Tensor]:
    """The bfloat16 tensors of a model that this CPU multiplies slowly; none unless all are plain and in its memory."""
    tensors = [*model.parameters(), *model.buffers()]
    is_plain = all(tensor.device.type == "cpu" and type(tensor) in (nn.Parameter, Tensor) for tensor in tensors)
    # Offloaded weights are loaded by hooks, and quantised ones multiply by kernels of their own.
    is_hooked = any(getattr(module, "_hf_hook", None) is not None for module in model.modules())
    if not is_plain or is_hooked or getattr(model, "hf_quantizer", None) is not None or has_bfloat16_matmul():
        return []
    return [tensor for tensor in tensors if tensor.dtype == torch.bfloat16]


def has_bfloat16_matmul() -> bool:
    """Whether PyTorch multiplies bfloat16 matrices on this CPU by oneDNN, instead of by plain loops."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _free_bytes() -> int | None:
    """Memory that programs can still take, from Linux; `None` if it does not say."""
    try:
        with open("/proc/meminfo") as lines:
            found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    except OSError:
        return None
    return 1024 * int(found[0]) if found else None

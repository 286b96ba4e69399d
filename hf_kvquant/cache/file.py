"""`KVQuantCache.save` and `load`: a cache as a file, from which generation continues bit for bit.

The file is safetensors. For each layer it has the planes cut to the tokens held, where padding ends, and the centre and
smoothing factors of the keys. Everything else is JSON in the metadata, with SHA-256 hashes of that JSON and of the
whole; `FileKind.opened` (`models/hashes.py`) checks name and version. Nothing in the file is executed. A hash detects
damage but not tampering, so every number that a kernel relies on is checked before memory is allocated, whatever the
hashes say. The contents of codes and scales are not checked: any bits are safe there.

A cache is only valid for one model, so the file identifies it: by the text config (except names, labels and special
tokens), the dtype, and a hash over some thousand numbers of each weight. Another checkpoint, training, an adapter,
factors folded in or removed and another RoPE are noticed. These may not be: a change of a few single weights, of
offloaded weights, or of a setting that only one of two versions of transformers knows.

Only caches whose whole state is in our layers can be saved. Rings of sliding windows are among them; the file has their
rows as they are. transformers keeps chunks, linear attention and unquantised sliding windows in classes that differ
from version to version, so caches with such layers are refused. `saved_layer.py` has what a file says about one layer.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ..common.output import written
from ..common.version import __version__
from ..config import KVQuantConfig
from ..models.hashes import FileKind, content_hash, quoted
from ..models.layers import layers_of
from ..models.text_config import text_config_of
from ..spec.key_transform import KeyTransform
from ..storage.layer_store import LayerStore
from ..storage.offloading import check_home
from .handle import MaskNotes
from .identity import check_meant, check_model, identity, places_of
from .layers import KVQuantLayer
from .offsets import TextOffsets
from .saved_layer import SavedLayer, described, flag, number, saved_layers
from .support import STATELESS, quantized_layers

_KIND = FileKind(
    format="hf_kvquant-cache",
    version=2,
    if_folder="Name the file in it.",
    if_absent="Save a cache first.",
    if_foreign="Fill a new cache from the text instead.",
    if_other_version=f"of format version {{}}, this is version 2 (hf_kvquant {__version__}). Install the version of "
    "hf_kvquant that wrote it.",
)
# safetensors' names of dtypes.
_STORED_AS = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
    torch.int32: "I32",
}


class SavedCache(Protocol):
    """What a file needs of a `KVQuantCache`, whose module imports this one."""

    quant_config: KVQuantConfig
    has_transforms: bool
    notes: MaskNotes
    layers: list[Any]

    def __init__(
        self,
        config: PreTrainedConfig,
        preset_or_config: KVQuantConfig,
        *,
        max_cache_len: int | None,
        key_transforms: Mapping[int, KeyTransform] | None,
    ) -> None: ...

    @property
    def storages(self) -> list[LayerStore]: ...


_Cache = TypeVar("_Cache", bound=SavedCache)


def save_cache(cache: SavedCache, path: str | os.PathLike[str], model: PreTrainedModel, *, overwrite: bool) -> None:
    """See `KVQuantCache.save`."""
    where = "KVQuantCache.save"
    target = _checked_target(where, path, overwrite)
    check_model(where, model)
    storages = _storages(where, cache, model)
    length, batch = _check_at_rest(where, storages)
    cache.notes.check_no_beams(where, "cache", length)
    layers: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for index, storage in storages.items():
        layers[str(index)], named = described(index, storage)
        tensors |= named
    text = json.dumps(
        {
            "package": __version__,
            "config": cache.quant_config.to_dict(),
            "model": identity(model),
            "length": length,
            "batch": batch,
            "max_cache_len": cache.storages[0].max_cache_len,
            "has_transforms": cache.has_transforms,
            "has_holes": cache.notes.has_holes,
            "has_seen_mask": cache.notes.has_seen_mask,
            "is_uneven": cache.notes.is_uneven,
            "offsets": cache.notes.offsets.facts(),
            "layers": layers,
        }
    )
    # The facts have a hash of their own, so that they can be trusted before tensors are read.
    metadata = {**_KIND.metadata(text, tensors), "facts_sha256": content_hash(text, {})}
    _write(where, target, tensors, metadata, overwrite)


def load_cache(
    kind: type[_Cache],
    path: str | os.PathLike[str],
    model: PreTrainedModel,
    preset_or_config: str | KVQuantConfig | Mapping[str, Any] | None,
    device: torch.device | str | None,
) -> _Cache:
    """See `KVQuantCache.load`."""
    where = "KVQuantCache.load"
    name = os.fspath(path)
    wanted = None if preset_or_config is None else KVQuantConfig.resolve(preset_or_config)
    check_model(where, model)
    places = places_of(where, model, device)
    expected = f"{where}: `path` must be a file written by KVQuantCache.save, got {name}"
    with _KIND.opened(name, expected) as (file, metadata):
        text = metadata.get("facts", "")
        if metadata.get("facts_sha256") != content_hash(text, {}):
            raise ValueError(f"{expected}, which is damaged (the hash of its description is wrong). {_REMEDY}")
        with _damage(expected):
            facts = json.loads(text)
            config = KVQuantConfig.from_dict(facts["config"])
            found = facts["model"]
            saved_by = found["config"].items(), found["dtype"], found["weights_sha256"]
        check_meant(where, name, model, saved_by, config, wanted)
        config = config if wanted is None else wanted
        if config.offloading:
            for place in places.values():
                check_home(f"{where}: {name}", place)
        with _damage(expected):
            max_cache_len = None if facts["max_cache_len"] is None else number(facts, "max_cache_len")
            # Only whether transforms were given is set here, which matters after a reset. `prepare` sets which.
            given: dict[int, KeyTransform] | None = {} if flag(facts, "has_transforms") else None
            cache = kind(model.config, config, max_cache_len=max_cache_len, key_transforms=given)
            cache.notes.has_holes = flag(facts, "has_holes")
            cache.notes.has_seen_mask = flag(facts, "has_seen_mask")
            # Files of earlier versions lack it. Their caches had no plans.
            cache.notes.is_uneven = "is_uneven" in facts and flag(facts, "is_uneven")
            cache.notes.offsets = TextOffsets.of_facts(facts.get("offsets", ()))
            storages = _storages(where, cache, model)
            plans = saved_layers(facts, storages)
            _check_header(file, plans)
            tensors = {key: file.get_tensor(key) for key in file.keys()}
            if metadata.get("sha256") != content_hash(text, tensors):
                raise ValueError("its hash does not match its contents")
            for index, plan in plans.items():
                plan.prepare(storages[index], tensors)
    _check_room(expected, plans, places)
    for index, plan in plans.items():
        plan.fill(storages[index], tensors, places[index])
    return cache


# --- what a file says -------------------------------------------------------------------------------------------------


def _check_header(file: Any, plans: Mapping[int, SavedLayer]) -> None:
    """Compare the names, shapes and dtypes in the header with the plans, before any tensor is read."""
    expected = {name: tensor for plan in plans.values() for name, tensor in plan.expected.items()}
    names = set(file.keys())
    if names != expected.keys():
        missing, extra = sorted(expected.keys() - names), sorted(names - expected.keys())
        raise ValueError(f"tensors missing: {missing}, tensors too many: {extra}")
    for name, tensor in expected.items():
        found = file.get_slice(name)
        shape, dtype = list(found.get_shape()), found.get_dtype()
        if (shape, dtype) != (list(tensor.shape), _STORED_AS[tensor.dtype]):
            raise ValueError(
                f"{name} is {dtype} of shape {shape}, not {_STORED_AS[tensor.dtype]} of shape {list(tensor.shape)}"
            )


def _check_room(expected: str, plans: Mapping[int, SavedLayer], places: Mapping[int, torch.device]) -> None:
    """Refuse buffers larger than a device's memory. An operating system that overcommits would fail only much later."""
    needed = dict.fromkeys(places.values(), 0)
    for index, plan in plans.items():
        needed[places[index]] += plan.num_bytes
    for device, num_bytes in needed.items():
        memory = _memory_of(device)
        if memory is not None and num_bytes > memory:
            raise ValueError(
                f"{expected}, whose buffers take {num_bytes / 1e9:.1f} GB, more than the {memory / 1e9:.1f} GB of "
                f"{device}. Load it where it was saved, or fill a new cache from the text."
            )


def _memory_of(device: torch.device) -> int | None:
    """Bytes of memory of a device, used or not; `None` if unknown."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type != "cpu" or "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


_REMEDY = "Copy it again from where it was written, or fill a new cache from the text."


@contextlib.contextmanager
def _damage(expected: str) -> Iterator[None]:
    """Report errors of the `with` block as a damaged file."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{expected}, which is damaged ({quoted(error)}). {_REMEDY}") from error


# --- what can be saved ------------------------------------------------------------------------------------------------


def _storages(where: str, cache: SavedCache, model: PreTrainedModel) -> dict[int, LayerStore]:
    """The storages of the quantised layers, by index.

    Raises:
        NotImplementedError: transformers keeps the state of some layers.
        ValueError: The cache and the model have different layers.
    """
    layer_types, _ = layers_of(text_config_of(model))
    layers = {index: layer for index, layer in enumerate(cache.layers) if isinstance(layer, KVQuantLayer)}
    quantized = quantized_layers(layer_types, cache.quant_config)
    if len(cache.layers) != len(layer_types) or list(layers) != quantized:
        raise ValueError(
            f"{where}: `model` must be the one that the cache was made for, got a {type(model).__name__} with "
            f"{len(layer_types)} cache layers, {len(quantized)} of them quantised, for a cache with "
            f"{len(cache.layers)} and {len(layers)}. Pass the model that made its tokens."
        )
    whole = {index for index, layer in layers.items() if not layer.holds_state}
    foreign = sorted({each for index, each in enumerate(layer_types) if index not in whole} - STATELESS)
    if foreign:
        raise NotImplementedError(
            f"{where}: `model` must have a quantised cache in all layers, got a {type(model).__name__} with layers of "
            f"type {foreign}, whose state transformers keeps in classes of its own. Keep the text, or pickle the cache."
        )
    return {index: layer.storage for index, layer in layers.items()}


def _check_at_rest(where: str, storages: Mapping[int, LayerStore]) -> tuple[int, int]:
    """Refuse a cache that is empty or in the middle of a step. Returns its length and batch size.

    Raises:
        RuntimeError: A step is being compiled or captured.
        ValueError: The cache is empty, or some layers lack tokens, or tokens were dropped.
    """
    if torch.compiler.is_compiling() or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
        raise RuntimeError(
            f"{where}: `cache` must be at rest, got one in a step that is being compiled or captured. "
            "Save it between calls of the model."
        )
    if all(storage.is_empty for storage in storages.values()):
        raise ValueError(f"{where}: `cache` must hold tokens, got an empty one. Save it after the first call.")
    counts = {(storage.length, storage.batch) for storage in storages.values()}
    is_counted_alike = len(counts) == 1 and all(
        storage.is_allocated and bool((storage.lengths == storage.length).all()) for storage in storages.values()
    )
    if not is_counted_alike or any(storage.pending is not None for storage in storages.values()):
        raise ValueError(
            f"{where}: `cache` must be at rest, got one in a step, whose tokens only some layers have. "
            "Save it between calls of the model, or reset it after a failed call."
        )
    length, batch = counts.pop()
    max_cache_len = min((storage.max_cache_len or length for storage in storages.values()), default=length)
    if length > max_cache_len:
        raise ValueError(
            f"{where}: `cache` must have had room for all tokens, got {length} tokens with room for {max_cache_len}; "
            "the rest are lost. Start a new cache with a larger max_cache_len."
        )
    return length, batch


# --- the file itself --------------------------------------------------------------------------------------------------


def _checked_target(where: str, path: str | os.PathLike[str], overwrite: bool) -> str:
    """The path to write to, with symbolic links resolved."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"{where}: `path` must be a path, got {type(path).__name__}. The model comes after it.")
    name = os.fspath(path)
    folder = os.path.dirname(os.path.realpath(name))
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"{where}: `path` must be in a folder that exists, got {name}. Create {folder} first.")
    if os.path.lexists(name) and not (overwrite and os.path.isfile(name)):
        raise FileExistsError(_exists(where, name))
    return os.path.realpath(name)


def _exists(where: str, name: str) -> str:
    remedy = "Pass overwrite=True to replace it." if os.path.isfile(name) else "Choose another name."
    return f"{where}: `path` must be new, got {name}, which exists. {remedy}"


def _write(where: str, name: str, tensors: dict[str, Tensor], metadata: dict[str, str], overwrite: bool) -> None:
    try:
        with written(Path(name), overwrite=overwrite) as path:
            save_file(tensors, path, metadata=metadata)
    except FileExistsError as error:
        raise FileExistsError(_exists(where, name)) from error
    except SafetensorError as error:
        raise OSError(f"{where}: `path` must be writable, got {name}: {error}. Nothing there has changed.") from error

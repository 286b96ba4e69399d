"""Hashes that tell whether weights or a file have changed, and files that carry such a hash."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel

from .adapters import adapter_settings
from .probing import keys_of_a_token

# Numbers hashed of each weight: a model of 300 weights is identified within some hundredths of a second, at any size.
SAMPLES = 4096


def weights_hash(model: PreTrainedModel) -> str:
    """SHA-256 over a sample of every weight, including changes that were injected, folded or calibrated into it.

    The hash changes with another checkpoint, after training, and with the adapters that are active. It may miss changes
    to a few numbers, and knows offloaded weights only by name and shape. A model with quantised weights is run on one
    token.
    """
    if getattr(model, "hf_quantizer", None) is not None:
        keys_of_a_token(model)  # some layers unpack or repack their weights in the first forward
    # `state_dict` would not do: bitsandbytes rounds the weights of a CPU model in it.
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)} | set(_saved_buffers(model))
    digest = hash_of(model, sorted(names), samples=SAMPLES)
    settings = adapter_settings(model)
    return hashlib.sha256(f"{digest} {settings}".encode()).hexdigest() if settings else digest


def _saved_buffers(model: PreTrainedModel) -> Iterator[str]:
    """Names of buffers without those that are not saved, such as the frequencies of a RoPE, which grow with a text."""
    for prefix, module in model.named_modules():
        for name, _ in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}".removeprefix(".")


def hash_of(model: PreTrainedModel, names: Iterable[str], samples: int | None = None) -> str:
    """SHA-256 of parameters and buffers with these names.

    Floating-point tensors are hashed as float32, so a checkpoint has the same hash when it is loaded in a wider dtype.
    `samples` is about how many numbers of each tensor to hash, spread evenly; `None` for all. With samples, offloaded
    tensors count only by name and shape, since they would have to be read whole.

    Raises:
        AttributeError: The model has no tensor of that name.
    """
    digest = hashlib.sha256()
    for name in names:
        owner, _, last = name.rpartition(".")
        module = model.get_submodule(owner)
        tensor = getattr(module, last).detach()
        # Where accelerate's hook takes an offloaded tensor from.
        offloaded = getattr(getattr(module, "_hf_hook", None), "weights_map", None)
        if tensor.is_meta and offloaded is not None and samples is None:
            tensor = offloaded[last].detach()
        digest.update(f"{name} {tuple(tensor.shape)}\n".encode())
        if not tensor.is_meta:
            for part in plain_tensors(tensor):
                if samples is not None:
                    # An odd stride reaches every row and every column of a matrix whose sides are powers of two.
                    part = part.reshape(-1)[:: part.numel() // samples | 1]
                numbers = part.float() if part.is_floating_point() else part
                digest.update(numbers.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that hold the numbers of a weight: itself, or what a quantised weight or one of a rank wraps."""
    if hasattr(tensor, "__tensor_flatten__"):
        parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        for part in parts:
            if isinstance(part, Tensor):
                yield from plain_tensors(part)
    else:
        yield tensor.as_subclass(Tensor)


def content_hash(facts: str, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of a file's content. It detects damage, not tampering: whoever writes a file can compute its hash."""
    digest = hashlib.sha256(facts.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


_LONGEST_QUOTE = 1000  # characters


def quoted(found: object) -> str:
    """Contents of a file, shortened for a message."""
    text = str(found)
    return text if len(text) <= _LONGEST_QUOTE else f"{text[:_LONGEST_QUOTE]}…"


@dataclasses.dataclass(frozen=True)
class FileKind:
    """A kind of safetensors file that describes itself: facts as JSON in the metadata, a version, and a hash.

    Its error messages begin with `expected`, which names the file, and end with what to do: if the path is a folder, if
    it is absent, or if the file is of another kind. The message for another version, `{}`, is whole.
    """

    format: str
    version: int
    if_folder: str
    if_absent: str
    if_foreign: str
    if_other_version: str

    def metadata(self, facts: str, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """The metadata of a file."""
        sha256 = content_hash(facts, tensors)
        return {"format": self.format, "version": str(self.version), "facts": facts, "sha256": sha256}

    @contextlib.contextmanager
    def opened(self, path: str, expected: str) -> Iterator[tuple[Any, dict[str, str]]]:
        """Open a file of this kind: safetensors' handle, and its metadata.

        Raises:
            FileNotFoundError, IsADirectoryError: There is no file of that name.
            ValueError: The file is of another kind or version, or cannot be read.
        """
        if os.path.isdir(path):
            raise IsADirectoryError(f"{expected}, which is a folder. {self.if_folder}")
        if not os.path.isfile(path):
            raise FileNotFoundError(f"{expected}, which is not there. {self.if_absent}")
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != self.format:
                    raise ValueError(f"{expected}, which holds something else. {self.if_foreign}")
                if metadata.get("version") != str(self.version):
                    raise ValueError(f"{expected} {self.if_other_version.format(quoted(metadata.get('version')))}")
                yield file, metadata
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{expected}: {quoted(error)}. Copy it again from where it was written.") from error

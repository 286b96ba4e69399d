"""Finds, by running the model, which parameters make each channel of its keys, queries or values.

Module names and layouts of fused projections differ from family to family, so this file looks up no names. Instead, it
replaces the output of each module inside an attention module by random numbers, one module at a time. A factor can be
folded into the last module whose numbers come out as keys, one for one and in proportion; where each number comes out
tells which row makes which channel. A projection followed by a norm is excluded this way, since the norm's output is
not proportional to its input.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..attention.observation import Observation, not_observed, observed
from ..cache.support import other_caches
from ..models.adapters import is_adapter
from ..models.probing import arbitrary_ids, forward, hooked
from ..models.quantized import quantized_tensor
from ..models.text_config import positions_of, text_config_of
from .decoder_check import check_decoder

# Which parameters scale features: the rows of a weight, its columns (GPT-2's Conv1D), the gain of a norm, or a gain
# that is stored as its difference from 1 (Gemma).
Rule = Literal["rows", "columns", "gain", "gain_plus_one"]
Side = Literal["key", "query", "value"]

# RoPE leaves position 0 unrotated and turns every pair at the others. Slow pairs turn visibly only at far positions, so
# the last position that the model has follows these.
POSITIONS = (0, 1, 2)
NUM_SAMPLES = 32  # random vectors: the odds that two independent ones agree to COSINE are below 1e-15
COSINE = 0.995  # least cosine of a module's numbers and a channel; rounding to bfloat16 leaves 0.9999
LOUD = 1024.0  # some samples are this many times larger, to notice clipping (OLMo's clip_qkv is 8)
NUM_LOUD = 8


@dataclasses.dataclass(frozen=True)
class Edit:
    """An edit of weights, as error messages name it: the tensors that they make or take, and what it does to them."""

    what: str
    verb: str


SMOOTHING = Edit("keys and queries", "smooth")
ROTATION = Edit("values and attention's output", "rotate")


@dataclasses.dataclass(frozen=True)
class Scalable:
    """The parameters of one module that make each channel of a layer's heads, or take it as input."""

    name: str  # the module's name in the model
    rule: Rule  # which parameters scale its output, or its input if it takes the channels
    index: Tensor  # `[heads, head_dim]` int64: the row, column or gain of each channel

    def by_feature(self, weight: Tensor) -> Tensor:
        """The weight of a projection with features first, a view without a gradient."""
        assert self.rule in ("rows", "columns")
        return weight.detach() if self.rule == "rows" else weight.detach().mT

    def per_feature(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Features, int64, and their values, float32, from one value per channel. A feature's channels must agree."""
        features, first = torch.unique(self.index.flatten(), return_inverse=True)
        made = torch.empty(len(features), dtype=torch.float32, device="cpu")
        return features, made.scatter_(0, first, values.flatten().float())


@dataclasses.dataclass(frozen=True)
class Output:
    """The output of a module that runs once inside an attention module, before it attends."""

    module: nn.Module
    shape: tuple[int, ...]  # the output's shape, without the batch
    token_axis: int  # the axis of `shape` that counts tokens

    @property
    def num_features(self) -> int:
        """How many numbers the module returns per token."""
        return math.prod(self.shape) // self.shape[self.token_axis]

    def filled(self, features: Tensor) -> Tensor:
        """Such an output, `[batch, *shape]`, with the same features (`[batch, features]`) for every token."""
        rest = [size for axis, size in enumerate(self.shape) if axis != self.token_axis]
        return features.view(-1, *rest).unsqueeze(1 + self.token_axis).expand(-1, *self.shape)


@dataclasses.dataclass(frozen=True)
class Source:
    """Where the keys, queries or values of a layer come from, one for one."""

    output: Output
    index: Tensor  # `[heads, head_dim]` int64: the feature of the output that makes each channel
    scalable: Scalable


class Probe:
    """Runs a model with chosen numbers in place of what modules return, and looks at what reaches attention.

    `modules` has the attention module of each layer whose cache would be quantised, by layer index, and `left_out` the
    reason for each other layer. `edit` is what the weights are to be edited for.

    Raises:
        TypeError: `model` is not a `PreTrainedModel`.
        NotImplementedError: The model keeps no keys of its own, or its attention cannot be watched.
    """

    def __init__(self, model: PreTrainedModel, edit: Edit, where: str) -> None:
        check_decoder(model, where)
        self.model, self.edit, self.where = model, edit, where
        self.names = {module: name for name, module in model.named_modules()}
        self.left_out = other_caches(model)
        self._check_own_keys()
        modules = self._attention_modules()
        self.modules = {index: module for index, module in modules.items() if index not in self.left_out}

    def run(self, observer: Callable[[Observation], Any], *, batch: int, extra_tokens: int = 0) -> None:
        """Run the model on arbitrary tokens.

        Attention returns the observer's tensor, or else zeros, so that random numbers do not grow from layer to layer.
        """
        last = positions_of(self.model, 4096) - 1
        positions = torch.tensor([*POSITIONS, *range(last - extra_tokens, last + 1)], device="cpu")
        input_ids = arbitrary_ids(self.model, len(positions)).expand(batch, -1)

        def observe(observation: Observation) -> Tensor:
            out = observer(observation)
            if isinstance(out, Tensor):
                return out
            query, value = observation.query, observation.value
            return query.new_zeros((query.shape[0], query.shape[2], query.shape[1], value.shape[-1]))

        with observed(self.model, observe):
            # Models that take no positions count from 0.
            forward(self.model, input_ids, only_last=True, position_ids=positions.expand(batch, -1))

    def sources(self, *sides: Side) -> dict[int, tuple[Source | str, ...]]:
        """Per layer and side, the module to edit, or why there is none. Refuses weights that cannot be edited."""
        passed = self._passed(sides)
        return {index: tuple(self._source(index, passed[index, side]) for side in sides) for index in self.modules}

    def check_editable(self, layer_idx: int, module: nn.Module) -> None:
        """Refuse a module of a layer whose weights are not plain numbers in memory."""
        name, edit = self.names[module], self.edit
        for wrapper in self.modules[layer_idx].modules():
            if is_adapter(wrapper) and any(child is module for child in wrapper.modules()):
                raise NotImplementedError(
                    f"{self.where}: `model` must have no adapters on {edit.what}, got {type(wrapper).__name__} at "
                    f"{self.names[wrapper]}. Merge them first (merge_and_unload), or {edit.verb} the base model and "
                    "train anew."
                )
        if getattr(getattr(module, "_hf_hook", None), "offload", False):
            raise self._not_in_memory(f"{name}, which is offloaded")
        found = quantized_tensor(module)
        if found is not None:
            raise NotImplementedError(
                f"{self.where}: `model` must have plain weights in float32, bfloat16 or float16 behind {edit.what}, "
                f"got {type(module).__name__} with {found} at {name}. {edit.verb.capitalize()} the unquantised model, "
                "then quantise its weights."
            )

    def check_not_shared(self, names: Iterable[str]) -> None:
        """Refuse to edit the modules of these names if other modules share their parameters."""
        owners: dict[int, list[str]] = defaultdict(list)
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            owners[parameter.data_ptr()].append(name)
        for name in names:
            for parameter in self.model.get_submodule(name).parameters(recurse=False):
                shared = owners[parameter.data_ptr()]
                if len(shared) > 1:
                    raise NotImplementedError(
                        f"{self.where}: `model` must not share the weights behind {self.edit.what}, got one tensor for "
                        f"{' and '.join(sorted(shared))}. Give each a copy of its own first."
                    )

    def _check_own_keys(self) -> None:
        """Refuse offloaded weights, and layers that reuse the keys of other layers."""
        offloaded = [name for name, parameter in self.model.named_parameters() if parameter.is_meta]
        if offloaded:
            raise self._not_in_memory(f"{len(offloaded)} offloaded weights, such as {offloaded[0]}")
        num_shared = getattr(text_config_of(self.model), "num_kv_shared_layers", 0)
        if num_shared:
            raise NotImplementedError(
                f"{self.where}: `model` must have keys of its own in every layer, got {num_shared} layers "
                f"of {type(self.model).__name__} that attend to those of others. Leave it as it is."
            )

    def _not_in_memory(self, found: str) -> NotImplementedError:
        return NotImplementedError(
            f"{self.where}: `model` must be in memory, got {found}. Load it without a device_map that offloads, for "
            "example on the CPU."
        )

    def _attention_modules(self) -> dict[int, nn.Module]:
        seen: dict[int, list[nn.Module]] = defaultdict(list)
        self.run(lambda observation: seen[observation.layer_idx].append(observation.module), batch=1)
        if not seen or -1 in seen:
            raise not_observed(self.model, self.where)
        if len({modules[0] for modules in seen.values()}) < sum(map(len, seen.values())):
            raise NotImplementedError(
                f"{self.where}: `model` must have an attention module for each layer, got {type(self.model).__name__}, "
                "whose layers share one or attend more than once. Leave it as it is."
            )
        return {index: modules[0] for index, modules in sorted(seen.items())}

    def _outputs(self) -> dict[int, list[Output]]:
        """Per layer, what its modules return before it attends, in the order in which they finish."""
        shorter, longer = (self._shapes(extra_tokens) for extra_tokens in (0, 1))
        found: dict[int, list[Output]] = {index: [] for index in self.modules}
        for index, calls in shorter.items():
            modules = [module for module, _ in calls]
            for (module, shape), (_, other) in zip(calls, longer[index], strict=True):
                grown = [axis for axis, sizes in enumerate(zip(shape, other, strict=True)) if sizes[0] != sizes[1]]
                if modules.count(module) == 1 and len(grown) == 1:
                    found[index].append(Output(module, shape, grown[0]))
        return found

    def inner_hooks(self, hook: Callable[..., Any]) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
        """A hook for each module inside the attention of each layer, which also gets the layer's index, first."""
        for index, attention in self.modules.items():
            for module in attention.modules():
                if module is not attention:
                    yield module, functools.partial(hook, index)

    def _shapes(self, extra_tokens: int) -> dict[int, list[tuple[nn.Module, tuple[int, ...]]]]:
        """Per layer, the modules that finish before it attends, with the shapes of what they return."""
        finished: dict[int, list[tuple[nn.Module, tuple[int, ...]]]] = {index: [] for index in self.modules}
        attended: set[int] = set()

        def note(index: int, module: nn.Module, args: Any, output: Any) -> None:
            if index not in attended and isinstance(output, Tensor) and output.ndim > 2:
                finished[index].append((module, tuple(output.shape[1:])))

        with hooked(self.inner_hooks(note)):
            self.run(lambda observation: attended.add(observation.layer_idx), batch=2, extra_tokens=extra_tokens)
        return finished

    def _passed(self, sides: Sequence[Side]) -> Mapping[tuple[int, Side], list[tuple[Output, Tensor]]]:
        """Per layer and side, the outputs that arrive there one for one, the last first, with the index of features."""
        outputs = self._outputs()
        passed: dict[tuple[int, Side], list[tuple[Output, Tensor]]] = defaultdict(list)
        generator = torch.Generator().manual_seed(0)
        for rank in range(max(map(len, outputs.values()), default=0)):
            current = {index: found[-1 - rank] for index, found in outputs.items() if rank < len(found)}
            sources = {index: random_samples((output.num_features,), generator) for index, output in current.items()}

            def look(
                observation: Observation, current: dict[int, Output] = current, sources: dict[int, Tensor] = sources
            ) -> None:
                index = observation.layer_idx
                for side in sides if index in current else ():
                    source = sources[index].to(observation.key)
                    features = one_for_one(source, getattr(observation, side)[:, :, 0])
                    if features is not None:
                        passed[index, side].append((current[index], features))

            with replaced({output.module: output.filled(sources[index]) for index, output in current.items()}):
                self.run(look, batch=NUM_SAMPLES + NUM_LOUD)
        return passed

    def _source(self, layer_idx: int, passed: list[tuple[Output, Tensor]]) -> Source | str:
        """The last module that can be edited, out of those whose outputs arrive, or why there is none."""
        if not passed:
            return "are not a multiple of any module's output"
        for output, index in passed:
            module, name = output.module, self.names[output.module]
            self.check_editable(layer_idx, module)
            weight = getattr(module, "weight", None)
            if isinstance(weight, nn.Parameter):
                rule = rule_of(output)
                if rule is None:
                    return f"come from {name} ({type(module).__name__}), whose weight scales in another way"
                # A gain spans the last axes of the output. If heads are an axis before these, they share it.
                span = weight.numel() if rule.startswith("gain") else output.num_features
                return Source(output, index, Scalable(name, rule, index % span))
        return f"come from {self.names[passed[0][0].module]}, which has no weights"


@contextlib.contextmanager
def replaced(outputs: Mapping[nn.Module, Tensor]) -> Iterator[None]:
    """Let modules return these tensors, in the dtype and on the device of their own output."""

    def replace(module: nn.Module, args: Any, old: Tensor) -> Tensor:
        return torch.empty_like(old).copy_(outputs[module])

    with hooked((module, replace) for module in outputs):
        yield


def random_samples(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Random samples for `one_for_one`: `NUM_SAMPLES` plain ones, then `NUM_LOUD` of them times `LOUD`."""
    quiet = torch.randn((NUM_SAMPLES, *shape), generator=generator, dtype=torch.float32, device="cpu")
    return torch.cat((quiet, LOUD * quiet[:NUM_LOUD]))


def differs_by_sample(states: Tensor) -> bool:
    """Whether samples, `[samples, ...]`, differ by more than rounding, which can differ between rows of a batch."""
    states = states.float()
    return bool((states - states[:1]).abs().amax() > 0.05 * states[:1].abs().amax())


def one_for_one(source: Tensor, states: Tensor) -> Tensor | None:
    """Which feature each channel of keys, queries or values is a multiple of; `None` unless all are multiples of one.

    `source` is what the module returned, `[samples, features]`. `states` is what arrived at the first token, which RoPE
    does not rotate, `[samples, heads, head_dim]`. The result is `[heads, head_dim]` int64, on the CPU.
    """
    unit = nn.functional.normalize(source[:NUM_SAMPLES].double(), dim=0)
    rows = []
    for head in states.double().unbind(1):
        cosine = nn.functional.normalize(head[:NUM_SAMPLES], dim=0).mT @ unit  # [head_dim, features]
        best = cosine.abs().max(-1)
        loud, quiet = head[NUM_SAMPLES:].norm(dim=0), head[:NUM_LOUD].norm(dim=0)
        if not (bool((best.values > COSINE).all()) and torch.allclose(loud, LOUD * quiet, rtol=0.01, atol=0)):
            return None
        rows.append(best.indices)
    return torch.stack(rows).cpu()


def rule_of(output: Output) -> Rule | None:
    """How a module's weight scales its output, tried out on copies of its parameters; `None` for any other way."""
    module: Any = output.module
    weight: Tensor = module.weight
    if isinstance(module, nn.Linear):
        return "rows" if weight.shape[0] == output.shape[-1] else None
    if isinstance(module, Conv1D):
        return "columns" if weight.shape[1] == output.shape[-1] else None
    behind_tokens = output.shape[output.token_axis + 1 :]
    if not 0 < weight.ndim <= len(behind_tokens) or tuple(weight.shape) != behind_tokens[-weight.ndim :]:
        return None
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((1, *output.shape), generator=generator, dtype=torch.float32, device="cpu").to(weight)
    silent: dict[Rule, float] = {"gain": 0.0, "gain_plus_one": -1.0}
    for rule, value in silent.items():
        # Not `functional_call`: where compressed-tensors (0.20) has dispatched a model, it leaves its numbers in place.
        trial: Any = copy.copy(module)
        # Those that it goes without, such as the bias of a LayerNorm, are `None` among its parameters, and asked for.
        own = module._parameters.items()
        trial._parameters = {name: None if each is None else torch.zeros_like(each) for name, each in own}
        trial._parameters["weight"] = torch.full_like(weight, value)
        if not type(module).forward(trial, x).any():
            return rule
    return None

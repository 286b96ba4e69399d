"""Finds, by running the model, which parameters make each channel of its keys and queries.

Module names differ from family to family (`k_proj`, `qkv_proj`, `query_key_value`, `Wqkv`, `c_attn`, `k_norm`), and so
do the layouts inside fused projections, so this file looks up no names. Instead, it replaces the output of each module
inside an attention module by random numbers, one module at a time. A factor can be folded into the last module whose
numbers come out as keys, one for one and in proportion; where each number comes out tells which row makes which
channel. A projection followed by a norm is excluded this way, since the norm's output is not proportional to its input.
Unit vectors from the module that was found then show which channels RoPE mixes (`rope.py`). `folding.py` folds factors
into the parameters found here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..cache.support import check_model, quantized_layers
from ..config import KVQuantConfig
from ..models.layers import keeps_cache, layers_of
from ..models.sharding import check_whole
from ..models.text_config import check_is_model, positions_of, text_config_of
from .observation import Observation, forward, observed
from .rope import POSITIONS, coupled_channels, tie, turn_per_token

# Which parameters scale features: the rows of a weight, its columns (GPT-2's Conv1D), the gain of a norm, or a gain
# that is stored as its difference from 1 (Gemma).
Rule = Literal["rows", "columns", "gain", "gain_plus_one"]
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

NUM_SAMPLES = 32  # random vectors: the odds that two independent ones agree to COSINE are below 1e-15
COSINE = 0.995  # least cosine of a module's numbers and a channel; rounding to bfloat16 leaves 0.9999
LOUD = 1024.0  # some samples are this many times larger, to notice clipping (OLMo's clip_qkv is 8)
NUM_LOUD = 8


@dataclasses.dataclass(frozen=True)
class Edit:
    """An edit of weights, as error messages name it.

    Attributes:
        what: The tensors that the weights make or take.
        verb: What the edit does to them.
    """

    what: str
    verb: str


SMOOTHING = Edit("keys and queries", "smooth")


@dataclasses.dataclass(frozen=True)
class Scalable:
    """The parameters of one module that make each channel of a layer's heads, or take it as input.

    Attributes:
        name: The module's name in the model.
        rule: Which parameters scale its output, or its input if it takes the channels.
        index: `[heads, head_dim]` int64: the row, column or gain of each channel.
    """

    name: str
    rule: Rule
    index: Tensor


@dataclasses.dataclass(frozen=True)
class LayerLayout:
    """Where one layer's keys and queries come from.

    Attributes:
        layer_idx: The layer.
        name: The attention module's name in the model.
        key: The parameters that make keys.
        query: The parameters that make queries.
        ties: `[num_kv_heads, head_dim]` int64: channels with the same number have to share a factor. Query heads take
            the factors of their key-value head.
        turn: `[num_kv_heads, head_dim]` float32: `|sin|` of the angle by which RoPE turns the channel from one token to
            the next; 0 for channels that are not rotated.
    """

    layer_idx: int
    name: str
    key: Scalable
    query: Scalable
    ties: Tensor
    turn: Tensor

    @property
    def num_q_per_kv(self) -> int:
        """Query heads that share a key-value head."""
        return self.query.index.shape[0] // self.key.index.shape[0]


@dataclasses.dataclass
class Candidate:
    """A module inside an attention module that runs before attention. `shape` is its output's, without the batch."""

    module: nn.Module
    name: str
    shape: tuple[int, ...]
    token_axis: int

    def output(self, features: Tensor) -> Tensor:
        """An output of this module, `[batch, *shape]`, with the same features (`[batch, features]`) for every token."""
        rest = [size for axis, size in enumerate(self.shape) if axis != self.token_axis]
        return features.view(-1, *rest).unsqueeze(1 + self.token_axis).expand(-1, *self.shape)

    @property
    def num_features(self) -> int:
        """How many numbers the module returns per token."""
        return math.prod(self.shape) // self.shape[self.token_axis]


@dataclasses.dataclass
class Found:
    """Keys, or queries, that come out of a candidate one for one.

    Attributes:
        candidate: The module.
        index: `[heads, head_dim]` int64: the feature that makes each channel.
    """

    candidate: Candidate
    index: Tensor


def find_layouts(model: PreTrainedModel, *, where: str) -> tuple[dict[int, LayerLayout], dict[int, str]]:
    """Find the parameters that make keys and queries in every layer whose cache would be quantised.

    Args:
        model: A decoder-only model. It is only run.
        where: Opens error messages.

    Returns:
        layouts: Per layer index, the layout.
        left_out: Per layer index, why the layer cannot be scaled.

    Raises:
        TypeError: `model` is not a `PreTrainedModel`.
        NotImplementedError: The model keeps no keys, its attention cannot be watched, or its weights cannot be edited
            in place.
    """
    check_decoder(model, where)
    check_own_keys(model, where)
    names = {module: name for name, module in model.named_modules()}
    modules = attention_modules(model, where)
    left_out = other_caches(model)
    modules = {index: module for index, module in modules.items() if index not in left_out}
    candidates = candidates_of(model, modules, names)
    keys, queries = match(model, candidates, "key", "query")
    layouts: dict[int, LayerLayout] = {}
    chosen: dict[int, tuple[Found, Found]] = {}
    for index in modules:
        key, query = (choose(side[index], names, modules[index], where) for side in (keys, queries))
        reasons = [
            f"{side} {reason}" for side, reason in (("keys", key), ("queries", query)) if isinstance(reason, str)
        ]
        if isinstance(key, Found) and isinstance(query, Found):
            chosen[index] = key, query
        else:
            left_out[index] = " and ".join(reasons)
    responses = _unit_responses(model, chosen)
    for index, (key, query) in chosen.items():
        layout = _layout(index, names[modules[index]], key, query, responses[index])
        if isinstance(layout, str):
            left_out[index] = layout
        else:
            layouts[index] = layout
    makers = [scalable.name for layout in layouts.values() for scalable in (layout.key, layout.query)]
    check_owners(model, makers, where)
    return layouts, dict(sorted(left_out.items()))


def other_caches(model: PreTrainedModel, config: KVQuantConfig | None = None) -> dict[int, str]:
    """The layers whose cache is left to transformers, each with the reason.

    Args:
        model: A decoder.
        config: The cache's config; `None` for a cache that quantises every layer it can.
    """
    layer_types, _ = layers_of(text_config_of(model))
    quantized = quantized_layers(layer_types, config or KVQuantConfig())
    return {
        index: f"its cache ({layer_type}) is not quantised"
        for index, layer_type in enumerate(layer_types)
        if index not in quantized
    }


def check_decoder(model: PreTrainedModel, where: str) -> None:
    """Refuse a model that keeps no keys that could be quantised.

    Raises:
        TypeError: `model` is not a `PreTrainedModel`.
        NotImplementedError: It is no decoder, caches something other than keys, or is sharded over processes.
    """
    check_is_model(
        model, where, "Pass the model itself, not a pipeline or a wrapper; merge adapters first (merge_and_unload)."
    )
    if model.config.is_encoder_decoder or not keeps_cache(model):
        raise NotImplementedError(
            f"{where}: `model` must be a decoder that keeps keys and values in a cache of transformers, got "
            f"{type(model).__name__}. Leave it as it is."
        )
    text_config = text_config_of(model)
    check_model(text_config, layers_of(text_config)[0], KVQuantConfig.from_preset("none"))
    check_whole(model, where)


def check_own_keys(model: PreTrainedModel, where: str) -> None:
    """Refuse offloaded weights, and layers that reuse the keys of other layers."""
    offloaded = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if offloaded:
        raise NotImplementedError(
            f"{where}: `model` must be in memory, got {len(offloaded)} offloaded weights, such as {offloaded[0]}. "
            "Load it without a device_map that offloads, for example on the CPU."
        )
    num_shared = getattr(text_config_of(model), "num_kv_shared_layers", 0)
    if num_shared:
        raise NotImplementedError(
            f"{where}: `model` must have keys of its own in every layer, got {num_shared} layers "
            f"of {type(model).__name__} that attend to those of others. Leave it as it is."
        )


def check_owners(model: PreTrainedModel, names: Iterable[str], where: str, *, edit: Edit = SMOOTHING) -> None:
    """Refuse to edit the modules of these names if other modules share their parameters."""
    owners: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners[parameter.data_ptr()].append(name)
    for name in dict.fromkeys(names):
        for parameter in model.get_submodule(name).parameters(recurse=False):
            shared = owners[parameter.data_ptr()]
            if len(shared) > 1:
                raise NotImplementedError(
                    f"{where}: `model` must not share the weights behind {edit.what}, got one tensor for "
                    f"{' and '.join(sorted(shared))}. Give each a copy of its own first."
                )


# --- the modules that could be scaled ---------------------------------------------------------------------------------


def attention_modules(model: PreTrainedModel, where: str) -> dict[int, nn.Module]:
    """The attention module of each layer."""
    seen: dict[int, list[nn.Module]] = defaultdict(list)

    def note(observation: Observation) -> None:
        seen[observation.layer_idx].append(observation.module)

    run_arbitrary(model, note, batch=1)
    if not seen or -1 in seen:
        raise NotImplementedError(
            f"{where}: `model` must attend through transformers' registry or PyTorch's scaled_dot_product_attention, "
            f"got {type(model).__name__}, whose attention cannot be watched. Leave it as it is."
        )
    again = [index for index, modules in seen.items() if len(modules) > 1]
    modules = [modules[0] for modules in seen.values()]
    if again or len(set(modules)) < len(modules):
        raise NotImplementedError(
            f"{where}: `model` must have an attention module for each layer, got {type(model).__name__}, whose layers "
            "share one or attend more than once. Leave it as it is."
        )
    return {index: modules[0] for index, modules in sorted(seen.items())}


def run_arbitrary(
    model: PreTrainedModel, observer: Callable[[Observation], Any], *, batch: int, extra_tokens: int = 0
) -> None:
    """Run the model on arbitrary tokens.

    Attention returns the observer's tensor, or else zeros, so that random numbers do not grow from layer to layer.
    """
    last = positions_of(model, 4096) - 1
    positions = [*POSITIONS, *range(last - extra_tokens, last + 1)]
    input_ids = torch.arange(5, 5 + len(positions)) % text_config_of(model).vocab_size
    # Slow pairs turn visibly only at far positions. Models that take no positions count from 0.
    position_ids = torch.tensor(positions).expand(batch, -1)

    def observe(observation: Observation) -> Tensor:
        out = observer(observation)
        if isinstance(out, Tensor):
            return out
        query, value = observation.query, observation.value
        return query.new_zeros((query.shape[0], query.shape[2], query.shape[1], value.shape[-1]))

    with observed(model, observe):
        forward(model, input_ids.expand(batch, -1), position_ids=position_ids)


@dataclasses.dataclass
class _ForwardLog:
    """Per layer, the modules that finished before its attention, with the shapes of their outputs without the batch."""

    finished: dict[int, list[tuple[nn.Module, tuple[int, ...]]]]
    attended: set[int]

    def note(self, index: int, module: nn.Module, args: Any, output: Any) -> None:
        """A forward hook."""
        if index not in self.attended and isinstance(output, Tensor) and output.ndim > 2:
            self.finished[index].append((module, tuple(output.shape[1:])))

    def end(self, observation: Observation) -> None:
        """Note that a layer attends."""
        self.attended.add(observation.layer_idx)


def candidates_of(
    model: PreTrainedModel, modules: Mapping[int, nn.Module], names: Mapping[nn.Module, str]
) -> dict[int, list[Candidate]]:
    """Per layer, the modules that run once and before its attention, in the order in which they finish."""
    runs = []
    for extra_tokens in (0, 1):
        log = _ForwardLog({index: [] for index in modules}, set())
        with contextlib.ExitStack() as stack:
            for index, attention in modules.items():
                for module in attention.modules():
                    if module is not attention:
                        _hook(stack, module, functools.partial(log.note, index))
            run_arbitrary(model, log.end, batch=2, extra_tokens=extra_tokens)
        finished = log.finished
        runs.append(finished)
    found: dict[int, list[Candidate]] = {}
    for index in modules:
        found[index] = []
        calls = [module for module, _ in runs[0][index]]
        for (module, shape), (_, longer) in zip(runs[0][index], runs[1][index], strict=True):
            grown = [axis for axis, (size, other) in enumerate(zip(shape, longer, strict=True)) if size != other]
            if calls.count(module) == 1 and len(grown) == 1:
                found[index].append(Candidate(module, names[module], shape, grown[0]))
    return found


def _hook(stack: contextlib.ExitStack, module: nn.Module, hook: Callable[..., Any]) -> None:
    stack.callback(module.register_forward_hook(hook).remove)


@contextlib.contextmanager
def replaced(outputs: Mapping[nn.Module, Tensor]) -> Iterator[None]:
    """Let modules return these tensors, in the dtype and on the device of their own output."""
    with contextlib.ExitStack() as stack:
        for module, output in outputs.items():
            _hook(stack, module, lambda module, args, old, output=output: torch.empty_like(old).copy_(output))
        yield


# --- which of them makes keys and queries -----------------------------------------------------------------------------


def match(
    model: PreTrainedModel, candidates: Mapping[int, list[Candidate]], *sides: Literal["key", "query", "value"]
) -> list[dict[int, list[Found]]]:
    """For each side, per layer, the candidates whose output arrives there one for one, the last to run first."""
    matched: list[dict[int, list[Found]]] = [{index: [] for index in candidates} for _ in sides]
    generator = torch.Generator().manual_seed(0)
    for rank in range(max((len(found) for found in candidates.values()), default=0)):
        current = {index: found[-1 - rank] for index, found in candidates.items() if rank < len(found)}
        sources: dict[int, Tensor] = {}
        for index, candidate in current.items():
            sources[index] = random_samples((candidate.num_features,), generator)
        outputs = {candidate.module: candidate.output(sources[index]) for index, candidate in current.items()}

        def look(
            observation: Observation,
            current: dict[int, Candidate] = current,
            sources: dict[int, Tensor] = sources,
        ) -> None:
            index = observation.layer_idx
            if index in current:
                source = sources[index].to(observation.key)
                for side, by_layer in zip(sides, matched, strict=True):
                    found = one_for_one(source, getattr(observation, side)[:, :, 0])
                    if found is not None:
                        by_layer[index].append(Found(current[index], found))

        with replaced(outputs):
            run_arbitrary(model, look, batch=NUM_SAMPLES + NUM_LOUD)
    return matched


def random_samples(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Random samples for `one_for_one`: `NUM_SAMPLES` plain ones, then `NUM_LOUD` of them times `LOUD`."""
    quiet = torch.randn((NUM_SAMPLES, *shape), generator=generator)
    return torch.cat((quiet, LOUD * quiet[:NUM_LOUD]))


def differs_by_sample(states: Tensor) -> bool:
    """Whether samples differ by more than rounding, which can differ between equal rows of a batch.

    Args:
        states: `[samples, ...]`.
    """
    states = states.float()
    return bool((states - states[:1]).abs().amax() > 0.05 * states[:1].abs().amax())


def one_for_one(source: Tensor, states: Tensor) -> Tensor | None:
    """Which feature each channel of keys, queries or values is a multiple of.

    Args:
        source: `[samples, features]`: what the module returned.
        states: `[samples, heads, head_dim]`: what arrived at the first token, which RoPE does not rotate.

    Returns:
        `[heads, head_dim]` int64, on the CPU; `None` unless every channel is a multiple of a feature.
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


def choose(
    passed: list[Found], names: Mapping[nn.Module, str], attention: nn.Module, where: str, *, edit: Edit = SMOOTHING
) -> Found | str:
    """The module to edit, or why there is none."""
    if not passed:
        return "are not a multiple of any module's output"
    for found in passed:
        module = found.candidate.module
        check_editable(module, found.candidate.name, attention, names, where, edit=edit)
        if isinstance(getattr(module, "weight", None), nn.Parameter):
            if rule_of(module, found.candidate) is None:
                return f"come from {found.candidate.name} ({type(module).__name__}), whose weight scales in another way"
            return found
    return f"come from {passed[0].candidate.name}, which has no weights"


def check_editable(
    module: nn.Module,
    name: str,
    attention: nn.Module,
    names: Mapping[nn.Module, str],
    where: str,
    *,
    edit: Edit = SMOOTHING,
) -> None:
    """Refuse weights that are not plain numbers in memory."""
    wrappers = [
        wrapper
        for wrapper in attention.modules()
        if (hasattr(wrapper, "base_layer") or hasattr(wrapper, "lora_A"))
        and any(child is module for child in wrapper.modules())
    ]
    if wrappers:
        raise NotImplementedError(
            f"{where}: `model` must have no adapters on {edit.what}, got {type(wrappers[0]).__name__} at "
            f"{names[wrappers[0]]}. Merge them first (merge_and_unload), or {edit.verb} the base model and train anew."
        )
    offload = getattr(module, "_hf_hook", None)
    if getattr(offload, "offload", False):
        raise NotImplementedError(
            f"{where}: `model` must be in memory, got {name}, which is offloaded. "
            "Load it without a device_map that offloads, for example on the CPU."
        )
    own = [tensor for tensor in module.state_dict(keep_vars=True).values() if isinstance(tensor, Tensor)]
    odd = [tensor for tensor in own if tensor.dtype not in FLOATS or type(tensor) not in (nn.Parameter, Tensor)]
    if odd:
        raise NotImplementedError(
            f"{where}: `model` must have plain weights in float32, bfloat16 or float16 behind {edit.what}, got "
            f"{type(module).__name__} with {str(odd[0].dtype).removeprefix('torch.')} {type(odd[0]).__name__} at "
            f"{name}. {edit.verb.capitalize()} the unquantised model, then quantise its weights."
        )


def rule_of(module: nn.Module, candidate: Candidate) -> Rule | None:
    """How a module's weight scales its output, tried out on copies of its parameters; `None` for any other way."""
    weight: Any = module.weight
    features = candidate.shape[-1]
    if isinstance(module, nn.Linear):
        return "rows" if weight.shape[0] == features else None
    if isinstance(module, Conv1D):
        return "columns" if weight.shape[1] == features else None
    behind_tokens = candidate.shape[candidate.token_axis + 1 :]
    if not 0 < weight.ndim <= len(behind_tokens) or tuple(weight.shape) != behind_tokens[-weight.ndim :]:
        return None
    x = torch.randn((1, *candidate.shape), generator=torch.Generator().manual_seed(0)).to(weight)
    for rule, silent in (("gain", 0.0), ("gain_plus_one", -1.0)):
        parameters = {name: torch.zeros_like(value) for name, value in module.named_parameters()}
        parameters["weight"] = torch.full_like(weight, silent)
        if not torch.func.functional_call(module, parameters, (x,)).any():
            return rule  # type: ignore[return-value]
    return None


def by_feature(weight: Tensor, rule: Rule) -> Tensor:
    """The weight of a projection with features first, a view without a gradient."""
    assert rule in ("rows", "columns")
    return weight.detach() if rule == "rows" else weight.detach().mT


# --- how RoPE and sharing tie channels --------------------------------------------------------------------------------


def _unit_responses(
    model: PreTrainedModel, chosen: Mapping[int, tuple[Found, Found]]
) -> dict[int, tuple[Tensor, Tensor, bool]]:
    """Per layer, the keys and queries that unit vectors give, and whether values change with them.

    Returns:
        key, query: `[head_dim, heads, tokens, head_dim]` float32 on the CPU, as `rope.coupled_channels` takes them.
        is_value_touched: Whether values change with the unit vector.
    """
    if not chosen:
        return {}
    batch = max(key.index.shape[1] for key, _ in chosen.values())
    features: dict[nn.Module, Tensor] = {}
    places: dict[nn.Module, Candidate] = {}
    for found in itertools.chain(*chosen.values()):
        module, channels = found.candidate.module, torch.arange(found.index.shape[1])
        places[module] = found.candidate
        unit = features.setdefault(module, torch.zeros((batch, found.candidate.num_features)))
        unit[channels.expand_as(found.index), found.index] = LOUD
    outputs = {module: candidate.output(features[module]) for module, candidate in places.items()}
    responses: dict[int, tuple[Tensor, Tensor, bool]] = {}

    def look(observation: Observation) -> None:
        if observation.layer_idx in chosen:
            head_dim = observation.key.shape[-1]
            responses[observation.layer_idx] = (
                observation.key[:head_dim].float().cpu(),
                observation.query[:head_dim].float().cpu(),
                differs_by_sample(observation.value[:head_dim]),
            )

    with replaced(outputs):
        run_arbitrary(model, look, batch=batch)
    return responses


def _layout(
    layer_idx: int, name: str, key: Found, query: Found, responses: tuple[Tensor, Tensor, bool]
) -> LayerLayout | str:
    """The layout of one layer, or why it cannot be scaled."""
    key_response, query_response, is_value_touched = responses
    if is_value_touched:
        return "values come from the same weights as keys"
    sides = []
    for found in (key, query):
        rule = rule_of(found.candidate.module, found.candidate)
        assert rule is not None
        # A gain spans the last axes of the output. If heads are an axis before these, they share it.
        weight: Any = found.candidate.module.weight
        span = weight.numel() if rule.startswith("gain") else found.candidate.num_features
        sides.append(Scalable(found.candidate.name, rule, found.index % span))
    if key.candidate.module is query.candidate.module and torch.isin(sides[0].index, sides[1].index).any():
        return "one parameter makes keys and queries"
    num_kv_heads, head_dim = sides[0].index.shape
    num_q_per_kv = sides[1].index.shape[0] // num_kv_heads
    nodes = torch.arange(num_kv_heads * head_dim).view(num_kv_heads, head_dim)
    query_nodes = nodes.repeat_interleave(num_q_per_kv, 0)
    edges = []
    for response, side_nodes in ((key_response, nodes), (query_response, query_nodes)):
        head, channel, source = coupled_channels(response).nonzero(as_tuple=True)
        edges.append(torch.stack((side_nodes[head, channel], side_nodes[head, source])))
    shared = [
        torch.stack((nodes.flatten(), sides[0].index.flatten())),
        torch.stack((query_nodes.flatten(), sides[1].index.flatten())),
    ]
    labels = tie(nodes.numel(), torch.cat(edges, dim=1), shared)
    return LayerLayout(layer_idx, name, sides[0], sides[1], labels.view_as(nodes), turn_per_token(key_response))

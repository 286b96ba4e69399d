"""Finds which parameters make each channel of a model's values, and which take each channel of attention's output.

Both are found by running the model, as for keys and queries (`layout.py`): values by replacing what modules return,
attention's output by replacing it and looking at the inputs of the modules after it. A layer is accepted only if an
orthogonal map over the channels of a head passes through: rows of a projection make values and nothing else, with the
same factor for all channels of a head, and columns of one projection take attention's output unchanged. A norm or a
gate in between, or keys made by the same rows, are refused. `value_rotation.py` rotates these weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from .layout import (
    NUM_LOUD,
    NUM_SAMPLES,
    Edit,
    Found,
    Scalable,
    attention_modules,
    candidates_of,
    check_decoder,
    check_editable,
    check_own_keys,
    check_owners,
    choose,
    differs_by_sample,
    match,
    one_for_one,
    other_caches,
    random_samples,
    replaced,
    rule_of,
    run_arbitrary,
)
from .observation import Observation

ROTATION = Edit("values and attention's output", "rotate")


@dataclasses.dataclass(frozen=True)
class ValueLayout:
    """The two projections of one layer that make values and take attention's output, by rows or columns.

    Attributes:
        layer_idx: The layer.
        value: The parameters that make values. Each feature makes one channel.
        output: The parameters that take attention's output.
    """

    layer_idx: int
    value: Scalable
    output: Scalable


@dataclasses.dataclass
class _Answers:
    """What one layer does with random values and a random output of attention.

    Attributes:
        made: `[samples, features]`: the random output of the projection.
        value: `[samples, num_kv_heads, head_dim]`: the values that attention gets from it; `None` until it runs.
        attended: `[samples, num_q_heads, head_dim]`: the random output of attention; `None` until it runs.
        is_key_touched: Whether keys or queries changed with the values.
        inputs: The modules that ran after attention, each with its input for the first token, `[samples, features]`.
    """

    made: Tensor
    value: Tensor | None = None
    attended: Tensor | None = None
    is_key_touched: bool = False
    inputs: list[tuple[nn.Module, Tensor]] = dataclasses.field(default_factory=list)

    def note(self, module: nn.Module, args: Any) -> None:
        """A forward pre-hook."""
        if self.attended is not None and args and isinstance(args[0], Tensor) and args[0].ndim == 3:
            if args[0].shape[0] == len(self.attended):
                self.inputs.append((module, args[0][:, 0]))


def find_value_layouts(model: PreTrainedModel, *, where: str) -> dict[int, ValueLayout]:
    """Find the value layout of every layer whose cache would be quantised.

    Args:
        model: A decoder-only model. It is only run.
        where: Opens error messages.

    Returns:
        Per layer index, the layout.

    Raises:
        TypeError: `model` is not a `PreTrainedModel`.
        NotImplementedError: Layers reuse the values of others, attention cannot be watched, weights cannot be edited in
            place, or a layer does more with values than project them.
    """
    check_decoder(model, where)
    check_own_keys(model, where)
    names = {module: name for name, module in model.named_modules()}
    left_out = other_caches(model)
    modules = {index: module for index, module in attention_modules(model, where).items() if index not in left_out}
    if not modules:
        raise NotImplementedError(
            f"{where}: `model` must have a layer whose cache is quantised, got {type(model).__name__} without one. "
            "Leave it as it is."
        )
    (values,) = match(model, candidates_of(model, modules, names), "value")
    chosen: dict[int, Found] = {}
    for index, attention in modules.items():
        found = choose(values[index], names, attention, where, edit=ROTATION)
        if isinstance(found, str):
            raise _refusal(model, index, f"its values {found}", where)
        if rule_of(found.candidate.module, found.candidate) not in ("rows", "columns"):
            raise _refusal(model, index, f"its values come from {found.candidate.name}, a norm", where)
        chosen[index] = found
    answers = _answers(model, modules, chosen)
    layouts: dict[int, ValueLayout] = {}
    for index, found in chosen.items():
        value = _value(found, answers[index])
        output = value if isinstance(value, str) else _output(answers[index], names, modules[index], where)
        if isinstance(value, str) or isinstance(output, str):
            raise _refusal(model, index, str(output), where)
        layouts[index] = ValueLayout(index, value, output)
    touched = [side.name for layout in layouts.values() for side in (layout.value, layout.output)]
    check_owners(model, touched, where, edit=ROTATION)
    return layouts


def _refusal(model: PreTrainedModel, index: int, reason: str, where: str) -> NotImplementedError:
    return NotImplementedError(
        f"{where}: `model` must make values by a projection and pass attention's output unchanged to another one, got "
        f"{type(model).__name__}: in layer {index}, {reason}. Leave it as it is."
    )


def _answers(
    model: PreTrainedModel, modules: Mapping[int, nn.Module], chosen: Mapping[int, Found]
) -> dict[int, _Answers]:
    """Run the model once with random values and attention outputs. No layer passes them on to the next."""
    generator = torch.Generator().manual_seed(1)
    batch = NUM_SAMPLES + NUM_LOUD
    answers: dict[int, _Answers] = {}
    outputs: dict[nn.Module, Tensor] = {}
    for layer_idx, found in chosen.items():
        # All other features of a fused projection are 0, in every sample.
        features = torch.zeros((batch, found.candidate.num_features))
        used = found.index.unique()
        features[:, used] = random_samples((len(used),), generator)
        answers[layer_idx] = _Answers(features)
        outputs[found.candidate.module] = found.candidate.output(features)

    def attend(observation: Observation) -> Tensor | None:
        if observation.layer_idx not in answers:
            return None
        answer, query, value = answers[observation.layer_idx], observation.query, observation.value
        answer.value = value[:, :, 0]
        answer.is_key_touched = differs_by_sample(observation.key) or differs_by_sample(query)
        answer.attended = random_samples((query.shape[1], value.shape[-1]), generator).to(query)
        return answer.attended.unsqueeze(1).expand(-1, query.shape[2], -1, -1).contiguous()

    with contextlib.ExitStack() as stack:
        for index, attention in modules.items():
            for module in attention.modules():
                if module is not attention:
                    stack.callback(module.register_forward_pre_hook(answers[index].note).remove)
            stack.callback(attention.register_forward_hook(_silence).remove)
        stack.enter_context(replaced(outputs))
        run_arbitrary(model, attend, batch=batch)
    return answers


def _silence(module: nn.Module, args: Any, output: Any) -> Any:
    """A forward hook: attention returns zeros, so that later layers get the same input in every sample."""
    if isinstance(output, tuple):
        return (torch.zeros_like(output[0]), *output[1:])
    return torch.zeros_like(output)


def _value(found: Found, answer: _Answers) -> Scalable | str:
    """The projection that makes values, or why it cannot be rotated."""
    candidate, index = found.candidate, found.index
    if answer.is_key_touched:
        return "keys or queries come from the same weights as values"
    assert answer.value is not None
    if not _is_in_proportion(answer.made.to(answer.value), answer.value, index):
        return f"values are multiplied per channel after {candidate.name}"
    index = index.unique(dim=0)  # a head that is repeated before attention (Falcon) counts once
    if index.unique().numel() < index.numel():
        return f"one feature of {candidate.name} makes several channels of values"
    return Scalable(candidate.name, "columns" if isinstance(candidate.module, Conv1D) else "rows", index)


def _output(answer: _Answers, names: Mapping[nn.Module, str], attention: nn.Module, where: str) -> Scalable | str:
    """The projection that takes attention's output, or why it cannot be rotated."""
    attended = answer.attended
    assert attended is not None
    takers: dict[nn.Module, tuple[Tensor, Tensor]] = {}
    for module, features in answer.inputs:
        index = one_for_one(features.float(), attended)
        # Over this many channels a norm is nearly a constant factor, but it makes loud samples as quiet as the others.
        if index is not None and one_for_one(attended.flatten(1), features[:, index.to(features.device)]) is not None:
            takers[module] = index, features
    for module in takers:
        check_editable(module, names[module], attention, names, where, edit=ROTATION)
    projections = [module for module in takers if isinstance(module, (nn.Linear, Conv1D))]
    if not projections and takers:
        last = list(takers)[-1]  # a container gets its input before the modules in it
        return f"attention's output goes through {names[last]} ({type(last).__name__})"
    if len(projections) != 1:
        return "attention's output is not passed to one projection, channel by channel"
    module = projections[0]
    index, features = takers[module]
    if not _is_in_proportion(features, attended, index):
        return f"attention's output is multiplied per channel before {names[module]} takes it, as by a gate"
    return Scalable(names[module], "rows" if isinstance(module, Conv1D) else "columns", index)


def _is_in_proportion(features: Tensor, states: Tensor, index: Tensor) -> bool:
    """Whether all channels of a head are the same multiple of their features. A factor per head commutes with rotation.

    Args:
        features: `[samples, features]`, rounded to the dtype of `states`.
        states: `[samples, heads, head_dim]`.
        index: `[heads, head_dim]`: which feature each channel is a multiple of.
    """
    source, target = features[:, index.to(features.device)].double(), states.double()
    ratio = (source * target).sum(0) / source.square().sum(0)
    spread = (ratio - ratio[:, :1]).abs().amax()
    # Copies have a ratio of exactly 1. The rounding errors of a product have either sign and average out.
    return bool(spread <= torch.finfo(states.dtype).eps / 2 * ratio.abs().amax())

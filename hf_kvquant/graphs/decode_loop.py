"""`generate` without the host in the loop: the step captured together with the choice of the next token.

The captured function runs the model, chooses the token, notes which sequences are finished and advances its own inputs.
The host keeps a few steps in flight and reads the tokens and flags of each when they arrive. Steps that ran beyond the
stop are undone. Results equal transformers' loop token for token, also when sampling.

The loop serves greedy decoding, and sampling that depends on the newest scores only. Assisted decoding is in
`assisted.py`. Everything else goes through transformers' loop, over the captured forward of `capture.py`; the log says
so, and why.
"""

from __future__ import annotations

import functools
import inspect
from collections import deque
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..attention.masks import is_bounds
from ..cache.kvquant_cache import KVQuantCache
from ..state import notes_on
from ..storage import rewind
from ..upstream.releases import CACHE, with_cache
from . import assisted
from .capture import CapturedStep, fill, is_captured, key_of, log_slower_loop
from .fusion import fused_prompts

# Steps in flight beyond the one whose flags are awaited. One hides the host's launch of the next step behind the
# device's work; a second one hides pauses of the host.
STEPS_AHEAD = 2

# These depend on the newest scores only, and never make the host wait.
_SERVED_PROCESSORS = (
    logits_process.TemperatureLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.MinPLogitsWarper,
    logits_process.TypicalLogitsWarper,
    logits_process.EpsilonLogitsWarper,
    logits_process.LogitNormalization,
)
_SERVED_CRITERIA = (MaxLengthCriteria, EosTokenCriteria)
# If a model overrides one of these, its inputs may advance in another way than by one position per step.
_FEEDING = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")
# Types whose own `prepare_inputs_for_generation` only limits the logits of a prompt (transformers 5.17 and 5.24).
_LIMIT_LOGITS = ("bamba", "falcon_h1", "nemotron_h", "zamba2")
# Inputs that the loop knows how to advance.
_ADVANCED = ("attention_mask", "position_ids", CACHE)


def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces `model.generate` on a model patched with `capture=True`; same arguments, same results."""
    method = type(model).generate
    own = ("generate", "_sample", "_assisted_decoding")
    if any(getattr(type(model), name) is not getattr(GenerationMixin, name) for name in own):
        return method(model, *args, **kwargs)
    call = inspect.signature(method).bind(model, *args, **kwargs).arguments
    options = {**call, **call.get("kwargs", {})}
    if options.get("custom_generate") or options.get("synced_gpus"):
        return method(model, *args, **kwargs)
    assistant = options.get("assistant_model")
    config, _ = model._prepare_generation_config(options.get("generation_config"), **options.get("kwargs", {}))
    if config.stop_strings is not None or config.token_healing:
        log_slower_loop("stop strings and token healing need the tokenizer")
        return method(model, *args, **kwargs)
    mode = None if config.disable_compile else config.get_generation_mode(assistant)
    if mode in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        # generate does not pass its streamer to a custom method.
        loop = functools.partial(decode, streamer=options.get("streamer"))
        return method(model, *args, **kwargs, custom_generate=loop)
    assisted_loop = None
    if mode == GenerationMode.ASSISTED_GENERATION:
        assisted_loop = assisted.decoding_method(model, config, options)
    if assisted_loop is None:
        return method(model, *args, **kwargs)
    with assisted.sized(model, assistant):
        return method(model, *args, **kwargs, custom_generate=assisted_loop)


def decode(model: Any, input_ids: Tensor, *, streamer: Any = None, **call: Any) -> Any:
    """A decoding method for `custom_generate` of `generate`: in our loop if it serves the call, else in transformers'.

    `call` are the other arguments of transformers' `_sample`.

    Raises:
        RuntimeError: The step cannot be captured.
        ValueError: The cache is full.
    """
    if is_captured(call.get(CACHE)):
        if call["generation_config"].is_assistant:  # always asked for scores
            return type(model)._sample(assisted.Replayed(model), input_ids, streamer=streamer, **call)
        loop = _Loop(model, input_ids, streamer, **call)
        reason = loop.why_not()
        if reason is None:
            return loop.run()
        log_slower_loop(reason)
    return type(model)._sample(model, input_ids, streamer=streamer, **call)


class Choice:
    """How the next token is chosen from logits, and which tokens end a sequence."""

    def __init__(
        self,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: Any,
    ) -> None:
        self.device = input_ids.device
        self.processors = logits_processor
        self.do_sample: bool = generation_config.do_sample
        ids = [criteria.eos_token_id for criteria in stopping_criteria if isinstance(criteria, EosTokenCriteria)]
        self.eos = torch.cat([each.flatten() for each in ids]).to(self.device) if ids else None
        self.pad = generation_config._pad_token_tensor.to(self.device) if ids else None

    @property
    def key(self) -> Hashable:
        """Everything about the choice that is fixed in a captured step."""
        processors = tuple((type(each), tuple(sorted(vars(each).items()))) for each in self.processors)
        tokens = tuple(None if each is None else tuple(each.view(-1).tolist()) for each in (self.eos, self.pad))
        return self.do_sample, processors, tokens

    def __call__(self, logits: Tensor, report: Tensor) -> None:
        """Choose a token for every sequence from `logits`, `[batch, 1, vocabulary]`.

        `report`, `[2, batch]` int64, is written in place: the tokens (padding for finished sequences), and 1 for every
        sequence that is not finished.
        """
        token, unfinished = report
        scores = logits[:, -1].to(copy=True, dtype=torch.float32)
        scores = self.processors(token[:, None], scores)
        if self.do_sample:
            # What torch.multinomial computes for one sample, without its check of the probabilities on the host.
            probabilities = torch.softmax(scores, dim=-1)
            scores = probabilities / torch.empty_like(probabilities).exponential_()
        chosen = scores.argmax(dim=-1)
        if self.eos is not None and self.pad is not None:
            chosen = chosen * unfinished + self.pad * (1 - unfinished)
            unfinished.mul_((chosen[:, None] != self.eos).all(dim=1))
        token.copy_(chosen)


class LoopStep(CapturedStep):
    """One decode step over static tensors: the model, the choice of the next token, and the inputs of the next step."""

    def __init__(self, inputs: Mapping[str, Any], report: Tensor, choice: Choice) -> None:
        super().__init__(inputs, report.device)
        self.report = report.clone()
        self._choice = choice  # the graph reads its tensors

    def start(self, inputs: Mapping[str, Any], report: Tensor) -> None:
        """Set the inputs of the first step after a prompt."""
        fill(self.inputs, inputs)
        self.report.copy_(report)

    def _finish(self, output: Any, cache: KVQuantCache) -> None:
        self._choice(output.logits, self.report)
        self.inputs["input_ids"].copy_(self.report[0][:, None])
        if "position_ids" in self.inputs:
            self.inputs["position_ids"].add_(1)
        mask = self.inputs.get("attention_mask")  # some models have a dictionary, with one for each kind of layer
        for bounds in mask.values() if isinstance(mask, Mapping) else [mask]:
            if bounds is not None:
                assert is_bounds(bounds)
                bounds[1].add_(1)


class _Mailbox:
    """Reports on their way to the host, in order: at most `size` at a time, all with the layout of `report`."""

    def __init__(self, report: Tensor, size: int) -> None:
        is_cuda = report.device.type == "cuda"
        slots = [torch.empty_like(report, device="cpu", pin_memory=is_cuda) for _ in range(size)]
        self._free = deque((slot, torch.cuda.Event(blocking=True) if is_cuda else None) for slot in slots)
        self._sent: deque[Any] = deque()

    def __len__(self) -> int:
        return len(self._sent)

    def send(self, report: Tensor) -> None:
        """Queue the copy of a report behind the work of the device."""
        slot, event = self._free.popleft()
        slot.copy_(report, non_blocking=True)
        if event is not None:
            event.record(torch.cuda.current_stream(report.device))
        self._sent.append((slot, event))

    def receive(self) -> Tensor:
        """Wait for the oldest report and return it."""
        slot, event = self._sent.popleft()
        if event is not None:
            event.synchronize()
        self._free.append((slot, event))
        report: Tensor = slot.clone()
        return report


class _Loop:
    """One call of `generate`. The streamer, if any, gets tokens as they arrive."""

    def __init__(
        self,
        model: Any,
        input_ids: Tensor,
        streamer: Any,
        *,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> None:
        self._model, self._input_ids, self._streamer = model, input_ids, streamer
        self._processors, self._criteria, self._config = logits_processor, stopping_criteria, generation_config
        self._inputs = model_kwargs
        self._cache: KVQuantCache = model_kwargs[CACHE]
        self._random_states: list[Tensor] = []  # after each token

    def why_not(self) -> str | None:
        """Why transformers' loop has to run, or `None` if this one serves the call."""
        for processor in self._processors:
            if type(processor) not in _SERVED_PROCESSORS:
                return f"{type(processor).__name__} looks at more than the newest scores"
        for criteria in self._criteria:
            if type(criteria) not in _SERVED_CRITERIA:
                return f"{type(criteria).__name__} decides on the host"
        for name in ("output_scores", "output_logits", "output_hidden_states"):
            if self._config.return_dict_in_generate and getattr(self._config, name):
                return f"{name}=True"
        for name in _FEEDING if self._model.config.model_type not in _LIMIT_LOGITS else ():
            if getattr(type(self._model), name) is not getattr(GenerationMixin, name):
                return f"{type(self._model).__name__} has its own {name}"
        for name, value in self._inputs.items():
            if name not in _ADVANCED and not isinstance(value, (int, float, str, type(None))):
                return f"the model is fed '{name}'"
        if self._input_ids.device != self._model.device:
            return f"the prompt is on {self._input_ids.device}, the model on {self._model.device}"
        mask = self._inputs.get("attention_mask")
        has_holes = mask is not None and bool((mask[:, :-1] > mask[:, 1:]).any())
        if has_holes or self._cache.notes.has_holes:
            return "the attention mask hides more than left padding"
        return None

    def run(self) -> Any:
        """Prefill, and decode until every sequence is finished or as long as it may get."""
        input_ids = self._input_ids
        is_cuda = input_ids.device.type == "cuda"
        self._random = torch.cuda.default_generators[input_ids.device.index] if is_cuda else torch.default_generator
        self._choice = Choice(input_ids, self._processors, self._criteria, self._config)
        with fused_prompts(self._model):
            outputs = self._model._prefill(input_ids, self._config, self._inputs)
        report = torch.ones((2, input_ids.shape[0]), dtype=torch.int64, device=input_ids.device)
        self._choice(outputs.logits, report)
        update = self._model._update_model_kwargs_for_generation
        self._inputs = update(outputs, self._inputs, is_encoder_decoder=False)
        del outputs  # a prompt's logits may be large
        returns_cache = self._config.return_dict_in_generate
        is_kept = returns_cache or getattr(self._cache, "_is_user_defined", False)
        # Steps are undone by a crop, which cannot restore tokens that have left a dense window, or a state.
        has_tails = any(storage.layout.has_tail for storage in self._cache.storages)
        steps_ahead = 0 if is_kept and (has_tails or self._cache.states) else STEPS_AHEAD
        with self._model._optimize_model_for_decode():
            received, num_behind = self._run_steps(report, steps_ahead)
        self._undo(num_behind, is_kept=is_kept)
        if self._streamer is not None:
            self._streamer.end()
        new_ids = torch.stack([tokens for tokens, _ in received], dim=1).to(input_ids.device)
        sequences: Any = torch.cat([input_ids, new_ids], dim=1)
        if returns_cache:
            return GenerateDecoderOnlyOutput(sequences=sequences, **with_cache(self._cache))
        return sequences

    def _run_steps(self, report: Tensor, steps_ahead: int) -> tuple[list[Tensor], int]:
        """Run steps until all sequences are finished: the reports up to the stop, and how many steps ran beyond it.

        `report` is of the token chosen after the prefill. `steps_ahead` run beyond the one whose flags are awaited.
        """
        room = min(storage.room for storage in self._cache.storages)
        max_length = min(each.max_length for each in self._criteria if isinstance(each, MaxLengthCriteria))
        max_new_tokens = max_length - self._input_ids.shape[1]
        mailbox = _Mailbox(report, steps_ahead + 1)
        mailbox.send(report)
        self._note_random_state()
        num_chosen = 1
        step: LoopStep | None = None
        received: list[Tensor] = []
        while not received or (len(received) < max_new_tokens and bool(received[-1][1].any())):
            if len(mailbox) <= steps_ahead and num_chosen < max_new_tokens and num_chosen <= room:
                step = step or self._step(report)
                step.run(self._model, self._cache)
                mailbox.send(step.report)
                self._note_random_state()
                num_chosen += 1
            elif mailbox:
                received.append(mailbox.receive())
                if self._streamer is not None:
                    self._streamer.put(received[-1][0])
            else:
                for storage in self._cache.storages:
                    storage.check_room(1)  # raises, as the next step would have
        return received, num_chosen - len(received)

    def _step(self, report: Tensor) -> LoopStep:
        """The captured step for this call, ready to run on the first new token."""
        tokens = torch.cat([self._input_ids, report[0][:, None]], dim=1)
        prepare = self._model.prepare_inputs_for_generation
        inputs: dict[str, Any] = prepare(tokens, next_sequence_length=1, **self._inputs)
        inputs["return_dict"] = True
        key = ("loop", self._choice.key, key_of(self._model, self._cache, inputs))
        step: LoopStep = notes_on(self._model).captures.get(key, lambda: LoopStep(inputs, report, self._choice))
        step.start(inputs, report)
        return step

    def _note_random_state(self) -> None:
        if self._choice.do_sample:
            self._random_states.append(self._random.get_state())

    def _undo(self, num_steps: int, *, is_kept: bool) -> None:
        """Undo the newest steps, in the cache if it is kept and in the random number generator."""
        if num_steps == 0:
            return
        if is_kept:
            for storage in self._cache.storages:
                rewind.crop(storage, num_steps)
        if self._random_states:
            self._random.set_state(self._random_states[-1 - num_steps])

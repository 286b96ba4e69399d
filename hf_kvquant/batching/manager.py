"""The manager of a patched model: transformers' own, with our attention and our cache.

Requests take pages and give them back in `cache.py`.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import operator
import reprlib
import weakref
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.continuous_api import (
    ContinuousBatchingManager,
    ContinuousBatchProcessor,
)
from transformers.generation.continuous_batching.initialization import update_cb_config_after_cache_creation
from transformers.generation.continuous_batching.requests import RequestState, RequestStatus
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING
from transformers.generation.continuous_batching.utils import WorkloadHints

from ..attention.registry import implementation_name, set_attention
from ..models.fingerprint import fingerprint
from ..models.hashes import weights_hash
from ..models.rope import has_position_table, is_dynamic
from ..models.sharding import why_not_captured
from ..models.text_config import context_of, text_config_of
from ..state import notes_on, patch_of, state_of
from ..transforms.of_model import key_transforms
from .attention import calls_of_a_token, paged_name
from .forwards import Wrapper, unwrap
from .grammars import Grammars
from .memory import CPU_SHARE
from .paged_cache import PagedCache, PagedLayer, check_room
from .rope import RopeByRequest
from .runner import Runner, inputs_of, max_blocks_of, settle_graphs
from .sampling import KEY, Sampling, reports
from .settings import check_end_tokens, new_tokens_of
from .slots import add_lengths
from .state_layers import forward_of_state
from .states import known_types
from .support import WHERE, check_latents, check_served, pages_of


class Processor(ContinuousBatchProcessor):
    """A `ContinuousBatchProcessor` with our runner.

    transformers clears the inputs of steps on the current stream, and copies the first step's inputs on another one
    without waiting (5.23). So a manager's first answers sometimes came from cleared inputs. Here, whatever clears them
    waits until they are clear.

    Weights and adapters may change while it runs. Then pages that are kept for later requests are forgotten, and so are
    captured steps that read other tensors.

    Args:
        model: Whose pages and steps these are.
        **options: See `ContinuousBatchProcessor`.
    """

    cache: PagedCache
    model_runner: Runner

    def __init__(self, *, model: Any, **options: Any) -> None:
        super().__init__(**options)
        self._model, self._generation_config = model, options["generation_config"]
        self._pages_of, self._steps_of = fingerprint(model, with_writes=True), fingerprint(model)
        self._has_looked = False  # in the present step
        self._most = context_of(model) if is_dynamic(model) or has_position_table(model) else None
        # Not a new runner beside theirs: it would free the memory pool that theirs has just made, and that aborts a
        # process in which a capture has failed before (torch 2.11). A Runner has no attributes of its own.
        self.model_runner.__class__ = Runner
        scheduler: Any = self.scheduler
        io: Any = self.inputs_and_outputs
        self._taken = io.prepare_batch_update
        io.prepare_batch_update = self._taken_with_logprobs
        self._add_waiting = scheduler.add_waiting_request
        scheduler.add_waiting_request = self._add_if_it_fits
        for each in inputs_of(io):
            add_lengths(each, self.cache.slots)
        if self.cache.states is not None:
            offloading: Any = self.offloading_manager
            self._offload = offloading._offload_to_cpu
            offloading._offload_to_cpu = self._offload_without_those_in_flight
            if self.cache.snapshots is not None:
                self._offload_requests = offloading.offload_requests
                offloading.offload_requests = self._offload_or_drop_snapshots
                self._schedule = scheduler._schedule_request
                scheduler._schedule_request = self._schedule_to_border
        self._wait_for_device()

    @property
    def room(self) -> int:
        """Tokens that a request can have: as many as pages hold, have positions, or leave all their RoPE factors."""
        room: int = self.cache.room
        return room if self._most is None else min(room, self._most)

    @property
    def _limit(self) -> tuple[str, str]:
        """What `room` is, and what helps against it, in words."""
        if self._most is None or self.cache.room <= self._most:
            return "as many as all pages hold", "set a larger `num_blocks` in the ContinuousBatchingConfig"
        if not is_dynamic(self._model):
            return "as many as this model has positions", "use a model with more"
        return "with more of which this model would take other RoPE factors for all requests", "use generate"

    def _add_if_it_fits(self, state: RequestState) -> None:
        """Let a request wait. One that never fits gets an error; transformers would end the manager for all (5.23).

        Raises:
            ValueError: It has no token, or more than `room`, or one that is no id or that the model does not have, or
                may get no new one, or an end token too early; or another request has its id.
        """
        scheduler, vocab_size = self.scheduler, text_config_of(self._model).vocab_size
        if state.request_id in scheduler.active_requests or state.request_id in scheduler.waiting_requests:
            raise ValueError(
                "continuous batching: `request_id` must be unique among requests that have not finished, got "
                f"{state.request_id!r} again. Pass another, or none."
            )
        num_tokens, room = len(state.initial_tokens), self.room
        if not 0 < num_tokens <= room:
            limit, remedy = self._limit
            raise ValueError(
                f"continuous batching: a prompt must have from 1 to {room} tokens, {limit}, got {num_tokens}. "
                f"Shorten it, or {remedy}."
            )
        # Nearly always `int` alone, which takes no time to see.
        for token in state.initial_tokens if set(map(type, state.initial_tokens)) != {int} else ():
            try:
                operator.index(token)
            except TypeError:
                raise ValueError(
                    f"continuous batching: a prompt must be a list of token ids, got {reprlib.repr(token)} in it. Call "
                    "the tokenizer first, and pass its `input_ids`."
                ) from None
        for token in (min(state.initial_tokens), max(state.initial_tokens)):
            if not 0 <= token < vocab_size:
                raise ValueError(
                    f"continuous batching: a prompt must have token ids from 0 to {vocab_size - 1}, which the model "
                    f"has, got {token}. Was it made by the tokenizer of another model?"
                )
        if state.max_new_tokens is not None and state.max_new_tokens < 1:
            raise ValueError(
                "continuous batching: `max_new_tokens`, or else `max_length` without the prompt, must be at least 1, "
                f"got {state.max_new_tokens}. Set a larger one."
            )
        if not self._has_looked:
            self.look_at_model()
            self._has_looked = True
        check_end_tokens(self._generation_config, state._eos_token_ids)
        self._add_waiting(state)

    def _offload_without_those_in_flight(
        self, victims: list[RequestState], tables: dict[str, dict[str, list[int]]]
    ) -> set[str]:
        """Copy requests to CPU memory, but for those that a step under way moves on: these begin again.

        transformers takes back the token of that step, and computes the one before it again (5.24). Keys and values
        become the same. A state has taken the token in already.
        """
        at_rest = [each for each in victims if each.current_len() < len(each.initial_tokens) + each.generated_len()]
        offloaded: set[str] = self._offload(at_rest, tables)
        return offloaded

    def _offload_or_drop_snapshots(self) -> bool:
        """Make room for requests that starve. Where no request can give way, all snapshots of states do."""
        snapshots = self.cache.snapshots
        assert snapshots is not None
        return self._offload_requests() or snapshots.clear()

    def _schedule_to_border(
        self, state: RequestState, request_tokens: list[int], token_budget: int, *options: Any
    ) -> None:
        """Let the chunk of a prompt end where its states are to be kept."""
        assert self.cache.snapshots is not None
        held = state.current_len()
        border = self.cache.snapshots.next_border(state.request_id, held)
        if border is not None:
            token_budget = min(token_budget, border - held)
        self._schedule(state, request_tokens, token_budget, *options)

    def _taken_with_logprobs(self) -> tuple[Any, Any, Any]:
        """Requests, new tokens and their reports, of those that want one."""
        requests, tokens, logprobs = self._taken()
        found = reports(each.state for each in requests if each.has_new_token)
        return requests, tokens, logprobs if found is None else found

    def look_at_model(self, *, is_suspect: bool = False) -> None:
        """Forget what does not fit the model any more. Called by the thread of the loop, or while that is paused.

        Args:
            is_suspect: Whether weights may have changed in a way that `fingerprint` does not show.
        """
        found = fingerprint(self._model, with_writes=True)
        if found == self._pages_of and not is_suspect:
            return
        self._pages_of = found
        self.cache.forget_pages()
        steps_of = fingerprint(self._model)
        if steps_of != self._steps_of:
            self._steps_of = steps_of
            self._wait_for_device()  # a step may be under way
            self.model_runner.forget_graphs()

    def prepare_next_batch(self) -> bool:
        """See `ContinuousBatchProcessor`. Requests that reach `room` get an error, and the others go on (5.23).

        Requests that outgrow their RoPE factors begin again.
        """
        self._has_looked = False
        if not self.scheduler.active_requests:
            # transformers lets requests wait once others have starved, until one finishes (5.24). None is left to.
            self.scheduler.block_new_requests = False
        room, rope = self.room, self.cache.rope
        for state in list(self.scheduler.active_requests.values()):
            if state.current_len() >= room:
                self._end_outgrown(state)
            elif rope is not None and rope.outgrows(state):
                self._begin_again(state)
        is_ready: bool = super().prepare_next_batch()
        return is_ready

    def _end_outgrown(self, state: RequestState) -> None:
        limit, remedy = self._limit
        error = ValueError(
            f"continuous batching: a request must have fewer than {self.room} tokens, {limit}, got {self.room}. "
            f"Set fewer `max_new_tokens`, or {remedy}."
        )
        self._handle_request_error(error, state)
        self.scheduler.finish_request(state.request_id)
        state._status = RequestStatus.FINISHED  # the step under way may hold it, and leaves out those that are finished

    def _begin_again(self, state: RequestState) -> None:
        """Let a request wait with its answer as part of the prompt, as transformers does with one that starves.

        It comes next, and keeps its times.
        """
        again = state.create_equivalent_initial_request()
        again.created_time, again._timestamps = state.created_time, state._timestamps
        state._status = RequestStatus.FINISHED
        self.scheduler.finish_request(state.request_id)
        self._add_waiting(again)
        self.scheduler.waiting_requests_order.rotate(1)

    def reset(self) -> None:
        """See `ContinuousBatchProcessor`."""
        super().reset()
        self._wait_for_device()

    def _wait_for_device(self) -> None:
        if self.model_device.type == "cuda":
            torch.cuda.synchronize(self.model_device)


class Purpose:
    """What a manager is made for. Its captured steps and the pages that it keeps for later requests fit nothing else.

    Args:
        model: Patched.
    """

    def __init__(self, model: Any) -> None:
        self._state = state_of(model)  # another one after calibration
        self._steps_of = fingerprint(model)
        self._pages_of: Hashable = None
        self._hash = ""  # until the manager is kept: it takes 50 ms

    def keep(self, model: Any) -> None:
        """Note the weights whose pages are kept. Weights that are not the model's are out of the pages by now."""
        pages_of = fingerprint(model, with_writes=True)
        if pages_of != self._pages_of:
            self._pages_of, self._hash = pages_of, weights_hash(model)

    def is_that_of(self, model: Any) -> bool:
        """Whether a kept manager of this model would be made for the same."""
        is_same = self._state is state_of(model) and self._steps_of == fingerprint(model)
        return is_same and self._hash == weights_hash(model)


class Manager(ContinuousBatchingManager):
    """A `ContinuousBatchingManager` over pages of codes. `init_continuous_batching` of a patched model makes it.

    While it exists and is not stopped, the model's attention is for pages only.

    Args:
        model: Patched, a `PreTrainedModel`.
        generation_config: As for transformers' own.
        continuous_batching_config: Likewise.
        workload_hints: Likewise.

    Attributes:
        made_for: Weights, adapters and the user's wishes; they may change.
        grammars: For requests whose answers must match one. Whoever adds such requests sets it before `warmup`.

    Raises:
        ImportError, NotImplementedError, ValueError: See `check_served` and `pages_of`. The model is unchanged.
    """

    def __init__(
        self,
        model: Any,
        generation_config: GenerationConfig,
        continuous_batching_config: ContinuousBatchingConfig,
        workload_hints: WorkloadHints | None = None,
    ) -> None:
        patch = patch_of(model)
        assert patch is not None
        self._attention = implementation_name(patch.previous_attention)
        self._paged_attention = paged_name(patch.previous_attention)
        self._restore_attention(model)  # of a manager that was dropped without being stopped
        self.made_for = Purpose(model)
        check_served(model, patch.config, continuous_batching_config)
        calls, self._state_layers = calls_of_a_token(model, patch.previous_attention, patch.config.torch_state_dtype)
        check_latents(model)
        pages = pages_of(model, patch.config, continuous_batching_config, calls)
        transforms = key_transforms(model, patch.config)
        if continuous_batching_config.scheduler_type not in SCHEDULER_MAPPING:
            raise ValueError(
                f"{WHERE}: `scheduler_type` must be one of {list(SCHEDULER_MAPPING)}, got "
                f"{continuous_batching_config.scheduler_type!r}."
            )
        self._layers: Mapping[int, PagedLayer] = {
            index: PagedLayer(page, transforms.get(index)) for index, page in pages.items()
        }
        self._states = None if self._state_layers is None else self._state_layers.layout
        self._rope = RopeByRequest.of(model)
        self._wrappers = [] if self._rope is None else [self._rope.wrapper]
        if self._state_layers is not None:
            self._wrappers.append(Wrapper(self._state_layers.modules.values(), forward_of_state))
        if continuous_batching_config.num_blocks is not None:
            check_room(self._layers, self._states, continuous_batching_config.num_blocks, is_given=True)
        resolved = copy.copy(continuous_batching_config)
        is_open = resolved.max_memory_percent is None and resolved.num_blocks is None
        if is_open and model.device.type == "cpu":
            resolved.max_memory_percent = CPU_SHARE
        if self._rope is not None and self._rope.switch.recomputes:
            # The last token with the old factors must be known before the text is computed again.
            if resolved.use_async_batching:
                raise NotImplementedError(
                    f"{WHERE}: `use_async_batching` must be False for {type(model).__name__}, which computes a text "
                    f"again where it exceeds {self._rope.switch.border} tokens, got True. Leave it out."
                )
            resolved.use_async_batching = False
        settle_graphs(resolved, model.device, can_capture=why_not_captured(model) is None)
        try:
            with known_types(text_config_of(model)):
                super().__init__(model, generation_config, resolved, workload_hints)
        except BaseException:
            self._restore_attention(model)
            raise
        # transformers resolves it to 0 for every attention except the flash-attention package.
        self.continuous_batching_config.max_blocks_per_request = max_blocks_of(model, resolved, workload_hints)
        self.logit_processor.supported_keys[KEY] = Sampling
        self.grammars: Grammars | None = None
        notes_on(model).manager = weakref.ref(self)

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        """Set our attention over pages, which needs no flash attention, and our forwards of other modules."""
        set_attention(model, self._paged_attention)
        for each in self._wrappers:
            each.wrap()

    def _restore_attention(self, model: Any) -> None:
        """Set what `generate` has again: attention, unless another has been set meanwhile, and other modules."""
        unwrap(model.modules())
        if text_config_of(model)._attn_implementation == self._paged_attention:
            set_attention(model, self._attention)

    def warmup(self) -> None:
        """See `ContinuousBatchingManager`. Graphs are of the model's device; upstream takes the current one (5.23)."""
        device = self.model.device
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            super().warmup()

    def start(self) -> None:
        """See `ContinuousBatchingManager`."""
        self.switch_to_cb_friendly_attn(self.model)
        super().start()

    def add_request(
        self,
        input_ids: list[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        *args: Any,
        **options: Any,
    ) -> str | None:
        """See `ContinuousBatchingManager`. `max_length` holds as in generate; upstream leaves it out (5.24).

        So does an `eos_token_id` that is a tensor.
        """
        if isinstance(options.get("eos_token_id"), torch.Tensor):
            options["eos_token_id"] = options["eos_token_id"].tolist()
        if max_new_tokens is None:
            max_new_tokens = new_tokens_of(self.generation_config, len(input_ids))
        return super().add_request(input_ids, request_id, max_new_tokens, *args, **options)

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """See `ContinuousBatchingManager`. If the thread goes on for a while, it restores the attention at its end."""
        super().stop(block, timeout, keep_for_next_session, hard_stop)
        if not self.is_running():
            self._leave_model()

    def _leave_model(self) -> None:
        """Give the model its attention back, and note its weights if this manager is kept."""
        self._restore_attention(self.model)
        if getattr(self.model, "_cached_continuous_batching_manager", None) is self:
            self.made_for.keep(self.model)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """See `ContinuousBatchingManager`. Pages of earlier requests are not found again after it.

        Those who pause write to the weights, also through `.data`. Requests that run go on with the tokens they hold.
        """
        with super().pause():
            try:
                yield
            finally:
                processor = self.batch_processor
                assert isinstance(processor, Processor)
                processor.look_at_model(is_suspect=True)

    def destroy(self) -> None:
        """See `ContinuousBatchingManager`. Frees the captured steps at once, also of a manager that is only kept.

        NCCL waits for graphs with its calls when a process group ends. Upstream leaves a kept manager's graphs to the
        garbage collector (5.23), since its processor is part of a cycle.
        """
        super().destroy()
        self.batch_processor = None
        gc.collect()
        self._restore_attention(self.model)

    def _run_generation_loop(self, *args: Any, **options: Any) -> None:
        super()._run_generation_loop(*args, **options)
        if isinstance(self.batch_processor, Processor):
            self.batch_processor.look_at_model()
        self._leave_model()

    def _create_batch_processor(self) -> ContinuousBatchProcessor:
        processor = self.batch_processor
        if processor is not None:
            processor.reset()
            return processor
        model: Any = self.model
        batching, text_config = self.continuous_batching_config, model.config.get_text_config()
        supports_logits_to_keep = model._supports_logits_to_keep()
        cache = PagedCache(
            text_config,
            batching,
            self._layers,
            model.device,
            supports_logits_to_keep,
            self.distributed_helper,
            self._states,
        )
        cache.rope = self._rope
        self._use_prefix_sharing = cache.use_prefix_sharing
        update_cb_config_after_cache_creation(batching, cache.num_blocks, cache.max_batch_tokens)
        scheduler: Any = SCHEDULER_MAPPING[batching.scheduler_type]
        processor = Processor(
            model=model,
            cache=cache,
            config=text_config,
            generation_config=self.generation_config,
            continuous_batching_config=batching,
            logit_processor=self.logit_processor,
            input_queue=self.input_queue if self.is_tp_driver else None,
            cancel_queue=self.cancel_queue if self.is_tp_driver else None,
            output_router=self.output_router,
            background_thread_status=self.background_thread_status,
            model_device=model.device,
            model_dtype=model.dtype,
            scheduler=scheduler(cache, batching.safety_margin, batching.max_requests_per_batch),
            distributed_helper=self.distributed_helper,
        )
        processor.model_runner.grammars = self.grammars
        return processor

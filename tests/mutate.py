"""Breaks one line of the package at a time, and reports which test fails: `make mutate`. For developers, not for CI.

Each mutation is a mistake that somebody could make, and names the tests of its subject. These run first, and the other
tests only if they all pass, so that a mutation that is caught costs seconds. Everything happens in a copy of the tree,
a git worktree in a temporary folder. Run this after changing what the quick tier leaves out: the quick tier has to
catch every mutation that `--all` catches.

    python tests/mutate.py                      # the quick tier, and all tests if it catches nothing
    python tests/mutate.py storage lengths      # only files with one of these in their names
    python tests/mutate.py csrc/cpu --first     # only the tests of the subject
    python tests/mutate.py --cuda               # CUDA sources, on a machine with a GPU and nvcc
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch  # noqa: F401  (see `catcher`)
import transformers  # noqa: F401

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 1800  # a run that takes longer counts as hanging, and so as caught


@dataclasses.dataclass(frozen=True)
class Mutation:
    """A mistake.

    Attributes:
        path: The file to change.
        old: Text that the file contains exactly once.
        new: The text that replaces it.
        why: What goes wrong then.
        tests: Test files of the subject, without `test_` and `.py`.
    """

    path: str
    old: str
    new: str
    why: str
    tests: str

    @property
    def is_cuda(self) -> bool:
        """Whether testing it needs a GPU."""
        return self.path.startswith("csrc/cuda")

    @property
    def is_compiled(self) -> bool:
        """Whether testing it needs a compiler."""
        return self.path.startswith("csrc")


def of(path: str, *mutations: tuple[str, str, str, str]) -> list[Mutation]:
    """Mutations of one file."""
    return [Mutation(path, *each) for each in mutations]


MUTATIONS = [
    *of(
        "hf_kvquant/storage/layer_store.py",
        ("if needed > self.max_cache_len:", "if needed >= self.max_cache_len:", "a cache is full too early", "storage"),
        ("self.is_empty = length == 0", "self.is_empty = False", "a crop to nothing leaves a first chunk", "storage"),
        (
            "        if self.pending is not None:\n            self.flush()\n",
            "",
            "pending tokens are lost",
            "storage cache",
        ),
        (
            "        self.flush()\n        self.residency.leave()",
            "        self.residency.leave()",
            "a copy lacks pending tokens",
            "storage cache",
        ),
        (
            "formats = dataclasses.replace(formats, sink_length=0)",
            "pass",
            "the first tokens of a window stay dense for ever",
            "rings windows",
        ),
        (
            "if index.dtype == torch.bool:",
            "if False:",
            "a mask selects sequences 0 and 1",
            "storage cache",
        ),
        (
            "count_of([count[b] for b in index.tolist()])",
            "count",
            "sequences of different lengths swap their lengths",
            "storage",
        ),
    ),
    *of(
        "hf_kvquant/storage/buffers.py",
        (
            "                if transform is not None:\n                    x = reference",
            "                if False:\n                    x = reference",
            "frozen scales are those of keys before their transform",
            "storage",
        ),
    ),
    *of(
        "hf_kvquant/spec/reference.py",
        (
            "is_written = (begin < lengths[:, None])",
            "is_written = (begin <= lengths[:, None])",
            "a page without tokens is written",
            "pages",
        ),
        (
            "max(kv_format.tail_begin(tokens, residual_length), least)",
            "kv_format.tail_begin(tokens, residual_length)",
            "a shared page gets codes of what is not in the tail",
            "pages",
        ),
        (
            "begin if tail_from is None else begin.maximum(tail_from.long())",
            "begin",
            "tokens that were taken over are read from a tail that lacks them",
            "pages",
        ),
        (
            "begin.maximum(_first_kept(tail, kv_format, lengths, sink_length))",
            "begin",
            "a query reads tokens from rows that newer ones have taken",
            "windows",
        ),
        (
            "is_absent = position >= end",
            "is_absent = position > end",
            "a static cache shows one token that was cropped",
            "storage dequantize",
        ),
    ),
    *of(
        "hf_kvquant/spec/pages.py",
        (
            "begin = aligned(parts[-1].end)",
            "begin = parts[-1].begin + PART_ALIGNMENT",
            "the planes of a page overlap",
            "batching_pages",
        ),
        (
            "(first + self.begin) // size",
            "self.begin // size",
            "all layers write into the pages of the first",
            "batching_pages batching",
        ),
    ),
    *of(
        "hf_kvquant/spec/tails.py",
        (
            "begin = aligned(found[-1].end)",
            "begin = found[-1].end",
            "a tail begins at bytes that kernels cannot load at once",
            "batching_pages",
        ),
        (
            "(begin, begin + sinks * row_bytes)",
            "(begin, begin + row_bytes)",
            "who takes over a page has its first sink alone",
            "batching_pages",
        ),
    ),
    *of(
        "hf_kvquant/batching/tails.py",
        (
            "past_length, query_length)\n        self._give_sinks(request_id)",
            "past_length, query_length)",
            "who gets its slot after its pages has no sinks",
            "batching",
        ),
    ),
    *of(
        "hf_kvquant/batching/slots.py",
        (
            "least = max(1, -(-max(tail, state) // bytes_per_block))",
            "least = max(1, max(tail, state) // bytes_per_block)",
            "what a request keeps runs into the next sector",
            "batching_pages",
        ),
        (
            "next(n for n in range(sector // size, 0, -1) if units % n == 0)",
            "(sector // size)",
            "slots do not divide a sector",
            "batching_pages",
        ),
        (
            ">= _WORTH * (tail + state)",
            "> 0",
            "sectors are large for little",
            "batching_pages",
        ),
    ),
    *of(
        "hf_kvquant/batching/batch.py",
        (
            "request.state.position_offset - request.query_length",
            "request.state.position_offset",
            "new tokens count twice",
            "batching",
        ),
        (
            "members[request.q_len, request.past > 0]",
            "members[request.q_len, True]",
            "a prompt attends to its codes",
            "batching_pages batching",
        ),
        (
            "[request.past + q_len for",
            "[request.past for",
            "lengths leave out new tokens",
            "batching_pages batching",
        ),
        (
            "        if request.q_len:\n            members[",
            "        if True:\n            members[",
            "a prompt of one token that is forked ends the manager",
            "batching_states",
        ),
        (
            "if any(after - before != q_len",
            "if any(after - before < q_len",
            "requests get the tokens of others between them",
            "batching_pages batching",
        ),
    ),
    *of(
        "hf_kvquant/batching/states.py",
        (
            "if not group.has_past:\n            return",
            "if False:\n            return",
            "a new request reads the state that another one left in its slot",
            "batching_states",
        ),
        (
            "write_slots, stored(state, plane.dtype))",
            "read_slots, stored(state, plane.dtype))",
            "padding writes the state that padding reads",
            "batching_states",
        ),
    ),
    *of(
        "hf_kvquant/batching/snapshots.py",
        (
            "self._kept[page_hash] = self._kept.pop(page_hash)",
            "self._kept[page_hash]",
            "what is used most goes first",
            "batching_snapshots",
        ),
        (
            "if len(self) < self.most else None",
            "",
            "snapshots take all memory",
            "batching_snapshots",
        ),
        (
            "if each not in pages or kept.shared is None]",
            "if each not in pages]",
            "requests wait for memory that states of a single prompt take",
            "batching_snapshots",
        ),
        (
            "        for snapshot in self._made.pop(request_id, {}).values():",
            "        for snapshot in ():",
            "slots leak when requests are cancelled on their way",
            "batching_snapshots",
        ),
        (
            "            self._copy(self._slots.slot_of(request_id), slot)",
            "            pass",
            "requests go on from states that were never copied",
            "batching_snapshots",
        ),
    ),
    *of(
        "hf_kvquant/batching/state_layers.py",
        (
            "group.q_len == 1 and group.has_past and takes_slots",
            "group.q_len == 1 and takes_slots",
            "the first token of a request reads the state of whoever had its slot",
            "state_chunks",
        ),
        (
            "if any(torch.equal(outs[0], out) for out in outs[1:]):",
            "if False:",
            "a model that forgets its state between chunks is served",
            "batching_states",
        ),
        (
            "        group_layer.store()\n",
            "        pass\n",
            "states stay as they were",
            "batching_states",
        ),
        (
            "cache.sequences is not None and num_tokens > 1 and",
            "False and",
            "prompts of layers with states are computed one length after the other",
            "state_chunks",
        ),
    ),
    *of(
        "hf_kvquant/batching/manager.py",
        (
            "at_rest = [each for each in victims if each",
            "at_rest = [each for each in victims if True or each",
            "a state that comes back has taken its last token in twice",
            "batching_states",
        ),
        (
            "token_budget = min(token_budget, border - held)",
            "pass",
            "no step ends where states are to be kept",
            "batching_snapshots",
        ),
        (
            "return self._offload_requests() or snapshots.clear()",
            "return self._offload_requests()",
            "a request that needs all memory fails for a snapshot",
            "batching_snapshots",
        ),
    ),
    *of(
        "hf_kvquant/cache/steps.py",
        (
            "bool(self.due or self._waiting) and not self.is_unwatched",
            "bool(self.due or self._waiting)",
            "a step of which torch compiled a part counts as one that ended early",
            "compile",
        ),
    ),
    *of(
        "hf_kvquant/presets.py",
        (
            "if preset is None and (key, value) == PRESETS[DEFAULT_PRESET]:",
            "if preset is None:",
            "formats without a preset's name get its dense tokens",
            "config",
        ),
    ),
    *of(
        "hf_kvquant/models/layers.py",
        (
            'getattr(hook, "offload", False)',
            "False",
            "a report does not know where offloaded layers compute",
            "report",
        ),
    ),
    *of(
        "hf_kvquant/batching/memory.py",
        (
            'if not getattr(config, "is_heterogeneous", False):',
            "if True:",
            "transformers asks a config of unequal layers for one head_dim, and raises",
            "batching",
        ),
        (
            "self.num_attention_masks = 0",
            "pass",
            "memory is kept free for masks that nobody makes",
            "batching_pages",
        ),
        (
            "min(sectors, self._sectors_of(requests, positions))",
            "sectors",
            "a CPU keeps memory that no request can use",
            "batching_memory",
        ),
    ),
    *of(
        "hf_kvquant/batching/paged_cache.py",
        (
            "if count and not self.snapshots.give(hashes[count - 1], request_id):",
            "if count and not self.snapshots.num_covered(hashes):",
            "a request takes over a prefix without its state",
            "batching_snapshots",
        ),
        (
            "            borders[len(hashes) * page] = hashes[-1]",
            "            pass",
            "prompts that begin alike never share what one step computes",
            "batching_snapshots",
        ),
        (
            "self.allocator.num_complete(num_tokens)) * page] = None",
            "num_tokens) * page] = None",
            "states are kept at the end of a page whose tokens have no codes yet",
            "batching_snapshots",
        ),
        (
            "super().mark_complete_blocks(state, {FULL_ATTENTION: min(count, most)})",
            "super().mark_complete_blocks(state, dict.fromkeys(self.cache_allocators, min(count, most)))",
            "the slot of a request counts as a page of its tokens",
            "batching_snapshots",
        ),
        (
            "position * self.bytes_per_page, self.bytes_per_block",
            "0, self.bytes_per_block",
            "all layers have the pages of the first",
            "batching",
        ),
        (
            "return max(layer.page.num_bytes for layer",
            "return min(layer.page.num_bytes for layer",
            "larger pages of some layers overlap those of the next",
            "batching",
        ),
        (
            "noted[1] != pages:",
            "len(noted[1]) != len(pages):",
            "pages that two requests come to share are read where they no longer are",
            "batching_pages",
        ),
        (
            "transform = None if layer.key_transform is None else",
            "transform = None if True else",
            "keys in pages are not transformed",
            "batching",
        ),
        (
            "len(state.initial_tokens) + num_new - 1)",
            "0)",
            "half of a prompt in two chunks is not shared",
            "batching",
        ),
        (
            "        return noted(key_states, self, layer_idx), value_states",
            "        return noted(key_states.clone(), self, layer_idx).clone(), value_states",
            "attention does not learn which pages its keys belong to",
            "batching",
        ),
        (
            "if not DO_MODELS_UPDATE_PAGES or not is_ours(self.config._attn_implementation):",
            "if not DO_MODELS_UPDATE_PAGES:",
            "another attention computes over the new tokens alone",
            "batching batching_support",
        ),
        (
            "self._tail_from[request_id], self._began[request_id] = prefix_len, self._epoch",
            "self._began[request_id] = self._epoch",
            "a request reads tokens that it took over from a tail that lacks them",
            "batching",
        ),
        (
            "return max(length - self._window, 0) // int(self.tokens_per_page)",
            "return length // int(self.tokens_per_page)",
            "pages are shared before they have codes",
            "batching",
        ),
        (
            "(first in unknown or sinks.get(first) is None)",
            "sinks.get(first) is None",
            "a page has the sinks of the prompt that it held before",
            "batching",
        ),
        (
            "if not no_cache and request_id in self.block_table:\n            self._tail_from.pop(request_id, None)",
            "self._tail_from.pop(request_id, None)",
            "a request that comes back reads tokens that it took over from its tail",
            "batching",
        ),
    ),
    *of(
        "hf_kvquant/upstream/releases.py",
        (".release[:2] > Version", ".release[:2] >= Version", "a tested release is called newer", "upstream"),
        (
            "if not is_theirs or (is_since(OLDEST) and not is_untested()):",
            "if not is_theirs:",
            "a bug of ours is blamed on a release",
            "upstream",
        ),
    ),
    *of(
        "hf_kvquant/upstream/contracts.py",
        (
            'names if name != "self"] != expected):',
            'names if name != "self"] == []):',
            "a method that ours replaces may take more than ours",
            "upstream",
        ),
        (
            "        if self.mentions:\n",
            "        if False:\n",
            "a name that ours reads can be lost without a word",
            "upstream",
        ),
        (
            "if not takes_all and not set(required) <= set(parameters):",
            "if not takes_all and not set(parameters):",
            "an override that cannot take what its callers pass is not found",
            "upstream",
        ),
    ),
    *of(
        "hf_kvquant/batching/runner.py",
        (
            "slot if request.past else states.read_trash_slot",
            "slot",
            "a prompt begins with the state of whoever had its slot",
            "state_chunks",
        ),
        (
            "if states is None or all(request.q_len == 1 for request in requests):",
            "if states is None:",
            "decoding requests go through the kernel for prompts",
            "state_steps",
        ),
        (
            "table is not None and all(past_of(state) > 0 for state in states)",
            "table is not None",
            "a prompt of one token attends to its codes",
            "batching",
        ),
        (
            "batching.use_cuda_graph is None or is_wanted",
            "is_wanted",
            "decode steps of a GPU are not captured unless asked for",
            "batching",
        ),
        (
            "            self.use_cuda_graph_decode = False\n            self.cb_config",
            "            self.cb_config",
            "a step that cannot be captured fails each time",
            "batching",
        ),
        (
            "max(wanted, min(2, pages_of_model))",
            "wanted",
            "short requests are not captured at the start",
            "batching",
        ),
    ),
    *of(
        "hf_kvquant/models/dequantized.py",
        (
            "if float(difference) <= MAX_DIFFERENCE else None",
            "",
            "a layer that is no product with a matrix counts as one",
            "latent",
        ),
    ),
    *of(
        "hf_kvquant/ops/planning.py",
        (
            "shares.minimum(held // min_tokens).clamp(min=1)",
            "shares.clamp(min=1)",
            "short sequences are cut",
            "split_plan",
        ),
        (
            "many + tokens_between < few",
            "few + tokens_between < many",
            "more shares are made where they end later",
            "split_plan",
        ),
        (
            "ends = first.flip(0)",
            "ends = first",
            "the longest share is taken to be followed by the next longest",
            "split_plan",
        ),
        (
            "argsort(descending=True, stable=True)",
            "argsort(stable=True)",
            "long shares come last",
            "split_plan",
        ),
        (
            "(slots.cumsum(0) - slots)[row]",
            "slots.cumsum(0)[row]",
            "shares are written beyond the workspace",
            "split_plan",
        ),
    ),
    *of(
        "hf_kvquant/storage/dealing.py",
        (
            "if num_kv_heads not in plans:",
            "if not plans:",
            "a layer has the plan of one with other heads",
            "dealing",
        ),
        (
            ' or options.get("num_splits")',
            "",
            "a fixed number of splits gives other bits in a padded batch",
            "dealing",
        ),
    ),
    *of(
        "hf_kvquant/storage/lengths.py",
        (
            "self.tensor.add_(tokens)\n            self._plans = {}",
            "self.tensor.add_(tokens)",
            "a step has the plan of the step before",
            "dealing",
        ),
        (
            "self._plans if self._behind[member] is None else {}",
            "self._plans",
            "a layer that counts alone has the plan of the others",
            "dealing",
        ),
    ),
    *of(
        "hf_kvquant/graphs/capture.py",
        (
            "            torch._C._cuda_endAllocateToPool(stream.device.index, pool)\n",
            "",
            "a capture that fails goes on for the allocator",
            "capture",
        ),
        ("        torch.cuda.set_stream(outside)\n", "", "a capture that fails keeps its stream", "capture"),
        (
            "        cache.notes.is_uneven,\n",
            "",
            "a graph without a plan serves padded batches",
            "dealing",
        ),
    ),
    *of(
        "hf_kvquant/serving/requests.py",
        (
            "self.cancel(output.request_id)\n            return",
            "return",
            "a cancellation that comes before its request is lost",
            "serve",
        ),
        (
            "self.by_id.pop(request.request_id, None)",
            "pass",
            "requests stay in memory",
            "serve_load",
        ),
        (
            "            self._cancel_answers(request)\n            self._end",
            "            self._end",
            "requests of clients that have left run to the end",
            "serve_load serve_fields",
        ),
        (
            "                self.cancel(answer.answer_id)\n        elif",
            "                pass\n        elif",
            "an answer goes on after its stop string",
            "serve_fields",
        ),
        (
            "return answer.is_followed or output.is_finished()",
            "return output.is_finished()",
            "a stop string is found at the end",
            "serve_fields",
        ),
    ),
    *of(
        "hf_kvquant/serving/generation.py",
        (
            "if wanted > left:",
            "if False:",
            "a request that does not fit ends the generation thread",
            "serve_load",
        ),
        (
            "if num_prompt == 0:",
            "if False:",
            "an empty prompt ends the generation thread",
            "serve",
        ),
        (
            "fatal_error is None and self.manager.is_running()",
            "fatal_error is None",
            "a thread that ended without a word counts as alive",
            "serve_load",
        ),
    ),
    *of(
        "hf_kvquant/common/errors.py",
        (
            "class PreflightError(KVQuantError, ValueError):",
            "class PreflightError(KVQuantError):",
            "a caller that catches `ValueError` misses a refused config",
            "errors",
        ),
    ),
    *of(
        "hf_kvquant/serving/tools.py",
        (
            'if message["role"] == "developer" and "developer" not in template:',
            "if False:",
            "a template leaves out what a developer says",
            "serve_tools",
        ),
        (
            'text=r"/[ \\n\\r\\t]*[^{ \\n\\r\\t](.|\\n)*/",',
            'text=r"/(.|\\n)+/",',
            "what Llama 3 calls need not fit",
            "serve_tools",
        ),
    ),
    *of(
        "hf_kvquant/serving/responses.py",
        (
            "    if num_first < 2:\n",
            "    if True:\n",
            "a template gets several system messages",
            "serve_responses",
        ),
    ),
    *of(
        "hf_kvquant/serving/writing.py",
        (
            "self._told(token, logprobs[index], self._num_echoed + self._num_decoded)",
            "self._told(token, logprobs[index], self._num_decoded)",
            "tokens of an answer begin where its prompt does",
            "serve_fields",
        ),
    ),
    *of(
        "hf_kvquant/serving/generation.py",
        (
            "prompt, new_tokens = prompt[:1], new_tokens + len(prompt) - 1",
            "prompt = prompt[:1]",
            "an answer ends before its prompt is scored",
            "serve_fields",
        ),
    ),
    *of(
        "hf_kvquant/serving/fields.py",
        (
            "if is_sampled or is_named else 0.0",
            "if True else 0.0",
            "greedy requests sample",
            "serve batch_command",
        ),
        (
            "        if content is None and not calls:",
            "        if False:",
            "a message may have no content",
            "serve",
        ),
    ),
    *of(
        "hf_kvquant/jobs/answers.py",
        (
            "output.error is not None and not output.error.startswith(FAILED)",
            "output.error is not None",
            "a line whose grammar fails ends the run",
            "batch_command",
        ),
        (
            "    manager.grammars = grammars\n",
            "",
            "lines that ask for a grammar end the run",
            "batch_command",
        ),
    ),
    *of(
        "hf_kvquant/batching/settings.py",
        (
            "    if refused:\n",
            "    if False:\n",
            "settings are dropped",
            "batching_support batch_command",
        ),
        (
            "return all(len(sequence) == 1 for",
            "return any(len(sequence) == 1 for",
            "biases of several tokens are dropped",
            "batching_support",
        ),
        (
            "    return settings_of(config) == settings_of(other)",
            "    return True",
            "a kept manager answers by the settings of before",
            "batching",
        ),
        (
            "        completed = prepare(config)[0]\n",
            "        completed = copy.deepcopy(config or model.generation_config)\n",
            "the end token and other settings of the model are dropped",
            "batching",
        ),
        (
            "    setattr(config, _IS_COMPLETE, True)\n",
            "",
            "an argument cannot switch off what the model brings",
            "batching",
        ),
        (
            "        if is_of_answer:\n            completed.max_new",
            "        if False:\n            completed.max_new",
            "paged generate without a length goes on to the end token",
            "batching",
        ),
        (
            "        if is_of_answer or (given",
            "        if is_of_answer and (given",
            "requests without a length end after generate's 20 tokens",
            "batching",
        ),
        (
            "    if wanted != patch.config:\n",
            "    if False:\n",
            "a cache config of another preset is ignored",
            "batching_support",
        ),
        (
            "in _OF_END and not _end_tokens(config.eos_token_id))",
            "in _OF_END)",
            "an end token comes before `min_new_tokens`",
            "batching_support",
        ),
        (
            "    if asked and _end_tokens(end_tokens)",
            "    if False and _end_tokens(end_tokens)",
            "the end token of a request comes before `min_new_tokens`",
            "batching",
        ),
    ),
    *of(
        "hf_kvquant/batching/manager.py",
        (
            "max_new_tokens = new_tokens_of(self.generation_config, len(input_ids))",
            "pass",
            "a request goes on after `max_length`",
            "batching",
        ),
    ),
    *of(
        "hf_kvquant/batching/sampling.py",
        (
            "config.do_sample, config.num_return_sequences = False, 1",
            "config.num_return_sequences = 1",
            "the model's settings may sample",
            "sampling serve",
        ),
        (
            "{self.seed} {self.choice} {position}",
            "{self.seed} {position}",
            "several answers to a prompt are the same",
            "sampling serve_fields",
        ),
        (
            "samplings[row].draw(states[row].position_offset)",
            "samplings[row].draw(0)",
            "every token of a request is drawn by the same number",
            "sampling",
        ),
        (
            "for is_truncated in (False, True):",
            "for is_truncated in (False,):",
            "requests with top_k and top_p take the most likely token",
            "sampling",
        ),
        (
            "return state.initial_tokens[:num_prompt], state.initial_tokens[num_prompt:]",
            "return state.initial_tokens[:num_prompt], state.initial_tokens[:0]",
            "a request that starts again forgets what it wrote",
            "sampling serve_fields serve_structured",
        ),
        (
            "logits = _masked(logits, bound, states, samplings, grammars)",
            "_masked(logits, bound, states, samplings, grammars)",
            "grammars hold for no token",
            "serve_structured",
        ),
        (
            "states[row].error = each.error",
            "pass",
            "an answer that no longer fits its grammar counts as complete",
            "serve_structured",
        ),
    ),
    *of(
        "hf_kvquant/serving/reading.py",
        (
            "calls = calls if self._is_parallel else calls[:1]",
            "calls = calls[:]",
            "an answer with a list of calls has several where one is wanted",
            "serve_tools",
        ),
    ),
    *of(
        "hf_kvquant/serving/front.py",
        (
            "(name, request.request_id.encode())",
            '*(header for header in scope["headers"] if header[0] == name)',
            "two requests of one name share an answer",
            "serve",
        ),
        (
            "return_when=asyncio.FIRST_COMPLETED",
            "return_when=asyncio.ALL_COMPLETED",
            "nobody notices that a client has left",
            "serve_load",
        ),
        (
            "if num_waiting >= self._max_waiting:",
            "if num_waiting > self._max_waiting:",
            "one request more may wait",
            "serve_load",
        ),
    ),
    *of(
        "hf_kvquant/serving/server.py",
        (
            'self._requests.end_all("cancelled", SHUT_DOWN, 503)',
            "pass",
            "those that are left at the end are cut off without a word",
            "serve_shutdown",
        ),
        (
            "os._exit(128 + sig)",
            "return",
            "a second signal does nothing",
            "serve_shutdown",
        ),
    ),
    *of(
        "hf_kvquant/batching/hook.py",
        (
            "        and kept.made_for.is_that_of(model)\n",
            "",
            "a kept manager shares pages from before the calibration",
            "batching",
        ),
        (
            "    if mask is not None and not",
            "    if False and not",
            "padding is read as text",
            "batching_support",
        ),
    ),
    *of(
        "hf_kvquant/batching/forwards.py",
        (
            "given is None or given.args[2] is not theirs",
            "True",
            "a manager that starts forgets its pages and captured steps",
            "batching_states",
        ),
    ),
    *of(
        "hf_kvquant/batching/manager.py",
        (
            "is_same and self._hash == weights_hash(model)",
            "is_same",
            "a kept manager shares pages of other weights",
            "batching",
        ),
        (
            "            self.look_at_model()\n",
            "",
            "a running manager shares pages of other weights",
            "batching adapters",
        ),
        (
            "                processor.look_at_model(is_suspect=True)\n",
            "                processor.look_at_model()\n",
            "a manager shares pages of weights that were written to through `.data`",
            "batching",
        ),
        (
            "            self.model_runner.forget_graphs()\n",
            "",
            "a captured step computes with other tensors",
            "batching",
        ),
        (
            "            self._has_looked = True\n",
            "",
            "requests that come together wait for as many looks at the model",
            "batching",
        ),
        (
            "        if pages_of != self._pages_of:\n            self._pages_of, self",
            "        if True:\n            self._pages_of, self",
            "a kept manager hashes all weights twice a call",
            "batching",
        ),
    ),
    *of(
        "hf_kvquant/models/fingerprint.py",
        (
            "            facts.append(adapter_state(module))\n",
            "            pass\n",
            "a step of another adapter is replayed",
            "adapters",
        ),
        (
            "            facts.append((tuple(own",
            "            ((tuple(own",
            "a step from before a hook is replayed",
            "adapters",
        ),
        (
            "                facts.append(id(kept[-1]))\n",
            "                pass\n",
            "a running manager shares pages of an adapter that was deleted and loaded again",
            "batching",
        ),
        (
            "                    facts.append(part._version)\n",
            "                    pass\n",
            "a running manager shares pages of weights that were written to",
            "batching",
        ),
        (
            "                facts.append(part.data_ptr())\n",
            "                pass\n",
            "a captured step computes with tensors that were replaced",
            "batching capture",
        ),
        (
            'left_out = own["_non_persistent_buffers_set"] if with_writes else ()',
            "left_out = ()",
            "a forward that writes to a buffer ends the sharing of prefixes",
            "batching",
        ),
    ),
    *of(
        "hf_kvquant/batching/paged_cache.py",
        (
            "        if self._began[request_id] < self._epoch:\n            return\n",
            "",
            "a request that runs on shares pages of the weights before",
            "batching",
        ),
        (
            "        self.evict_cached_blocks()\n        self.allocator",
            "        self.allocator",
            "pages that are forgotten are never free again",
            "batching",
        ),
        (
            "        if not no_cache and request_id in self.block_table:\n",
            "        if not no_cache:\n",
            "a request that was offloaded reads a tail for tokens that it took over",
            "batching",
        ),
    ),
    *of(
        "hf_kvquant/batching/manager.py",
        ("if not 0 < num_tokens <= room:", "if not 0 < num_tokens:", "a prompt that never fits ends all", "batching"),
        (
            " or has_position_table(model) else None",
            " else None",
            "a request that passes a table of positions ends all",
            "batching",
        ),
        (
            "            self.batch_processor.look_at_model()\n        self._leave_model()",
            "            self.batch_processor.look_at_model()",
            "a manager that is not waited for leaves its attention on the model",
            "batching",
        ),
        (
            "        gc.collect()\n        self._restore_attention(self.model)",
            "        gc.collect()",
            "a manager that never started leaves its attention on the model",
            "batching batching_support",
        ),
        (
            "        except BaseException:\n            self._restore_attention(model)",
            "        except BaseException:",
            "a manager that fails leaves its attention on the model",
            "batching",
        ),
    ),
    *of(
        "hf_kvquant/patching.py",
        (
            "    notes_on(model).bias_centers = None  # weights may have been loaded since\n",
            "",
            "centres stay those of the weights before",
            "transforms",
        ),
        (
            "    hook.__func__ =",
            "    hook.unbound =",
            "a model that lends its hook to a part raises an error",
            "parts",
        ),
        (
            "    batching.close(model)\n",
            "",
            "a manager goes on after unpatch",
            "batching",
        ),
    ),
    *of(
        "hf_kvquant/storage/residency.py",
        (
            "else key_transform.clone(device)",
            "else key_transform.to(device)",
            "the next cache's transform is written into a model's tensors",
            "pool",
        ),
    ),
    *of(
        "hf_kvquant/storage/lengths.py",
        (
            "elif behind == _ONE_STEP_BEHIND and tokens == self._newest:",
            "elif behind == _ONE_STEP_BEHIND:",
            "a layer that takes other tokens than the rest gets their length",
            "lengths",
        ),
        (
            "late: Count = _LOST",
            "late: Count = _ONE_STEP_BEHIND",
            "a layer left out of two compiled steps has a wrong length",
            "lengths",
        ),
        (
            "if group is None or group.num_members == 0:",
            "if group is None:",
            "a new cache begins at the length of one that was released",
            "lengths storage cache",
        ),
    ),
    *of(
        "hf_kvquant/storage/rows.py",
        (
            "return capacity + 1 - self.window",
            "return capacity + 2 - self.window",
            "the newest token of a chunk overwrites what its first query sees",
            "rings static_rings",
        ),
        (
            "self.most_held = max(self.most_held, before)",
            "self.most_held = before",
            "a second crop shows overwritten tokens",
            "static_rings rings",
        ),
        (
            "elif length < window or self.kept_from == 0:",
            "elif length <= window or self.kept_from == 0:",
            "a crop is served whose first token is gone",
            "rings",
        ),
    ),
    *of(
        "hf_kvquant/cache/kvquant_cache.py",
        (
            "if self.has_transforms or not all(",
            "if not all(",
            "a cache loses the transforms that it was given",
            "cache generate transforms",
        ),
        (
            "            rewind.check_crop(storage, -tokens_to_remove)\n",
            "            pass\n",
            "a refused crop has cropped some layers",
            "rings cache",
        ),
    ),
    *of(
        "hf_kvquant/cache/layers.py",
        (
            "return key_states.contiguous(), value_states.contiguous()",
            "return key_states, value_states",
            "preset none sums in another order than transformers",
            "generate cache",
        ),
    ),
    *of(
        "hf_kvquant/cache/file.py",
        (
            'if metadata.get("sha256") != content_hash(text, tensors):',
            "if False:",
            "damaged numbers are loaded",
            "cache_file fuzz_cache_file",
        ),
    ),
    *of(
        "hf_kvquant/cache/saved_layer.py",
        (
            "            storage.rows.most_held = self.most_held\n",
            "            pass\n",
            "a loaded ring crops back to overwritten tokens",
            "cache_file static_rings",
        ),
        (
            "(starts >= 0) & (starts <= self.length)",
            "(starts >= 0)",
            "padding behind the last token is loaded",
            "cache_file fuzz_cache_file",
        ),
    ),
    *of(
        "hf_kvquant/storage/pool.py",
        (
            "found is not None and found[0] == kind",
            "found is not None",
            "a cache gets the buffers of another shape",
            "pool",
        ),
        (
            "        if not self._is_closed:\n",
            "        if True:\n",
            "an unpatched model keeps a cache in memory",
            "pool",
        ),
    ),
    *of(
        "hf_kvquant/spec/codes.py",
        (
            "codes[..., i::num_codes] >> (8 - shift)",
            "codes[..., i::num_codes] >> shift",
            "a code over two bytes loses bits",
            "formats",
        ),
    ),
    *of(
        "hf_kvquant/spec/key_transform.py",
        (
            "if self.is_rotated != other.is_rotated:",
            "if False:",
            "two transforms are equal of which one rotates",
            "transforms smoothing",
        ),
        (
            "not (self.smoothing > 0).all()",
            "not (self.smoothing >= 0).all()",
            "keys are divided by 0",
            "transforms",
        ),
    ),
    *of(
        "hf_kvquant/calibration/folding.py",
        (
            " | (after / self.factors != before)",
            "",
            "factors are folded that lose bits of subnormal weights",
            "smoothing",
        ),
        (
            "is_bad = torch.isin(layout.ties, layout.ties[is_bad])",
            "is_bad = is_bad",
            "channels that RoPE mixes get different factors",
            "smoothing",
        ),
        (
            "return wide + self.offset if self.offset else wide",
            "return wide + self.offset",
            "zeros of a smoothed model lose their sign",
            "smoothing",
        ),
    ),
    *of(
        "hf_kvquant/transforms/balancing.py",
        (
            "is_large = (octaves.amax(-1, keepdim=True) >= MIN_OCTAVES)",
            "is_large = (octaves.amax(-1, keepdim=True) >= 0)",
            "heads without outliers get factors of noise",
            "balancing",
        ),
        ("queries).log2() / 4", "queries).log2() / 2", "factors leave the outliers to the queries", "balancing"),
    ),
    *of(
        "hf_kvquant/transforms/of_model.py",
        (
            "if transforms_of(model).smoothing or state_of(model).smoothing is not None:",
            "if transforms_of(model).smoothing:",
            "a calibrated model is smoothed twice",
            "balancing",
        ),
        (
            'if each.is_rotated and "smooth" in wanted',
            'if "smooth" in wanted',
            "a forward is spent where factors have no part",
            "balancing",
        ),
    ),
    *of(
        "hf_kvquant/attention/registry.py",
        (
            'return str(getattr(function, "__module__", "")).startswith("transformers.")',
            "return True",
            "the kernel takes the place of the user's attention",
            "attention",
        ),
    ),
    *of(
        "hf_kvquant/cache/layers.py",
        (
            "dtype = torch.promote_types(key.dtype, value.dtype)",
            "dtype = value.dtype",
            "keys lose bits under autocast",
            "generate",
        ),
    ),
    *of(
        "hf_kvquant/transforms/centering.py",
        (
            "if bool(center.any())}",
            "}",
            "layers without a bias are centred by nothing",
            "transforms generate",
        ),
        (
            "return many.mean(-2, keepdim=True)\n    return tuple(part.mean(-2, keepdim=True)",
            "return many.mean(-2, keepdim=True)\n    return tuple(part[..., :1, :]",
            "centres are those of the first position",
            "transforms",
        ),
    ),
    *of(
        "hf_kvquant/calibration/value_rotation.py",
        (
            "_refuse_above(bound, errors[worst],",
            "_refuse_above(1.0, errors[worst],",
            "a rotation of one wrong head passes its check",
            "value_rotation",
        ),
        (
            "_refuse_above(LOGIT_FACTOR * bound,",
            "_refuse_above(1e9,",
            "a rotation that moves the logits is kept",
            "value_rotation",
        ),
    ),
    *of(
        "hf_kvquant/calibration/search.py",
        (
            "<= (1 - MIN_GAIN) * errors[0]",
            "<= errors[0]",
            "layers are smoothed that gain nothing",
            "smoothing calibration",
        ),
        (
            "logs[inside] -= logs[inside].mean()",
            "logs[inside] -= 0",
            "factors drift from 1 and leave no room for the rest",
            "smoothing calibration",
        ),
    ),
    *of(
        "hf_kvquant/generate/continued.py",
        (
            "return input_ids.shape[1] - held",
            "return input_ids.shape[1]",
            "assisted decoding reads tokens again that a given cache holds",
            "generate",
        ),
    ),
    *of(
        "hf_kvquant/generate/positions.py",
        (
            "setattr(model.get_submodule(name), _NAME, offset.to(model.device))",
            "pass",
            "a turn has another text's",
            "pictures",
        ),
    ),
    *of(
        "hf_kvquant/generate/hook.py",
        (
            '    check_folded(model, "generate")\n',
            "",
            "an adapter acts beside weights that it was not trained with",
            "adapters",
        ),
        (
            "max_length + (generation_config.prompt_lookup_num_tokens or 0)",
            "max_length",
            "proposals beyond the requested length find a full static cache",
            "compile capture",
        ),
        (
            "    note_cache(model, cache)\n",
            "",
            "every call is said to have used no cache of ours",
            "parts",
        ),
    ),
    *of(
        "hf_kvquant/generate/switching.py",
        ("cache.reset()", "pass", "tokens are in the cache twice, with the factors of both lengths", "switching"),
        (
            "    return {**inputs, CACHE: cache}",
            "    return inputs",
            "a long text runs over another cache",
            "switching",
        ),
    ),
    *of(
        "hf_kvquant/generate/watch.py",
        (
            "None if self.is_choice else self.why_other",
            "None",
            "nobody learns that a checkpoint asks for no cache",
            "parts",
        ),
        (
            "if each.thread == threading.get_ident()",
            "",
            "a call is said to use no cache of ours since one in another thread does not",
            "parts",
        ),
    ),
    *of(
        "hf_kvquant/models/text_config.py",
        (
            'theirs = mapped.replace("encoder", "decoder")',
            "pass",
            "a decoder alone has the layers of an encoder",
            "encoder_decoder",
        ),
    ),
    *of(
        "hf_kvquant/models/parts.py",
        ("_described(part) == config", "False", "a model whose part generates is refused", "parts"),
    ),
    *of(
        "hf_kvquant/state.py",
        (
            "folded=samples or None",
            "folded=None",
            "changed weights are forgotten, and take any adapter",
            "adapters",
        ),
    ),
    *of(
        "hf_kvquant/models/adapters.py",
        (
            "if len(old) and len(new)",
            "",
            "a model whose weights were quantised after calibration is refused",
            "quantized_weights",
        ),
    ),
    *of(
        "hf_kvquant/models/hashes.py",
        (
            "if settings else digest",
            "if False else digest",
            "a saved cache is continued with another adapter",
            "adapters",
        ),
        (
            "                yield from plain_tensors(part)",
            "                pass",
            "codes of quantised weights are not hashed",
            "quantized_weights",
        ),
        (
            "if tensor.is_meta and offloaded is not None",
            "if False",
            "an offloaded model does not get the factors of its checkpoint",
            "calibration",
        ),
    ),
    *of(
        "hf_kvquant/preflight/divergence.py",
        (
            ".masked_fill_(probabilities == 0, 0.0)",
            "",
            "logits of minus infinity make a divergence no number",
            "preflight",
        ),
        (
            "            expect_crops(storage)\n",
            "",
            "formats with dense newest tokens look costlier than they are",
            "preflight",
        ),
    ),
    *of(
        "evals/hf_kvquant_evals/measuring/steps.py",
        (
            "        expect_crops(storage)\n",
            "        pass\n",
            "evaluations find fewer tokens dense than generate does",
            "simulation",
        ),
    ),
    *of(
        "hf_kvquant/preflight/check.py",
        (
            "if num_bytes >= sum(size for size, _ in smallest) and budget <= most:",
            "if num_bytes >= sum(size for size, _ in smallest):",
            "more bits than the unquantised cache takes are measured for minutes",
            "budget",
        ),
        (
            "candidates = [picked, *(each for each in uniform if self._is_within(num_bytes, each, costs))]",
            "candidates = [picked]",
            "a mixture is taken that costs more than one preset for all layers",
            "budget",
        ),
        (
            "next(accepted, None)",
            "next(good, None)",
            "a preset of which nothing is known is suggested",
            "preflight",
        ),
    ),
    *of(
        "hf_kvquant/patching.py",
        (
            "        notes_on(model).balancing = None  # found in other keys\n",
            "",
            "factors belong to keys that the checkpoint has rounded",
            "quantized_weights",
        ),
    ),
    *of(
        "hf_kvquant/attention/masks.py",
        (
            'is_last = kwargs["q_length"] == 1 and isinstance',
            "is_last = isinstance",
            "a chunk does not see the later tokens of a picture",
            "pictures",
        ),
        (
            "        padding.follow(notes.padded, starts)\n",
            "        pass\n",
            "dense first tokens are looked for where only a later mask has padding",
            "padding",
        ),
        (
            "                notes.check_attention()\n",
            "                pass\n",
            "an attention module of the user's in the last layer adds bounds to its scores",
            "bypass",
        ),
    ),
    *of(
        "hf_kvquant/cache/handle.py",
        (
            "return starts if q_len <= num_masked else None",
            "return starts",
            "tokens of the model's own before the text are taken for padding",
            "padding",
        ),
    ),
    *of(
        "hf_kvquant/generate/hook.py",
        (
            "cache.notes.told = starts, mask.shape[1]",
            "pass",
            "padding is dense where a model makes its masks itself",
            "padding",
        ),
        (
            "        _check_no_weights(call)  # now",
            "        pass  # now",
            "a given cache takes tokens of a call that wants attention weights",
            "patching",
        ),
    ),
    *of(
        "hf_kvquant/cache/kvquant_cache.py",
        (
            "            self._check_no_recurrence(tokens_to_remove)\n",
            "            pass\n",
            "a recurrent state keeps tokens that a crop has removed",
            "hybrids",
        ),
        (
            "                indices = torch.arange(batch, device=given.device)[given]\n",
            "                indices = given\n",
            "a mask that is too short selects sequences",
            "cache",
        ),
    ),
    *of(
        "hf_kvquant/cache/states.py",
        (
            "if self.do_states_stay and new.shape == state.shape:",
            "if False:",
            "states of a static cache move when sequences are selected",
            "hybrids",
        ),
    ),
    *of(
        "hf_kvquant/cache/shown.py",
        (
            "return _views_shown(result, [each for each in args if isinstance(each, Shown)])",
            "return result",
            "a change of a view of keys is lost",
            "cache",
        ),
    ),
    *of(
        "hf_kvquant/storage/padding.py",
        (
            "        _check_shown(store, starts)\n",
            "        pass\n",
            "padding without codes is shown",
            "padding",
        ),
    ),
    *of(
        "hf_kvquant/models/quantized.py",
        (
            'name not in ("weight", "bias")',
            "False",
            "factors are folded into weights that compressed-tensors rounds again",
            "quantized_weights",
        ),
    ),
    *of(
        "hf_kvquant/graphs/capture.py",
        ("        model.training,\n", "", "a step captured in training serves evaluation", "capture"),
        (
            "        fingerprint(model),\n",
            "",
            "a step of another adapter is replayed",
            "adapters",
        ),
        ("        cache.check_in_step()\n", "", "a step is captured over layers of different lengths", "capture"),
        (
            "            storage.check_room(num_tokens)\n",
            "            pass\n",
            "a full cache replays a step beyond its end",
            "capture",
        ),
    ),
    *of(
        "hf_kvquant/state.py",
        ("popitem(last=False)", "popitem()", "the newest graph is dropped, not the oldest", "capture"),
        ("        self.pool.close()\n", "", "buffers come back to a model that is no longer patched", "pool"),
    ),
    *of(
        "hf_kvquant/graphs/fusion.py",
        (
            "if last.total is not x or x._version != last.version:",
            "if last.total is not x:",
            "a norm gets what was computed before its input was changed",
            "fusion",
        ),
    ),
    *of(
        "hf_kvquant/spec/state_steps.py",
        (
            "new = new.clamp(-largest, largest)",
            "new = new",
            "a number that float16 does not have becomes infinity, and later tokens NaN",
            "state_dtype state_steps",
        ),
        (
            "held = held.to(torch.promote_types(state.dtype, torch.float32))",
            "held = held.clone()",
            "sums over a state in float16 are float16, too",
            "state_steps",
        ),
    ),
    *of(
        "hf_kvquant/spec/state_chunks.py",
        (
            "state[write] = stored(held[0], state.dtype)",
            "state[write] = held[0]",
            "a number that float16 does not have becomes infinity behind a prompt",
            "state_chunks",
        ),
    ),
    *of(
        "hf_kvquant/cache/states.py",
        (
            "            recurrent_states = stored(recurrent_states, self.state_dtype)\n",
            "            pass\n",
            "states stay in float32 in `generate`",
            "state_dtype",
        ),
    ),
    *of(
        "hf_kvquant/cache/support.py",
        (
            "not (found & RECURRENT and has_gated_delta_rule(text_config))",
            "not found & RECURRENT",
            "states that nothing was measured of lose bits",
            "state_dtype",
        ),
    ),
    *of(
        "hf_kvquant/graphs/state_steps.py",
        (
            "if threading.get_ident() == thread and is_known and hidden_states.shape[-1] == 1:",
            "if is_known and hidden_states.shape[-1] == 1:",
            "another thread's convolution takes part in this one's trials",
            "state_steps",
        ),
        (
            "not options.keys() & _OTHER_OPTIONS",
            "True",
            "the kernel ignores an option of the delta rule",
            "state_steps",
        ),
        (
            "    slots.store(new)\n",
            "",
            "states that the model's own function computed are lost",
            "state_steps",
        ),
    ),
    *of(
        "hf_kvquant/graphs/gates.py",
        (
            "argument.tensor if isinstance(argument, Gate) and argument.is_computed else argument",
            "argument",
            "a gate that was changed in place counts as it was before",
            "gates",
        ),
        (
            "or beta.names & g.names",
            "",
            "one projection makes both gates and is multiplied by the weight of another",
            "gates",
        ),
        (
            "if not is_known or not is_served():",
            "if not is_known:",
            "a function of another thread gets what is no tensor",
            "gates",
        ),
        (
            "lambda x, *_: (g.at(x), beta.at(x))",
            "lambda *given: _kernel(1.0, *given)",
            "gates that compute something else are replaced",
            "gates",
        ),
    ),
    *of(
        "hf_kvquant/graphs/trials.py",
        (
            "unit * largest",
            "100 * unit * largest",
            "a function that computes something else is replaced",
            "state_steps",
        ),
    ),
    *of(
        "hf_kvquant/graphs/state_chunks.py",
        (
            "not options.keys() & _OTHER_OPTIONS",
            "True",
            "the kernel ignores an option of a convolution",
            "state_chunks",
        ),
        (
            'is_known_delta(options["output_final_state"], options)',
            "True",
            "the kernel for many tokens ignores an option of the delta rule",
            "state_chunks",
        ),
        (
            "        out, new = _delta_by_sequence(original, options, *vectors, states.gathered(), states.sequences)\n"
            "        states.store(new)\n",
            "        out, new = _delta_by_sequence(original, options, *vectors, states.gathered(), states.sequences)\n",
            "states that the model's own function computed for many tokens are lost",
            "state_chunks",
        ),
        (
            "before.copy_(initial_state)",
            "pass",
            "a chunk of a prompt begins without the state before it",
            "state_chunks",
        ),
        (
            "return x.is_cuda and 1 < num_tokens",
            "return 1 < num_tokens",
            "a prompt on a CPU is computed one token after the other",
            "state_chunks",
        ),
    ),
    *of(
        "hf_kvquant/graphs/trials.py",
        (
            "for dtype in {tensors[0].dtype, torch.float32}:",
            "for dtype in {tensors[0].dtype}:",
            "rounding to 16 bits hides that a kernel computes something else",
            "fusion",
        ),
        (
            "return tensor.shape, tuple(strides), tensor.dtype",
            "return tensor.shape, tensor.dtype",
            "a kernel's output is laid out in another way than the model's",
            "fusion",
        ),
    ),
    *of(
        "hf_kvquant/graphs/decode_loop.py",
        (
            "chosen = chosen * unfinished + self.pad * (1 - unfinished)",
            "chosen = chosen * 1",
            "finished sequences go on",
            "capture",
        ),
        (
            "0 if is_kept and (has_tails or self._cache.states)",
            "0 if is_kept and self._cache.states",
            "steps behind the stop turn dense tokens into codes",
            "capture",
        ),
        (
            "bool((mask[:, :-1] > mask[:, 1:]).any())",
            "False",
            "holes in a mask are attended to",
            "capture",
        ),
        ("self._random_states[-1 - num_steps]", "self._random_states[-1]", "sampling goes on elsewhere", "capture"),
    ),
    *of(
        "csrc/format.h",
        (
            "token - number * params.page_rows};",
            "token};",
            "tokens of later pages are beyond the first",
            "pages",
        ),
    ),
    *of(
        "csrc/args.cpp",
        (
            "slot >= 0 && slot < params.num_tails",
            "slot >= 0 && slot < params.num_pages",
            "a slot that is none is read behind the tails",
            "pages",
        ),
        (
            "*pages >= 0 && *pages < params.num_pages",
            "*pages < params.num_pages",
            "tokens without a page are read before the planes",
            "pages",
        ),
        (
            "side.head_dim > 0 && side.head_dim % 8 == 0 && side",
            "side.head_dim > 0 && side",
            "kernels read past rows of other sizes",
            "ops op_arguments fuzz_ops",
        ),
        (
            "int64_t{params.capacity} + 1 - params.q_len;",
            "int64_t{params.capacity} + 2 - params.q_len;",
            "a ring may overwrite what its first query sees",
            "ring_ops op_arguments",
        ),
    ),
    *of(
        "csrc/cpu/simd.h",
        (
            "shifts[i] = i % kOfWord * kBits",
            "shifts[i] = i * kBits",
            "AVX-512: codes of three bits behind the eighth of a vector are those of nobody",
            "ops dequantize",
        ),
        (
            "if (magnitude >= 0x477FF000)",
            "if (magnitude >= 0x48000000)",
            "portable: scales of 70000 are NaN",
            "ops extreme_values",
        ),
        (
            "(magnitude < (121 << 23) ? tiny : normal)",
            "(magnitude < (120 << 23) ? tiny : normal)",
            "fp8 codes below 2^-6 are wrong",
            "ops",
        ),
    ),
    *of(
        "csrc/cpu/quantize.h",
        (
            "0.0f, high, static_cast",
            "0.0f, high + is_symmetric, static_cast",
            "symmetric int4 overflows a nibble",
            "ops",
        ),
        ("scale == 0 ? smallest : scale", "scale", "zeros are divided by a scale of 0", "ops"),
        (
            "size == kWidth ? x : blend_lanes<size % kWidth>(x, swap_lanes<size % kWidth>(x))",
            "x",
            "AVX-512: the range of 8 channels takes in a 0",
            "ops",
        ),
        (
            "to_halves(low + (span - clipped) * 0.5f)",
            "to_halves(low + (span - clipped))",
            "clipped codes are not in the middle of their range",
            "ops",
        ),
        ("t < first ? offset", "t <= first ? offset", "the first token behind padding has no codes", "blocks"),
    ),
    *of(
        "csrc/cpu/transform.h",
        (
            "if (block >= 16) x = butterfly<8>(x);",
            "x = butterfly<8>(x);",
            "AVX-512: heads of 8 and 40 channels are rotated in blocks of 16",
            "transforms",
        ),
        (
            "constants = fma(",
            "constants = size < kWidth ? constants : fma(",
            "AVX-512: the last 8 channels of a centre are left out",
            "transforms",
        ),
    ),
    *of(
        "csrc/cpu/attend_float.h",
        (
            "if (!side.is_symmetric) x = fma(load(work.key_zero + t), broadcast(work.query_sums[r]), x);",
            "",
            "portable, AVX2: scores lack the zero",
            "ops",
        ),
    ),
    *of(
        "csrc/cpu/attend_integer_values.h",
        (
            "kFirst = 4 * kPart % (16 / kBits)",
            "kFirst = 0",
            "AVX-512: half of the channels of values of two bits get the codes of others",
            "ops",
        ),
    ),
    *of(
        "csrc/cpu/attend_integer_keys.h",
        (
            "by_place = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13,",
            "by_place = _mm_setr_epi8(1, 5, 9, 13, 0, 4, 8, 12,",
            "AVX-512: keys of two bits are multiplied by other channels of the query",
            "ops",
        ),
        ("if (largest > limit * unit) unit *= 2.0f;", "", "AVX-512: the largest channel of a query wraps", "ops"),
        (
            "return 4 * num_small >= side.head_dim;",
            "return false;",
            "AVX-512: channels beside a huge one lose their bits",
            "extreme_values",
        ),
    ),
    *of(
        "csrc/cpu/attend.h",
        (
            "(is_paged ? params.page_rows : params.capacity)",
            "params.capacity",
            "attention reads on behind the end of a page",
            "pages",
        ),
        (
            "row.sum = weight * row.sum + other_weight * other.sum;",
            "row.sum = row.sum + other_weight * other.sum;",
            "tokens with codes weigh too much beside dense ones",
            "windows",
        ),
        (
            "if (!is_first) cut((int64_t{token} / side.ring + 1) * side.ring);",
            "",
            "dense tokens are read past the end of their ring",
            "windows",
        ),
        (
            "window_begin(side, max_of(position + 1, 0), params.lengths[b],",
            "window_begin(side, params.lengths[b], params.lengths[b],",
            "all queries of a step have the window of the last one",
            "windows assisted_capture",
        ),
        (
            "rows[r].end = dense_rows[r].end = min_of(seen[r].end, until);",
            "rows[r].end = dense_rows[r].end = seen[r].end;",
            "a query reads a token as codes and from the tail",
            "windows",
        ),
        (
            "double sum = sink == kInfinity ? 1.0 : std::exp(sink - base);",
            "double sum = std::exp(sink - base);",
            "an infinite sink makes NaN",
            "extreme_values",
        ),
        (
            "row.sum = row.sum * row.rescale + sum_of(sum);",
            "row.sum = row.sum + sum_of(sum);",
            "weights of earlier tiles count as if the maximum had not moved",
            "ops",
        ),
    ),
    *of(
        "csrc/cuda/common/transform.cuh",
        ("__frcp_rn(smoothing[k])", "__fdividef(1.f, smoothing[k])", "keys are off by a bit", "transforms"),
    ),
    *of(
        "csrc/cuda/attend/combine.cuh",
        ("(sink == maximum ? 1.f : exp2_below", "(exp2_below", "an infinite sink makes NaN", "extreme_values"),
        (
            "if (params.lengths[segment.b] > plan.max_length) sink = NAN;",
            "",
            "a result without the tokens that had no room looks like any other",
            "compile cuda_decode",
        ),
    ),
    *of(
        "csrc/cuda/attend/attend.cuh",
        (
            "closes_block = behind < num_rounds;",
            "closes_block = behind == 0;",
            "a thread block reads codes of a new block that another one writes",
            "split_plan",
        ),
    ),
    *of(
        "csrc/cuda/attend/row_view.cuh",
        (
            " && token < dense_from",
            "",
            "a query reads a token as codes and from the tail",
            "windows",
        ),
    ),
    *of(
        "csrc/cuda/sm90/chunk/shape.cuh",
        (
            "has_coded_value && !has_coded_key : has_coded_key;",
            "true : true;",
            "a query reads a token as codes and from the tail",
            "windows",
        ),
    ),
    *of(
        "csrc/cuda/sm90/chunk/scratch.cuh",
        (
            "segment.b = plan.first_b + blockIdx.z",
            "segment.b = blockIdx.z",
            "every slice has the tiles of the first sequences",
            "chunk_scratch",
        ),
        (
            "step_of<Shape::kTileTokens>(span.begin) + slot;",
            "slot;",
            "with a window, the scratch has the first tiles of the sequence",
            "chunk_scratch",
        ),
    ),
    *of(
        "csrc/requirements.cpp",
        (
            "side.head_dim / side.num_groups % kGroupChannels == 0",
            "side.head_dim / side.num_groups % 16 == 0",
            "groups of 16 channels get the kernel for 32",
            "why_general",
        ),
        (
            "has_token_stride(side, 0) || has_token_stride(side, 1);",
            "true;",
            "scales with gaps between them are copied as if they had none",
            "why_general",
        ),
        (
            "if (requirement.of == Of::sides && !requirement.is_met(call, values))",
            "if (false)",
            "only keys have requirements",
            "why_general",
        ),
    ),
    *of(
        "csrc/cuda/plan/choose.cpp",
        (
            "new_tokens->q_len > (is_blocked ? kMaxAppendedToBlock : kMaxAppended)",
            "false",
            "chunks are appended by the kernel for single tokens",
            "ops cuda_decode",
        ),
    ),
    *of(
        "hf_kvquant/attention/latent.py",
        (
            "known is None or known[0] != state",
            "known is None",
            "latents are absorbed with weights that have been changed",
            "latent",
        ),
        (
            "softmax_scale=scaling, starts=starts)",
            "softmax_scale=1.0, starts=starts)",
            "latents get another scale than keys",
            "latent",
        ),
        (
            "return out if transform is None else reference.rotate(out.float()).to(out.dtype)",
            "return out",
            "sums of rotated latents stay rotated",
            "latent",
        ),
        (
            "if is_causal and storage.serves_latent",
            "if storage.serves_latent",
            "masks with holes are forgotten over latents",
            "latent",
        ),
        (
            "if is_for_us and is_ours(module.config._attn_implementation):",
            "if is_for_us:",
            "another attention gets latents for keys",
            "latent",
        ),
    ),
    *of(
        "csrc/cpu/attend.h",
        (
            "rotate_row(work.tile, value_dim);",
            "",
            "sums of rotated latents stay rotated",
            "latent_ops",
        ),
        (
            "const float ratio = factors[r] == work.factors[r] ? 1.0f : work.factors[r] / factors[r];",
            "const float ratio = 1.0f;",
            "scores of rope parts have the factor of latents",
            "latent_ops",
        ),
        (
            "if (params.is_latent && value_kernel->restore != nullptr) value_kernel = &kTileValues;",
            "",
            "sums of rotated latents meet those of flawed codes",
            "latent_ops",
        ),
    ),
    *of(
        "csrc/cuda/append/append.sm89.cu",
        (
            "*scale_at(job.side, token.slot, 0, 0, 0) = kHalfNan;",
            "",
            "tokens without a scale get the codes of a frozen one",
            "ops extreme_values",
        ),
    ),
]


# --- running them -----------------------------------------------------------------------------------------------------


@contextmanager
def copied_tree() -> Iterator[Path]:
    """A worktree of the tracked files with their uncommitted changes, and with the extension."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()

    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        git("worktree", "add", "--detach", str(tree), git("stash", "create") or "HEAD")
        try:
            for extension in (ROOT / "hf_kvquant").glob("_C.*.so"):
                shutil.copy2(extension, tree / "hf_kvquant")
            yield tree
        finally:
            git("worktree", "remove", "--force", str(tree))


def build(tree: Path, with_cuda: bool) -> bool:
    """Compile what has changed. Returns whether that succeeded."""
    skip = {} if with_cuda else {"HF_KVQUANT_SKIP_CUDA": "1"}
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    return subprocess.run(command, cwd=tree, env={**os.environ, **skip}, capture_output=True).returncode == 0


def catcher(tree: Path, arguments: list[str]) -> str | None:
    """Run tests until one fails. Returns its name, or `None` if all pass."""
    log = tree / "pytest.log"
    child = os.fork()  # torch and transformers are imported already
    if child == 0:
        code = 1
        try:
            signal.alarm(SECONDS)
            os.chdir(tree)
            sys.path[0], os.environ["PYTHONPATH"] = str(tree), f"{tree}{os.pathsep}{tree / 'evals'}"
            for descriptor in (1, 2):
                os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
            options = ["-x", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider"]
            options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # about modules that transformers imported
            code = pytest.main([*options, *arguments])
        finally:  # the child must not go on as the parent would
            sys.stdout.flush()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    text = log.read_text(encoding="utf-8")
    log.unlink()
    if code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return None
    found = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", text, re.MULTILINE)
    return found[1] if found else f"pytest, which ended with {code}: {text[-500:]}"


def check(tree: Path, mutation: Mutation, jobs: list[str], only_first: bool) -> tuple[str, str | None]:
    """Which tier catches a mutation, and which test."""
    first = [f"tests/test_{name}.py" for name in mutation.tests.split()]
    others = [f"--ignore={path}" for path in first]
    stages = [("quick", first), ("quick", [*others, *jobs]), ("all", ["--all", *first]), ("all", ["--all", *others])]
    for tier, arguments in stages[:: 2 if only_first else 1]:
        found = catcher(tree, arguments)
        if found is not None:
            return tier, found
    return "nothing", None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of file names; default: all files")
    parser.add_argument("--first", action="store_true", help="run only the tests of the subject")
    parser.add_argument("--cuda", action="store_true", help="mutate CUDA sources")
    parser.add_argument("-n", dest="jobs", default="2", help="processes for the other tests (default: 2)")
    options = parser.parse_args()
    chosen = [
        mutation
        for mutation in MUTATIONS
        if mutation.is_cuda == options.cuda
        and (not options.names or any(name in mutation.path for name in options.names))
    ]
    for mutation in chosen:
        count = (ROOT / mutation.path).read_text(encoding="utf-8").count(mutation.old)
        assert count == 1, f"{mutation.path} must have one piece {mutation.old!r}, has {count}. Bring it up to date."
    caught: dict[str, int] = {"quick": 0, "all": 0, "nothing": 0}
    with copied_tree() as tree:
        for mutation in chosen:
            begin, path = time.monotonic(), tree / mutation.path
            text = path.read_text(encoding="utf-8")
            path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
            if mutation.is_compiled and not build(tree, mutation.is_cuda):
                tier, test = "quick", "the compiler"
            else:
                tier, test = check(tree, mutation, ["-n", options.jobs], options.first)
            path.write_text(text, encoding="utf-8")
            caught[tier] += 1
            seconds = time.monotonic() - begin
            print(f"{tier:8}{seconds:5.0f} s  {mutation.path}: {mutation.why}\n{'':16}{test}", flush=True)
    print(f"{len(chosen)} mutations, caught by the quick tier: {caught['quick']}, by all tests only: {caught['all']}")
    raise SystemExit(bool(caught["all"] or caught["nothing"]))


if __name__ == "__main__":
    main()

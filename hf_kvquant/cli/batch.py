"""`hf-kvquant batch`: answers the lines of a file through continuous batching, and resumes if it was stopped."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tqdm.auto
from rich.console import Console
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..batching.grammars import Grammars
from ..batching.sampling import SETTINGS
from ..batching.support import for_command
from ..calibration.smoothing_file import FILE_NAME
from ..common.errors import Interrupted, RefusedRequest, RefusedResult, UsageError, is_out_of_memory
from ..common.naming import model_name, sha256
from ..common.progress import Tell, show_progress
from ..common.version import __version__
from ..config import KVQuantConfig
from ..jobs.answers import Answer, answered, end_tokens, made, start
from ..jobs.forms import answer_line, error_line
from ..jobs.lines import SAMPLING, Job, check_sampling, read_jobs
from ..jobs.output import Done, Output, Writer
from ..jobs.processes import Processes, joined, tell_one_process, this_process_device
from ..jobs.prompts import Limits, Request, Requests
from ..jobs.sampling import Defaults, Survey, generation_config_of, survey
from ..models.hashes import weights_hash
from ..models.text_config import context_of, text_config_of
from ..patching import patched
from . import arguments, loading
from .loading import load_calibration

# Bad lines that are told on stderr. All of them are in the output.
MOST_TOLD = 20
TELL_S = 2.0


@dataclasses.dataclass
class Tally:
    """What one process has done in this run."""

    done: int = 0
    bad: int = 0
    tokens: int = 0


@dataclasses.dataclass(frozen=True)
class Work:
    """What the lines are answered with."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    preset: str
    config: KVQuantConfig
    defaults: Defaults
    generation_config: GenerationConfig
    batching: Mapping[str, Any]

    @property
    def ends(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return end_tokens(self.generation_config)

    @functools.cached_property
    def grammars(self) -> Grammars:
        """Of the model."""
        return Grammars(self.tokenizer, text_config_of(self.model).vocab_size, self.ends)


def run(args: argparse.Namespace) -> None:
    """Run `hf-kvquant batch`."""
    config, batching = arguments.served_config(args), arguments.checked_batching(args)
    arguments.check_counts(args, "max_new_tokens")
    for name in SAMPLING:
        if getattr(args, name) is not None:
            check_sampling(name, getattr(args, name), UsageError, shown=arguments.option(name))
    path, output = checked_input(args.input), Output(arguments.checked_output(args.output))
    if output.path.resolve() == path.resolve():
        raise UsageError(f"`--output` must be another file than the input, got {args.output}. Name another.")
    output.check_owned()
    tell_one_process("batch")
    model, tokenizer = loading.load_placed(args, default_device=this_process_device())
    load_calibration(model, args.model)
    loading.set_caches_aside(model, args)
    defaults = defaults_of(args, model.generation_config)
    generation_config = generation_config_of(model, defaults)
    work = Work(model, tokenizer, args.model, args.preset, config, defaults, generation_config, batching)
    with refusing(work), contextlib.ExitStack() as stack:  # before anything is read or written
        made_for(work, stack)
    source = survey(path)
    with joined() as processes:
        answer(work, source, output, processes)


def checked_input(name: str) -> Path:
    """The path of the input, which can be read more than once. A pipe would have no lines the second time."""
    path = Path(name).expanduser()
    if path.is_fifo():
        raise UsageError(
            f"`IN` must be a file of JSON lines, which is read more than once, got {name}, a pipe. Write the lines to "
            "a file first."
        )
    try:
        with path.open("rb"):
            return path
    except OSError as error:
        raise UsageError(f"`IN` must be a file of JSON lines, got {name}: {error.strerror}.") from error


def defaults_of(args: argparse.Namespace, generation_config: Any) -> Defaults:
    """What lines get that do not say: the options, else what the model's generation config says."""
    sampling: dict[str, float] = {}
    for name in SETTINGS:
        given = getattr(args, name, None)  # there is no option for `min_p`
        value = getattr(generation_config, name, None) if given is None else given
        if value:
            sampling[name] = value
        elif given is not None:
            sampling[name] = given
    return Defaults(args.max_new_tokens, args.sample, sampling)


def settings_of(work: Work, source: Survey) -> dict[str, Any]:
    """Everything that answers depend on. Pages and devices change at most the order of sums."""
    model = work.model
    smoothing = Path(work.name).expanduser() / FILE_NAME
    return {
        "command": "batch",
        "hf_kvquant": __version__,
        "input_sha256": source.sha256,
        "model": model_name(work.name),
        "weights_sample_sha256": weights_hash(model),
        "smoothing_sha256": sha256(smoothing) if smoothing.is_file() else None,
        "generation_config": _without_versions(work.generation_config),
        "tokenizer_sha256": _sha256_of(work.tokenizer),
        "dtype": str(model.dtype).removeprefix("torch."),
        "preset": work.preset,
        "formats": work.config.to_dict(),
        **work.defaults.to_dict(),
    }


def _without_versions(config: GenerationConfig) -> dict[str, Any]:
    """What a generation config says of answers, besides their length, which is a setting of its own."""
    left_out = ("transformers_version", "max_new_tokens", "max_length")
    found = json.loads(config.to_json_string(use_diff=True))
    return {name: value for name, value in found.items() if name not in left_out and not name.startswith("_")}


def _sha256_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """Of what makes prompts and texts: the vocabulary, its rules and the chat template."""
    inner: Any = getattr(tokenizer, "backend_tokenizer", None)
    words = tokenizer.get_vocab() if inner is None else json.loads(inner.to_str())
    for name in ("padding", "truncation") if inner is not None else ():  # each call sets these
        words.pop(name, None)
    return sha256(json.dumps([words, tokenizer.chat_template], sort_keys=True).encode())


def answer(work: Work, source: Survey, output: Output, processes: Processes) -> None:
    """Answer the lines that the output lacks, and say what became of all."""
    settings, tally, started = settings_of(work, source), Tally(), time.monotonic()
    total = source.num_lines
    try:
        if processes.rank > 0:
            processes.wait()  # until the first has the answers so far in one file
            fill(work, source, output, processes, tally)
            processes.wait()
            processes.total(tally.done, tally.bad, tally.tokens)
            return
        with output.opened(settings):
            processes.wait()
            fill(work, source, output, processes, tally)
            processes.wait()
            output.collect()
            done = output.done()
            _, _, tokens = processes.total(tally.done, tally.bad, tally.tokens)
    except KeyboardInterrupt as error:
        kept = f"{output.path} and its parts" if processes.count > 1 else str(output.path)
        raise Interrupted(
            f"{tally.done:,} answers of this run are in {kept}: run the same command again to resume."
        ) from error
    except OSError as error:
        raise UsageError(
            f"`--output` must be a file that can be written, got {error.strerror or error} after {tally.done:,} "
            "answers. Make room, then run the same command again to resume."
        ) from error
    show(output, done, total, tokens, time.monotonic() - started)


def show(output: Output, done: Done, total: int, tokens: int, seconds: float) -> None:
    """Print what became of the lines.

    Raises:
        RefusedResult: Some lines could not be answered.
    """
    speed = f", {tokens / seconds:,.0f} a second" if tokens else ""
    answers = f"{len(done.lines) - len(done.bad):,} of {total:,} lines answered in {output.path}"
    Console(highlight=False).print(f"{answers}; {tokens:,} output tokens in this run{speed}.", soft_wrap=True)
    if done.bad:
        raise RefusedResult(
            f"{len(done.bad):,} of {total:,} lines could not be answered. {output.path} has the reasons under `error`."
        )


def fill(work: Work, source: Survey, output: Output, processes: Processes, tally: Tally) -> None:
    """Answer this process's share of the lines that the output lacks."""
    done = output.done().lines
    num_missing = source.num_lines - len(done)
    share = (num_missing - processes.rank + processes.count - 1) // processes.count
    if not share:
        return
    with (
        show_progress("batch", share, unit="line", is_shown=processes.rank == 0) as tell,
        output.writing(processes.rank, processes.count) as writer,
    ):
        tell(doing="loading")
        missing = (job for job in read_jobs(source.path) if job.line not in done)
        mine = (job for position, job in enumerate(missing) if processes.is_mine(position))
        with contextlib.ExitStack() as stack:
            manager, room = started(work, stack)
            try:
                write_answers(work, mine, manager, room, writer, tally, tell)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                raise too_large(f"{tally.done:,} answers of this run are kept.") from error


def started(work: Work, stack: contextlib.ExitStack) -> tuple[Any, int]:
    """Start a manager that ends with the stack. Returns it and the number of tokens that its pages hold."""
    try:
        with refusing(work):
            manager = made_for(work, stack)
            return manager, start(manager, work.grammars)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise too_large("Nothing was answered in this run.") from error


def made_for(work: Work, stack: contextlib.ExitStack) -> Any:
    """Patch the model and make a manager, both until the stack ends."""
    stack.enter_context(patched(work.model, work.config))
    return stack.enter_context(made(work.model, work.generation_config, work.batching))


@contextlib.contextmanager
def refusing(work: Work) -> Iterator[None]:
    """Name the model where it, or a setting for it, cannot be batched."""
    try:
        yield
    except (ImportError, NotImplementedError, TypeError, ValueError) as error:
        raise UsageError(f"{work.name} cannot be batched like this. {for_command(error)}") from error


def too_large(kept: str) -> UsageError:
    """The error if memory ran out. `kept` says what was kept of the run."""
    return UsageError(
        "`--cb-max-memory-percent` must leave enough memory, got too little. Lower it, or give --cb-num-blocks and "
        f"--cb-max-batch-tokens. {kept}"
    )


def write_answers(
    work: Work, jobs: Iterator[Job], manager: Any, room: int, writer: Writer, tally: Tally, tell: Tell
) -> None:
    """Write a line for every job, through a manager whose pages have room for `room` tokens."""
    limits, started, told = Limits(context_of(work.model), room), time.monotonic(), 0.0
    prompts = Requests(work.model, work.tokenizer, work.grammars, limits, work.defaults)

    def refuse(job: Job, problem: str) -> None:
        writer.put(error_line(job, problem))
        report(job, problem, tally)
        tell(1)

    def requests() -> Iterator[Request]:
        for job in jobs:
            try:
                yield from prompts.of(job)
            except RefusedRequest as problem:
                refuse(job, str(problem))

    ended: dict[int, list[Answer]] = defaultdict(list)  # by line: answers to it, until all are there
    for answer in answered(manager, requests(), work.ends):
        job = answer.request.job
        ended[job.line].append(answer)
        if job.asked is not None and len(ended[job.line]) < job.asked.num_choices:
            continue
        answers = sorted(ended.pop(job.line), key=lambda each: each.request.choice)
        problem = next((each.problem for each in answers if each.problem is not None), None)
        if problem is not None:
            refuse(job, problem)
            continue
        writer.put(answer_line(answers, work.tokenizer, work.name))
        tally.done, tally.tokens = tally.done + 1, tally.tokens + sum(len(each.tokens) for each in answers)
        now = time.monotonic()
        is_due = now - told > TELL_S
        told = now if is_due else told
        tell(1, doing=f"{tally.tokens / (now - started):,.0f} output tokens a second" if is_due else None)


def report(job: Job, problem: str, tally: Tally) -> None:
    """Say on stderr which line is bad and why, above a progress bar if there is one."""
    tally.bad += 1
    if tally.bad <= MOST_TOLD:
        tqdm.auto.tqdm.write(f"hf-kvquant: batch: line {job.line} is left out: {problem}", file=sys.stderr)
    if tally.bad == MOST_TOLD:
        tqdm.auto.tqdm.write("hf-kvquant: batch: further bad lines are in the output only.", file=sys.stderr)

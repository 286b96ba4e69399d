"""Models over several processes and devices: tensor parallelism on the CPU through gloo, and accelerate's hooks.

Ranks are processes, slow to start, so every number of ranks is started once, and runs all scenarios below in turn. A
scenario is a function of `Ranks`, which loads a saved model both whole and sharded; what it asserts, it asserts on
every rank.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import faulthandler
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import models
import programs
import pytest
import torch
from accelerate import dispatch_model
from test_capture import Recorded
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.distributed import DistributedConfig
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

import hf_kvquant
from hf_kvquant import KVQuantConfig
from hf_kvquant.graphs import capture
from hf_kvquant.transforms import of_model
from hf_kvquant.upstream.releases import DO_MODELS_UPDATE_PAGES, HAS_PAGES, cache_of

NEW_TOKENS = 8
NUM_HEADS = 4
# A scenario that takes longer has its threads printed: on several GPUs, a rank that waits for others says nothing.
STALL_SECONDS = 60
SAVED: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": NUM_HEADS},
    "qwen2": {"model_type": "qwen2", "num_attention_heads": 8, "num_key_value_heads": NUM_HEADS},  # with key biases
    # Its attention is in no plan: every rank has all heads, and the sinks that go with them.
    "gpt_oss": {**models.FAMILIES["gpt_oss"].options, "model_type": "gpt_oss", "num_key_value_heads": NUM_HEADS},
    "one_head": {"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 1},
    # Latents are whole on every rank, and heads are made of them.
    "minicpm3": {**models.FAMILIES["minicpm3"].options, "model_type": "minicpm3"},
}
# gpt-oss asks for RoPE factors that no tiny model fits.
SAVED["gpt_oss"] |= {"num_attention_heads": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}


def save(name: str, folder: Path) -> None:
    model = models.build(**SAVED[name])
    if name == "qwen2":
        with torch.no_grad():  # biases of the last head alone: the other ranks see none in their own weights
            for module_name, parameter in model.named_parameters():
                if module_name.endswith("k_proj.bias"):
                    parameter[: -models.HEAD_DIM] = 0
    model.save_pretrained(folder / name)


@dataclasses.dataclass(frozen=True)
class Ranks:
    """One rank's view.

    Attributes:
        rank: Its number.
        num_ranks: Of how many.
        folder: Where models are saved.
        device: Of this rank.
    """

    rank: int
    num_ranks: int
    folder: Path
    device: torch.device

    def load(self, name: str, plan: str | dict[str, str] = "auto") -> tuple[Any, Any]:
        """The model whole in this process, and sharded."""
        whole = AutoModelForCausalLM.from_pretrained(self.folder / name).to(self.device)
        config = DistributedConfig(tp_plan=plan, tp_size=self.num_ranks)
        return whole, AutoModelForCausalLM.from_pretrained(self.folder / name, distributed_config=config)

    def say(self, what: str) -> None:
        """Print how far this rank is. The process may be ended from outside, so the line must be out by then."""
        print(f"{time.monotonic():.1f} s, rank {self.rank}: {what}", flush=True)

    def part(self, tensor: Tensor) -> Tensor:
        """This rank's heads of `[NUM_HEADS, head_dim]`."""
        return tensor.chunk(self.num_ranks)[self.rank]


def check_tokens(whole: Any, sharded: Any, config: Any, num_heads: int) -> list[Any]:
    """Both write the same; every quantised layer of the sharded model holds so many heads, attended to from codes.

    Returns:
        The key transforms of the sharded model's layers.
    """
    results = []
    for model in (whole, sharded):
        with hf_kvquant.patched(model, config):
            results.append(models.greedy(model, models.left_padded(), NEW_TOKENS))
    assert results[0].sequences.tolist() == results[1].sequences.tolist()
    storages = cache_of(results[1]).storages
    assert storages and all(storage.shape[1] == num_heads for storage in storages)
    for storage in storages:
        assert storage.planes[0].codes.shape[1] == storage.planes[1].codes.shape[1] == num_heads
        assert not storage.tally.fallbacks
    return [storage.key_transform for storage in storages]


def plain(ranks: Ranks) -> None:
    whole, sharded = ranks.load("llama")
    windows = {"preset": "int4-token", "sink_length": 2, "residual_length": 4}
    for config in ("none", "int8", "int4-token", "int4-channel", {"preset": "int4-token", "static": True}, windows):
        for transform in check_tokens(whole, sharded, config, NUM_HEADS // ranks.num_ranks) if config != "none" else ():
            assert transform is None or transform.describe() == "rotate"


def centers_of_biases(ranks: Ranks) -> None:
    """They are found on each rank for its own heads, though only the last has any."""
    whole, sharded = ranks.load("qwen2")
    found = {}
    for preset in ("int8", "int4-token"):
        found = dict(enumerate(check_tokens(whole, sharded, preset, NUM_HEADS // ranks.num_ranks)))
    for index, transform in hf_kvquant.key_transforms(whole, "int4-token").items():
        part = ranks.part(transform.center)
        assert bool(part.any()) == (ranks.rank == ranks.num_ranks - 1)
        torch.testing.assert_close(found[index].center if part.any() else torch.zeros_like(part), part)


def given_tensors(ranks: Ranks) -> None:
    """Centres and factors of all heads are cut to this rank's; those of this rank's heads are taken as they are."""
    whole, sharded = ranks.load("qwen2")
    num_heads = NUM_HEADS // ranks.num_ranks
    shape = (NUM_HEADS, models.HEAD_DIM)
    centers = {index: torch.randn(shape) for index in range(2)}
    factors = {0: torch.full(shape, 2.0), 1: 2.0 ** torch.randint(-2, 3, shape)}
    of_model.set_smoothing(whole, factors)
    of_model.set_smoothing(sharded, factors)  # beside centres of biases, which are this rank's from the beginning
    config = KVQuantConfig.resolve({"preset": "int4-token", "transforms": ["center", "smooth", "rotate"]})
    check_tokens(whole, sharded, config, num_heads)
    of_model.set_centers(whole, centers)
    for cut in (lambda tensor: tensor, ranks.part):
        of_model.set_centers(sharded, {index: cut(tensor) for index, tensor in centers.items()})
        of_model.set_smoothing(sharded, {index: cut(tensor) for index, tensor in factors.items()})
        transforms = check_tokens(whole, sharded, config, num_heads)
        for index, transform in enumerate(transforms):
            assert transform.describe() == "center+smooth+rotate"
            assert torch.equal(transform.center, ranks.part(centers[index]))
            assert torch.equal(transform.smoothing, ranks.part(factors[index]))
    of_model.set_centers(sharded, {0: torch.ones(3, models.HEAD_DIM)})
    message = (
        f"key_transforms: `centers` of layer 0 must have {num_heads} heads, like the keys of this rank, "
        f"or {NUM_HEADS}, like those of all {ranks.num_ranks}, got 3. Was it made for another model?"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        hf_kvquant.key_transforms(sharded, config)


def unsharded_heads(ranks: Ranks) -> None:
    whole, sharded = ranks.load("gpt_oss")
    centers = {1: torch.randn(NUM_HEADS, models.HEAD_DIM)}
    for model in (whole, sharded):
        of_model.set_centers(model, centers)
    _, transform = check_tokens(whole, sharded, "int4-token", NUM_HEADS)
    assert torch.equal(transform.center, centers[1])


def latents(ranks: Ranks) -> None:
    """Ranks hold the same latents, and attend with heads of their own."""
    whole, sharded = ranks.load("minicpm3")
    for config in ("none", "int8", "int4", {"preset": "int8", "static": True}):
        check_tokens(whole, sharded, config, 1)


def sharded_sinks(ranks: Ranks) -> None:
    """Sinks are this rank's query heads', in a plan that shards them. transformers 5.17 knows none."""
    if "local_params" not in ALL_PARALLEL_STYLES:
        return
    attention = "model.layers.*.self_attn"
    plan = {f"{attention}.{name}": "colwise" for name in ("q_proj", "k_proj", "v_proj", "sinks")}
    whole, sharded = ranks.load("gpt_oss", {**plan, f"{attention}.o_proj": "rowwise", attention: "local_params"})
    check_tokens(whole, sharded, "int4-token", NUM_HEADS // ranks.num_ranks)


def batched(ranks: Ranks) -> None:
    """Continuous batching: all ranks get the answers, each computed with its own heads."""
    if not HAS_PAGES:
        return
    whole, sharded = ranks.load("llama")
    check_answers(ranks, whole, sharded, (NUM_HEADS, NUM_HEADS // ranks.num_ranks))
    if DO_MODELS_UPDATE_PAGES:
        check_answers(ranks, *ranks.load("minicpm3"), (1, 1))


def check_answers(ranks: Ranks, whole: Any, sharded: Any, num_heads: tuple[int, int]) -> None:
    """Both answer the same. `num_heads` are those in their pages."""
    prompts = [[5, 6, 7], [4, 8] * 15, [9, 3, 40]]
    for preset in ("int8", "int4-token"):
        answers = []
        for model in (whole, sharded):
            name = f"batched, {preset}, {'whole' if model is whole else 'sharded'}"
            with hf_kvquant.patched(model, preset):
                ranks.say(f"{name}: generates")
                generation = GenerationConfig(do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=None)
                settings = ContinuousBatchingConfig(page_size=128, num_blocks=8, max_batch_tokens=64)
                outputs = model.generate_batch(prompts, generation, settings, persistent_manager=True)
                answers.append([output.generated_tokens for output in outputs.values()])
                layers = model._cached_continuous_batching_manager._layers
                assert {layer.page.num_kv_heads for layer in layers.values()} == {num_heads[model is sharded]}
                ranks.say(f"{name}: destroys the manager")
                model.destroy_cached_continuous_batching_manager()
        assert answers[1] == answers[0]


@contextlib.contextmanager
def recorded(ranks: Ranks) -> Iterator[None]:
    """Steps are captured: as CUDA graphs, or on a CPU as calls that are made again."""
    if ranks.device.type == "cpu":
        capture.RUNNERS["cpu"] = Recorded
    try:
        yield
    finally:
        capture.RUNNERS.pop("cpu", None)


def captured(ranks: Ranks) -> None:
    """Steps are recorded with what the ranks say to each other. All ranks write what the whole model writes."""
    Recorded.runs = 0
    inputs = {key: value.to(ranks.device) for key, value in models.left_padded().items()}
    with recorded(ranks):
        for name in ("llama", "qwen2", "minicpm3"):
            whole, sharded = ranks.load(name)
            for preset, options in (("int4-token", {}), ("int8", {"do_sample": True, "temperature": 0.7})):
                results = []
                for model in (whole, sharded):
                    config = {"preset": preset, "capture": model is sharded}
                    with hf_kvquant.patched(model, config):
                        torch.manual_seed(3)
                        defaults = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
                        results.append(model.generate(**inputs, **{**defaults, **options}))
                assert results[0].tolist() == results[1].tolist()
    if ranks.device.type == "cpu":
        assert Recorded.runs > 4 * (NEW_TOKENS - 2)


def gathered_weights_are_not_captured(ranks: Ranks) -> None:
    """FSDP's weights come together in every forward, which a graph would not repeat."""
    whole, _ = ranks.load("llama")
    fully_shard(whole)
    with recorded(ranks), hf_kvquant.patched(whole, {"preset": "int8", "capture": True}):
        with pytest.raises(NotImplementedError, match="in another way than by tensor parallelism"):
            models.greedy(whole, models.left_padded(), NEW_TOKENS)


def refused(ranks: Ranks) -> None:
    _, sharded = ranks.load("one_head")
    before = sharded.config._attn_implementation
    message = (
        f"must have a multiple of {ranks.num_ranks} key-value heads for tensor parallelism over {ranks.num_ranks} "
        "ranks, got 1, which would split a head. Load it on fewer ranks."
    )
    with pytest.raises(ValueError, match=re.escape(f"patch: `model` {message}")):
        hf_kvquant.patch(sharded, "int4-token")
    assert sharded.config._attn_implementation == before
    hf_kvquant.enable()
    backend = {"cache_implementation": "quantized", "cache_config": {"backend": "hf_kvquant"}}
    with pytest.raises(ValueError, match=re.escape(f"generate: `model` {message}")):
        models.greedy(sharded, models.left_padded(), NEW_TOKENS, **backend)
    hf_kvquant.disable()
    _, sharded = ranks.load("llama")
    texts = [40 * "Some text. "]
    tasks: dict[str, Callable[[], Any]] = {
        "smooth_attention": lambda: hf_kvquant.smooth_attention(sharded, models.tokenizer(), texts, num_tokens=64),
        "run_preflight": lambda: hf_kvquant.run_preflight(sharded),
    }
    for where, task in tasks.items():
        with pytest.raises(
            NotImplementedError, match=f"{where}: `model` must be whole in this process.*tensor parallelism.$"
        ):
            task()


SCENARIOS = (
    plain,
    centers_of_biases,
    given_tensors,
    unsharded_heads,
    latents,
    sharded_sinks,
    batched,
    captured,
    gathered_weights_are_not_captured,
    refused,
)
ON_GPUS = (captured, batched)


def run_rank(rank: int, num_ranks: int, folder: Path, is_cuda: bool = False) -> None:
    """What a process does. It ends with the process group that graphs have used."""
    view = Ranks(rank, num_ranks, folder, torch.device("cuda", rank) if is_cuda else torch.device("cpu"))
    view.say("starts")
    # Once the time is up, the threads show what they wait for; whoever started the test ends it.
    faulthandler.dump_traceback_later(STALL_SECONDS, file=sys.__stderr__)
    torch.set_num_threads(1)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
    if not is_cuda:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # transformers would give every rank a GPU, and have NCCL join them
    backend = "nccl" if is_cuda else "gloo"
    if is_cuda:
        torch.cuda.set_device(view.device)
    torch.distributed.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    for scenario in ON_GPUS if is_cuda else SCENARIOS:
        faulthandler.dump_traceback_later(STALL_SECONDS, file=sys.__stderr__)
        view.say(f"runs {scenario.__name__}")
        torch.manual_seed(0)
        scenario(view)
    view.say("ends the process group")
    torch.distributed.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()
    view.say("is done")


@pytest.mark.full(when=lambda num_ranks: num_ranks > 2, reason="heads are cut in four as they are in two")
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_tensor_parallel(num_ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SAVED:
        save(name, tmp_path)
    # A rank that fails ends the others, and its traceback is what this raises.
    method = programs.FORKS.get_start_method()
    if torch.cuda.is_available():  # what has looked for GPUs before a fork finds them after it
        method = "spawn"
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    torch.multiprocessing.start_processes(run_rank, (num_ranks, tmp_path), num_ranks, start_method=method)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensor_parallel_on_gpus(tmp_path: Path) -> None:
    """Steps are CUDA graphs, in `generate` and in continuous batching."""
    for name in SAVED:
        save(name, tmp_path)
    torch.multiprocessing.spawn(run_rank, (2, tmp_path, True), nprocs=2)


@pytest.mark.parametrize("offloaded_layers", [(0,), (1,), (0, 1)])
def test_offloaded_weights(offloaded_layers: tuple[int, ...], tmp_path: Path) -> None:
    """Weights that are on disk between forwards are not read where they are not."""
    whole = models.build("qwen2")
    places = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    places |= {f"model.layers.{index}": "disk" if index in offloaded_layers else "cpu" for index in range(2)}
    offloaded = dispatch_model(copy.deepcopy(whole), places, main_device="cpu", offload_dir=tmp_path)
    is_away = [parameter.is_meta for parameter in offloaded.model.layers.parameters()]
    assert any(is_away) and all(is_away) == (len(offloaded_layers) == 2)
    expected = hf_kvquant.key_transforms(whole, "int4-token")
    found = hf_kvquant.key_transforms(offloaded, "int4-token")
    assert expected.keys() == found.keys() == {0, 1}
    for index, transform in found.items():
        assert transform.center is not None and transform.equals(expected[index])
    for preset in ("int8", "int4-token"):
        check_tokens(whole, offloaded, preset, 2)

"""`hf-kvquant serve` under torchrun: the ranks share a model, the first answers, and all end together."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from waiting import PATIENCE

import hf_kvquant
from hf_kvquant.upstream.releases import HAS_PAGES

if not HAS_PAGES:
    pytest.skip("transformers' paged cache has another design", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = str(ROOT / "evals" / "reference_model")
PROMPT, NEW_TOKENS = "The river", 12


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The launcher, and where the first rank listens."""
    launcher = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"
    # Ranks add in another order than `generate` of the whole model, which decides between near tokens in bfloat16.
    options = "--device", "cpu", "--dtype", "float32", "--port", "0", "--cb-num-blocks", "32"
    command = "-m", "hf_kvquant", "serve", REFERENCE, *options
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    # The launcher kills ranks that still run so long after a signal; 30 seconds may be too few on a busy machine.
    environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(PATIENCE // 2)
    printed: list[str] = []
    process = subprocess.Popen(
        [sys.executable, *launcher, *command],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            printed.append(line)
            ready = re.match(r"Ready on (http://\S+)/v1", line)
            if ready:
                yield process, ready[1]
                break
        else:
            pytest.fail(f"it ended before it was ready: {''.join(printed)}")
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def test_ranks_answer_together_and_end_together(launched: tuple[subprocess.Popen[str], str]) -> None:
    """The launcher passes Ctrl-C on, and says whom it had to kill."""
    process, url = launched
    tokenizer = AutoTokenizer.from_pretrained(REFERENCE)
    model = AutoModelForCausalLM.from_pretrained(REFERENCE, dtype=torch.float32)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    with hf_kvquant.patched(model, "int4-token"):
        out = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
    expected = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    body = {"prompt": PROMPT, "max_tokens": NEW_TOKENS}
    for _ in range(2):
        answer = httpx2.post(f"{url}/v1/completions", json=body, timeout=PATIENCE)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == expected
    # Each rank draws for itself. If they differed, their caches would, and the second answer with them.
    sampled = {**body, "temperature": 1.0, "top_p": 0.95, "frequency_penalty": 0.5, "seed": 3, "logprobs": 1}
    answers = [httpx2.post(f"{url}/v1/completions", json=sampled, timeout=PATIENCE).json() for _ in range(2)]
    assert answers[0]["choices"] == answers[1]["choices"] and answers[0]["choices"][0]["text"] != expected
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=PATIENCE)
    assert "Stopping: 0 requests" in said and "forcefully exiting" not in said
    assert "hf_kvquant/" not in said, said  # no traceback of ours: torchrun has one of its own

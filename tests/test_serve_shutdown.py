"""How a server starts and ends: its words on stdout, its exit code, and what clients get that are in the middle."""

from __future__ import annotations

import concurrent.futures
import importlib.util
import json
import re
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import models
import pytest

from hf_kvquant import cli
from hf_kvquant.upstream.releases import HAS_PAGES

if not HAS_PAGES:
    pytest.skip("transformers' paged cache has another design", allow_module_level=True)

import httpx2
from programs import Program, started
from servers import held, serving
from waiting import PATIENCE, until

ROOT = Path(__file__).resolve().parents[1]
LONG = {"prompt": "a", "max_tokens": 4000}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return models.save_llama(tmp_path_factory.mktemp("model"), 4096)


# --- the end ----------------------------------------------------------------------------------------------------------


def test_those_that_are_left_at_the_end_are_told(folder: str) -> None:
    with (
        serving(folder, shutdown_timeout=0.2, num_blocks=32) as running,
        concurrent.futures.ThreadPoolExecutor(2) as pool,
    ):
        answers = [pool.submit(running.complete, **LONG, stream=stream) for stream in (True, False)]
        until(lambda: running.generation.num_running() == 2)
        running.server.stop()
        streamed, whole = (answer.result() for answer in answers)
        told = "the server shut down before the answer was complete"
        assert json.loads(streamed.text.rstrip().rpartition("data: ")[2])["error"]["message"] == told
        assert whole.status_code == 503 and whole.json()["error"]["message"] == told
        running.thread.join(PATIENCE)
        assert running.app.requests.metrics.outcomes["cancelled"]._value.get() == 2


def test_after_the_signal_the_server_says_so(folder: str) -> None:
    """It takes no requests, and tells supervisors about itself while others finish."""
    with (
        serving(folder, shutdown_timeout=PATIENCE, num_blocks=32) as running,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        with held(running):
            answer = pool.submit(running.complete, prompt="a", max_tokens=3)
            until(lambda: running.app.requests.num_unanswered() == 1)
            assert running.http.get("/health").status_code == 200
            running.server.stop()
            with httpx2.Client(base_url=running.url, timeout=PATIENCE) as newcomer:
                health, page = newcomer.get("/health"), newcomer.get("/metrics")
                assert (health.status_code, health.json()) == (503, {"status": "stopping"})
                assert page.status_code == 200 and "hf_kvquant_requests_waiting" in page.text
                refused = newcomer.post("/v1/completions", json=LONG)
                assert refused.status_code == 503
                assert refused.json()["error"]["message"] == "the server is shutting down."
        assert answer.result().json()["usage"]["completion_tokens"] == 3
        running.thread.join(PATIENCE)


def test_the_end_does_not_wait_for_a_long_step(folder: str, tmp_path: Path) -> None:
    """transformers' thread would keep the process alive."""
    script = tmp_path / "script.py"
    script.write_text(STUCK.format(folder=folder), encoding="utf-8")
    with started(program := Program(str(script))):
        url = program.says("/v1\n").rpartition("Ready on ")[2].strip()
        body = {"prompt": "a", "max_tokens": 100, "stream": True}
        with httpx2.stream("POST", f"{url}/completions", json=body, timeout=PATIENCE) as response:
            program.says("stuck\n")
            program.signal(signal.SIGTERM)
            assert '"message":"the server shut down before' in "".join(response.iter_text())
        assert program.end() == 0 and "Stopping: 1 requests have 1.6 seconds." in program.out


STUCK = """
import threading
from hf_kvquant import cli
from hf_kvquant.batching.manager import Processor

def step(self, model):
    print("stuck", flush=True)
    threading.Event().wait()

Processor._generation_step = step
sizes = ("--cb-num-blocks", "2", "--cb-max-batch-tokens", "64", "--shutdown-timeout", "2")
cli.main(["serve", {folder!r}, "--port", "0", "--host", "127.0.0.1", "--device", "cpu", *sizes])
"""


@pytest.fixture
def command(folder: str) -> Iterator[tuple[Program, str]]:
    """The command in a process of its own, and where it listens."""
    arguments = ("serve", folder, "--host", "127.0.0.1", "--port", "0", "--device", "cpu", "--dtype", "float32")
    # 32 pages of tokens, and one for the dense windows of requests.
    sizes = ("--cb-page-size", "128", "--cb-num-blocks", "33", "--cb-max-batch-tokens", "512")
    program = Program("-m", "hf_kvquant", *arguments, *sizes, "--shutdown-timeout", str(PATIENCE))
    with started(program):
        *words, ready = program.says("/v1\n").splitlines()
        assert words == [
            f"Loading {folder} …",
            f"Serving {folder} with int8 on cpu: 4,096 tokens of cache, up to 4,096 for each request.",
        ]
        yield program, ready.removeprefix("Ready on ")


STOPPING = f"Stopping: 1 requests have {PATIENCE - 5} seconds. Signal again to end now.\n"


def test_a_signal_lets_running_requests_finish(command: tuple[Program, str]) -> None:
    program, url = command
    body = {"prompt": "a", "max_tokens": 200, "stream": True, "stream_options": {"include_usage": True}}
    with httpx2.stream("POST", f"{url}/completions", json=body, timeout=PATIENCE) as response:
        pieces = response.iter_lines()
        next(pieces)
        program.signal(signal.SIGTERM)
        program.says(STOPPING)
        health = httpx2.get(url.removesuffix("/v1") + "/health")
        text = "\n".join(pieces)
    assert '"finish_reason":"length"' in text and '"completion_tokens":200' in text
    assert (health.status_code, health.json()) == (503, {"status": "stopping"})
    assert program.end() == 0 and program.out.endswith(f"/v1\n{STOPPING}")
    assert "Traceback" not in program.err
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(f"{url}/models")


def test_a_second_signal_ends_at_once(command: tuple[Program, str]) -> None:
    program, url = command
    with httpx2.stream("POST", f"{url}/completions", json={**LONG, "stream": True}, timeout=PATIENCE) as stream:
        pieces = stream.iter_lines()
        next(pieces)
        program.signal(signal.SIGINT)
        program.says(STOPPING)
        program.signal(signal.SIGTERM)
        assert program.end() == 128 + signal.SIGTERM
        with pytest.raises(httpx2.TransportError):  # the answer is cut off
            list(pieces)


def test_an_interrupted_start_leaves_no_thread(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the process would not end."""

    async def interrupted(self: Any, sockets: Any = None) -> None:
        assert self._generation.is_alive()
        seen.append(self._generation.manager)
        raise KeyboardInterrupt

    seen: list[Any] = []
    monkeypatch.setattr("hf_kvquant.serving.server.Server.serve", interrupted)
    sizes = ("--cb-num-blocks", "2", "--cb-max-batch-tokens", "64", "--port", "0", "--device", "cpu")
    assert cli.main(["serve", folder, *sizes]) == 130
    assert [manager.is_running() for manager in seen] == [False]


# --- the start --------------------------------------------------------------------------------------------------------


def test_the_page_lists_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "serve.md").read_text(encoding="utf-8")
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    options = set(re.findall(r"--[a-z-]+", capsys.readouterr().out)) - {"--help"}
    assert options <= set(re.findall(r"--[a-z-]+", page))
    default = cli.parser().parse_args(["serve", "MODEL"]).shutdown_timeout
    assert f"| `--shutdown-timeout` | seconds from a signal to the end of the server; {default} by default |" in page
    assert default < 30  # Kubernetes' terminationGracePeriodSeconds, and torchrun's patience


@pytest.mark.parametrize(
    "options, message",
    [
        (["--preset", "int9"], "`--preset` must be one of "),
        (["--preset", "int4-token:4+128"], "{folder} cannot be served like this. "),
        (["--cb-page-size", "100"], "`--cb-page-size` must be a multiple of 128 tokens, got 100."),
        (["--cb-block-size", "0"], "`--cb-page-size` must be at least 1, got 0."),
        (["--cb-num-blocks", "0"], "`--cb-num-blocks` must be at least 1, got 0."),
        (["--cb-max-memory-percent", "90"], "`--cb-max-memory-percent` must be above 0 and at most 1, got 90.0."),
        (["--cb-use-cuda-graph"], "{folder} cannot be served like this. "),
        (["--max-waiting", "0"], "`--max-waiting` must be at least 1, got 0."),
        (["--api-key", ""], "`--api-key` must have a character, got none. Leave it out for the default."),
        (["--served-model-name", ""], "`--served-model-name` must have a character, got none."),
        (["--chat-template", "absent.jinja"], "`--chat-template` must be a text file, got absent.jinja: No such file"),
        (["--shutdown-timeout", "-1"], "`--shutdown-timeout` must be at least 0 seconds, got -1.0."),
        (["--device", "abacus"], "`--device` must be a torch device such as cpu or cuda:0, got 'abacus'."),
        (["--host", "192.0.2.1"], "`--host` and `--port` must be a free address of this machine, got 192.0.2.1 and 0"),
        (["--port", "70000"], "`--port` must be from 0 to 65535, got 70000."),
        (["--cb-num-blocks", "1000000000"], "`--cb-num-blocks` and `--cb-max-batch-tokens` must fit into the memory"),
        (["--attn-implementation", "nonsense"], "`MODEL` must be a folder with a causal language model"),
    ],
)
def test_mistakes(
    folder: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    message: str,
) -> None:
    monkeypatch.setattr("hf_kvquant.serving.server.Server.serve", _serve_nothing)  # a mistake that is taken ends, too
    sizes = ("--cb-max-batch-tokens", "512", "--cb-num-blocks", "2", "--device", "cpu", "--host", "127.0.0.1")
    code = cli.main(["serve", folder, *sizes, "--port", "0", *options])
    error = capsys.readouterr().err
    assert code == 2
    assert error.startswith("hf-kvquant: error: serve: " + message.replace("{folder}", folder))
    assert error.count("\n") == 1


SMALL = ("--cb-num-blocks", "2", "--cb-max-batch-tokens", "64", "--port", "0", "--device", "cpu")


def asking_for(folder: str, tmp_path: Path, **settings: Any) -> Path:
    """A copy of a checkpoint whose generation config has these settings, too."""
    path = tmp_path / "model"
    shutil.copytree(folder, path)
    config = path / "generation_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text(encoding="utf-8")), **settings}), encoding="utf-8")
    return path


def test_settings_of_the_model_that_would_be_dropped(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_kvquant.serving.server.Server.serve", _serve_nothing)
    path = asking_for(folder, tmp_path, stop_strings=["a"], temperature=0.5)
    assert cli.main(["serve", str(path), *SMALL]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"hf-kvquant: error: serve: {path} cannot be served like this. init_continuous_batching")
    assert "got stop_strings=['a']. Leave out" in error and "(generation_config.json) sets stop_strings." in error
    assert error.count("\n") == 1


def test_a_cache_that_the_checkpoint_asks_for_is_left_out(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_kvquant.serving.server.Server.serve", _serve_nothing)
    asked = {"cache_implementation": "quantized", "cache_config": {"backend": "hf_kvquant", "preset": "int4"}}
    path = asking_for(folder, tmp_path, **asked)
    assert cli.main(["serve", str(path), *SMALL]) == 0
    names = "`cache_implementation`, `cache_config`"
    why = "is left out: --preset says what the cache is."
    assert f"hf-kvquant: serve: {names} in the generation config of {path} {why}\n" in capsys.readouterr().err


def test_a_preset_that_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    narrow = models.save(models.build("llama", head_dim=40), tmp_path / "narrow")
    assert cli.main(["serve", narrow, "--preset", "int4-g32", "--port", "0", "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"hf-kvquant: error: serve: `--preset int4-g32` does not fit {narrow}. ")
    assert "`group_size` must divide head_dim 40, got 32" in error


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("bloom", "init_continuous_batching: BloomForCausalLM does not have the attention implementation that patch"),
        (
            "mamba",
            "KVQuantCache: mamba has only layers of type ",
        ),
    ],
)
def test_a_model_that_is_not_served(name: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By pages, or by any preset. Presets are not to blame."""
    path = models.save(models.family(name) if name == "bloom" else models.build(name), tmp_path / name, eos_token="~")
    assert cli.main(["serve", path, "--port", "0", "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"hf-kvquant: error: serve: {path} cannot be served like this. {reason}")
    assert error.count("\n") == 1


def test_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "./absent"]) == 2
    assert "`MODEL` must be a folder with a transformers model or a hub id" in capsys.readouterr().err


def test_a_chat_template_that_is_none(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "template.jinja"
    for text, message in (
        ("\n{% for message in %}", f"must be a Jinja template, got {file}: line 2, Expected an expression"),
        (" ", f"{file} must hold text, got nothing but white space. Write a Jinja template into it."),
    ):
        file.write_text(text, encoding="utf-8")
        assert cli.main(["serve", folder, "--port", "0", "--device", "cpu", "--chat-template", str(file)]) == 2
        assert capsys.readouterr().err.startswith(f"hf-kvquant: error: serve: `--chat-template` {message}")


def test_a_port_that_is_taken(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It is said before the model is loaded."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert cli.main(["serve", folder, "--host", "127.0.0.1", "--port", str(port)]) == 2
    output = capsys.readouterr()
    assert output.out == "" and re.search(r"got 127.0.0.1 and \d+: .*in use. Use another, or --port 0", output.err)


def test_without_the_packages(folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    missing = ("fastapi", "prometheus_client")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in missing else find(name, *rest))
    assert cli.main(["serve", folder]) == 2
    assert capsys.readouterr().err == (
        "hf-kvquant: error: serve: fastapi, prometheus_client must be installed for serving, got no such package. "
        "Install it: pip install 'hf-kvquant[serve]'.\n"
    )


def test_calibration_that_is_saved_with_the_model_is_loaded(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the other commands load it: from the model's folder, before the patch."""
    seen: list[Any] = []
    monkeypatch.setattr("hf_kvquant.cli.serve.load_calibration", lambda model, name: seen.append((model, name)))
    monkeypatch.setattr("hf_kvquant.serving.server.Server.serve", _serve_nothing)
    assert cli.main(["serve", folder, "--cb-num-blocks", "2", "--cb-max-batch-tokens", "64", "--port", "0"]) == 0
    ((model, name),) = seen
    assert name == folder and type(model).__name__ == "LlamaForCausalLM"


async def _serve_nothing(self: Any, sockets: Any = None) -> None:
    pass

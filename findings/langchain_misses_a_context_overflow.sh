#!/usr/bin/env bash
# langchain-openai 1.7.4: a prompt that is too long should raise `OpenAIContextOverflowError`, on which agents that shorten
# a conversation rely. With openai 2.54.0 it does. With openai 3.57.0, which langchain-openai allows, the same answer of
# the server raises `OpenAIInvalidRequestError`: the code is looked for in the text of the error, which no longer has it.
# The error object still has it as `code`. Servers whose message says "prompt is too long" are not affected.
#
# Source: langchain_openai/chat_models/base.py, `_handle_openai_bad_request`; openai/_exceptions.py.
#
# Seen: Python 3.11, a server on this machine that gives OpenAI's answer to such a prompt:
#     openai 2.54.0: OpenAIContextOverflowError, code context_length_exceeded, in the text: True
#     openai 3.57.0: OpenAIInvalidRequestError, code context_length_exceeded, in the text: False
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/run.py" <<'PYTHON'
import http.server
import importlib.metadata
import json
import sys
import threading

from langchain_openai import ChatOpenAI

ERROR = {
    "message": "Your input exceeds the context window of this model. Please adjust your input and try again.",
    "type": "invalid_request_error",
    "param": "input",
    "code": "context_length_exceeded",
}


class TooLong(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        body = json.dumps({"error": ERROR}).encode()
        self.send_response(400)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), TooLong)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/v1"
try:
    ChatOpenAI(model="any", api_key="none", base_url=url, max_retries=0).invoke("a long prompt")
except Exception as error:
    has_code = ERROR["code"] in str(error)
    version = importlib.metadata.version("openai")
    print(f"openai {version}: {type(error).__name__}, code {error.code}, in the text: {has_code}")
    assert (type(error).__name__, error.code, has_code) == (sys.argv[1], ERROR["code"], sys.argv[2] == "True")
else:
    raise AssertionError("nothing was raised")
PYTHON
# try_with VERSION ERROR IN_TEXT: of openai, and what is expected.
try_with() {
    python3 -m venv "$folder/$1"
    "$folder/$1/bin/pip" install --quiet langchain-openai==1.7.4 openai=="$1"
    "$folder/$1/bin/python" "$folder/run.py" "$2" "$3"
}
try_with 2.54.0 OpenAIContextOverflowError True
try_with 3.57.0 OpenAIInvalidRequestError False

"""Open WebUI without its page, by the requests that the page sends: chats, its own tools, documents."""

from __future__ import annotations

import os
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import httpx
from rows import ANSWER, BASE, MODEL, QUESTION, case, main, refusal
from server import free_port, serving

PORT = free_port()
WEBUI = f"http://127.0.0.1:{PORT}"
ASKED = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}]}
DOCUMENT = "Call me Ishmael. " * 1000
PIXEL = "data:image/gif;base64,R0lGODlhAQABAAAAACwAAAAAAQABAAA="
SETTINGS = {
    "OPENAI_API_BASE_URL": f"{BASE}/v1", "OPENAI_API_KEY": "any", "ENABLE_OLLAMA_API": "False",
    "WEBUI_AUTH": "False", "WEBUI_SECRET_KEY": str(uuid.uuid4()), "OFFLINE_MODE": "True",
    "RAG_EMBEDDING_ENGINE": "openai", "BYPASS_EMBEDDING_AND_RETRIEVAL": "True", "RAG_SYSTEM_CONTEXT": "True",
}  # fmt: skip
"""Nothing is embedded. Whole documents go into the system message, where a later question finds their KV."""
TIMEOUT_S = 120
client = httpx.Client(base_url=WEBUI, timeout=TIMEOUT_S)


def post(path: str, **body: Any) -> dict[str, Any]:
    """Return the answer, or raise with the body of an error."""
    answer = client.post(path, json=body)
    assert answer.is_success, answer.text
    found: dict[str, Any] = answer.json()
    return found


def complete(**more: Any) -> dict[str, Any]:
    return post("/api/chat/completions", **ASKED | more)


def said(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


def saved(**more: Any) -> dict[str, Any]:
    """Ask in a new chat, as the page does. Return the saved answer, or raise with the error shown there."""
    question, answer = str(uuid.uuid4()), str(uuid.uuid4())
    message = {"id": question, "parentId": None, "role": "user", "content": QUESTION, "models": [MODEL]}
    asked = complete(
        stream=True, stream_options={"include_usage": True}, parent_id=None, session_id="page", id=answer,
        user_message=message | more,
    )  # fmt: skip
    until = time.monotonic() + TIMEOUT_S
    while True:
        chat = client.get(f"/api/v1/chats/{asked['chat_id']}").json()["chat"]
        found: dict[str, Any] = chat["history"]["messages"][answer]
        if found.get("done"):
            assert "error" not in found, found["error"]
            return found
        assert time.monotonic() < until, found
        time.sleep(0.1)


@case
def models() -> None:
    assert [model["id"] for model in client.get("/api/models").json()["data"]] == [MODEL]


@case
def chat() -> None:
    assert said(complete()) == ANSWER


@case
def stream_and_own_tool() -> None:
    """The model calls the first of its tools, which tells the time."""
    answer = saved()
    steps = [(step["type"], step["status"]) for step in answer["output"]]
    assert steps == [(kind, "completed") for kind in ("function_call", "function_call_output", "message")]
    assert answer["output"][-1]["content"][0]["text"] == ANSWER, answer
    assert answer["usage"]["completion_tokens"] > 0, answer


@case
def title_and_tags() -> None:
    for task in ("title", "tags"):
        assert said(post(f"/api/v1/tasks/{task}/completions", **ASKED)) == ANSWER


@case
def document_twice() -> None:
    file = client.post("/api/v1/files/?process_in_background=false", files={"file": ("book.txt", DOCUMENT)})
    files = [{"type": "file", "id": file.json()["id"]}]
    first = complete(files=files)
    messages = [*ASKED["messages"], first["choices"][0]["message"], {"role": "user", "content": "Who?"}]
    again = complete(messages=messages, files=files)
    assert said(first) == said(again) == ANSWER
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > len(DOCUMENT), again["usage"]


@case
def image() -> str:
    return refusal(lambda: saved(files=[{"type": "image", "url": PIXEL}]), "must be a part of type text")


@case
def too_long() -> str:
    asked = [{"role": "user", "content": "x" * 140_000}]
    return refusal(lambda: complete(messages=asked), "context_length_exceeded")


def sign_in() -> None:
    """Without WEBUI_AUTH everyone is the administrator."""
    token = post("/api/v1/auths/signin", email="", password="")["token"]
    client.headers["authorization"] = f"Bearer {token}"


with tempfile.TemporaryDirectory() as home:
    program = Path(sys.executable).with_name("open-webui")
    command = [program, "serve", "--host", "127.0.0.1", "--port", str(PORT)]
    own = {"PATH": os.environ["PATH"], "HOME": home, "DATA_DIR": home}
    with serving(command, f"{WEBUI}/ready", own | SETTINGS):
        sign_in()
        main()

"""`make demo`: runs the whole service on this machine and asks two questions about one long document.

The demo starts Ray and Deltafront with two prefill stages and one decode worker, on the CPU. It sends a
document of about 8K tokens, the beginning of Moby Dick with hidden facts, and asks for one of them. It shows
the progress of prefill and streams the answer. The second question, about the book, is appended to the
session, so the document is not prefilled again. Then the demo sends the document through OpenAI's API without
a session. The prefix cache has the document's KV, so again it is not prefilled. At the end the demo stops
everything that it started.
"""

from __future__ import annotations

# ruff: noqa: E402
import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback on Ctrl-C while modules load

import argparse
import itertools
import json
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table

from deltafront.benchmarks import DEMO_TEXT
from deltafront.service.client import DeltafrontClient, GenerateFinished, Progress, Token
from deltafront.service.config import ConfigError, load
from deltafront.service.errors import DeltafrontError
from deltafront.service.local.server_process import LocalService, NotServing
from deltafront.workers.calibration import needles as hay

HERE = Path(__file__).resolve().parent
CONFIG = HERE.parent / "config" / "demo.yaml"
CHARACTERS_PER_TOKEN = 4.15  # an estimate for this text; the server reports the true count
CHARACTERS_PER_NEEDLE_TOKEN = 2.34  # for numbers and uuids
HIDDEN = 40
BOOK_QUESTION = "\nIn which town is the Spouter-Inn? The Spouter-Inn is in"
BOOK_ANSWER = "New Bedford"


def ask(
    client: DeltafrontClient, console: Console, question: str, expected: str, **source: Any
) -> GenerateFinished:
    """Send one question, show progress and tokens, and return the last event."""
    console.print(f"\n[bold]Question:[/bold] {question.strip()} …")
    finish: GenerateFinished | None = None
    answer = ""
    columns = (TextColumn("prefill"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"))
    bar = Bar(*columns, TimeElapsedColumn(), console=console)
    task = bar.add_task("prefill", total=None)
    with bar:
        events = client.generate(append=question, max_tokens=48, stop=["."], **source)
        first = next(events)
        while isinstance(first, Progress):
            bar.update(task, completed=first.tokens_done, total=first.tokens_total)
            first = next(events)
        if bar.tasks[task].total is None:
            bar.remove_task(task)  # nothing was prefilled
    console.print("[bold]Answer:[/bold]", end="")
    for event in itertools.chain([first], events):
        match event:
            case Token(text=text):
                answer += text
                console.print(text, end="", style="green", markup=False, highlight=False)
            case GenerateFinished() as finish:
                answer += finish.text
                console.print(finish.text, style="green", markup=False, highlight=False)
    if finish is None:
        raise SystemExit("the stream ended without a finish event")
    right = answer.strip().startswith(expected)
    verdict = "[green]correct[/green]" if right else f"[red]expected {expected}[/red]"
    console.print(f"[bold]Answer is[/bold] {verdict}")
    return finish


def show_timings(console: Console, title: str, finish: GenerateFinished) -> None:
    table = Table(title=title, show_header=True)
    table.add_column("part of the time to first token")
    table.add_column("seconds", justify="right")
    table.add_column("share", justify="right")
    total = finish.timings.ttft_seconds
    for name, seconds in finish.timings.parts.items():
        if seconds >= 0.0005:
            table.add_row(name, f"{seconds:.3f}", f"{seconds / total:.1%}")
    table.add_row("[bold]time to first token[/bold]", f"[bold]{total:.3f}[/bold]", "100%")
    console.print(table)
    usage = finish.usage
    console.print(
        f"{usage.prompt_tokens} prompt tokens, {usage.cached_tokens} of them cached; "
        f"{usage.completion_tokens} answer tokens; attention density {finish.density.mean:.2f} "
        f"({finish.density.method or 'no prefill'})"
    )


def ask_by_openai(console: Console, api: str, model: str, prompt: str, first_s: float) -> None:
    """Send the whole document again by OpenAI's API, and print how much of it was cached. first_s: the first
    question's time to first token."""
    body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    request = urllib.request.Request(
        f"{api}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    began = time.monotonic()
    with urllib.request.urlopen(request, timeout=600) as answer:
        usage = json.load(answer)["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    console.print(
        f"\n[bold]The same document by OpenAI's API, without a session:[/bold] {usage['prompt_tokens']} "
        f"prompt tokens, {cached} of them cached; answered after {time.monotonic() - began:.2f} s "
        f"(first question: {first_s:.2f} s)"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default=str(CONFIG))
    parser.add_argument("--tokens", type=int, default=8000, help="approximate length of the document")
    parser.add_argument("--method", default="", help="attention method; empty: the server's default")
    arguments = parser.parse_args()
    console = Console()

    needles = hay.make_needles(HIDDEN, seed=7)
    text = DEMO_TEXT.read_text()
    needle_tokens = sum(len(needle.sentence) + 1 for needle in needles) / CHARACTERS_PER_NEEDLE_TOKEN
    room = int((arguments.tokens - needle_tokens) * CHARACTERS_PER_TOKEN)
    document = hay.hide(text[: max(room, 1000)], needles, seed=7)

    console.print("Starting Ray and Deltafront on this machine (about half a minute) …")
    console.print(
        f"{HIDDEN} facts are hidden in the beginning of Moby Dick; two questions ask for one of them and "
        "about the book.",
        soft_wrap=True,
    )
    service = LocalService(arguments.config)
    console.print(f"Its log is {service.log}", soft_wrap=True, highlight=False)
    try:
        run(console, service, arguments, document, needles)
    except (DeltafrontError, NotServing, ConfigError, OSError) as error:
        console.print(f"deltafront: {error}", style="red", soft_wrap=True, markup=False, highlight=False)
        if service.log.exists():
            console.print(f"{service.log} says more", soft_wrap=True, highlight=False)
        return 1
    except KeyboardInterrupt:
        console.print("Stopped.")
        return 1
    return 0


def run(
    console: Console,
    service: LocalService,
    arguments: argparse.Namespace,
    document: str,
    needles: list[hay.Needle],
) -> None:
    """Start the service, ask the questions, and stop it."""
    started = time.monotonic()
    with service, DeltafrontClient(service.address) as client:
        info = client.info()
        console.print(
            f"Serving [bold]{info.display_name}[/bold] on {service.address} "
            f"after {time.monotonic() - started:.0f} s: {info.prefill_stages} prefill stages, "
            f"{info.decode_workers} decode worker; metrics at http://{info.metrics_address}/metrics"
        )
        source = {"prompt": document, "method": arguments.method, "session_ttl_s": 600}
        first = ask(client, console, needles[4].question, needles[4].value, **source)
        show_timings(console, "First question: the document is prefilled", first)
        if first.session is None:
            raise SystemExit("the server kept no session")
        second = ask(client, console, BOOK_QUESTION, BOOK_ANSWER, session_id=first.session.session_id)
        show_timings(console, "Second question: the session holds the document", second)
        client.release(first.session.session_id)
        api = f"http://127.0.0.1:{load(Path(arguments.config)).door.http_port}"
        prompt = document + needles[23].question
        ask_by_openai(console, api, info.model, prompt, first.timings.ttft_seconds)
        console.print(
            f"Second question's time to first token: "
            f"{second.timings.ttft_seconds / first.timings.ttft_seconds:.1%} of the first's. Stopping …"
        )
    console.print("Stopped.")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())

"""How long a client waits when a worker dies under its request, and how much is read again; on this machine.

    python -m deltafront.benchmarks.recovery [--config deploy/config/demo.yaml] [--tries 3]

Serves the configuration twice, with a spare group and decode worker and without, and kills (SIGKILL) a
stage or a controller when a prompt is read to four fifths, and a decode worker in the middle of an answer.
The pause is the longest time between two events of the stream from the kill on. Every answer must be that of
an undisturbed run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ..service.client import DeltafrontClient, GenerateFinished, Progress, Token
from ..service.client.server_process import LocalService
from . import DEMO_TEXT

_ANSWER = 48
_KILL_AT_TOKEN = 8
READ_AGAIN = "deltafront_tokens_read_again_total"


@dataclass(frozen=True)
class Kill:
    """One request and one death. part: the words in a worker process's command line."""

    name: str
    part: str
    reading: bool


KILLS = [
    Kill("stage", "ray::StageActor", True),
    Kill("controller", "ray::ControllerActor", True),
    Kill("decode worker", "ray::DecodeActor", False),
]
_SHORT = 256
"""Tokens of a prompt that is read again for the rest of an answer."""


def processes(service: LocalService, part: str) -> list[int]:
    """Those of the service whose command line has these words; the busiest first."""
    import psutil

    found: list[tuple[float, int]] = []
    for process in psutil.Process(service.pid).children(recursive=True):
        try:
            if part in " ".join(process.cmdline()):
                found.append((sum(process.cpu_times()[:2]), process.pid))
        except psutil.Error:
            continue
    return [pid for _seconds, pid in sorted(found, reverse=True)]


def busiest(service: LocalService, part: str, before: dict[int, float]) -> int:
    """Who has worked most since `before`."""
    import psutil

    return max(before, key=lambda pid: sum(psutil.Process(pid).cpu_times()[:2]) - before[pid])


def seconds_of(service: LocalService, part: str) -> dict[int, float]:
    """CPU seconds by process."""
    import psutil

    return {pid: sum(psutil.Process(pid).cpu_times()[:2]) for pid in processes(service, part)}


@dataclass
class Outcome:
    """ids of the answer; longest gaps between events before and after the kill, in seconds."""

    ids: list[int]
    before: float = 0.0
    pause: float = 0.0
    replay: float = 0.0


def ask(client: DeltafrontClient, service: LocalService, text: str, kill: Kill | None) -> Outcome:
    """One request, with a death on the way."""
    outcome, killed = Outcome([]), False
    idle = {} if kill is None else seconds_of(service, kill.part)
    last = time.monotonic()
    stream = client.generate(text, max_tokens=_ANSWER, ignore_eos=True)
    for event in stream:
        now = time.monotonic()
        if killed:
            outcome.pause = max(outcome.pause, now - last)
        elif len(outcome.ids) != 0 or isinstance(event, Progress):
            outcome.before = max(outcome.before, now - last)
        last = now
        if isinstance(event, Token):
            outcome.ids.append(event.token_id)
        if isinstance(event, GenerateFinished):
            outcome.replay = event.timings.parts.get("replay", 0.0)
        if kill is not None and not killed and _due(event, kill, len(outcome.ids)):
            os.kill(busiest(service, kill.part, idle), signal.SIGKILL)
            killed = True
    return outcome


def _due(event: object, kill: Kill, answered: int) -> bool:
    if kill.reading:
        return isinstance(event, Progress) and event.tokens_done >= 0.8 * event.tokens_total
    return answered == _KILL_AT_TOKEN


def read_again(address: str) -> float:
    """Tokens, as the doors count them."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(READ_AGAIN))


def whole(client: DeltafrontClient, groups: int, workers: int, patience_s: float = 300.0) -> None:
    """Wait until so many are there."""
    until = time.monotonic() + patience_s
    while (info := client.info()).prefill_groups < groups or info.decode_workers < workers:
        if time.monotonic() > until:
            raise RuntimeError(f"{info.prefill_groups} groups, {info.decode_workers} decode workers")
        time.sleep(0.5)


def measure(config: Path, spare: bool, tries: int, tokens: int) -> list[dict[str, Any]]:
    """One row a kind of death."""
    content = yaml.safe_load(config.read_text())
    content["prefill"]["groups"] = content["decode"]["workers"] = 2 if spare else 1
    content["prefill"]["chunk_tokens"] = max(128, tokens // 16 // 128 * 128)
    content["door"] |= {"prefix_reuse": False, "default_method": "dense"}
    prose = DEMO_TEXT.read_text()
    rows: list[dict[str, Any]] = []
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", dir=config.parent) as file:
        yaml.safe_dump(content, file)
        file.flush()
        with LocalService(file.name, start_s=900) as service, DeltafrontClient(service.address) as client:
            count = 2 if spare else 1
            whole(client, count, count)
            metrics = client.info().metrics_address
            for kill in KILLS:
                text = prose[: 4 * (tokens if kill.reading else _SHORT)]
                undisturbed, found, again = ask(client, service, text, None), list[Outcome](), list[float]()
                for _ in range(tries):
                    before = read_again(metrics)
                    found.append(ask(client, service, text, kill))
                    again.append(read_again(metrics) - before)
                    whole(client, count, count)
                rows.append(
                    {
                        "killed": kill.name,
                        "spare": spare,
                        "tries": tries,
                        "differ": sum(one.ids != undisturbed.ids for one in found),
                        "pause_s": [round(one.pause, 2) for one in found],
                        "gap_before_s": round(statistics.median(one.before for one in found), 2),
                        "replay_s": [round(one.replay, 2) for one in found],
                        "tokens_read_again": again,
                    }
                )
                print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=Path("deploy/config/demo.yaml"))
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=8192, help="of the prompt that a stage dies in")
    parser.add_argument("--spare", choices=("yes", "no", "both"), default="both")
    parser.add_argument("--out", type=Path, help="a JSON file of the rows")
    arguments = parser.parse_args()
    chosen = {"yes": [True], "no": [False], "both": [True, False]}[arguments.spare]
    how = arguments.tries, arguments.tokens
    rows = [row for spare in chosen for row in measure(arguments.config, spare, *how)]
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()

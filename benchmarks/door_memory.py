"""Memory of the doors, and waits of others, while one caller sends too much.

    python -m deltafront.benchmarks.door_memory [--config FILE] [--message-mib 64] [--only N …] [--json FILE]

Each attack comes from a process of its own, through the service's public ports. Meanwhile another process
sends small requests, one after the other, and asks for the server's information in between. Resident memory
of every door is read ten times a second, and once more when ten seconds have passed after the attack. The
first row is nobody's attack.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import yaml

from deltafront.benchmarks import DEMO_TEXT
from deltafront.protos.v1 import deltafront_pb2 as pb
from deltafront.service.client import DeltafrontClient, DeltafrontError
from deltafront.service.local.server_process import LocalService

CALLERS = 20
_CHANNEL = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
_AFTER_S = 10.0
_DOOR = "FrontDoor"


def novel(size: int) -> str:
    text = DEMO_TEXT.read_text()
    return (text * (size // len(text) + 1))[:size]


def dense(size: int) -> str:
    """Few tokens for its length, and no place to cut: what fits the model at all takes longest."""
    line = "\n" + " " * 80
    return (line * (size // len(line) + 1))[:size]


def grpc_request(message: pb.GenerateRequest, timeout: float = 300.0) -> Callable[[str, str], str]:
    data = message.SerializeToString()

    def send(address: str, _http: str) -> str:
        with grpc.insecure_channel(address, _CHANNEL) as channel:
            call: Any = channel.unary_stream("/deltafront.v1.DeltafrontService/Generate")
            try:
                for _answer in call(data, timeout=timeout):
                    pass
            except grpc.RpcError as error:
                return f"{error.code().name}: {(error.details() or '')[:60]}"
        return "answered"

    return send


def http_request(content: bytes) -> Callable[[str, str], str]:
    def send(_grpc: str, address: str) -> str:
        url, headers = f"{address}/v1/chat/completions", {"content-type": "application/json"}
        try:
            answer = httpx.post(url, content=content, headers=headers, timeout=300)
        except httpx.HTTPError as error:
            return type(error).__name__
        return f"HTTP {answer.status_code}: {answer.text[:60]}"

    return send


def text(content: str, timeout: float = 300.0) -> Callable[[str, str], str]:
    return grpc_request(pb.GenerateRequest(prompt=pb.Prompt(text=content)), timeout)


def messages(count: int) -> Callable[[str, str], str]:
    one = pb.ChatMessages(messages=[pb.ChatMessage(role="user")]).SerializeToString()
    chat = pb.ChatMessages.FromString(one * count)
    return grpc_request(pb.GenerateRequest(prompt=pb.Prompt(messages=chat)))


def chat_of(messages: bytes) -> Callable[[str, str], str]:
    return http_request(b'{"model":"x","messages":[' + messages + b"]}")


def body(size: int) -> Callable[[str, str], str]:
    return chat_of(json.dumps({"role": "user", "content": novel(size)}).encode())


def nothing_sent(_grpc: str, _http: str) -> str:
    time.sleep(20.0)
    return "nothing sent"


MB = 10**6
ATTACKS: dict[str, Callable[[], Callable[[str, str], str]]] = {
    "none": lambda: nothing_sent,
    "prompts of 60 MB": lambda: text(novel(60 * MB)),
    "prompts of 9 MB": lambda: text(novel(9 * MB)),
    "prompts of 4 MB without a place to cut": lambda: text(dense(4 * MB)),
    "prompts of 9 MB, left after 1 s": lambda: text(novel(9 * MB), timeout=1.0),
    "times 3,000,000 messages": lambda: messages(3_000_000),
    "times 1,500,000 messages": lambda: messages(1_500_000),
    "bodies of 60 MB": lambda: body(60 * MB),
    "bodies of 9 MB": lambda: body(9 * MB),
    "bodies of 300,000 messages": lambda: chat_of(b",".join([b'{"role":"user","content":""}'] * 300_000)),
    "bodies of 3,000,000 lists": lambda: chat_of(b",".join([b"[]"] * 3_000_000)),
}
"""Name → what makes one call, which every caller makes at once, given the addresses of gRPC and HTTP."""


def attack(name: str, grpc_address: str, http_address: str, begin: Any, answers: Any) -> None:
    """All callers at once, from this process, once what they send is made."""
    send = ATTACKS[name]()
    begin.wait()
    with ThreadPoolExecutor(CALLERS) as pool:
        for answer in pool.map(lambda _: send(grpc_address, http_address), range(CALLERS)):
            answers.put(answer)


def small_requests(address: str, stop: Any, waits: Any) -> None:
    """Until it is told to stop: what was asked, and the seconds to its answer; -1 for one that failed."""
    with DeltafrontClient(address, retry_s=0) as client:

        def answer() -> None:
            for _event in client.generate("Call me Ishmael.", max_tokens=1):
                pass

        asked: dict[str, Callable[[], object]] = {"answer": answer, "info": client.info}
        while not stop.is_set():
            for name, ask in asked.items():
                started = time.monotonic()
                try:
                    ask()
                    waits.put((name, time.monotonic() - started))
                except DeltafrontError:
                    waits.put((name, -1.0))
            time.sleep(0.05)


class Memory:
    """Memory of a service's doors in MiB. `peaks`: by process, while the block runs."""

    def __init__(self, service: int) -> None:
        self._doors = [one for one in psutil.Process(service).children(recursive=True) if _is_door(one)]
        self.peaks = self.now()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def now(self) -> list[int]:
        return [door.memory_info().rss >> 20 for door in self._doors]

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.1):
            self.peaks = [max(pair) for pair in zip(self.peaks, self.now(), strict=True)]


def _is_door(process: psutil.Process) -> bool:
    try:
        return any(_DOOR in part for part in process.cmdline())
    except psutil.Error:
        return False


@dataclass
class Row:
    """Memory in MiB of each door; waits of others in seconds: the median and the longest."""

    attack: str
    seconds: float
    before: list[int]
    peaks: list[int]
    after: list[int]
    answer: tuple[float, float]
    info: tuple[float, float]
    asked: int
    failed: int
    answers: dict[str, int]


def waited(heard: Sequence[tuple[str, float]], kind: str) -> tuple[float, float]:
    """The median and the longest wait of this kind of request, in seconds."""
    waits = [wait for asked, wait in heard if asked == kind and wait >= 0]
    return round(statistics.median(waits), 2), round(max(waits), 2)


def tried(name: str, service: int, grpc_address: str, http_address: str) -> Row:
    context = multiprocessing.get_context("spawn")
    begin, stop, waits, answers = context.Event(), context.Event(), context.Queue(), context.Queue()
    others = context.Process(target=small_requests, args=(grpc_address, stop, waits))
    attacker = context.Process(target=attack, args=(name, grpc_address, http_address, begin, answers))
    others.start()
    attacker.start()
    time.sleep(_AFTER_S)  # what is sent is made, and a first answer is there
    while not waits.empty():
        waits.get()
    with Memory(service) as memory:
        before, started = memory.now(), time.monotonic()
        begin.set()
        said = [answers.get(timeout=600) for _ in range(CALLERS)]
        attacker.join()
        seconds = round(time.monotonic() - started, 1)
        stop.set()
        heard = [waits.get() for _ in range(waits.qsize())]
        others.join()
        time.sleep(_AFTER_S)
        after = memory.now()
    return Row(
        attack=name if name == "none" else f"{CALLERS} {name}",
        seconds=seconds,
        before=before,
        peaks=memory.peaks,
        after=after,
        answer=waited(heard, "answer"),
        info=waited(heard, "info"),
        asked=len(heard),
        failed=sum(wait < 0 for _, wait in heard),
        answers={answer: said.count(answer) for answer in sorted(set(said))},
    )


@contextmanager
def served(config: Path, message_mib: int | None) -> Iterator[tuple[int, str, str]]:
    """The service's process id and addresses."""
    content = yaml.safe_load(config.read_text())
    if message_mib is not None:
        content["door"]["max_message_bytes"] = message_mib << 20
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / config.name
        path.write_text(yaml.safe_dump(content))
        with LocalService(path, start_s=600) as service:
            yield service.pid, service.address, f"http://127.0.0.1:{content['door'].get('http_port', 8000)}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=Path("deploy/config/demo.yaml"))
    parser.add_argument(
        "--message-mib", type=int, help="door.max_message_bytes; default: the configuration's"
    )
    parser.add_argument("--only", type=int, nargs="*", help="numbers of attacks, from 0")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    names = list(ATTACKS)
    numbers = range(len(names)) if given.only is None else given.only
    rows = []
    with served(given.config, given.message_mib) as (service, grpc_address, http_address):
        for number in numbers:
            row = tried(names[number], service, grpc_address, http_address)
            rows.append(asdict(row))
            print(json.dumps(rows[-1]), flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps({"message_mib": given.message_mib, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()

"""The command line with a door and fake workers."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from deltafront import __version__
from deltafront.service.cli import terminal
from deltafront.service.cli.automatic import Wishes
from deltafront.service.cli.main import app
from deltafront.service.cli.serve import read_settings, with_keys
from deltafront.service.cli.size import SHAPES
from deltafront.service.client import DeltafrontClient
from deltafront.service.request.answers import ProfileInfo, Timings
from deltafront.workers.settings import ModelSpec

from ...workers.tiny_model import write_weights
from ..inprocess import HANG_S, House, settings, write_model
from ..test_requests import expected, ids

DEMO = Path(__file__).parents[3] / "deploy" / "config" / "demo.yaml"


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "document.txt"
    path.write_text("a document " * 30)
    return path


def run(*arguments: object, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(app, [str(one) for one in arguments], input=stdin)


def test_generate_streams_the_answer(house: House, document: Path) -> None:
    asked = ("generate", document, "-q", "why?", "--max-tokens", 6, "--address", house.address, "--timings")
    done = run(*asked, "--raw")
    assert done.exit_code == 0, done.output
    assert done.stdout == expected(ids(document.read_text() + "why?"), 6) + "\n"
    assert "prefill.attention" in done.stderr
    assert "Time to first token" in done.stderr


@pytest.mark.parametrize("how", [[], ["--chat"]])
def test_sends_messages_if_the_model_has_a_chat_template(
    house: House, document: Path, how: list[str]
) -> None:
    """Questions to sessions are sent as messages, too."""
    run("generate", document, "-q", "why?", *how, "--address", house.address)
    read = f"[s:be nice][u:{document.read_text()}][u:why?][a:"
    assert bytes(house.group.jobs[-1].token_ids[::4]).decode() == read
    session = run("prefill", document, "--keep", 30, *how, "--address", house.address).stdout.strip()
    done = run("generate", "-s", session, "-q", "why?", "--json", *how, "--address", house.address)
    assert json.loads(done.stdout)["usage"]["prompt_tokens"] == len(read)


def test_sends_plain_text_if_the_model_has_no_chat_template(
    make_house: Callable[..., House], model: Path, document: Path, tmp_path: Path
) -> None:
    bare = shutil.copytree(model, tmp_path / "bare")
    (bare / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer = bare / "tokenizer_config.json"
    told = json.loads(tokenizer.read_text())
    told.pop("chat_template", None)
    tokenizer.write_text(json.dumps(told))
    house = make_house(settings(bare))
    assert run("generate", document, "-q", "why?", "--address", house.address).exit_code == 0
    assert house.group.jobs[-1].token_ids[4::4] == f"{document.read_text()}why?".encode()
    refused = run("generate", document, "--chat", "--address", house.address)
    assert refused.exit_code == 1 and "generate --raw` sends text" in refused.stderr


def test_warns_of_a_shared_prefix_cache_and_names_cache_salt(house: House, document: Path) -> None:
    """Without bearer tokens all callers are one owner and share cached blocks."""
    first = run("prefill", document, "--keep", 60, "--address", house.address)
    assert "from earlier prompts" not in first.stderr
    again = run("generate", document, "-q", "why?", "--address", house.address)
    told = " ".join(again.stderr.split())
    assert "336 of them cached from earlier prompts" in told and "any caller's" in told
    assert "--cache-salt" in told
    apart = run("generate", document, "-q", "why?", "--cache-salt", "mine", "--address", house.address)
    assert "from earlier prompts" not in apart.stderr
    assert len(house.group.jobs) == 2


def test_generate_sends_recompute_blocks_and_prints_the_tokens(house: House, document: Path) -> None:
    sparse = ("--method", "streaming", "--option", "min_tokens=0", "--recompute", 1, "--timings")
    done = run("generate", document, "-q", "why?", *sparse, "--address", house.address)
    assert done.exit_code == 0, done.output
    assert house.decode.reservations[-1].options.recompute_blocks == 1
    assert "128 recomputed" in " ".join(done.stderr.split())


def test_prefills_a_session_answers_a_question_and_releases_it(house: House, document: Path) -> None:
    done = run("prefill", "-", "--raw", "--address", house.address, "--keep", 30, stdin=document.read_text())
    assert done.exit_code == 0, done.output
    session = done.stdout.strip()
    asked = run(
        "generate",
        "--raw",
        "-s",
        session,
        "-q",
        "why?",
        "--max-tokens",
        4,
        "--address",
        house.address,
        "--json",
    )
    result = json.loads(asked.stdout)
    assert result["text"] == expected(ids(document.read_text()) + ids("why?", bos=False), 4)
    assert result["usage"]["cached_tokens"] == len(document.read_text()) + 1
    assert run("sessions", "release", session, "--address", house.address).exit_code == 0
    again = run("sessions", "release", session, "--address", house.address)
    assert again.exit_code == 1
    assert "no such session" in again.stderr


def test_info_prints_a_table_or_json(house: House) -> None:
    done = run("info", "--address", house.address)
    assert done.exit_code == 0
    assert "8192" in done.stdout
    assert "dpxa" in done.stdout
    assert "{" not in done.stdout
    assert json.loads(run("info", "--json", "--address", house.address).stdout)["vocabulary"] == 258


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["generate"], "either FILE or --session"),
        (["generate", "-s", "x"], "needs a --question"),
        (["generate", "/nowhere/at/all"], "cannot be read"),
        (["info", "--address", "127.0.0.1:1"], "is a server running at 127.0.0.1:1?"),
        (["serve"], "give --config FILE or --model NAME"),
        (["serve", "--config", "/nowhere.yaml"], "/nowhere.yaml: cannot be read"),
        (["serve", "--config", "/nowhere.yaml", "--adapter", "x"], "--adapter: goes with --model"),
        (["serve", "--model", "/nowhere"], "/nowhere"),
    ],
)
def test_prints_an_error_in_one_line_with_what_to_do(arguments: list[str], says: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 1
    assert says in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert "Traceback" not in done.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["generate", "--seed", -1], "sampling.seed: "),
        (["generate", "--top-k", 99999999999], "sampling.top_k: "),
        (["generate", "--max-tokens", 9999999999], "sampling.max_tokens: "),
        (["generate", "--recompute", 9999999999], "recompute_blocks: "),
        (["generate", "--keep", "inf"], "session_ttl: "),
        (["generate", "--timeout", "inf"], "deadline: "),
        (["generate", "--timeout", 1e12], "deadline: "),
        (["prefill", "--keep", "nan"], "session_ttl: "),
        (["chat", "--keep", "inf"], "session_ttl: "),
    ],
)
def test_refuses_a_number_out_of_range_in_one_line(
    house: House, arguments: list[object], says: str, document: Path
) -> None:
    command, *options = arguments
    done = run(command, document, *options, "--address", house.address)
    assert isinstance(done.exception, SystemExit) and done.exit_code == 1, done.exception
    assert done.stderr.startswith(f"deltafront: {says}") and done.stderr.count("\n") == 1, done.stderr


def test_error_names_standard_input_that_is_not_utf_8() -> None:
    """Runs in its own process, because in a container's locale Python would accept the bytes."""
    command = [sys.executable, "-m", "deltafront.service.cli.main", "prefill", "-"]
    how = {"env": {**os.environ, "LC_ALL": "C.UTF-8"}, "timeout": HANG_S}
    done = subprocess.run(command, input=b"\xff", capture_output=True, check=False, **how)
    assert done.returncode == 1
    assert done.stderr.decode() == "deltafront: - cannot be read: it is not UTF-8 text\n"


def test_standard_input_stays_open_for_the_next_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("Müller\r\n".encode())))
    assert terminal.read_text("-") == "Müller\n"
    assert terminal.read_text("-") == "" and not sys.stdin.closed


def test_version_option_prints_the_version() -> None:
    done = run("--version")
    assert (done.exit_code, done.stdout) == (0, f"deltafront {__version__}\n")


def test_command_line_ports_override_those_of_the_configuration() -> None:
    settings = read_settings(DEMO, None, None)
    moved = with_keys(settings, "door", {"http_port": 8080, "grpc_port": 9090, "metrics_port": None})
    assert (moved.door.http_port, moved.door.grpc_port, moved.door.metrics_port) == (8080, 9090, 9464)
    same = moved.model_dump()
    same["door"] |= {"http_port": 8000, "grpc_port": 9000}
    assert same == settings.model_dump()


def test_max_model_len_sets_the_models_positions(tmp_path: Path) -> None:
    tiny = str(write_model(tmp_path / "tiny", positions=512))
    write_weights(Path(tiny))
    changed = read_settings(None, tiny, None, Wishes(max_model_len=256))
    assert changed.model.max_position_embeddings == 256
    refusals = {0: "--max-model-len 0: must be at least 1", 513: "but the model has 512 positions"}
    for given, says in refusals.items():
        done = run("serve", "--model", tiny, "--max-model-len", given)
        assert done.exit_code == 1 and says in " ".join(done.stderr.split())


@pytest.mark.parametrize(("port", "says"), [(0, "door.http_port = 0: must be"), (9000, "must differ")])
def test_error_names_an_invalid_port(port: int, says: str) -> None:
    done = run("serve", "--config", DEMO, "--port", port)
    assert done.exit_code == 1 and says in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("stages", [1, 2, 9])
def test_timings_fit_80_columns_with_full_names(stages: int) -> None:
    phases = {"projection": 14.296, "activation_wait": 5.987, "kv_gather": 0.027, "a_rather_long_phase": 0.1}
    parts = {f"prefill.{name}": seconds for name, seconds in phases.items()}
    console = Console(width=80, record=True, file=io.StringIO())
    terminal.show_timings(console, Timings(sum(parts.values()), parts, [phases] * stages, 20.0))
    shown = console.export_text()
    for name in (*phases, *parts, *(f"stage {number}" for number in range(stages))):
        assert name in shown
    assert shown.count("14.296") == stages + 1 and "…" not in shown


def test_info_prints_profile_measurements_as_names_and_values(house: House) -> None:
    figures = {"measured": "held-out {texts}", "needles": {"dpxa at 128": {"exact": 9, "kl": 0.5}}}
    info = replace(
        DeltafrontClient(house.address).info(), profile=ProfileInfo("tiny", [], json.dumps(figures))
    )
    console = Console(width=80, record=True, file=io.StringIO())
    terminal.show_info(console, info)
    shown = console.export_text()
    for words in ("held-out {texts}", "needles: dpxa at 128", "exact 9, kl 0.5"):
        assert words in shown
    assert "'" not in shown and '"' not in shown


def test_serve_names_a_misspelt_key(tmp_path: Path, model: Path) -> None:
    config = tmp_path / "bad.yaml"
    config.write_text(f"model: {{path: {model}}}\nprefill: {{stagse: 3}}\n")
    done = run("serve", "--config", config)
    assert done.exit_code == 1
    assert f"{config}: unknown key 'prefill.stagse'; did you mean 'stages'?" in done.stderr


def test_model_option_replaces_the_configurations_model() -> None:
    demo = Path(__file__).parents[3] / "deploy" / "config" / "demo.yaml"
    settings = read_settings(demo, "owner/name", None)
    assert settings.model == ModelSpec(path="owner/name", dtype=settings.model.dtype)
    assert (settings.decode.page_selection, settings.decode.delta_layers) == ("full", ())
    assert settings.door.model_name == ""
    assert read_settings(demo, None, None).model.adapter is not None


def test_model_option_ignores_the_configurations_profile() -> None:
    """The warm-up names densities that the other model's profile may lack."""
    settings = read_settings(Path(__file__).parents[3] / "deploy" / "config" / "gpu.yaml", "owner/name", None)
    settings.check_against(SHAPES["8b"], None)
    assert settings.prefill.warm_up == ("dense", "dpxa")


def test_model_option_keeps_the_configurations_quantisation(tmp_path: Path) -> None:
    file = tmp_path / "fp8.yaml"
    gpus = "prefill: {device: cuda}\ndecode: {device: cuda, page_selection: full}\n"
    file.write_text("model: {path: x, dtype: bfloat16, quantisation: fp8}\n" + gpus)
    assert read_settings(file, "owner/name", None).model.quantisation == "fp8"


def test_serve_refuses_a_directory_without_weights(tmp_path: Path) -> None:
    (write_model(tmp_path) / "model.safetensors").unlink()
    done = run("serve", "--model", tmp_path)
    assert done.exit_code == 1
    assert "it lacks *.safetensors" in " ".join(done.stderr.split())

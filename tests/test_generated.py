"""Generated files and declarations are up to date: protobuf code, the package list, tables, documents."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from deltafront.benchmarks import configuration, tables
from deltafront.kernels.methods import PRESETS

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("kernels", "protos", "service", "workers")


def test_committed_protobuf_code_is_up_to_date(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="grpcio-tools is a development dependency")
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", "deltafront/protos=protos"]
    command += [f"--{kind}_out={tmp_path}" for kind in ("python", "grpc_python", "pyi")]
    subprocess.run([*command, "protos/v1/deltafront.proto"], cwd=ROOT, check=True)
    made = sorted((tmp_path / "deltafront" / "protos" / "v1").iterdir())
    kept = sorted(p.name for p in (ROOT / "protos" / "v1").glob("deltafront_pb2*"))
    assert [p.name for p in made] == kept
    for path in made:
        assert path.read_text() == (ROOT / "protos" / "v1" / path.name).read_text(), (
            f"{path.name}: run make proto"
        )


def test_every_folder_of_modules_is_an_installed_package() -> None:
    folders = {path.parent for name in PRODUCT for path in (ROOT / name).rglob("*.py")}
    assert all((folder / "__init__.py").exists() for folder in folders)
    wanted = {".".join(("deltafront", *folder.relative_to(ROOT).parts)) for folder in folders}
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert set(setuptools["packages"]) == {"deltafront", *wanted}


@pytest.mark.parametrize("path", tables.DOCUMENTS, ids=lambda path: path.name)
def test_committed_tables_match_the_results(path: Path) -> None:
    text = path.read_text()
    assert "<!-- table: " in text
    assert tables.render(text) == text, "run python -m deltafront.benchmarks.tables"


@pytest.mark.parametrize("section", configuration.SECTIONS)
def test_documentation_explains_every_configuration_key(section: str) -> None:
    rows = list(configuration.rows(section))
    named = [row[0].strip("`") for row in rows]
    assert named == [field.name for field in dataclasses.fields(configuration.SECTIONS[section])]
    assert all(len(words.split()) >= 2 and words.endswith(".") for *_, words, _level in rows)
    assert not {*configuration.BASIC[section].split()} - {*named}


def test_readmes_chart_is_drawn_from_the_results() -> None:
    assert tables.CHART.read_text() == tables.chart(), "run python -m deltafront.benchmarks.tables"


def test_readme_has_at_most_700_words_two_tables_and_two_pictures() -> None:
    text = re.sub(r"<!--.*?-->", "", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert len([word for word in text.split() if re.search(r"\w", word)]) <= 700
    assert len(re.findall(r"^\|---", text, re.MULTILINE)) == 2
    assert text.count("![") == 2


def test_methods_in_the_architectures_table_exist() -> None:
    """For each `Class.method` in the table, both are defined in one file."""
    guide = (ROOT / "docs" / "architecture.md").read_text()
    (table,) = re.findall(r"## Find it in ten minutes\n(.*?)\n## ", guide, re.DOTALL)
    sources = [path.read_text() for room in ("service", "workers") for path in (ROOT / room).rglob("*.py")]
    named = re.findall(r"`([A-Z]\w+)\.(\w+)`", table)
    missing = [
        f"{owner}.{name}"
        for owner, name in named
        if not any(re.search(rf"\bclass {owner}\b.*\bdef {name}\(", text, re.DOTALL) for text in sources)
    ]
    assert named and not missing


def test_methods_tables_are_complete() -> None:
    text = (ROOT / "docs" / "methods.md").read_text()
    tables = [table.splitlines() for table in text.split("\n\n") if "\n|---|" in table]
    for table in tables:
        rows = [line.strip("|").split("|") for line in table if line.startswith("| ")]
        assert {len(row) for row in rows} == {len(rows[0])} and len(rows) > 1
        assert all(cell.strip(" –") for row in rows for cell in row)
    assert sum(len(table) for table in tables) > 80
    own = [name for name, preset in PRESETS.items() if preset.module == "deltafront.kernels.options"]
    assert own and not [name for name in own if f"`{name}`" not in text]


def test_commands_in_documents_exist() -> None:
    """Checks `python -m deltafront.…` in every document and in the benchmarks' help."""
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.py")]
    named = {
        name for path in documents for name in re.findall(r"python -m deltafront\.([\w.]+)", path.read_text())
    }
    paths = {name: ROOT / name.replace(".", "/") for name in named}
    missing = [
        name
        for name, path in paths.items()
        if not path.with_suffix(".py").exists() and not (path / "__main__.py").exists()
    ]
    assert named and not missing, missing


def anchors(document: Path) -> set[str]:
    """Return GitHub's anchors of a document's headings."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    plain = (re.sub(r"\[(.*?)\]\([^)]*\)", r"\1", heading).lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def test_links_between_documents_lead_to_a_file_and_a_heading() -> None:
    broken = []
    for document in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        text = document.read_text()
        links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"^\[[^\]]+\]: (\S+)$", text, re.MULTILINE)
        for link in links:
            if "://" in link:
                continue
            name, _, anchor = link.partition("#")
            target = document.parent / name if name else document
            if not target.exists() or (anchor and anchor not in anchors(target)):
                broken.append(f"{document.relative_to(ROOT)}: {link}")
    assert not broken


def test_imports_of_readmes_python_exist() -> None:
    lines = re.findall(r"^from deltafront\S* import .+$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert lines
    for line in lines:
        exec(line, {})


def declared() -> list[tuple[str, str]]:
    """Return kind and name of every declared metric."""
    files = ("metrics.py", "fleet/worker_gauges.py")
    source = "".join((ROOT / "service" / file).read_text() for file in files)
    found = re.findall(r'\b_?(histogram|counter|gauge)\(\s*"(\w+)"', source)
    return [
        *found,
        *(("gauge", name) for name in re.findall(r'^    "\w+": \("(\w+)", ', source, re.MULTILINE)),
    ]


def declared_series() -> set[str]:
    """Return the names of all series of the declared metrics."""
    endings = {"histogram": ("_bucket", "_sum", "_count")}
    return {f"deltafront_{name}{end}" for kind, name in declared() for end in endings.get(kind, ("",))}

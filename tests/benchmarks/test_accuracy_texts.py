"""Running text out of the formats that the measured texts come in."""

from __future__ import annotations

from deltafront.benchmarks.accuracy.texts import SOURCES, of_html, of_info, of_wesnoth, tidy


def test_strips_navigation_scripts_and_spaces_from_html() -> None:
    page = """<html><head><title>no</title></head><body><div class="navheader">no <div>no</div></div>
    <h1>Title</h1><p>One  two
    &amp; three<script>no()</script></p><pre>a  b
    c</pre><nav>no</nav><table><tr><td>x</td><td>y</td></tr></table></body></html>"""
    assert tidy(of_html(page)) == "Title\n\nOne two & three\n\na  b\n    c\n\n x y\n"


def test_strips_menus_and_indices_from_an_info_manual() -> None:
    manual = (
        "preamble\x1f\nFile: a.info, Node: Top, Next: B\n\nText (*note Other part::).\n\n* Menu:\n\n* B::\n"
        "\x1f\nFile: a.info, Node: Concept Index\n\nno\n\x1f\nTag table\nno\n"
    )
    assert "".join(of_info(manual)) == "\nText (see Other part).\n\n\n"


def test_extracts_each_line_of_a_wesnoth_scenario_once() -> None:
    scenario = (
        '[message]\nspeaker=Delfador\nmessage= _ "Who goes there, ""friend""?"\n[/message]\n'
        '[part]\nstory= _ "A <b>long</b>\n time ago."\n[/part]\nname= _ "short"\n'
        '[message]\nspeaker=narrator\nmessage= _ "Nobody answered."\n[/message]\n'
    )
    seen = set[str]()
    said = list(of_wesnoth(scenario, seen))
    assert said == ['Delfador: Who goes there, "friend"?\n\n', "A long time ago.\n\n", "Nobody answered.\n\n"]
    assert list(of_wesnoth(scenario, seen)) == []


def test_every_text_has_a_digest_of_its_own_and_pinned_packages() -> None:
    assert len({source.sha256 for source in SOURCES}) == len(SOURCES)
    assert all(len(source.sha256) == 64 for source in SOURCES)
    assert all(package.count("=") == 1 for source in SOURCES for package in source.packages)

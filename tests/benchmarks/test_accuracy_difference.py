"""Differences of two rows on the documents that both have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deltafront.benchmarks.accuracy.difference import differences, main, pairs

ONE = [
    {
        "document": "a",
        "kl": 0.2,
        "key_tokens": 3,
        "key_loss": 1.0,
        "questions": 4,
        "exact": 2,
        "exact_dense": 4,
        "logp_difference": -1.0,
    },
    {"document": "b", "kl": 0.4, "questions": 2, "exact": 1, "exact_dense": 1, "logp_difference": 0.5},
    {"document": "alone", "kl": 9.0},
]
OTHER = [
    {"document": "b", "kl": 0.1, "questions": 2, "exact": 1, "exact_dense": 1, "logp_difference": 0.5},
    {
        "document": "a",
        "kl": 0.1,
        "key_tokens": 3,
        "key_loss": 0.4,
        "questions": 4,
        "exact": 3,
        "exact_dense": 4,
        "logp_difference": 0.5,
    },
]


def test_each_figure_is_paired_by_document() -> None:
    found = {name: (value, drawn) for name, value, drawn in differences(pairs(ONE, OTHER))}
    assert found["KL, less"][0] == pytest.approx((0.1 + 0.3) / 2)
    assert found["KL, over"][0] == pytest.approx(0.6 / 0.2)
    assert found["KL, over"][1] == pytest.approx((2.0, 4.0))  # a alone, b alone
    assert found["loss at key tokens, less"] == (pytest.approx(0.6), None)  # one document has key tokens
    assert found["exact answers of dense's, less"][0] == pytest.approx(-1 / 5)
    assert found["logp, less"][0] == pytest.approx(-1.5 * 4 / 6)


def test_rows_without_questions_have_no_answers_to_compare() -> None:
    bare = [{"document": one["document"], "kl": one["kl"]} for one in ONE]
    assert [name for name, *_ in differences(pairs(bare, bare))] == ["KL, less", "KL, over"]


def test_documents_that_were_asked_other_questions_are_not_compared() -> None:
    others = [{**one, "questions": 7} for one in OTHER]
    with pytest.raises(ValueError, match="not the same"):
        pairs(ONE, others)
    with pytest.raises(ValueError, match="no document in common"):
        pairs(ONE, [{"document": "another"}])


def test_a_row_is_named_by_file_case_and_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"case": "x:share=0.05", "task": "copies", "tokens": 100, "by_document": ONE},
        {"case": "x:share=0.05", "task": "needles", "tokens": 100, "by_document": OTHER},
        {"case": "x:share=0.05", "task": "needles", "tokens": 200, "by_document": ONE},
        {"case": "bare", "tokens": 100},
    ]
    (path := tmp_path / "a.json").write_text(json.dumps({"rows": rows}))
    main([f"{path}:x:share=0.05", f"{path}:x:share=0.05", "--task", "copies"])
    assert capsys.readouterr().out.startswith("3 documents\nKL, less: 0.00000 (0.00000 to 0.00000)\n")
    main([f"{path}:x:share=0.05", f"{path}:x:share=0.05", "--task", "needles", "--tokens", "200", "100"])
    assert capsys.readouterr().out.startswith("2 documents\nKL, less: 0.20000 (0.10000 to 0.30000)\n")
    with pytest.raises(SystemExit, match="no figures by document"):
        main([f"{path}:bare", f"{path}:x:share=0.05"])
    with pytest.raises(SystemExit):
        main([f"{path}:x:share=0.05", f"{path}:x:share=0.05", "--tokens", "1", "2", "3"])
    assert "--tokens: one number, or one for each row" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="3 rows, not one"):
        main([f"{path}:x:share=0.05", f"{path}:x:share=0.05"])
    with pytest.raises(SystemExit, match="0 rows, not one"):
        main([f"{path}:y", f"{path}:x:share=0.05"])

"""``xentflow derive``: what it prints and writes for combinations that make sense, and how it refuses the rest."""

import json

import pytest

from xentflow.cli import main

SENSIBLE = {
    "the issue's": "--model quadratic --axis sequence --potential logsumexp --splitting strang --heads 4",
    "certified": "--model linear --axis classes --step certified",
    "searched": "--model bilinear --axis sequence --potential sparsemax --constraint sphere --step line-search",
    "causal": "--model quadratic --axis classes --roles own --causal --oracle shift --heads 2 --rank 3 --step learned",
    "causal given": "--model quadratic --axis sequence --roles own --causal",
    "printed": "--model quadratic --axis sequence --printed_form",
    "whitened": "--model linear --axis sequence --potential softplus --splitting rk4 --constraint whitened",
    "dual": "--model quadratic --axis classes --heads 2 --splitting strang --constraint dual",
    "exact": "--model quadratic --axis classes --exact --oracle band --splitting lie-trotter",
    "still": "--model linear --axis classes --classes 1",
}


def derive(line, folder):
    return main(["derive", *line.split(), "--output", str(folder)])


@pytest.mark.parametrize("name", SENSIBLE)
def test_it_prints_a_derivation_and_its_certificate_and_writes_both(name, tmp_path, capsys):
    line = SENSIBLE[name] + " --tokens 9 --features 4"
    assert derive(line, tmp_path) == 0
    printed = capsys.readouterr().out
    record = json.loads((tmp_path / "result.json").read_text())
    assert printed.startswith(record["derivation"])
    for asked in line.replace("--", "").replace("_", " ").split():
        assert asked in str(record["config"]).replace("_", " ")
    c = record["certificate"]
    assert (c["gradient_error"] <= 1e-14) == (c["kind"] != "no common energy")
    assert f"declared {c['declared_order']}" in printed
    assert (c["measured_order"] is None) == ("nothing moves" in printed) == (name == "still")
    if c["measured_order"] is not None and name != "searched":  # the weights of sparsemax have kinks
        assert c["measured_order"] == pytest.approx(c["declared_order"], abs=0.1)
    assert len(c["energy"]) == 11
    for words in ("Certificate", "curvature bound L", "rises of ℓ", "parameters", "FLOPs", "least bytes", "Written:"):
        assert words in printed
    assert ("cannot raise ℓ" in printed) == c["certified"] == (name in ("certified", "still"))
    assert record["labels_used"] == "nowhere: targets given are random"


def test_latex_alone_can_be_piped_into_a_paper(tmp_path, capsys):
    assert derive("--model quadratic --axis sequence --form latex", tmp_path) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("% objective\n\\begin{align*}")
    assert printed.endswith("\\end{align*}\n")
    assert json.loads((tmp_path / "result.json").read_text())["certificate"]["kind"] == "gradient flow"


def test_the_same_seed_gives_the_same_result_and_another_another(tmp_path):
    results = []
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        derive(f"--model linear --axis classes --seed {seed}", tmp_path / name)
        results.append(json.loads((tmp_path / name / "result.json").read_text())["certificate"])
    assert results[0] == results[1] != results[2]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--model quadratic --axis sequence --causal", 'causal: expected roles="own", got "both"'),
        ("--model linear --axis sequence --causal", "causal: expected a Quadratic model"),
        ("--model linear --axis sequence --oracle shift", "oracle: expected one for Linear logits, got Shift"),
        ("--model linear --axis sequence --splitting heun --exact", "exact: expected a splitting, got heun"),
        ("--model quadratic --axis classes --step certified", "step: expected a gradient flow of an affine model"),
        ("--model quadratic --axis classes --roles own --step line-search", "got a game: nothing need fall"),
        ("--model quadratic --axis classes --step -1", "step: expected a positive finite number"),
        ("--model linear --axis classes --roles own", "roles and rank: expected with the quadratic model"),
        ("--model linear --axis classes --heads 0", "heads: expected a positive whole number, got 0"),
        ("--model linear --axis classes --temperature -2", "temperature: expected a positive finite number"),
        ("--model linear --axis classes --potential softplus --temperature 2", "temperature: expected with logsumexp"),
        ("--model linear --axis classes --constraint whitened --tokens 4", "at least as many tokens as features"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_printed(line, message, tmp_path, capsys):
    assert derive(line, tmp_path / "out") == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("line", ["--model quadratic", "--model cubic --axis classes", "--model linear --axis rows"])
def test_what_is_no_choice_is_refused_by_the_parser(line, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        derive(line, tmp_path)
    assert stop.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_a_step_that_blows_up_is_said_and_nothing_is_written(tmp_path, capsys):
    assert derive("--model quadratic --axis classes --step 1e200", tmp_path) == 1
    assert "take a smaller step" in capsys.readouterr().err
    assert not (tmp_path / "result.json").exists()

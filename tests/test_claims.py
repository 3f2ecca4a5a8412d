import json

import pytest
import torch

from xentflow import XentflowError
from xentflow.claims import Claim, Comparison, Verdict, judge, on_both_axes, try_claims
from xentflow.claims.package import PACKAGE_CLAIMS
from xentflow.claims.paper import PAPER_CLAIMS
from xentflow.cli import main


def _named(claims, name):
    (claim,) = [claim for claim in claims if claim.name.startswith(name)]
    return claim


def _findings(claim, instances=50):
    return list(try_claims([claim], instances, seed=1))


@pytest.mark.parametrize("claim", PAPER_CLAIMS + PACKAGE_CLAIMS, ids=lambda claim: claim.name)
def test_every_verdict_is_the_expected_one_for_another_seed(claim):
    for finding in _findings(claim, instances=8):
        assert finding.as_expected, finding


def test_the_quadratic_corollary_misses_the_gradient_by_about_37_percent():
    for finding in _findings(_named(PAPER_CLAIMS, "quadratic N"), instances=200):
        assert finding.verdict is Verdict.REFUTED
        assert 0.33 < finding.median_error < 0.41
        assert finding.right_error < 1e-13


def test_the_dissipation_is_mended_by_the_constant_two():
    for finding in _findings(_named(PAPER_CLAIMS, "dℓ/dt")):
        assert finding.verdict is Verdict.CORRECTED
        assert finding.constant == pytest.approx(2, abs=1e-12)


def _claim_with(claimed, actual, right=None, expected=Verdict.HOLDS):
    return Claim("c", "s", lambda draw, axis: Comparison(claimed, actual, right), on_both_axes(expected))


ONE, TWO, MIXED = torch.ones(3), 2 * torch.ones(3), torch.tensor([1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    ("claimed", "actual", "verdict"),
    [
        (ONE, ONE, Verdict.HOLDS),
        (ONE, TWO, Verdict.CORRECTED),
        (ONE, -ONE, Verdict.CORRECTED),
        (ONE, MIXED, Verdict.REFUTED),
        (torch.full((3,), torch.nan), ONE, Verdict.REFUTED),
        (torch.zeros(3), torch.zeros(3), Verdict.HOLDS),
        (ONE, torch.zeros(3), Verdict.REFUTED),
    ],
)
def test_verdicts_are_read_off_the_errors(claimed, actual, verdict):
    claim = _claim_with(claimed, actual)
    assert judge(claim, "classes", [claim.trial(None, "classes")] * 2).verdict is verdict


def test_a_constant_must_mend_every_instance():
    claim = _claim_with(ONE, TWO)
    finding = judge(claim, "classes", [Comparison(ONE, TWO), Comparison(ONE, 3 * ONE)])
    assert finding.verdict is Verdict.REFUTED


def test_a_wrong_right_form_is_not_as_expected():
    claim = _claim_with(ONE, MIXED, right=MIXED + 1e-6, expected=Verdict.REFUTED)
    finding = judge(claim, "classes", [claim.trial(None, "classes")] * 2)
    assert finding.verdict is Verdict.REFUTED
    assert not finding.as_expected


def test_too_few_instances_are_refused():
    with pytest.raises(XentflowError, match="instances: expected at least 2, got 1"):
        list(try_claims(PAPER_CLAIMS[:1], 1, seed=0))


class TestCommand:
    def test_it_prints_writes_and_succeeds(self, tmp_path, capsys):
        assert main(["verify", "--instances", "3", "--output", str(tmp_path)]) == 0
        printed = " ".join(capsys.readouterr().out.split())
        assert "every verdict is the expected one" in printed
        assert "Corollary 2" in printed
        record = json.loads((tmp_path / "result.json").read_text())
        assert record["all_as_expected"] is True
        assert record["config"] == {"instances": 3, "seed": 0}
        assert record["labels_used"] == "nowhere"
        assert len(record["findings"]) == sum(len(claim.expected) for claim in PAPER_CLAIMS + PACKAGE_CLAIMS)

    def test_the_same_seed_gives_the_same_result(self, tmp_path):
        for name in ("a", "b"):
            main(["verify", "--instances", "2", "--seed", "5", "--output", str(tmp_path / name)])
        assert (tmp_path / "a/result.json").read_text() == (tmp_path / "b/result.json").read_text()

    def test_an_unexpected_verdict_fails(self, tmp_path, monkeypatch, capsys):
        wrong = _claim_with(ONE, MIXED)
        monkeypatch.setattr("xentflow.claims.verify.PACKAGE_CLAIMS", (wrong,))
        assert main(["verify", "--instances", "2", "--output", str(tmp_path)]) == 1
        assert "UNEXPECTED" in capsys.readouterr().out

    def test_wrong_use_exits_with_two_and_says_why(self, tmp_path, capsys):
        assert main(["verify", "--instances", "1", "--output", str(tmp_path)]) == 2
        assert "instances: expected at least 2, got 1" in capsys.readouterr().err
        with pytest.raises(SystemExit) as stop:
            main(["verify", "--instances", "many"])
        assert stop.value.code == 2

    def test_an_output_that_cannot_be_written_is_refused_before_any_work(self, tmp_path, capsys):
        (tmp_path / "file").write_text("in the way")
        assert main(["verify", "--output", str(tmp_path / "file")]) == 1
        captured = capsys.readouterr()
        assert "expected a folder that can be written" in captured.err
        assert captured.out == ""

    def test_settings_come_from_a_file(self, tmp_path):
        (tmp_path / "verify.yaml").write_text("instances: 2\nseed: 9\n")
        assert main(["verify", "--config", str(tmp_path / "verify.yaml"), "--output", str(tmp_path)]) == 0
        assert json.loads((tmp_path / "result.json").read_text())["config"] == {"instances": 2, "seed": 9}

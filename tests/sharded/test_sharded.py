"""Logits cut among processes give what whole ones give: values, gradients, and digits of confident rows."""

import pytest
import torch
from sharded_checks import everything

import xentflow as xf
from processes import spawn
from xentflow import sharded


@pytest.mark.parametrize("size", [2, 4])
def test_cut_logits_give_what_whole_ones_give(size, tmp_path):
    found = spawn(everything, size, tmp_path)
    differences = {
        f"{check}, process {rank}: {name}": result
        for rank, of_rank in enumerate(found)
        for check in ("losses", "attention", "confident", "large")
        for name, result in of_rank[check].items()
    }
    assert len(differences) > 250 * size
    assert {name: pair for name, pair in differences.items() if not pair[0] <= pair[1]} == {}
    for of_rank in found:
        assert {expected: said for expected, said in of_rank["refusals"].items() if expected not in said} == {}


def test_without_a_group_the_reason_is_said():
    with pytest.raises(xf.XentflowError, match="group: expected a process group, got none"):
        sharded.self_attention(torch.ones(2, 3), axis="classes")

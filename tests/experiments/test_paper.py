import pytest

from xentflow.experiments import paper


def test_the_twelve_cells():
    assert paper.TABLE_1["clean"] == (0.8424, 0.9788, 0.9963, 0.9992, 0.9998, 0.9999)
    assert paper.TABLE_1["noisy"] == (0.8139, 0.9835, 0.9978, 0.9999, 1.0, 1.0)
    assert paper.rmse(paper.TABLE_1) == 0


def test_distances_by_hand():
    ours = {"clean": list(paper.TABLE_1["clean"]), "noisy": [cell - 0.01 for cell in paper.TABLE_1["noisy"]]}
    ours["clean"][2] += 0.02
    assert paper.rmse(ours) == pytest.approx(((0.02**2 + 6 * 0.01**2) / 12) ** 0.5)
    assert paper.largest_difference(ours) == pytest.approx(0.02)
    assert paper.differences(ours)["noisy"] == pytest.approx([-0.01] * 6)


def test_fewer_passes_are_compared_as_far_as_they_go():
    ours = {start: row[:3] for start, row in paper.TABLE_1.items()}
    assert [len(row) for row in paper.differences(ours).values()] == [3, 3]
    assert paper.rmse(ours) == 0

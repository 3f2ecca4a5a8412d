"""Tasks: batches are functions of the plan, labels are right, and nothing held out is ever trained on."""

import pytest
import torch
from torch.testing import assert_close

from xentflow.data import LabelledImages
from xentflow.errors import XentflowError
from xentflow.training.tasks import IGNORED, Images, Recall, Text


def pictures(n=60, side=6, classes=3, seed=0):
    """Classes differ in brightness."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (n,), generator=generator)
    images = 80 * labels[:, None, None] + torch.randint(80, (n, side, side), generator=generator)
    return LabelledImages(images.to(torch.uint8), labels, tuple("abc"[:classes]))


def rows(plan, step=0):
    return {name: value[step] for name, value in plan.items()}


class TestImages:
    def test_patches_are_the_image_in_reading_order_and_standardised(self):
        task = Images(pictures(), pictures(seed=1), patch=3, shift=0)
        x, y = next(task.held_out("test"))
        image = pictures(seed=1).images[0].double()
        corner = image[0:3, 3:6].flatten() / 255
        assert_close(x[0, 1].double(), (corner - 0.2860) / 0.3530, rtol=1e-5, atol=1e-5)
        assert_close(y, pictures(seed=1).labels)

    def test_a_training_image_is_moved_and_mirrored_as_planned(self):
        task = Images(pictures(), pictures(seed=1), patch=6, shift=2)
        plan = rows(task.plan(torch.Generator().manual_seed(0), 1, 8))
        plan["moves"][:] = torch.tensor([1, -2])
        plan["mirrored"][:] = torch.tensor([0, 1] * 4)
        x, y = task.batch(plan)
        pixels = (x.view(8, 6, 6) * 0.3530 + 0.2860) * 255
        for number, index in enumerate(plan["index"]):
            image = task._images[index].float()
            moved = torch.zeros(6, 6)
            moved[1:, :4] = (image.flip(-1) if number % 2 else image)[:-1, 2:]
            assert_close(pixels[number], moved, rtol=0, atol=1e-2)
            assert y[number] == task._labels[index]

    def test_what_is_held_out_is_a_tenth_and_never_planned(self):
        data = pictures(50)
        task = Images(data, pictures(seed=1), patch=6)
        assert len(task._labels) == 45
        kept = {image.numpy().tobytes() for image in task._images}
        held = {image.numpy().tobytes() for image in task._held["validation"][0]}
        assert len(kept) == 45
        assert len(held) == 5
        assert not kept & held
        planned = task.plan(torch.Generator(), task.steps_per_pass(9), 9)["index"]
        assert set(planned.flatten().tolist()) == set(range(45))

    def test_shuffled_labels_are_the_same_labels_on_other_images_in_training_only(self):
        plain, shuffled = (Images(pictures(), pictures(seed=1), 6, shuffled=which) for which in (False, True))
        assert not torch.equal(plain._labels, shuffled._labels)
        assert torch.equal(plain._held["test"][1], shuffled._held["test"][1])
        assert torch.equal(plain._held["validation"][1], shuffled._held["validation"][1])
        assert "shuffled" in shuffled.labels_used

    @pytest.mark.parametrize(("settings", "message"), [({"patch": 4}, "patch"), ({"patch": 6, "shift": 6}, "shift")])
    def test_bad_settings_are_refused(self, settings, message):
        with pytest.raises(XentflowError, match=message):
            Images(pictures(), pictures(), **settings)

    def test_a_batch_larger_than_the_data_is_refused(self):
        with pytest.raises(XentflowError, match="batch"):
            Images(pictures(), pictures(), 6).steps_per_pass(55)


class TestRecall:
    def test_each_query_asks_for_the_value_that_its_key_was_shown_with(self):
        task = Recall(pairs=3, keys=5, values=4)
        x, y = task.batch(rows(task.plan(torch.Generator().manual_seed(0), 1, 50)))
        assert x.shape == y.shape == (50, 9)
        assert (y[:, :6] == IGNORED).all()
        for tokens, answers in zip(x.tolist(), y.tolist(), strict=True):
            shown = dict(zip(tokens[0:6:2], (value - 5 for value in tokens[1:6:2]), strict=True))
            assert len(shown) == 3
            assert sorted(tokens[6:]) == sorted(shown)
            assert answers[6:] == [shown[key] for key in tokens[6:]]

    def test_what_is_held_out_is_the_same_each_time_and_differs_between_parts(self):
        task = Recall(pairs=3)
        first, again, other = (next(task.held_out(part))[0] for part in ("test", "test", "validation"))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)

    def test_more_pairs_than_keys_are_refused(self):
        with pytest.raises(XentflowError, match="recall"):
            Recall(pairs=9, keys=8)


class TestText:
    TEXT = "".join("abcd"[n * n % 4] for n in range(1000)) + "wxyz" * 100

    def test_labels_are_the_next_characters_of_the_first_nine_tenths(self):
        task = Text(self.TEXT, tokens=7)
        x, y = task.batch(rows(task.plan(torch.Generator().manual_seed(0), 1, 20)))
        assert torch.equal(x[:, 1:], y[:, :-1])
        characters = sorted(set(self.TEXT))
        for window, last in zip(x.tolist(), y[:, -1].tolist(), strict=True):
            string = "".join(characters[number] for number in [*window, last])
            assert string in self.TEXT[: len(self.TEXT) * 9 // 10]

    def test_each_held_out_character_is_asked_for_once(self):
        task = Text(self.TEXT, tokens=7)
        asked = torch.cat([y.flatten() for _, y in task.held_out("test")])
        text = self.TEXT[len(self.TEXT) * 19 // 20 :]
        characters = sorted(set(self.TEXT))
        assert "".join(characters[number] for number in asked) == text[1 : 1 + len(asked)]
        assert len(text) - len(asked) <= 7

    def test_a_text_too_short_is_refused(self):
        with pytest.raises(XentflowError, match="text"):
            Text("short", tokens=7)

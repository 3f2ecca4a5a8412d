"""Figures: the paper's Figure 1 for our own sample, and the energies. matplotlib is imported only when one is drawn."""

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xentflow.report.reading import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
"""Okabe and Ito's, which colour-blind readers can tell apart."""

DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P")


# In inches. Placed by hand: a layout that is solved for moves when the same figure is drawn again.
_CELL, _IMAGE, _HEIGHT = 1.55, 1.4, 4.45
_FIRST, _SECOND, _BAR = 2.75, 0.55, 0.38
"""Where the first line of images, the second, and the colour bars stand."""


@dataclass(frozen=True)
class Theme:
    """Ink and paper."""

    ink: str
    paper: str
    faint: str


LIGHT = Theme("#1b1b1b", "#ffffff", "#c8c8c8")
DARK = Theme("#e6e6e6", "#16181c", "#4a4d52")


@dataclass(frozen=True)
class Drawing:
    """One figure in every form it is needed in, and what it shows, in words."""

    png: bytes
    svg: bytes
    dark_svg: bytes
    text: str


def figure1(result: Result) -> Drawing:
    """The sample on its way: images on the first line, their differences to Z⁽⁰⁾ on the second."""
    sample = result.record["sample"]
    steps = [f"{word} {p:.2f}" for word, p in zip(sample["predicted"], sample["probability"], strict=True)]
    names = ["the original", "the noisy image", *(f"pass {n}" for n in range(1, len(steps) - 1))]
    text = f"An image of {sample['label']} on its way through the block, with predicted class and probability: "
    return _drawn(
        lambda theme: _figure1(result, theme), text + "; ".join(map(": ".join, zip(names, steps, strict=True)))
    )


def energy(result: Result) -> Drawing:
    """ℓ per pass, to the targets given and to the true labels, for the paper's row and every control."""
    ends = []
    for name, control in result.record["controls"].items():
        given, true = (result.cells(name, "noisy", quantity)[0] for quantity in ("energy", "energy_to_labels"))
        ends.append(f"{control['title']}: {given[0]:.3f} to {given[-1]:.3f}, {true[0]:.3f} to {true[-1]:.3f}")
    text = (
        "Energy per image from the noisy images, before the first pass and after the last, on a log scale, to the "
        "targets given and to the true labels. "
    ) + "; ".join(ends)
    return _drawn(lambda theme: _energy(result, theme), text)


def _figure1(result: Result, theme: Theme) -> "Figure":
    from matplotlib.figure import Figure

    sample = result.record["sample"]
    shape = tuple(result.record["image_shape"])
    # Arrays, since matplotlib asks tensors for copies in a way that numpy warns of.
    path = result.tensors["sample.path"].reshape(-1, *shape).numpy()
    images = [result.tensors["sample.original"].reshape(shape).numpy(), *path]
    titles = ["X", *(f"Z$^{{({n})}}$" for n in range(len(path)))]
    low, high = float(images[0].min()), float(images[0].max())
    figure = Figure(figsize=(_CELL * len(images), _HEIGHT), facecolor=theme.paper)
    for column, (image, title) in enumerate(zip(images, titles, strict=True)):
        axis = _place(figure, column, _FIRST, _IMAGE, theme)
        axis.imshow(image, cmap="gray", vmin=low, vmax=high)
        axis.set_title(title, fontsize=13, color=theme.ink)
        right = "✓" if sample["predicted"][column] == sample["label"] else "✗"
        words = f"{sample['predicted'][column]}\n{sample['probability'][column]:.2f} {right}"
        axis.set_xlabel(words, fontsize=10.5, color=theme.ink)
        if column < 2:
            continue
        difference = image - path[0]
        # Never zero: a colour bar needs some width.
        most = max(float(abs(difference).max()), 1e-12)
        axis = _place(figure, column, _SECOND, _IMAGE, theme)
        shown = axis.imshow(difference, cmap="PuOr_r", vmin=-most, vmax=most)
        axis.set_title(f"{title} − {titles[1]}", fontsize=11, color=theme.ink)
        bar = figure.colorbar(shown, cax=_place(figure, column, _BAR, 0.1, theme), orientation="horizontal")
        bar.set_ticks([-most, 0, most], labels=[f"−{most:.2f}", "0", f"{most:.2f}"])
        bar.ax.tick_params(labelsize=9, colors=theme.ink)
        bar.outline.set_edgecolor(theme.faint)
        # Inwards, so that neighbouring bars' labels do not meet.
        ends = bar.ax.get_xticklabels()
        ends[0].set_horizontalalignment("left")
        ends[2].set_horizontalalignment("right")
    words = f"true class:\n{sample['label']}\n\nimage {sample['image']},\nseed {result.record['seeds'][0]}"
    height = (_SECOND + _IMAGE / 2) / _HEIGHT
    figure.text(0.1 / _CELL / len(images), height, words, fontsize=11, color=theme.ink, va="center")
    return figure


def _place(figure: "Figure", column: int, bottom: float, height: float, theme: Theme) -> Any:
    width, total = figure.get_size_inches()
    left = column * _CELL + (_CELL - _IMAGE) / 2
    axis = figure.add_axes((left / width, bottom / total, _IMAGE / width, height / total))
    axis.set_xticks([])
    axis.set_yticks([])
    _inked(axis, theme)
    return axis


def _energy(result: Result, theme: Theme) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    panels = ((left, "energy", "to the targets given to the block"), (right, "energy_to_labels", "to the true labels"))
    for axis, quantity, title in panels:
        for number, (name, control) in enumerate(result.record["controls"].items()):
            mean, _ = result.cells(name, "noisy", quantity)
            style: dict[str, Any] = {"color": COLOURS[number], "linestyle": DASHES[number], "marker": MARKERS[number]}
            axis.plot(range(len(mean)), mean, label=control["title"], markersize=5, linewidth=1.8, **style)
        axis.set_yscale("log")
        axis.set_xticks(range(len(mean)))
        axis.set_xlabel("pass", fontsize=12)
        axis.set_title(f"ℓ {title}", fontsize=12.5)
        axis.tick_params(labelsize=11)
        axis.grid(True, color=theme.faint, linewidth=0.5)
        axis.set_facecolor(theme.paper)
        _inked(axis, theme)
    left.set_ylabel("energy ℓ per image, log scale", fontsize=12)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=3, fontsize=11, frameon=False, labelcolor=theme.ink,
        handlelength=3.5,
    )  # fmt: skip
    figure.set_facecolor(theme.paper)
    return figure


def _inked(axis: Any, theme: Theme) -> None:
    axis.tick_params(colors=theme.ink)
    for text in (axis.title, axis.xaxis.label, axis.yaxis.label):
        text.set_color(theme.ink)
    for spine in axis.spines.values():
        spine.set_edgecolor(theme.faint)


def _drawn(draw: Callable[[Theme], "Figure"], text: str) -> Drawing:
    light = draw(LIGHT)
    return Drawing(_saved(light, "png"), _saved(light, "svg"), _saved(draw(DARK), "svg"), text)


def _saved(figure: "Figure", form: str) -> bytes:
    from matplotlib import rc_context

    # Without these, the same figure would be another file each time.
    fixed: dict[str, Any] = {"Date": None} if form == "svg" else {}
    file = io.BytesIO()
    with rc_context({"svg.hashsalt": "xentflow"}):
        figure.savefig(file, format=form, dpi=150, metadata=fixed)
    return file.getvalue()

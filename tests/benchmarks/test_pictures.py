"""What pictures share."""

from xml.etree import ElementTree

import pytest
from matplotlib import pyplot

from benchmarks.drawings import DRAWINGS, main
from benchmarks.pictures import _GAP, FOLDER, color_of, name_ends


@pytest.mark.check
def test_drawings_are_what_the_command_draws(tmp_path):
    main(tmp_path)
    for name in DRAWINGS:
        drawn = (tmp_path / f"{name}.svg").read_text()
        ElementTree.fromstring(drawn)
        assert (FOLDER / f"{name}.svg").read_text() == drawn, name


def test_a_system_has_its_colour_whatever_follows_its_name():
    assert color_of("h2o 820") == color_of("h2o 20%") == color_of("h2o")
    assert color_of("h2o uniform") != color_of("h2o") != color_of("stock")
    assert color_of("h2o-paper") == color_of("something else")


def test_names_at_the_ends_keep_apart_and_inside():
    figure, axes = pyplot.subplots()
    axes.set_ylim(0, 1)
    name_ends(axes, {"stock": 1.0, "h2o": 0.999, "h2o uniform": 0.998, "full": 0.2})
    height = axes.transAxes.transform((0, 1))[1] - axes.transAxes.transform((0, 0))[1]
    at = {text.get_text(): text.get_position()[1] for text in axes.texts}
    pyplot.close(figure)
    assert at["full"] < at["h2o uniform"] < at["h2o"] < at["stock"] <= 1.0
    apart = at["h2o"] - at["h2o uniform"]
    assert apart * height * 72 / figure.dpi > 0.99 * _GAP
    assert abs(at["full"] - 0.2) < 1e-6

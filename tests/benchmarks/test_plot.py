"""Pictures out of result files."""

import pytest

from benchmarks import plot
from benchmarks.cells import Cell
from benchmarks.compare import save
from tests.benchmarks.helpers import made_up_result


def draw(results, output):
    plot.main(["--results", str(results), "--output-dir", str(output)])
    return {path.stem for path in output.glob("*.png")}


def test_all_pictures(tmp_path):
    cells = [Cell("512+512"), Cell("chat", tensor_parallel_size=2)]
    cells += [Cell("growth-1024"), Cell("growth-2048")]
    cells.append(Cell("512+1024", ("20%", "10%"), ("h2o", "h2o-model"), share=True))
    for cell in cells:
        path = save(made_up_result(cell), cell, tmp_path)
        path.with_suffix(".failed.json").write_text('{"error": "of an earlier try"}')
    assert draw(tmp_path, tmp_path / "docs") == {*plot.PICTURES}
    assert len(plot.load(tmp_path)) == len(cells)


def test_no_picture_without_its_results(tmp_path):
    cell = Cell("growth-1024")
    save(made_up_result(cell), cell, tmp_path)
    assert draw(tmp_path, tmp_path / "docs") == {"tpot_over_context"}


def test_no_results_at_all(tmp_path):
    with pytest.raises(SystemExit, match="benchmarks.compare"):
        draw(tmp_path, tmp_path)

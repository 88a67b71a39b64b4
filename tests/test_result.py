"""result.json: its types are what the README says; test_train holds a run's against them."""

from __future__ import annotations

from pathlib import Path

import rl_pipeline
from rl_pipeline.run import result


def test_the_readme_lists_result_json_as_it_is():
    readme = Path(rl_pipeline.__file__).parents[1] / "README.md"
    assert result.listing() in readme.read_text()

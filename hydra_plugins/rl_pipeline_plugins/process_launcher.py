"""Where Hydra looks for `hydra/launcher=process`: it finds only classes that are defined here."""

from __future__ import annotations

from rl_pipeline.study import launcher


class ProcessLauncher(launcher.ProcessLauncher):
    """The launcher of the study room."""

"""Adds `./conf` of the working directory, where users and `tune` keep their own options."""

from __future__ import annotations

from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class WorkingDirectoryConf(SearchPathPlugin):
    """Behind the package's own options, so that it adds and never replaces."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append `./conf`, where there is one."""
        conf = Path.cwd() / "conf"
        if conf.is_dir():
            search_path.append("working-directory", f"file://{conf}")

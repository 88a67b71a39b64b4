"""Adds `./conf` of the working directory, where users and `tune` keep their own options."""

from __future__ import annotations

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from rl_pipeline.config.origins import conf_folder


class WorkingDirectoryConf(SearchPathPlugin):
    """Behind the package's own options, so that it adds and never replaces."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append `./conf`, where there is one."""
        conf = conf_folder()
        if conf.is_dir():
            search_path.append("working-directory", f"file://{conf}")

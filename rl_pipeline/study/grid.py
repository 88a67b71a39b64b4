"""The jobs of a sweep, known and checked before the first of them runs."""

from __future__ import annotations

import math
from itertools import islice
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from rl_pipeline.config import origins
from rl_pipeline.config.checks import check_machine
from rl_pipeline.config.explain import explain_composition
from rl_pipeline.config.load import job_config, load
from rl_pipeline.config.options import check_recipe
from rl_pipeline.config.origins import parse_overrides
from rl_pipeline.config.settings import Settings
from rl_pipeline.errors import ConfigError


def sweep_settings(config: DictConfig) -> list[Settings]:
    """The settings of every job of a grid sweep, checked; raises ConfigError naming the job.

    Other sweepers decide while they run: for them only the base configuration is checked.
    """
    from hydra.core.global_hydra import GlobalHydra

    for part in ("sweeper", "launcher"):
        if "_target_" not in (config.hydra[part] or {}):
            raise ConfigError(f"hydra.{part} must be one; leave it out")
    if not str(config.hydra.sweeper._target_).endswith("BasicSweeper"):
        return [load(job_config(config))]
    here = not str(config.hydra.launcher._target_).endswith("RayLauncher")
    loader = GlobalHydra.instance().config_loader()
    settings = []
    for job in _grid(config, loader):
        try:
            check_recipe(job)
            cfg = loader.load_sweep_config(config, job)
            settings.append(load(job_config(cfg)))
            check_machine(settings[-1], here)
            if again := settings[-1].study.resume:
                origins.check_same(cfg, config, f"study.resume={again}")
            if settings[-1].resume:
                raise ConfigError("resume continues one run and cannot be swept")
        except (ConfigError, HydraException) as error:
            why = str(error) if isinstance(error, ConfigError) else explain_composition(error)
            raise ConfigError(f"job {' '.join(job)}: {why}") from None
    return settings


MOST_JOBS = 10_000
"""More are a slip of the pen."""


def _grid(config: DictConfig, loader: ConfigLoader) -> list[list[str]]:
    """The overrides of every job, as Hydra's own sweeper will make them; raises ConfigError."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    if (size := config.hydra.sweeper.max_batch_size) is not None and size < 1:
        raise ConfigError(f"hydra.sweeper.max_batch_size={size}: must be at least 1")
    arguments = [f"{k}={v}" for k, v in _params(config).items()]
    arguments += list(config.hydra.overrides.task)
    # The loader knows the options that glob() chooses from.
    overrides = OverridesParser.create(config_loader=loader).parse_overrides(arguments)
    sizes = {o.get_key_element(): _size(o) for o in overrides if o.is_sweep_override()}
    if math.prod(sizes.values()) > MOST_JOBS:
        raise ConfigError(
            f"{' x '.join(sizes)} are more than {MOST_JOBS:,} jobs; sweep over fewer values"
        )
    batches = BasicSweeper.split_arguments(overrides, max_batch_size=None)
    return [job for batch in batches for job in batch]


def _size(override: Override) -> int:
    """Number of values that a key is swept over, up to one more than may be; raises ConfigError."""
    line = override.input_line
    if override.is_interval_sweep():
        key = override.get_key_element()
        raise ConfigError(
            f"{line}: a grid needs single values, e.g. {key}=choice(...) or {key}=range(...); an "
            "interval is for hydra/sweeper=optuna"
        )
    try:
        size = sum(1 for _ in islice(override.sweep_string_iterator(), MOST_JOBS + 1))
    except (ValueError, ArithmeticError, HydraException) as error:
        raise ConfigError(f"{line}: {error}") from None
    if not size:
        raise ConfigError(f"{line}: there is nothing to sweep over")
    return size


def _params(config: DictConfig) -> dict[str, Any]:
    return dict((OmegaConf.select(config, "hydra.sweeper.params") or {}).items())


def varied_keys(config: DictConfig) -> list[str]:
    """The keys that a sweep varies, from hydra.sweeper.params and the command line."""
    preset = [f"{k}={v}" for k, v in _params(config).items()]
    overrides = parse_overrides(preset + list(config.hydra.overrides.task))
    last = {o.key_or_group: o for o in overrides}
    return [key for key, override in last.items() if override.is_sweep_override()]

"""Hydra plugins of rl_pipeline: the `process` launcher and the `conf/` of the working directory."""

"""rl_pipeline: find what makes deep-RL training slow, prove what makes it fast, keep the proof."""

__version__ = "0.1.0"

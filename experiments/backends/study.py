"""Which backend trains PPO on CartPole fastest? Run by `make repro-backends`."""

from pathlib import Path

from experiments.frame import run

if __name__ == "__main__":
    run(
        Path(__file__).parent,
        "backends",
        quick=["seed=1,2", "total_steps=30_000", "eval.episodes=5"],
        full=["seed=1,2,3,4,5", "total_steps=100_000"],
    )

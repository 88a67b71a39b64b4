"""What does the choice of replay buffer cost a DQN end to end? Run by `make repro-replay`."""

from pathlib import Path

from experiments.frame import run

if __name__ == "__main__":
    run(
        Path(__file__).parent,
        "buffers",
        quick=["seed=1,2", "total_steps=10_000", "eval.episodes=5"],
        full=["seed=1,2,3,4,5"],
    )

"""Gymnasium environments in one worker process each, observations in shared memory."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from gymnasium.vector.async_vector_env import AsyncState, _async_worker

from rl_pipeline.config.settings import EnvSettings
from rl_pipeline.envs import randomness
from rl_pipeline.envs.base import BaseVecEnv, RawStep, env_seeds
from rl_pipeline.envs.gymnasium import make_env

START_TIMEOUT_S = 120.0
"""For the first reset, in which workers import and construct."""


class WorkerError(RuntimeError):
    """A worker process failed; the message names the environment and the true cause."""


class _Workers(AsyncVectorEnv):
    """Gymnasium's vector environment, with errors that say which environment failed and why."""

    def _raise_if_errors(self, successes: Any) -> None:
        if all(successes):
            return
        index, _, value, trace = self.error_queue.get()
        print(trace, file=sys.stderr)
        self._state = AsyncState.DEFAULT
        raise WorkerError(f"environment {index} raised {value}")


class _Telling(gym.Wrapper):
    """Wrapper in a worker: it sends errors as plain text, and of `info` only what is read.

    An exception that does not pickle would be lost in the worker, and the trainer wait for it.
    """

    def reset(self, **options: Any) -> Any:
        try:
            obs, info = self.env.reset(**options)
        except Exception as error:
            raise _told(error) from error
        return obs, _read(info)

    def step(self, action: Any) -> Any:
        if isinstance(self.env.action_space, gym.spaces.Box):
            action = np.asarray(action)  # a number, where the box has no dimension
        try:
            *row, info = self.env.step(action)
        except Exception as error:
            raise _told(error) from error
        return *row, _read(info)


def _read(info: dict[str, Any]) -> dict[str, Any]:
    return {"game_ended": info["game_ended"]} if "game_ended" in info else {}


def _told(error: Exception) -> WorkerError:
    return WorkerError(f"{type(error).__name__}: {error}")


def _make(env: EnvSettings, seed: int) -> gym.Env:
    """One environment as a worker makes it: it also informs about games, by `info`.

    The worker's own random generators follow from the seed; a fork would have the trainer's.
    """
    randomness.seed_process(seed)
    made = _Telling(make_env(env, informs=True))
    randomness.seed_spaces(made, seed)
    return made


class GymnasiumAsyncVecEnv(BaseVecEnv):
    """Any Gymnasium id, each environment in a process of its own.

    A worker that raises, dies or does not answer within `step_timeout_s` ends the run with a
    WorkerError that names its environment; no process is left behind.
    """

    def __init__(
        self,
        env: EnvSettings,
        num_envs: int,
        seed: int,
        step_timeout_s: float,
        wide_obs: bool = False,
    ) -> None:
        """Raise ValueError for an id, package or constructor argument that does not work here."""
        self._atari = env.kind == "atari"
        seeds = env_seeds(seed, num_envs)
        self._seeds: list[int | None] | None = [*seeds]
        self._timeout_s = step_timeout_s
        with randomness.preserved():  # Gymnasium, too, makes one here, to read its spaces
            probe: Any = make_env(env)
            limit = probe.spec.max_episode_steps if probe.spec else None
            if self._atari:
                limit = probe.max_episode_steps
            probe.close()
            self._vec = _Workers(
                [partial(_make, env, one) for one in seeds],
                copy=False,
                worker=_work,
                autoreset_mode=AutoresetMode.NEXT_STEP,
            )
        try:
            super().__init__(
                env,
                backend="gymnasium_async",
                num_envs=num_envs,
                observation_space=self._vec.single_observation_space,
                action_space=self._vec.single_action_space,
                metadata=self._vec.metadata,
                max_episode_steps=limit,
                reuses_obs=True,
                wide_obs=wide_obs,
            )
        except ValueError:
            self._vec.close(terminate=True)
            raise

    def _reset(self) -> np.ndarray:
        # Seeded once: later resets go on with the environments' own generators.
        seeds, self._seeds = self._seeds, None
        options = {"new_game": True} if self._atari else None
        timeout_s = max(START_TIMEOUT_S, self._timeout_s)

        def call() -> np.ndarray:
            self._vec.reset_async(seed=seeds, options=options)
            return self._vec.reset_wait(timeout_s)[0]

        return self._guarded(call, timeout_s)

    def _send(self, action: np.ndarray) -> None:
        self._guarded(lambda: self._vec.step_async(action), self._timeout_s)

    def _recv(self) -> RawStep:
        def call() -> tuple[Any, ...]:
            return self._vec.step_wait(self._timeout_s)

        obs, reward, terminated, truncated, info = self._guarded(call, self._timeout_s)
        return obs, reward, terminated, truncated, info.get("game_ended")

    def _guarded(self, call: Callable[[], Any], timeout_s: float) -> Any:
        """The result of `call`; where a worker fails, all of them are ended first."""
        try:
            return call()
        except WorkerError as error:
            self._fail(str(error), error)
        except multiprocessing.TimeoutError as error:
            silent = [i for i, pipe in enumerate(self._vec.parent_pipes) if not pipe.poll(0)]
            self._fail(
                f"environment {silent[0] if silent else '?'} did not answer within "
                f"backend.step_timeout_s={timeout_s:g}",
                error,
            )
        except (EOFError, ConnectionError) as error:
            for process in self._vec.processes:
                process.join(0.5)
            dead = [(i, p.exitcode) for i, p in enumerate(self._vec.processes) if not p.is_alive()]
            index, code = dead[0] if dead else ("?", None)
            how = f"by signal {-code}" if code is not None and code < 0 else f"with code {code}"
            self._fail(f"the process of environment {index} ended {how}", error)

    def _fail(self, cause: str, error: BaseException) -> NoReturn:
        self.close()
        raise WorkerError(f"{self._name}: {cause}") from error

    def _close(self) -> None:
        # Not a polite close: it waits for workers that may hang.
        for process in self._vec.processes:
            process.terminate()
        for process in self._vec.processes:
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self._vec.parent_pipes:
            if pipe is not None:
                pipe.close()
        self._vec.closed = True


def _work(*arguments: Any) -> None:
    """Gymnasium's worker loop, deaf to the terminal: the trainer decides when to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["OMP_NUM_THREADS"] = "1"  # for libraries that the environment loads from here on
    _async_worker(*arguments)

"""The standard Atari preprocessing on Gymnasium's emulator, frame for frame that of EnvPool.

The rules are those of EnvPool's `atari_env.h` to the letter, but for an end in exactly the step of
the time limit: it is a termination too, as envpool.py reads from the infos. `tests/test_envs.py`
steps both with the same actions and compares every pixel.
"""

from __future__ import annotations

from typing import Any

import ale_py
import cv2
import gymnasium as gym
import numpy as np

from rl_pipeline.config.settings import EnvSettings
from rl_pipeline.errors import ConfigError

gym.register_envs(ale_py)


def emulator_settings(env: EnvSettings) -> dict[str, Any]:
    """Arguments of the `ALE/...-v5` ids under which the wrapper alone decides.

    Raises ConfigError where `env.kwargs` would change one of them.
    """
    assert env.atari is not None
    fixed = {
        "frameskip": 1,
        "repeat_action_probability": env.atari.sticky_actions,
        "max_num_frames_per_episode": 0,  # no limit: ours counts agent steps
        "obs_type": "grayscale",
        "sound_obs": False,
        "continuous": False,
    }
    if clash := fixed.keys() & env.kwargs.keys():
        raise ConfigError(f"env.kwargs cannot set {', '.join(sorted(clash))}; use env.atari")
    return fixed


class AtariEnv(gym.Wrapper):
    """One game: obs uint8 [frame_stack, screen_size, screen_size], newest frame last.

    With episodic life, `terminated` is also the loss of a life; the next `reset` then goes on with
    the game and keeps the frame stack. The array returned is overwritten by the next call.
    """

    def __init__(self, game: gym.Env, env: EnvSettings, informs: bool = False):
        """`game` comes from `gym.make` with `emulator_settings`; `informs` fills `info`."""
        super().__init__(game)
        atari = env.atari
        assert atari is not None
        self.max_episode_steps = env.max_episode_steps or 108_000 // atari.frame_skip
        self.game_ended = False
        """The last call ended a game (a reset: one that ended in the no-ops after a life)."""
        self._atari = atari
        self._ale = game.unwrapped.ale  # type: ignore[attr-defined]
        full = env.kwargs.get("full_action_space", False)
        self._actions = self._ale.getLegalActionSet() if full else self._ale.getMinimalActionSet()
        self._fires = atari.fire_reset and ale_py.Action.FIRE in self._actions
        self._pooled, self._latest = (np.zeros(self._ale.getScreenDims(), np.uint8) for _ in "ab")
        self._stack = np.zeros((atari.frame_stack, atari.screen_size, atari.screen_size), np.uint8)
        self._informs = informs
        self._elapsed = 0
        self._lives = 0
        self._game_over = True
        self.observation_space = gym.spaces.Box(0, 255, self._stack.shape, np.uint8)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        """Start a game, or go on after a life unless `options={"new_game": True}`."""
        ale = self._ale
        is_new = (
            seed is not None
            or (options or {}).get("new_game", False)
            or self._game_over
            or self._elapsed >= self.max_episode_steps
            or not self._atari.episodic_life
        )
        if seed is not None:
            self.env.reset(seed=seed)
        elif is_new:
            ale.reset_game()
        if is_new:
            self._elapsed = 0
        fill = is_new
        self.game_ended = False
        for _ in range(self._num_noops()):
            ale.act(ale_py.Action.NOOP)
            if ale.game_over():
                ale.reset_game()
                # EnvPool does not restart the time limit here.
                fill, self.game_ended = True, not is_new
        if self._fires:
            ale.act(ale_py.Action.FIRE)
        ale.getScreenGrayscale(self._pooled)
        self._push()
        if fill:
            self._stack[:] = self._stack[-1]
        self._lives, self._game_over = ale.lives(), False
        return self._stack, self._info()

    def step(self, action: Any):
        """`frame_skip` emulator steps; returns the usual five, the reward untransformed."""
        ale, button = self._ale, self._actions[action]
        reward, over = 0.0, False
        for left in range(self._atari.frame_skip, 0, -1):
            reward += ale.act(button)
            over = ale.game_over()
            if left == 2 or self._atari.frame_skip == 1:
                ale.getScreenGrayscale(self._pooled)
            elif left == 1:
                ale.getScreenGrayscale(self._latest)
                np.maximum(self._pooled, self._latest, out=self._pooled)
            if over:  # an end before the last two frames shows the previous ones again
                break
        self._push()
        self._elapsed += 1
        truncated = self._elapsed >= self.max_episode_steps
        lives = ale.lives()
        life_lost = self._atari.episodic_life and 0 < lives < self._lives
        self._lives, self._game_over = lives, over
        self.game_ended = over or truncated
        return self._stack, reward, over or life_lost, truncated, self._info()

    def _info(self) -> dict[str, Any]:
        return {"game_ended": self.game_ended} if self._informs else {}

    def _num_noops(self) -> int:
        """Draw as EnvPool does: the press of FIRE counts as one of `noop_max`."""
        if self._atari.noop_max == 0:
            return 0
        return int(self.unwrapped.np_random.integers(self._atari.noop_max)) + 1 - self._fires

    def _push(self) -> None:
        self._stack[:-1] = self._stack[1:]
        size = self._atari.screen_size
        cv2.resize(self._pooled, (size, size), dst=self._stack[-1], interpolation=cv2.INTER_AREA)

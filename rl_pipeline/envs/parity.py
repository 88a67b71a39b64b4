"""Are two backends the same task? Measured on the environments, not read from their settings."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from rl_pipeline.config.settings import EnvSettings
from rl_pipeline.types import ActionSpace, Continuous, MultiBinary, Step, VecEnv

Make = Callable[[EnvSettings, int, int], VecEnv]
"""(task, number of environments, seed) -> environments of one backend."""

SHORT_LIMIT = 5
"""Time limit under which its unit is measured."""
MAX_FALL = 3_000
"""Steps in which a first termination is waited for."""
NUM_FRAMES = 300
"""Steps whose every pixel is compared."""


@dataclass
class Sample:
    """Facts and samples of a task in one backend, under a uniformly random policy."""

    facts: dict[str, str]
    """Properties that are either equal or not, as measured; absent where the games did not tell."""
    starts: np.ndarray
    """First observations of episodes, [S, ...]."""
    lengths: np.ndarray
    """Agent steps of full games."""
    returns: np.ndarray
    """Their raw scores."""
    at_limit: str = ""
    """End of an episode that terminates in exactly the step of its time limit; "" where none
    terminated. No verdict is based on it: `differences.py` names where backends differ."""


@dataclass
class Verdict:
    """One backend compared with the reference."""

    unequal: list[str] = field(default_factory=list)
    """Facts that differ."""
    p_values: dict[str, float] = field(default_factory=dict)
    """Two-sample tests of what is random; 1 where both are the same constant."""

    def differs(self, level: float) -> list[str]:
        """Names of the properties that differ, tests at `level` each."""
        return self.unequal + [name for name, p in self.p_values.items() if p < level]


def random_actions(action: ActionSpace, num_envs: int, rng: np.random.Generator) -> np.ndarray:
    """Uniform over the space; unbounded sides of a box are taken as +-1."""
    if isinstance(action, Continuous):
        low = np.where(np.isfinite(action.low), action.low, -1)
        high = np.where(np.isfinite(action.high), action.high, 1)
        return rng.uniform(low, high, (num_envs, *action.shape)).astype(np.float32)
    counts = 2 if isinstance(action, MultiBinary) else np.array(action.num_actions)
    return rng.integers(0, counts, (num_envs, *action.shape))


def sample(make: Make, env: EnvSettings, games: int, starts: int, num_envs: int = 8) -> Sample:
    """Play `games` full games and `starts` first steps, rounded up to whole shares."""
    lengths, returns, facts = _play(make(env, num_envs, 1), -(-games // num_envs))
    short = env.model_copy(update={"max_episode_steps": SHORT_LIMIT})
    facts["time limit in"] = _limit_unit(make(short, num_envs, 2))
    if env.atari is not None:
        fixed = env.atari.model_copy(update={"noop_max": 1})
        facts["frames"] = _frames(make(env.model_copy(update={"atari": fixed}), 1, 3))
    one = env.model_copy(update={"max_episode_steps": 1})
    first = _starts(make(one, num_envs, 4), -(-starts // num_envs))
    return Sample(facts, first, lengths, returns, _at_limit(make, env, num_envs))


def compare(reference: Sample, other: Sample) -> Verdict:
    """Facts by equality; first observations, lengths and returns by two-sample tests."""
    told = [key for key in reference.facts if key in other.facts]
    verdict = Verdict([key for key in told if reference.facts[key] != other.facts[key]])
    verdict.p_values = {
        "starts": _starts_p(reference.starts, other.starts),
        "length": _ks(reference.lengths, other.lengths),
        "return": _ks(reference.returns, other.returns),
    }
    return verdict


def _play(envs: VecEnv, share: int) -> tuple[np.ndarray, np.ndarray, dict[str, str]]:
    """The first `share` games of each environment: the first to finish would be short ones."""
    spec, rng = envs.spec, np.random.default_rng(0)
    left = np.full(spec.num_envs, share)
    lengths, returns = [], []
    ends, games, signs, plain = 0, 0, True, True
    envs.reset()
    while left.any():
        step = envs.step(random_actions(spec.action, spec.num_envs, rng))
        ends += int((step.terminated | step.truncated).sum())
        signs &= bool(np.array_equal(step.reward, np.sign(step.raw_reward)))
        plain &= bool(np.array_equal(step.reward, step.raw_reward))
        if not (signs or plain):
            raise ValueError(f"{spec.id}: the learner's reward is neither raw nor its sign")
        for game in envs.pop_episodes():
            games += 1
            if left[game.env_id] > 0:
                left[game.env_id] -= 1
                lengths.append(game.length)
                returns.append(game.return_raw)
    envs.close()
    facts = {
        "observations": f"{list(spec.obs_shape)} {spec.obs_dtype}",
        "actions": _action_text(spec.action),
        "frame skip": str(spec.frame_skip),
        "time limit": str(spec.max_episode_steps),
        "life ends episode": "yes" if ends > games else "no",
    }
    if not (signs and plain):  # else every reward was a sign to begin with
        facts["reward clipped"] = "yes" if signs else "no"
    return np.array(lengths), np.array(returns), facts


def _action_text(action: ActionSpace) -> str:
    if isinstance(action, Continuous):
        return f"Continuous {action.low.tolist()} to {action.high.tolist()}"
    return str(action)


def _limit_unit(envs: VecEnv) -> str:
    """Unit that a time limit counts in: agent steps, or something else."""
    rng = np.random.default_rng(0)
    envs.reset()
    count, over = 0, False
    while not over and count < 5 * SHORT_LIMIT:
        step = envs.step(random_actions(envs.spec.action, envs.spec.num_envs, rng))
        count, over = count + 1, bool(step.truncated.any())
    envs.close()
    return "agent steps" if count == SHORT_LIMIT else f"{count / SHORT_LIMIT:g} agent steps"


def _at_limit(make: Make, env: EnvSettings, num_envs: int) -> str:
    """Plays to the first termination, then the same again under a time limit of that many steps."""

    def play(task: EnvSettings, num_steps: int) -> tuple[int, Step]:
        envs, rng = make(task, num_envs, 5), np.random.default_rng(0)
        envs.reset()
        taken, over = 0, False
        while not over and taken < num_steps:
            step = envs.step(random_actions(envs.spec.action, num_envs, rng))
            taken, over = taken + 1, bool((step.terminated | step.truncated).any())
        envs.close()
        return taken, step

    num_steps, step = play(env, MAX_FALL)
    if not step.terminated.any():
        return ""
    place = int(step.terminated.argmax())
    at, again = play(env.model_copy(update={"max_episode_steps": num_steps}), num_steps)
    if at != num_steps or not (again.terminated | again.truncated)[place]:
        return "not seen again"
    return "terminated" if again.terminated[place] else "truncated only"


def _frames(envs: VecEnv) -> str:
    """A digest of all that happens in NUM_FRAMES steps: without no-ops a game is deterministic."""
    rng, digest = np.random.default_rng(0), hashlib.sha256()
    digest.update(envs.reset().tobytes())
    for _ in range(NUM_FRAMES):
        step = envs.step(random_actions(envs.spec.action, 1, rng))
        for column in (step.obs, step.raw_reward, step.terminated, step.truncated):
            digest.update(np.ascontiguousarray(column).tobytes())
    envs.close()
    return digest.hexdigest()[:8]


def _starts(envs: VecEnv, share: int) -> np.ndarray:
    """First observations, under a time limit of one step: every second row is a start."""
    rng = np.random.default_rng(0)
    found = [envs.reset()]
    while len(found) < share:
        envs.step(random_actions(envs.spec.action, envs.spec.num_envs, rng))
        step = envs.step(random_actions(envs.spec.action, envs.spec.num_envs, rng))
        assert not step.valid.any()
        found.append(step.obs)
    envs.close()
    return np.concatenate(found)


def _starts_p(a: np.ndarray, b: np.ndarray) -> float:
    """Smallest p over the dimensions of a vector (Bonferroni), or over the images as kinds."""
    if a.shape[1:] != b.shape[1:]:
        return 0.0
    if a.dtype == np.uint8:
        kinds = [[hashlib.sha256(x.tobytes()).digest() for x in obs] for obs in (a, b)]
        return _kinds_p(*kinds)
    a, b = a.reshape(len(a), -1), b.reshape(len(b), -1)
    return min(1.0, min(_ks(x, y) for x, y in zip(a.T, b.T, strict=True)) * a.shape[1])


def _kinds_p(a: list[bytes], b: list[bytes]) -> float:
    """Chi-square test that two lists hold the same kinds equally often; rare kinds are pooled."""
    from scipy.stats import chi2_contingency

    kinds = sorted(set(a) | set(b))
    table = np.array([[row.count(kind) for kind in kinds] for row in (a, b)])
    rare = table.sum(0) < 10
    if rare.any():
        table = np.column_stack([table[:, ~rare], table[:, rare].sum(1)])
    return 1.0 if table.shape[1] < 2 else float(chi2_contingency(table).pvalue)


def _ks(a: np.ndarray, b: np.ndarray) -> float:
    """Kolmogorov-Smirnov; conservative where values repeat."""
    from scipy.stats import ks_2samp

    if len(np.unique(np.concatenate([a, b]))) == 1:
        return 1.0
    return float(ks_2samp(a, b, method="asymp").pvalue)

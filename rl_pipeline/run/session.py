"""One run from its first step to result.json: log, evaluate, save, stop, and say how it ended."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch

from rl_pipeline.config.settings import Settings
from rl_pipeline.engine.background import Background
from rl_pipeline.engine.graphs import CompileLog
from rl_pipeline.engine.phases import NullPhases, Phases, SerialisedPhases
from rl_pipeline.engine.transfers import HiddenWaits, Transfers
from rl_pipeline.errors import ConfigError
from rl_pipeline.files import give_room, told, why_not, write_json
from rl_pipeline.loops import sync
from rl_pipeline.redaction import redact
from rl_pipeline.run.checkpoint import Checkpoints
from rl_pipeline.run.parts import OffPolicy
from rl_pipeline.run.result import (
    Best,
    Counters,
    Facts,
    Result,
    Resume,
    Returns,
    Startup,
    Status,
    Throughput,
)
from rl_pipeline.stop import Killed, StopRequest, no_exit
from rl_pipeline.telemetry.hardware import HardwareSampler
from rl_pipeline.telemetry.progress import NullProgress, Progress, ProgressView
from rl_pipeline.telemetry.recorder import Recorder, bottleneck
from rl_pipeline.terminal import say
from rl_pipeline.tracking.tracker import NullTracker, Tracker
from rl_pipeline.types import Episode, Learner, Metrics, StateError, VecEnv

DRAIN_S = 60.0
"""Seconds that a finished run waits for the tracking store to take the last rows."""
KILLED_DRAIN_S = 5.0
"""The same for a run that was told to stop: the tracker goes on alone."""
TROUBLED_DRAIN_S = 3.0
"""The same for a store that does not answer: the tracker goes on alone, the rows are on disk."""


class Evaluation(NamedTuple):
    """Result of one evaluation: mean and standard deviation over its games."""

    env_steps: int
    mean: float
    std: float
    games: int

    def surely_below(self, other: Evaluation) -> bool:
        """Whether the difference is beyond the scatter of the games: two standard errors."""
        error = math.hypot(self.std / self.games**0.5, other.std / other.games**0.5)
        return other.mean - self.mean > 2 * error


@dataclass
class Session:
    """The parts of a run, built by build.py, and what happens to them."""

    settings: Settings
    folder: Path
    facts: Facts
    envs: VecEnv
    learner: Learner
    loop: Callable[[sync.Counters, np.ndarray, sync.Hook], None]
    """Trains from an observation [N, ...] on until the hook says stop."""
    replay: OffPolicy | None
    phases: Phases | NullPhases
    recorder: Recorder
    tracker: Tracker | NullTracker
    hardware: HardwareSampler
    progress: Progress | NullProgress
    checkpoints: Checkpoints
    evaluate: Callable[[int, Callable[[], object]], np.ndarray | None]
    """Scores of the n-th evaluation of this run; None once the function it is given is true."""
    synchronize: Callable[[], None]
    """Waits for the device."""
    compile_log: CompileLog
    background: Background | None
    transfers: Transfers
    counters: sync.Counters = field(default_factory=sync.Counters)
    stop: StopRequest = field(default_factory=StopRequest)
    _scores: np.ndarray | None = None
    _curve: list[Evaluation] = field(default_factory=list)
    _evals: int = 0
    _updates_before: int = 0
    """Updates of earlier sessions of this run."""
    _compiled_at: int | None = None
    _next_eval: int = 0
    _next_save: int = 0
    _next_look: int = 0
    """Env steps at which something other than a log tick is due."""
    _note: str = ""
    _startup: Startup = Startup()
    _resume: Resume | None = None
    _waits: HiddenWaits | None = None

    def run(self, resume_from: dict[str, Any] | None = None) -> dict[str, Any]:
        """Train to the end; returns result.json's object, which is written in every case.

        Raises what stopped the run: an error of a part, or Killed after a signal.
        """
        failure: BaseException | None = None
        with self.stop.installed():
            try:
                with no_exit():
                    reason = self._train(resume_from)
                status: Status = "finished"
                if self.stop.reason:
                    raise Killed(self.stop.reason)
            except (KeyboardInterrupt, Killed) as error:
                failure = error if isinstance(error, Killed) else Killed("SIGINT")
                status, reason = "killed", str(failure)
            except BaseException as error:
                # A driver's words may repeat the password that it was given.
                failure, status = error, "failed"
                reason = redact(f"{type(error).__name__}: {error}")
            result = self._finish(status, reason)
        if failure:
            raise failure
        return result

    def _train(self, state: dict[str, Any] | None) -> str | None:
        obs = self._begin(state)
        if self.counters.env_steps >= self.settings.total_steps:
            # A run that was stopped in its last evaluation: that is what is left.
            self.recorder.start(self.counters)
            self._evaluate(obs)
            return None
        self._next_eval = self._after(self.settings.evaluate_every)
        self._next_save = self._after(self.settings.checkpoint.every_steps)
        began = psutil.Process().create_time()
        self._startup = Startup(until_first_step_s=time.time() - began)
        self.recorder.start(self.counters)
        self._look_at()
        with ExitStack() as watched:
            if isinstance(phases := self.phases, SerialisedPhases):
                self._waits = HiddenWaits(lambda: phases.current)
                watched.enter_context(self._waits.watching())
            self.loop(self.counters, obs, self._after_turn)
        return self._note or None

    def _begin(self, state: dict[str, Any] | None) -> np.ndarray:
        if state is None:
            return self.envs.reset()
        try:
            return self._restore(state)
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise ConfigError(
                f"resume={self.folder}: its checkpoint does not fit this run "
                f"({type(error).__name__}: {error}); start a new run"
            ) from error

    def _look_at(self) -> None:
        self._next_look = min(self.settings.total_steps, self._next_eval, self._next_save)

    def _after(self, every: int) -> int:
        """The next multiple of `every` env steps; never, for 0."""
        return (self.counters.env_steps // every + 1) * every if every else 2**62

    def _after_turn(self, obs: np.ndarray, metrics: Callable[[], Metrics]) -> bool:
        """All that is not training. True stops the loop.

        Called after every environment step by some loops: a microsecond where nothing is due.
        """
        games = self.envs.pop_episodes()
        if games:
            with self.phases("log"):
                self.counters.episodes += len(games)
                self.recorder.episodes(games)
        steps, limit = self.counters.env_steps, self.settings.max_wall_s
        late = limit is not None and self.recorder.elapsed_s >= limit
        if not (late or self.recorder.due or steps >= self._next_look or self.stop.reason):
            return False
        if late:
            self._note = f"max_wall_s={limit:g} reached"
        done = late or steps >= self.settings.total_steps or self.stop.reason is not None
        saves, evaluates = done or steps >= self._next_save, done or steps >= self._next_eval
        with self.phases("learn"):
            # What is still queued on the device is learning, not logging or saving.
            self.synchronize()
        self.counters.note_skipped(self.learner.skipped_updates())
        if saves:
            # Before the evaluation: whoever interrupts that has lost nothing.
            self._save(obs)
            self._next_save = self._after(self.settings.checkpoint.every_steps)
        if evaluates and self.settings.eval.episodes and not self.stop.reason:
            self._evaluate(obs)
            self._next_eval = self._after(self.settings.evaluate_every)
        self._look_at()
        with self.phases("log"):
            row = self.recorder.tick(self.counters, metrics())
            self._show(row)
        if self.background is not None and not done:
            self._compile_what_is_built(row["throughput/env_steps_per_s"])
        return done

    def _compile_what_is_built(self, rate: float) -> None:
        """Where compile=auto may change how the network runs: between rollouts, or rounds."""
        assert self.background is not None
        steps = self.counters.env_steps
        left = self.settings.total_steps - steps
        if self.background.poll(left / rate if rate else 0.0):
            self._compiled_at = steps
            # What was measured until now is not how the run goes on.
            self.recorder.begin_anew()
            self.progress.message(f"compile=auto: compiled from env step {steps:,} on")

    def _show(self, row: dict[str, float]) -> None:
        rate = row["throughput/env_steps_per_s"]
        left = self.settings.total_steps - self.counters.env_steps
        self.progress.update(
            ProgressView(
                env_steps=self.counters.env_steps,
                env_steps_per_s=rate,
                return_mean=self.recorder.return_mean,
                episodes=self.counters.episodes,
                elapsed_s=self.recorder.elapsed_s,
                eta_s=max(left, 0) / rate if rate else None,
                phases={
                    name.removeprefix("phase/").removesuffix("_share"): share
                    for name, share in row.items()
                    if name.startswith("phase/")
                },
                note="",
            )
        )

    def _evaluate(self, obs: np.ndarray) -> None:
        with self.phases("eval"), self.recorder.excluded():
            scores = self.evaluate(self._evals, lambda: self.stop.reason)
        if scores is None:
            return
        self._scores = scores
        self._evals += 1
        mean = float(scores.mean())
        steps = self.counters.env_steps
        self._curve.append(Evaluation(steps, mean, float(scores.std()), len(scores)))
        self.recorder.write(self.counters.env_steps, {"return/eval": mean})
        cut = self.settings.eval.episodes - len(scores)
        self.progress.message(
            f"evaluation at {self.counters.env_steps:,} env steps: return {mean:.1f} "
            f"+- {scores.std():.1f} over {len(scores)} games"
            + (f"; {cut} fewer than asked: games were cut at eval.max_steps" if cut else "")
        )
        with self.phases("checkpoint"), self.recorder.excluded():
            self.checkpoints.offer_best(self._state(obs), mean)

    def _save(self, obs: np.ndarray) -> None:
        with self.phases("checkpoint"), self.recorder.excluded():
            state = self._state(obs)
            if not torch.isfinite(state["learner"]["params"]).all():
                raise FloatingPointError(
                    f"the weights are not finite at env step {self.counters.env_steps:,} and are "
                    "not saved; lower algo.learning_rate, the checkpoint before is kept"
                )
            replay = self.replay.buffer.state_dict() if self.replay and self.replay.save else None
            self.checkpoints.save(self.counters.env_steps, state, replay)
            score = self.recorder.return_mean
            if not self.settings.eval.episodes and score is not None:
                self.checkpoints.offer_best(state, score)

    def _state(self, obs: np.ndarray) -> dict[str, Any]:
        """All that a resumed run needs."""
        env_state = self.envs.state()
        return {
            "learner": self.learner.state_dict(),
            "counters": asdict(self.counters),
            "pace": self.replay.pace.state_dict() if self.replay else None,
            "evals": self._evals,
            "curve": [list(point) for point in self._curve],
            "recent": [list(game) for game in self.recorder.recent],
            "obs": torch.from_numpy(obs.copy()),
            "env_state": None
            if env_state is None
            else torch.frombuffer(bytearray(env_state), dtype=torch.uint8),
            "settings": self.settings.model_dump(mode="json"),
        }

    def _restore(self, state: dict[str, Any]) -> np.ndarray:
        exact = self.learner.load_state_dict(state["learner"])
        self.counters = sync.Counters(**state["counters"])
        self._updates_before = self.counters.updates
        self._evals = state["evals"]
        self._curve = [Evaluation(*point) for point in state.get("curve", ())]
        self.recorder.episodes(Episode(*game) for game in state["recent"])
        obs, trouble = self._restore_envs(state["env_state"])
        known = obs is not None
        exact = exact and known
        more: dict[str, Any] = {}
        if self.replay:
            more = self._restore_replay(self.replay, state, known)
            exact = exact and more["replay"] == "restored" and "lost_transitions" not in more
        self._resume = Resume(from_env_steps=self.counters.env_steps, exact=exact, **more)
        self.progress.message(
            f"resumed at {self.counters.env_steps:,} env steps"
            + ("" if known else f"; games that were under way begin anew{trouble}")
        )
        return self.envs.reset() if obs is None else obs

    def _restore_envs(self, state: torch.Tensor | None) -> tuple[np.ndarray | None, str]:
        """The current observations, or None (and why) where new episodes must begin."""
        if state is None:  # this backend cannot export its environments
            return None, ""
        try:
            return self.envs.load_state(state.numpy().tobytes()), ""
        except StateError as error:
            return None, f" ({error})"

    def _restore_replay(
        self, replay: OffPolicy, state: dict[str, Any], known: bool
    ) -> dict[str, Any]:
        """Restore the replay, or begin it anew; returns the fields of `Resume` about it."""
        if state["replay"] is None:
            # Without contents the buffer fills as at the start of a run.
            replay.pace.begin_anew(self.counters.env_steps)
            return {"replay": "begun anew"}
        replay.buffer.load_state_dict(state["replay"])
        replay.pace.load_state_dict(state["pace"])
        if not known:
            replay.buffer.cut()
        lost = {"lost_transitions": replay.buffer.lost} if replay.buffer.lost else {}
        return {"replay": "restored", **lost}

    def _finish(self, status: Status, reason: str | None) -> dict[str, Any]:
        """Write the last words, then close every part, whatever the others raise."""
        with self.stop.ignored():
            told_first = {"status": status, "reason": reason}
            result = told_first | self._result(status, reason).model_dump(exclude_unset=True)
            give_room(self.folder)
            written = self._write(result)
        parts: list[Any] = [self.replay.buffer] if self.replay else []
        if self.background is not None:
            parts.append(self.background)
        for part in (*parts, self.envs, self.progress, self.recorder, self.hardware):
            name = type(part).__name__
            with self.stop.cutting(lambda name=name: say(f"{name} was not closed")):  # type: ignore
                told(name, part.close, say)
        trouble = self.tracker.state().trouble
        if trouble:
            say(f"the tracking store does not answer: {trouble}")
        drain_s = KILLED_DRAIN_S if status == "killed" else DRAIN_S
        # The tracker's own last figures are known only when it is done.
        with self.stop.cutting(lambda: result.update(tracking=self.tracker.finish(0).dump())):
            wait_s = TROUBLED_DRAIN_S if trouble else drain_s
            result["tracking"] = self.tracker.finish(wait_s).dump()
        if written:
            with self.stop.ignored():
                self._write(result)
        return result

    def _write(self, result: dict[str, Any]) -> bool:
        try:
            write_json(self.folder / "result.json", result)
        except OSError as error:
            say(f"result.json was not written: {why_not(error)}")
            return False
        return True

    def _result(self, status: Status, reason: str | None) -> Result:
        phases, tracked = self.recorder.phases(), self.tracker.state()
        throughput = self.recorder.throughput()
        wall = throughput["steady_s"] or self.recorder.wall_s or 1e-9
        cost = {
            "phases_s": self.phases.entries * self.phases.cost_s(),
            "recorder_s": self.recorder.cpu_s,
            "progress_s": self.progress.cpu_s,
            "hardware_s": self.hardware.cpu_s,
            "tracker_s": tracked.cpu_s,
        }
        facts = dict(self.facts)
        facts["effective"] = self.facts.effective | {"compile": self._compile_form()}
        if fallbacks := self.compile_log.fallbacks:
            eager = f"eager for {', '.join(fallbacks)}"  # why: compile.fallbacks
            facts["effective"] |= {"compile": eager}
        more: dict[str, Any] = {}
        if self._resume:
            more["resume"] = self._resume
        copies: dict[str, Any] = dict(self.transfers.report(self.counters.env_steps))
        if self._waits:
            copies["hidden_waits"] = self._waits.report()
        if copies:
            more["transfers"] = copies
        if phases:
            more |= {"phases": phases, "bottleneck": bottleneck(phases)}
        return Result(
            **facts,
            status=status,
            reason=reason,
            startup=self._startup,
            counters=Counters(
                env_steps=self.counters.env_steps,
                frames=self.counters.env_steps * self.envs.spec.frame_skip,
                updates=self.counters.updates,
                episodes=self.counters.episodes,
                skipped_updates=self.counters.skipped_updates,
            ),
            throughput=Throughput(**throughput),
            returns=self._returns(),
            compile=self.compile_log.report(self.counters.updates - self._updates_before),
            accounting={**cost, "share_of_steady_wall": sum(cost.values()) / wall},
            hardware=self.hardware.facts(),
            tracking=tracked.dump(),
            **more,
        )

    def _compile_form(self) -> str:
        """How the network ran: as asked, or what compile=auto came to."""
        asked = str(self.facts.effective["compile"])
        if asked != "auto":
            return asked
        if self._compiled_at is not None:
            return f"eager until step {self._compiled_at}, then default"
        return self.compile_log.update_form

    def _returns(self) -> Returns:
        scores, best = self._scores, max(self._curve, key=lambda e: e.mean, default=None)
        return Returns(
            train_mean=self.recorder.return_mean,
            eval_mean=None if scores is None else float(scores.mean()),
            eval_std=None if scores is None else float(scores.std()),
            episodes=0 if scores is None else len(scores),
            eval_scores=[] if scores is None else [float(s) for s in scores],
            best=best
            and Best(
                eval_mean=best.mean,
                env_steps=best.env_steps,
                fell=self._curve[-1].surely_below(best),
            ),
        )

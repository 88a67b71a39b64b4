"""Every setting of a run as frozen, typed values; the text under a field is its documentation.

Built by `config.load` from the composed YAML. This module imports no heavy package, so that a bad
value is answered in well under two seconds.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    model_validator,
)

from rl_pipeline.config.backends import BACKENDS, Backend, BackendName


def _refuse_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("expected a number, not true or false")
    return value


# `1e6` arrives from Hydra as a float: pydantic takes integral floats as integers, refuses others.
Int = Annotated[int, BeforeValidator(_refuse_bool)]
Float = Annotated[float, BeforeValidator(_refuse_bool), Field(allow_inf_nan=False)]
PositiveInt = Annotated[Int, Field(gt=0)]
Count = Annotated[Int, Field(ge=0)]
PositiveFloat = Annotated[Float, Field(gt=0)]
NonNegative = Annotated[Float, Field(ge=0)]
Fraction = Annotated[Float, Field(ge=0, le=1)]


class Frozen(BaseModel):
    """Immutable, refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class AtariSettings(Frozen):
    """Preprocessing of a game, the same on every backend."""

    frame_skip: PositiveInt = 4
    """Emulator frames per agent step; the last two are max-pooled."""
    frame_stack: PositiveInt = 4
    screen_size: PositiveInt = 84
    noop_max: Count = 30
    """Up to this many no-ops at every reset."""
    fire_reset: bool = True
    """Press FIRE after every reset, where the game has that action."""
    episodic_life: bool = True
    """The loss of a life ends the learner's episode; scores still count full games."""
    clip_reward: bool = True
    """The learner sees the sign of the reward; scores use the raw one."""
    sticky_actions: Fraction = 0.0
    """Probability that the emulator repeats the previous action."""


class WrapperSettings(Frozen):
    """A Gymnasium wrapper."""

    name: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]
    """`package.module:Class`."""
    kwargs: dict[str, Any] = {}
    """Passed to the class after the environment."""


def _named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


class EnvSettings(Frozen):
    """The task."""

    name: str
    id: str
    """Gymnasium id, also `package.module:Id`."""
    envpool_id: str | None = None
    """The same task's id in EnvPool, or null where EnvPool does not have it."""
    kind: Literal["classic", "mujoco", "atari", "other"] = "other"
    max_episode_steps: PositiveInt | None = None
    """Time limit in agent steps; null keeps the task's own."""
    atari: AtariSettings | None = None
    flatten_obs: bool = False
    """Observe the parts of a Dict, Tuple or discrete observation as one vector of floats."""
    wrappers: tuple[Annotated[WrapperSettings, BeforeValidator(_named)], ...] = ()
    """Gymnasium wrappers, the first innermost: `package.module:Class` or {name, kwargs}."""
    kwargs: dict[str, Any] = {}
    """Passed to the environment's constructor; add keys with `+env.kwargs.key=value`."""


class BackendSettings(Frozen):
    """The backend that steps the environments."""

    name: BackendName
    num_envs: PositiveInt = 8
    """More sample faster and learn otherwise. `auto` chooses by task and CPU budget, says why."""
    num_threads: PositiveInt | Literal["auto"] = "auto"
    """Worker threads of EnvPool and of ALE's native form; `auto` chooses from the CPU budget and
    the task and says why."""
    lanes: PositiveInt = 1
    """Groups of environments that take turns: one steps while the policy acts for the next; or
    `auto`."""
    step_timeout_s: PositiveFloat | None = None
    """gymnasium_async: a worker that does not answer within this many seconds ends the run."""

    @property
    def traits(self) -> Backend:
        """Traits of this backend."""
        return BACKENDS[self.name]


class BufferSettings(Frozen):
    """The buffer in which transitions wait for the learner."""

    name: Literal["rollout", "uniform", "prioritized", "deque", "memmap"]
    placement: Literal["cpu", "pinned", "cuda"] = "cpu"
    """Memory that holds the bytes."""
    capacity: PositiveInt | None = None
    """Rows in all, over the environments; null for rollout, whose size is one horizon."""
    alpha: Fraction | None = None
    """prioritized: exponent of the priorities; 0 is uniform (Schaul et al. 2016)."""
    beta: Fraction | None = None
    """prioritized: exponent of the importance weights at the start, annealed to 1."""
    prefetch: bool = False
    """Draw the next batch on a thread of its own while the learner works on this one."""
    save: bool = True
    """Contents go into checkpoints; without them a resumed run fills its replay anew."""


class NetworkSettings(Frozen):
    """Policy and value networks."""

    name: Literal["mlp", "nature_cnn"]
    hidden: tuple[PositiveInt, ...] = (64, 64)
    """Widths of the hidden layers; for nature_cnn those after the convolutions."""
    activation: Literal["tanh", "relu"] = "tanh"
    shared: bool = False
    """One trunk for policy and value, or one each."""


class PPOSettings(Frozen):
    """Proximal policy optimisation (Schulman et al. 2017, arXiv:1707.06347)."""

    name: Literal["ppo"]
    horizon: PositiveInt = 128
    """Rows collected per environment between updates."""
    num_epochs: PositiveInt = 4
    num_minibatches: PositiveInt = 4
    learning_rate: PositiveFloat = 2.5e-4
    anneal_lr: bool = True
    """Linearly to 0 over `total_steps`."""
    adam_eps: PositiveFloat = 1e-5
    gamma: Fraction = 0.99
    gae_lambda: Fraction = 0.95
    ratio_clip: PositiveFloat = 0.2
    value_clip: PositiveFloat | None = 0.2
    """Largest change of the value estimate that the loss rewards; null switches it off."""
    value_coef: NonNegative = 0.5
    entropy_coef: NonNegative = 0.01
    max_grad_norm: PositiveFloat = 0.5
    normalize_advantage: bool = True
    """Per minibatch, over its valid rows."""
    target_kl: PositiveFloat | None = None
    """Stop after an epoch whose last minibatch has an approximate KL above 1.5 times this. Stable-
    Baselines3 looks at each minibatch and stops before that step; here an epoch may be one graph,
    so that up to `num_minibatches` more steps are taken."""
    normalize_obs: bool = False
    """By running mean and standard deviation, clipped to +-10. Statistics move between updates."""
    normalize_reward: bool = False
    """By the running standard deviation of the discounted return, clipped to +-10."""
    log_std_init: Float = 0.0
    """Initial log standard deviation of the Gaussian policy."""


class ReplayAlgorithm(Frozen):
    """Settings of all algorithms that learn from replay."""

    learning_starts: Count = 1_000
    """Env steps stored before the first update."""
    batch_size: PositiveInt = 32
    """Transitions per update."""
    replay_ratio: PositiveFloat = 8.0
    """Transitions drawn per env step: updates x batch_size / env steps, held at every turn."""
    update_burst: PositiveInt = 1
    """Updates made one after another: they wait until so many are due. One at a time each finds the
    caches full of acting and stepping, which in turn find them full of learning."""
    gamma: Fraction = 0.99
    n_step: PositiveInt = 1
    """Rewards summed before the bootstrap; windows end where their episode ends."""


class DQNSettings(ReplayAlgorithm):
    """Deep Q-learning (Mnih et al. 2015, doi:10.1038/nature14236)."""

    name: Literal["dqn"]
    learning_rate: PositiveFloat = 1e-4
    anneal_lr: bool = False
    """Linearly to 0 over `total_steps`."""
    adam_eps: PositiveFloat = 1e-8
    double: bool = False
    """The learning network chooses the action that the target network values (van Hasselt et al.
    2016, arXiv:1509.06461)."""
    target_every: PositiveInt = 1_000
    """Updates (as in the paper, not env steps) between moves of the target network."""
    tau: Annotated[Float, Field(gt=0, le=1)] = 1.0
    """Share of the way that the target moves towards the network each time; 1 copies it."""
    error_clip: PositiveFloat | None = 1.0
    """Error at which the Huber loss turns from quadratic to linear; null is half the squared error.
    With rewards that are not clipped it hides large errors at episode ends, and Q can diverge."""
    max_grad_norm: PositiveFloat = 10.0
    epsilon_start: Fraction = 1.0
    epsilon_end: Fraction = 0.05
    """Probability of a random action in training. Evaluation has none."""
    epsilon_fraction: Fraction = 0.1
    """Part of `total_steps` over which epsilon falls, linearly."""


class DeviceSettings(Frozen):
    """The device that holds the tensors."""

    name: Literal["auto", "cpu", "cuda"]


class PrecisionSettings(Frozen):
    """Arithmetic of the networks: facts that belong together."""

    name: Literal["fp32", "tf32", "bf16", "fp16"]
    autocast: Literal["bfloat16", "float16"] | None = None
    """Type of matrix products and convolutions; logits, values and losses stay in float32."""
    matmul: Literal["highest", "high"] = "highest"
    """Precision of what is left in float32: `high` lets matrix products use TF32."""
    loss_scale: PositiveFloat | None = None
    """Initial loss scale, for fp16 gradients; null does without one."""

    @model_validator(mode="after")
    def _bundle(self) -> PrecisionSettings:
        """The name says what the values are: a comparison groups by it."""
        autocast = {"bf16": "bfloat16", "fp16": "float16"}.get(self.name)
        matmul = "high" if self.name == "tf32" else "highest"
        if (self.autocast, self.matmul) != (autocast, matmul):
            raise ValueError(
                f"precision.autocast and precision.matmul belong to precision={self.name}; choose "
                "by precision=fp32, tf32, bf16 or fp16"
            )
        if (self.loss_scale is not None) != (self.name == "fp16"):
            raise ValueError("precision.loss_scale goes with precision=fp16 and with no other")
        return self


class CompileSettings(Frozen):
    """The way that act, advantages and updates are compiled."""

    name: Literal["auto", "eager", "default", "reduce_overhead", "max_autotune", "cudagraphs"]
    """auto: eager until the graphs are built, in the background; at once where they are kept."""
    backend: str | None = None
    """Any torch.compile backend; null takes inductor, and for cudagraphs none: eager's kernels."""
    fallback: bool = False
    """A function that cannot be compiled runs eagerly, on record, instead of ending the run."""

    @model_validator(mode="after")
    def _effective(self) -> CompileSettings:
        for key in ("backend", "fallback"):
            if self.name in ("auto", "eager") and getattr(self, key):
                raise ValueError(
                    f"compile.{key} has no effect with compile={self.name}; use compile=default"
                )
        return self


class ModeSettings(Frozen):
    """The schedule of sampling and learning."""

    name: Literal["sync"]


class ProfileSettings(Frozen):
    """Measurements inside the loop."""

    name: Literal["phases", "serialised", "none"]


class TrackingSettings(Frozen):
    """The store that a run is recorded in besides its own folder."""

    name: Literal["mlflow", "server", "none"]
    uri: str | None = None
    """Tracking URI; null takes MLFLOW_TRACKING_URI, else `mlflow.db` in the working directory."""
    experiment: str | None = None
    """MLflow experiment; null takes MLFLOW_EXPERIMENT_NAME, else `rl_pipeline`."""
    flush_s: PositiveFloat = 10.0
    """Seconds between batches sent to the store."""
    system_metrics: bool = True
    """MLflow's own metrics of the whole machine, as context: a sample with every batch."""
    max_artifact_bytes: Count = 200_000_000
    """The best checkpoint goes into the store up to this size; 0 keeps it out."""


class EvalSettings(Frozen):
    """Greedy policy, fresh seeds, full games, raw rewards."""

    episodes: Count = 20
    """0 switches evaluation off."""
    every_steps: Count | None = None
    """Env steps between evaluations during training; null takes a tenth of `total_steps`, 0
    evaluates at the end only. Their time is no part of the throughput."""
    num_envs: PositiveInt = 10
    max_steps: PositiveInt = 30_000
    """A game still running after this many agent steps counts with the score it has."""


class CheckpointSettings(Frozen):
    """Checkpoints in the run folder."""

    every_steps: Count = 100_000
    """Env steps between checkpoints; 0 saves at the end only."""
    keep_last: PositiveInt = 2
    keep_best: bool = True
    """Also keep the checkpoint with the best evaluation (training return where none ran)."""


class MemorySettings(Frozen):
    """The allocator of the training process."""

    keep_freed: bool = True
    """The C library keeps large blocks that are freed: convolutions and updates then pay no page
    faults for theirs again. Takes effect with glibc only."""


class StudySettings(Frozen):
    """The study that a multirun belongs to."""

    name: str | None = None
    """Name of the parent run; null takes the sweep's varied settings."""
    interleave: bool = False
    """Repeat the grid seed by seed, each time in a random order of its own, so that drift of the
    machine does not become an effect."""
    resume: str | None = None
    """Folder, name or MLflow id of an earlier multirun: only its missing jobs are run."""
    baseline: str | None = None
    """Setting that the comparison takes as 1, e.g. backend=gymnasium; null: the first setting."""
    threshold: Float | None = None
    """Return whose first reach (env steps, seconds) the comparison tells."""


class Settings(Frozen):
    """One run."""

    seed: Count | None = None
    """null draws a fresh one and records it."""
    total_steps: PositiveInt = 150_000
    """Env steps: valid agent steps summed over environments."""
    log_every_s: PositiveFloat = 1.0
    max_wall_s: PositiveFloat | None = None
    """Stop cleanly after this many seconds of training."""
    resume: str | None = None
    """Run folder or run id to continue."""
    eval: EvalSettings = EvalSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    memory: MemorySettings = MemorySettings()
    study: StudySettings = StudySettings()
    env: EnvSettings
    backend: BackendSettings
    buffer: BufferSettings
    network: NetworkSettings
    algo: Annotated[PPOSettings | DQNSettings, Field(discriminator="name")]
    device: DeviceSettings
    precision: PrecisionSettings
    compile: CompileSettings
    mode: ModeSettings
    profile: ProfileSettings
    tracking: TrackingSettings
    _chosen: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def evaluate_every(self) -> int:
        """Env steps between evaluations, 0 for none before the end."""
        if not self.eval.episodes:
            return 0
        every = self.eval.every_steps
        return -(-self.total_steps // 10) if every is None else every

    @property
    def minibatch_rows(self) -> int:
        """Rows that one update learns from."""
        if isinstance(self.algo, ReplayAlgorithm):
            return self.algo.batch_size
        return self.algo.horizon * self.backend.num_envs // self.algo.num_minibatches

    @property
    def chosen(self) -> dict[str, str]:
        """Choices of `auto` and their reasons, by setting."""
        return self._chosen

    @classmethod
    def chosen_by(cls, chosen: dict[str, str], values: dict[str, Any]) -> Settings:
        """The settings of `values`, in which `auto` chose what `chosen` says."""
        settings = cls.model_validate(values)
        settings._chosen = chosen
        return settings

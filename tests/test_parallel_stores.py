"""Many jobs, one store: every point of every run arrives, also where the server goes away."""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
import waiting

pytestmark = pytest.mark.slow
LIMIT_S = 420.0


def until(condition, what: str) -> None:
    waiting.until(condition, LIMIT_S, what, every_s=0.2)


def sweep(cwd: Path, *overrides: str) -> subprocess.Popen[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("MLFLOW_")}
    env["PYTHONPATH"] = os.pathsep.join([str(cwd), env.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "rl_pipeline.train", "-m", "debug=short", "eval.episodes=0",
               "tracking.flush_s=0.5", "tracking.system_metrics=false", *overrides]  # fmt: skip
    return subprocess.Popen(
        command, cwd=cwd, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def logged(folder: Path) -> set[tuple[str, int, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {(k, r["step"], v) for r in rows for k, v in r["metrics"].items()}


def stored(database: Path, run_id: str) -> list[tuple[str, int, float]]:
    with sqlite3.connect(database, timeout=30) as db:
        return db.execute(
            "select key, step, value from metrics where run_uuid = ? and key not like 'result/%'",
            (run_id,),
        ).fetchall()


def check_all_there(cwd: Path, database: Path, jobs: int, status: str) -> None:
    folders = sorted(p.parent for p in cwd.rglob("run.json"))
    assert len(folders) == jobs

    def shipped() -> bool:
        states = [json.loads((f / "mlflow.json").read_text()) for f in folders]
        return all(state["finished"] for state in states)

    until(shipped, "all shipped")
    ids = set()
    for folder in folders:
        state = json.loads((folder / "mlflow.json").read_text())
        ids.add(state["run_id"])
        points = stored(database, state["run_id"])
        assert len(points) == len(set(points)), "a point came twice"
        assert set(points) == logged(folder)
        assert len(points) > 100
        assert state["status"] == status and state["refused"] == 0
    assert len(ids) == jobs
    with sqlite3.connect(database) as db:
        rows = db.execute(
            "select r.run_uuid, r.status, t.value from runs r left join tags t"
            " on t.run_uuid = r.run_uuid and t.key = 'mlflow.parentRunId'"
        ).fetchall()
    assert {run for run, _, parent in rows if parent} == ids, "a run was lost or made twice"
    assert {found for _, found, parent in rows if parent} == {status}


def test_four_jobs_at_once_on_the_embedded_store(tmp_path):
    job = sweep(tmp_path, "seed=1,2,3,4", "hydra.launcher.n_jobs=4", "max_wall_s=10",
                "total_steps=1e9")  # fmt: skip
    out, err = waiting.finish(job, LIMIT_S)
    assert job.returncode == 0, out + err
    check_all_there(tmp_path, tmp_path / "mlflow.db", 4, "FINISHED")


class Server:
    """A real `mlflow server` that can be stopped and started again on its port."""

    def __init__(self, root: Path) -> None:
        self.root, self.database = root, root / "server.db"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--port", str(self.port),
                   "--backend-store-uri", f"sqlite:///{self.database}", "--workers", "2",
                   "--artifacts-destination", str(self.root / "artifacts")]  # fmt: skip
        self._process = subprocess.Popen(
            command, cwd=self.root, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        until(self.answers, "the server's start")

    def answers(self) -> bool:
        with socket.socket() as probe:
            probe.settimeout(1)
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def stop(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def test_eight_jobs_on_a_server_that_goes_away_for_ten_seconds(tmp_path):
    # Trainings that mostly wait: eight that compute would leave two cores no time for the rest.
    (tmp_path / "slow.py").write_text(
        "import time, gymnasium as gym\n"
        "class Env(gym.Wrapper):\n"
        "    def __init__(self, render_mode=None):\n"
        "        super().__init__(gym.make('CartPole-v1'))\n"
        "    def step(self, action):\n"
        "        time.sleep(0.005)\n"
        "        return super().step(action)\n"
        "gym.register('Slow-v0', entry_point='slow:Env')\n"
    )
    server = Server(tmp_path)
    server.start()
    job = None
    try:
        job = sweep(
            tmp_path, "seed=1,2,3,4,5,6,7,8", "hydra.launcher.n_jobs=8", "total_steps=1e9",
            "env=gym", "env.id=slow:Slow-v0", "backend.num_envs=1",
            "tracking=server", f"tracking.uri={server.uri}",
        )  # fmt: skip

        def shipped() -> list[int]:
            states = [json.loads(p.read_text()) for p in sorted(tmp_path.rglob("mlflow.json"))]
            return [state.get("values", 0) for state in states]

        until(lambda: len(shipped()) == 8 and all(shipped()), "values of all eight runs")
        server.stop()
        files = list(tmp_path.rglob("metrics.jsonl"))
        before = [file.stat().st_size for file in files]
        time.sleep(10)
        assert not server.answers()
        grown = [file.stat().st_size > size for file, size in zip(files, before, strict=True)]
        assert all(grown), "training goes on without the server"
        during = shipped()
        server.start()
        until(lambda: all(b > a for a, b in zip(during, shipped(), strict=True)), "values again")
        for request in tmp_path.rglob("tracking.json"):
            os.kill(json.loads(request.read_text())["pid"], signal.SIGTERM)
        waiting.finish(job, LIMIT_S)
        check_all_there(tmp_path, server.database, 8, "KILLED")
    finally:
        if job and job.poll() is None:
            job.terminate()
            job.wait(LIMIT_S)
        server.stop()

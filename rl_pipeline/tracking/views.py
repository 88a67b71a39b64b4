"""Prepared views of MLflow's run list: columns and chart groups worth seeing first.

MLflow keeps views that users share as tags of the experiment (`mlflow.sharedViewState.<key>`); its
page `#/experiments/<id>/runs?viewStateShareKey=<key>` shows one. Ours are made with the experiment
(key `rl_pipeline`: all training runs) and with each study (key: its run id; the study's jobs).
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from typing import Any

KEY = "rl_pipeline"
TAG = "mlflow.sharedViewState."
TRAINING_RUNS = "tags.run_key LIKE '%'"

# Few: MLflow sorts them by name, and these stand in the order in which one asks.
_METRICS = ("result/env_steps_per_s", "result/eval_mean", "result/steady", "result/wall_s")
_PARAMS = (
    "env.name", "algo.name", "backend.name", "backend.num_envs", "precision.name", "compile.name",
    "device.name", "seed",
)  # fmt: skip
_SECTIONS: dict[str, tuple[str, ...]] = {
    "Learning": ("return/train", "return/eval"),
    "Speed": ("throughput/env_steps_per_s", "throughput/updates_per_s"),
    "Where the time goes": ("phase/learn_share", "phase/env_share", "phase/act_share"),
    "Machine": ("cpu/util_pct", "cpu/rss_bytes", "gpu/util_pct", "gpu/mem_used_bytes"),
}
_SCATTER = ("result/env_steps_per_s", "result/eval_mean")


def jobs_of(parent_run_id: str) -> str:
    """The filter that leaves the jobs of a study, each on a line of its own.

    Without those that failed or were killed: a group's average would have them beside the runs
    that made them good. The comparison in the parent's artifacts names them.
    """
    bad = " and ".join(f"attributes.status != '{status}'" for status in ("FAILED", "KILLED"))
    return f"tags.mlflow.parentRunId = '{parent_run_id}' and {bad}"


def view_state(search: str, group_by: Sequence[str] = ()) -> str:
    """The view of the runs that `search` finds, as MLflow's front end reads it.

    Grouped by params, seeds are averaged; runs below a parent are else shown once it is unfolded.
    """
    charts: list[dict[str, Any]] = []
    sections: list[dict[str, Any]] = []
    for name, metrics in _SECTIONS.items():
        section = f"rl-{len(sections)}"
        sections.append({"uuid": section, "name": name, "display": True, "isReordered": False})
        for metric in metrics:
            charts.append(_chart("LINE", section, len(charts)) | {
                "metricKey": metric, "selectedMetricKeys": [metric], "scaleType": "linear",
                "xAxisKey": "step", "xAxisScaleType": "linear", "lineSmoothness": 0,
                "yAxisKey": "metric", "yAxisExpressions": [], "ignoreOutliers": False,
                "useGlobalXaxisKey": True, "useGlobalLineSmoothing": True, "range": {},
            })  # fmt: skip
    x, y = ({"key": key, "type": "METRIC"} for key in _SCATTER)
    charts.append(_chart("SCATTER", "rl-1", len(charts)) | {"xaxis": x, "yaxis": y})
    columns = [f"metrics.`{m}`" for m in _METRICS] + [f"params.`{p}`" for p in _PARAMS]
    state: dict[str, Any] = {
        "selectedColumns": columns, "runsHiddenMode": "FIRST_20_RUNS", "compareRunCharts": charts,
        "compareRunSections": sections, "searchFilter": search,
        "isAccordionReordered": True,  # ours first, then those that MLflow makes by itself
    }  # fmt: skip
    if group_by:
        state["groupBy"] = {
            "aggregateFunction": "average",
            "groupByKeys": [{"mode": "param", "groupByData": key} for key in group_by],
        }
    # A tag holds 5,000 characters; MLflow packs its own views likewise.
    packed = zlib.compress(json.dumps(state).encode(), 9)
    return "deflate;" + base64.b64encode(packed).decode()


def _chart(kind: str, section: str, number: int) -> dict[str, Any]:
    return {
        "type": kind, "uuid": f"rl-chart-{number}", "metricSectionId": section,
        "runsCountToCompare": 20, "deleted": False, "isGenerated": False,
    }  # fmt: skip
